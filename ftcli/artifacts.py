"""Final weights in the form that plain transformers and peft load, and the proof that they do.

A run writes `final/` and a probe: fixed inputs with the logits that the trained model itself gave. An export is
reloaded without ftcli in a fresh process, and is done only when those logits come out again.
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InputError
from .recipe import Recipe
from .recipe_file import load_recipe
from .run_folder import RunFolder

if TYPE_CHECKING:
    from torch import Tensor

    from .run import Run

PROBE = "probe.safetensors"
PROBE_ROWS = 2
# Most relative distance |a - b| / |b| between logits of the same weights, by the dtype they were computed in.
TOLERANCES = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 3e-2, "bf16_pure": 3e-2}
MERGED_TOLERANCE = 1e-3  # float32 merging rounds W + BA once more


def save_final(run: Run) -> None:
    """Write final/ and the probe of a run that has a folder; a collective, every rank calls it."""
    if run.folder is None:
        return
    probe = _probe(run)
    trained_only = run.recipe.adapter.type != "none"
    values = dict(run.hardware.parameters(run.model, trained_only=trained_only))
    if not run.hardware.ranks.is_main:
        return
    from safetensors.torch import save_file

    model: Any = run.hardware.unwrap(run.model)
    if not trained_only:
        persistent = model.state_dict()
        values |= {name: buffer.detach().cpu() for name, buffer in model.named_buffers() if name in persistent}
    temporary = run.folder.path / "final.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary, state_dict=values)
    run.task.save_processor(str(temporary))
    (temporary / "README.md").write_text(model_card(run.recipe, run.folder), encoding="utf-8")
    save_file(probe, run.folder.path / PROBE)
    shutil.rmtree(run.folder.final, ignore_errors=True)  # of a run that was resumed to go further
    temporary.rename(run.folder.final)


def _probe(run: Run) -> dict[str, Tensor]:
    """Return fixed inputs and the prepared model's own logits for them; every rank runs the same forward."""
    import torch

    rows = [run.rows.train[i] | {"epoch": 0, "training": False} for i in range(min(PROBE_ROWS, len(run.rows.train)))]
    inputs = run.task.probe(run.task.collate(rows))
    run.model.eval()
    with torch.no_grad():
        logits = run.model(**run.to_device(inputs)).logits
    return {name: value.contiguous() for name, value in inputs.items()} | {"logits": logits.float().cpu().contiguous()}


def model_card(recipe: Recipe, folder: RunFolder) -> str:
    """Return the README of the trained weights."""
    evaluations = [row for row in folder.metrics() if any(name.startswith("eval/") for name in row)]
    measured = [
        f"| {name.removeprefix('eval/')} | {value:.4f} |"
        for name, value in (evaluations[-1].items() if evaluations else ())
        if name.startswith("eval/")
    ]
    table = ["| metric | value |", "|---|---|", *measured] if measured else ["Not evaluated."]
    kind = "LoRA adapter for" if recipe.adapter.type == "lora" else "Fine-tuned from"
    base = recipe.model.name
    return "\n".join(
        [
            "---",
            "library_name: peft" if recipe.adapter.type == "lora" else "library_name: transformers",
            "tags: [ftcli]",
            "---",
            f"# {kind} {base}",
            "",
            f"Task {recipe.task} on {recipe.data.train.path}, {recipe.batch.global_size} rows a step, "
            f"learning rate {recipe.optimizer.learning_rate:g}, precision {recipe.precision}, seed {recipe.seed}.",
            "",
            *table,
            "",
        ]
    )


def export(run: str | Path, directory: str | Path, *, merge: bool = False) -> Path:
    """Write the trained weights of a run folder into `directory` for plain transformers or peft; return it.

    With `merge` a LoRA adapter is merged into its base model. What was written is loaded again in a fresh process
    and must give the logits that the trained model gave; raises `RuntimeError`, and writes nothing, if it does not.
    """
    folder, target = RunFolder(run), Path(directory).absolute()
    if not folder.final.is_dir():
        raise InputError(f"{folder.path} has no final weights", hint="has the run ended? `ftcli show RUN` tells")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InputError(f"{target} already holds something", hint="export into a new folder")
    adapter = (folder.final / "adapter_config.json").exists()
    if merge and not adapter:
        raise InputError("--merge is for adapter runs; this run trained the whole model", hint="leave --merge out")
    recipe = load_recipe(folder.path / "recipe.yaml")
    temporary = target.with_name(f"{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        distance = _write_and_compare(recipe, folder, temporary, merge=merge)
        if target.exists():
            target.rmdir()
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(
        f"ftcli: {target} loads in plain transformers; its logits are within {distance:.1e} of the trained model's",
        file=sys.stderr,
    )
    return target


def _write_and_compare(recipe: Recipe, folder: RunFolder, temporary: Path, *, merge: bool) -> float:
    """Write the export and return how far its logits are from the probe's; raises when that is too far."""
    auto_class = _auto_class(recipe)
    shutil.copytree(folder.final, temporary)
    tolerance, labels = TOLERANCES[recipe.precision], _labels(auto_class, folder.path / PROBE)
    if merge:
        _merge(auto_class, folder.final, temporary, labels)
        tolerance = max(tolerance, MERGED_TOLERANCE)
    distance = _reload_and_compare(auto_class, temporary, folder.path / PROBE, labels)
    if not distance <= tolerance:
        raise RuntimeError(f"reloaded logits are {distance:.2g} away from the trained model's (most: {tolerance:g})")
    return distance


def _auto_class(recipe: Recipe) -> str:
    from .tasks import find_task

    name: str = find_task(recipe.task).Task.auto_class
    return name


def _labels(auto_class: str, probe: Path) -> int:
    """Return the width of the trained classifier's head, or 0 for a language model."""
    from safetensors import safe_open

    if auto_class == "AutoModelForCausalLM":
        return 0
    with safe_open(probe, framework="pt") as file:
        width: int = file.get_slice("logits").get_shape()[-1]
    return width


def _merge(auto_class: str, adapter: Path, target: Path, labels: int) -> None:
    """Replace the adapter's files in `target` by the merged model's."""
    model = load_plain(auto_class, adapter, labels).merge_and_unload()
    for file in target.glob("adapter_*"):
        file.unlink()
    model.save_pretrained(target)
    card = target / "README.md"
    text = card.read_text(encoding="utf-8").replace("library_name: peft", "library_name: transformers")
    card.write_text(text.replace("# LoRA adapter for", "# Fine-tuned (LoRA, merged) from"), encoding="utf-8")


def load_plain(auto_class: str, folder: Path, labels: int = 0) -> Any:
    """Return the model in `folder`, full or adapter, in float32 on the host, as any user of transformers loads it.

    `labels` is the width of a classifier's head that an adapter brings with it; 0 where the base has its own head.
    """
    import torch

    auto = getattr(importlib.import_module("transformers"), auto_class)
    config = folder / "adapter_config.json"
    if not config.exists():
        return auto.from_pretrained(folder, dtype=torch.float32).eval()
    from peft import PeftModel

    head = {"num_labels": labels, "ignore_mismatched_sizes": True} if labels else {}
    base = json.loads(config.read_text())["base_model_name_or_path"]
    return PeftModel.from_pretrained(auto.from_pretrained(base, dtype=torch.float32, **head), str(folder)).eval()


RELOAD = """
import json, sys
import torch, transformers
from safetensors.torch import load_file
auto_class, folder, probe, labels = sys.argv[1:]
inputs = load_file(probe)
wanted = inputs.pop("logits")
auto = getattr(transformers, auto_class)
try:
    config = json.load(open(folder + "/adapter_config.json"))
except FileNotFoundError:
    model = auto.from_pretrained(folder, dtype=torch.float32)
else:
    from peft import PeftModel
    more = {} if labels == "0" else {"num_labels": int(labels), "ignore_mismatched_sizes": True}
    base = auto.from_pretrained(config["base_model_name_or_path"], dtype=torch.float32, **more)
    model = PeftModel.from_pretrained(base, folder)
bad = [name for name, p in model.named_parameters() if p.numel() == 0 or not torch.isfinite(p).all()]
assert not bad, f"empty or not finite: {bad[:3]}"
with torch.no_grad():
    logits = model.eval()(**inputs).logits.float()
real = inputs["attention_mask"].bool() if logits.ndim == 3 else slice(None)
print((torch.linalg.vector_norm(logits[real] - wanted[real]) / torch.linalg.vector_norm(wanted[real])).item())
"""


def _reload_and_compare(auto_class: str, folder: Path, probe: Path, labels: int) -> float:
    """Return the relative distance between the logits of `folder`, loaded by plain transformers in a fresh process
    that never imports ftcli, and those in the probe."""
    command = [sys.executable, "-c", RELOAD, auto_class, str(folder), str(probe), str(labels)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{folder} does not load in plain transformers:\n{result.stderr[-2000:]}")
    return float(result.stdout.split()[-1])
