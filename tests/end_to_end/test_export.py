"""Any checkpoint becomes a folder of plain transformers or peft with the trained model's logits. Tiny models."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from ftcli.__main__ import main
from ftcli.checkpoint import assemble
from ftcli.checkpoint.export import export
from ftcli.checkpoint.final import load_plain
from ftcli.checkpoint.folder import read_state, update_state
from ftcli.checkpoint.foreign_files import remove_checkpoint
from ftcli.config.load import load_recipe
from ftcli.runtime.checkpoint_names import checkpoint_path
from ftcli.runtime.errors import ExportError, InputError
from ftcli.testing import run_on_cpu
from ftcli.training.setup import prepare

from ..support.cells import CELLS, FURTHER_CELLS, cell, save_and_resume
from ..support.runner import MakeInputs, RunCli

CLASSES = {
    "sft": "AutoModelForCausalLM",
    "text_classification": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
}
# Each is trained and exported by a process of its own.
SOME_FAST = [
    "sft-tied",
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("sft-untied", "sft-lora", "text-lora", "mobilenet")),
    *(pytest.param(n, marks=pytest.mark.slow) for n in ("resnet-sync", "resnet-lora", "vit-mixed")),
]
Ftcli = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    """Return a folder of this module's own, because a test takes a model out of it for a while."""
    return make_inputs()


@pytest.fixture(scope="module")
def runs(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives a finished run of a cell, with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("runs")

    def run(name: str) -> Path:
        if not (folder / name).exists():
            model = {"name": str(inputs / (CELLS | FURTHER_CELLS)[name][1]), "dropout": 0.0}
            trains_statistics = {"model": model | {"batch_norm": "train"}} if name == "mobilenet" else {}
            recipe = cell(inputs, name, checkpoint={"every_steps": 2}, **trains_statistics)
            (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
            with pytest.raises(SystemExit) as end:
                main(["train", str(folder / "recipe.yaml"), "--output", str(folder / name)])
            assert not end.value.code
        return folder / name

    return run


@pytest.fixture
def ftcli(run_cli: RunCli) -> Ftcli:
    """Return a function that runs one command line in this process and gives (exit code, all output)."""

    def run(*arguments: object) -> tuple[int, str]:
        ended = run_cli(*arguments)
        return ended.code, ended.text

    return run


def distance(checkpoint: Path, exported: Path) -> float:
    """Return how far the logits of an export are from those of a run that resumes from the checkpoint."""
    run = prepare(load_recipe(checkpoint.parent.parent / "recipe.yaml"), cpu=True, resume=checkpoint)
    rows = [run.rows.train[i] | {"epoch": 0, "training": False} for i in range(3)]
    batch = run.task.probe(run.task.collate(rows))
    labels = 0 if run.recipe.task == "sft" else run.hardware.unwrap(run.model).config.num_labels  # type: ignore
    plain = load_plain(CLASSES[run.recipe.task], exported, labels)
    with torch.no_grad():
        expected, actual = run.model.eval()(**batch).logits.float(), plain(**batch).logits
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["multi-label", "regression", "regression-lora", "class-weights"])
def test_run_of_every_problem_type_is_evaluated_and_exported_for_plain_transformers(
    name: str, runs: Callable[[str], Path], ftcli: Ftcli, tmp_path: Path
) -> None:
    folder = runs(name)
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    code, output = ftcli("evaluate", folder)
    assert code == 0 and all(key.removeprefix("eval/") in output for key in last if key.startswith("eval/")), output
    target = tmp_path / "exported"
    code, output = ftcli("export", folder, target)
    assert code == 0, output
    # The product with a head of one output is rounded by the address of its weights, which are in a mapped file here.
    assert float(output.partition("its logits are within ")[2].split()[0]) <= (1e-6 if name == "regression" else 0.0)
    kind = load_recipe(folder / "recipe.yaml").task_options.get("problem_type", "single_label_classification")
    for written in () if "lora" in name else (folder / "final", target):
        assert json.loads((written / "config.json").read_text())["problem_type"] == kind
    assert distance(checkpoint_path(folder, 4), target) < 1e-6


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("name", SOME_FAST)
def test_export_of_an_intermediate_checkpoint_gives_its_logits(
    name: str, merge: bool, runs: Callable[[str], Path], ftcli: Ftcli, tmp_path: Path
) -> None:
    middle, last = (checkpoint_path(runs(name), step) for step in (2, 4))
    target = tmp_path / "new" / "exported"
    code, output = ftcli("export", middle, target, *["--merge"] * merge)
    if merge and "lora" not in name:
        assert code == 2 and "--merge: this run trained the whole model" in output and not target.parent.exists()
        return
    assert code == 0 and "all weights are equal to the trained ones, and its logits are within" in output, output
    assert [item.name for item in target.parent.iterdir()] == ["exported"]
    assert distance(middle, target) < 1e-5
    assert distance(last, target) > 1e-4
    adapted = "lora" in name and not merge
    assert (target / "adapter_config.json").exists() == adapted
    assert (target / "model.safetensors").exists() != adapted
    final = {item.name for item in (runs(name) / "final").iterdir()}
    assert merge or {item.name for item in target.iterdir()} == final
    assert ("library_name: peft" in (target / "README.md").read_text()) == adapted
    for written in (runs(name) / "final", target) if name.startswith("sft") else ():
        assert json.loads((written / "generation_config.json").read_text())["eos_token_id"] == [1]
        assert "Answers end with `<|im_end|>`: `generation_config.json` has it" in (written / "README.md").read_text()
    if not name.startswith("sft"):
        config = json.loads((target / ("base_config/config.json" if adapted else "config.json")).read_text())
        expected = ["x", "y", "z"] if name == "text-lora" else ["green", "red"]
        assert list(config["id2label"].values()) == expected
        assert config["problem_type"] == "single_label_classification"


def test_export_that_writes_a_wrong_weight_of_a_checkpoint_is_refused(
    runs: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = assemble.full_weights

    def wrong(*arguments: Any, **options: Any) -> tuple[dict[str, torch.Tensor], Iterator[tuple[str, torch.Tensor]]]:
        shapes, values = right(*arguments, **options)
        return shapes, ((name, value * (1.05 if "layers.1.mlp.down_proj" in name else 1)) for name, value in values)

    monkeypatch.setattr(assemble, "full_weights", wrong)
    with pytest.raises(ExportError, match="its logits differ from those of the trained model"):
        export(checkpoint_path(runs("sft-tied"), 2), tmp_path / "exported")
    assert not (tmp_path / "exported").exists()


@pytest.mark.parametrize("merge", [False, True])
def test_export_of_a_lora_classifier_has_label_names_in_every_form(
    merge: bool, runs: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, pipeline

    from ftcli.checkpoint.export import _plan_export, _write_final

    job = _plan_export(runs("text-lora"), merge=merge, dtype=None, most=10**9, trusted=False)
    proof = _write_final(job, tmp_path)
    assert proof.names == {0: "x", 1: "y", 2: "z"}
    card = (tmp_path / "README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert merge != ("## How to load" in card)
    assert (tmp_path / "base_config").exists() != merge
    more = {} if merge else {"config": AutoConfig.from_pretrained(tmp_path, subfolder="base_config")}
    assert not merge or json.loads((tmp_path / "config.json").read_text())["label2id"] == {"x": 0, "y": 1, "z": 2}
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path, **more)
    predictions = pipeline("text-classification", model=model, tokenizer=AutoTokenizer.from_pretrained(tmp_path))(
        "x alpha"
    )
    assert {each["label"] for each in predictions} <= {"x", "y", "z"}
    assert model.config.problem_type == "single_label_classification"
    inputs = load_file(runs("text-lora") / "probe.safetensors")
    expected = inputs.pop("logits")
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(**inputs).logits, expected, atol=1e-4, rtol=1e-4)


DORA = {"type": "lora", "r": 4, "use_dora": True}
WITH_CODE: dict[str, tuple[str, dict[str, Any]]] = {
    "text-lora": ("new tokens and DoRA", {"adapter": DORA, "model": {"new_tokens": ["<a>", "<b>"]}}),
    "vit": ("DoRA of images", {"adapter": DORA | {"target_modules": "all-linear"}}),
    "reward-lora": ("new tokens of a reward model", {"model": {"new_tokens": ["<a>", "<b>"]}}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "text-lora" else pytest.mark.slow) for name in WITH_CODE],
    ids=[what for what, _ in WITH_CODE.values()],
)
def test_code_of_the_model_card_loads_the_adapter_that_was_exported(
    name: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = dict(WITH_CODE[name][1])
    model = {"name": str(inputs / (CELLS | FURTHER_CELLS)[name][1]), "dropout": 0.0} | changes.pop("model", {})
    recipe = cell(inputs, name, model=model, train={"max_steps": 3}, **changes)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    with pytest.raises(SystemExit) as end:
        main(["train", str(tmp_path / "recipe.yaml"), "--output", str(tmp_path / "run")])
    assert not end.value.code
    probe = load_file(tmp_path / "run" / "probe.safetensors")
    logits = probe.pop("logits")
    for checkpoint in (None, checkpoint_path(tmp_path / "run", 3)):
        folder = export(checkpoint or tmp_path / "run", tmp_path / f"exported-{checkpoint is None}")
        code = (folder / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
        scope: dict[str, Any] = {"folder": str(folder)}
        exec(code, scope)
        with torch.no_grad():
            torch.testing.assert_close(scope["model"].eval()(**probe).logits, logits, atol=1e-5, rtol=1e-5)
        assert scope["classify"].model is scope["model"]
    # Older versions wrote the number of rows after the resize.
    config = tmp_path / "run" / "final" / "base_config" / "config.json"
    settings = json.loads(config.read_text())
    if "vocab_size" in settings:
        config.write_text(json.dumps(settings | {"vocab_size": settings["vocab_size"] + 2}))
        adapter = tmp_path / "run" / "final" / "adapter_config.json"
        assert "~" not in json.loads(adapter.read_text())["base_model_name_or_path"]
        stored = tmp_path / "run" / "recipe.yaml"  # a recipe may name the model by ~
        stored.write_text(stored.read_text().replace(str(inputs), "~"))
        monkeypatch.setenv("HOME", str(inputs))
        older = export(tmp_path / "run", tmp_path / "older") / "base_config" / "config.json"
        assert json.loads(older.read_text())["vocab_size"] == settings["vocab_size"]


def test_export_of_final_weights_without_the_trained_ends_adds_them(
    runs: Callable[[str], Path], tmp_path: Path
) -> None:
    from ftcli.checkpoint.export import _plan_export, _write_final

    run, target = Path(shutil.copytree(runs("sft-tied"), tmp_path / "run")), tmp_path / "exported"
    target.mkdir()
    settings = run / "final" / "generation_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"eos_token_id": 0}))  # as earlier versions did
    _write_final(_plan_export(run, merge=False, dtype=None, most=10**9, trusted=False), target)
    assert json.loads((target / settings.name).read_text())["eos_token_id"] == [1, 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sft-tied", "mobilenet"])
def test_export_of_the_last_checkpoint_equals_the_final_weights(
    name: str, runs: Callable[[str], Path], ftcli: Ftcli, tmp_path: Path
) -> None:
    code, output = ftcli("export", checkpoint_path(runs(name), 4), tmp_path / "a")
    assert code == 0 and "logits are within" in output, output
    assert ftcli("export", runs(name), tmp_path / "b")[0] == 0
    final = runs(name) / "final"
    for file in final.iterdir():
        for other in (tmp_path / "a", tmp_path / "b"):
            if file.suffix == ".safetensors":
                expected, actual = load_file(file), load_file(other / file.name)
                assert expected.keys() == actual.keys()
                assert all(torch.equal(expected[key], actual[key]) for key in expected)
            elif file.suffix == ".json":
                assert json.loads(file.read_text()) == json.loads((other / file.name).read_text()), file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "source", "dtype"),
    [
        pytest.param("sft-tied", "final", "bfloat16", marks=pytest.mark.slow),
        pytest.param("sft-tied", "checkpoint", "float16", marks=pytest.mark.slow),
        pytest.param("sft-lora", "final", "float16", marks=pytest.mark.slow),
        ("sft-lora", "checkpoint", "bfloat16"),
    ],
)
def test_export_with_dtype_and_shard_size_rounds_once_and_writes_an_index(
    name: str, source: str, dtype: str, runs: Callable[[str], Path], ftcli: Ftcli, tmp_path: Path
) -> None:
    origin = runs(name) if source == "final" else checkpoint_path(runs(name), 2)
    merge = ["--merge"] * ("lora" in name)
    code, output = ftcli("export", origin, tmp_path / "e", "--dtype", dtype, "--shard-size", "9KB", *merge)
    assert code == 0, output
    assert ftcli("export", origin, tmp_path / "whole", *merge)[0] == 0
    index = json.loads((tmp_path / "e" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "e").glob("model-*.safetensors"))
    assert len(files) > 2 and not (tmp_path / "e" / "model.safetensors").exists()
    whole = load_file(tmp_path / "whole" / "model.safetensors")
    assert index["weight_map"].keys() == whole.keys()
    assert index["metadata"]["total_size"] == sum(value.numel() * 2 for value in whole.values())
    for key, file in index["weight_map"].items():
        assert torch.equal(load_file(tmp_path / "e" / file)[key], whole[key].to(getattr(torch, dtype)))
    largest = max(value.numel() * 2 for value in whole.values())
    for file in files:
        with safe_open(file, framework="pt") as opened:
            tensors = [opened.get_tensor(key) for key in opened.keys()]  # noqa: SIM118
        assert sum(value.nbytes for value in tensors) <= max(9000, largest)
    assert json.loads((tmp_path / "e" / "config.json").read_text())["dtype"] == dtype


def assert_newest_is_found_again(
    run: Path, newer: Path, older: Path, aside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that a checkpoint which is deleted while its hashes are computed is left for a newer one."""
    from ftcli.checkpoint import folder as module

    shutil.copytree(newer, older)
    newer.rename(aside)
    digest = module._sha256

    def delete_first(path: Path) -> str:
        if aside.exists():
            aside.rename(newer)
            remove_checkpoint(older)
        return digest(path)

    with monkeypatch.context() as patched:
        patched.setattr(module, "_sha256", delete_first)
        checkpoint, problems = module.newest_intact(run)
    assert checkpoint == newer and problems == []


def test_export_of_a_checkpoint_that_its_run_deletes_meanwhile_takes_the_newest(
    runs: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ftcli.checkpoint import export as module

    run, write = shutil.copytree(runs("sft-tied"), tmp_path / "run"), module._write_checkpoint
    shutil.rmtree(run / "final")
    older, newer = (checkpoint_path(run, step) for step in (2, 4))
    newer.rename(tmp_path / "kept")

    def write_later(job: Any, folder: Path) -> Any:
        if job.checkpoint == older:  # the run saves its next checkpoint, and deletes this one
            (tmp_path / "kept").rename(newer)
            remove_checkpoint(older)
        return write(job, folder)

    monkeypatch.setattr(module, "_write_checkpoint", write_later)
    assert export(run, tmp_path / "exported").is_dir()
    assert f"{older} was deleted while it was read" in capsys.readouterr().err
    assert_newest_is_found_again(run, newer, older, tmp_path / "aside", monkeypatch)
    (tmp_path / "kept").mkdir()
    newer.rename(tmp_path / "kept" / newer.name)
    shutil.copytree(tmp_path / "kept" / newer.name, older)
    monkeypatch.setattr(module, "_write_checkpoint", lambda job, folder: (remove_checkpoint(older), write(job, folder)))
    with pytest.raises(InputError, match="was deleted while it was read: its run continues"):
        export(older, tmp_path / "other")
    assert not (tmp_path / "other").exists() and not list(tmp_path.glob("*.tmp-*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text-lora", "resnet-lora"])
def test_export_of_an_adapter_in_16_bits_allows_for_their_rounding(
    name: str, runs: Callable[[str], Path], ftcli: Ftcli, tmp_path: Path
) -> None:
    """Heads and batch norms that an adapter saves whole are rounded like the weights of a model."""
    code, output = ftcli("export", runs(name), tmp_path / "e", "--dtype", "bfloat16")
    assert code == 0, output
    exported = load_file(tmp_path / "e" / "adapter_model.safetensors")
    kinds = {value.dtype for value in exported.values() if value.is_floating_point()}
    assert kinds == {torch.bfloat16}


def test_export_of_a_run_without_final_weights_uses_the_newest_intact_checkpoint(
    runs: Callable[[str], Path], ftcli: Ftcli, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(runs("sft-tied"), tmp_path / "run"))
    shutil.rmtree(run / "final")
    next(checkpoint_path(run, 4).glob("*.safetensors")).unlink()
    code, output = ftcli("export", run, tmp_path / "e")
    assert code == 0, output
    assert "is missing" in output and "falling back to" in output and "step-000002" in output
    assert distance(checkpoint_path(run, 2), tmp_path / "e") < 1e-5


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--dtype", "bf16"), "--dtype bf16 is not supported"),
        (("--dtype", "bfloat"), "did you mean 'bfloat16'"),
        (("--shard-size", "5 apples"), "--shard-size 5 apples: not a size"),
        (("--shard-size", "0GB"), "not a size"),
    ],
)
def test_export_with_wrong_arguments_is_refused(
    arguments: tuple[str, ...], expected: str, runs: Callable[[str], Path], ftcli: Ftcli, tmp_path: Path
) -> None:
    code, output = ftcli("export", runs("sft-tied"), tmp_path / "e", *arguments)
    assert code == 2 and expected in output and not list(tmp_path.iterdir())


def test_export_of_a_damaged_checkpoint_or_another_base_is_refused_and_leaves_nothing(
    runs: Callable[[str], Path], inputs: Path, ftcli: Ftcli, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(runs("sft-tied"), tmp_path / "run"))
    base, moved = inputs / "tied", inputs / "moved"
    base.rename(moved)
    missing = ftcli("export", checkpoint_path(run, 2), tmp_path / "e")
    shutil.copytree(inputs / "encoder", base)
    other = ftcli("export", checkpoint_path(run, 2), tmp_path / "e")
    shutil.rmtree(base)
    moved.rename(base)
    assert missing[0] == 2 and "no model folder at" in missing[1]
    assert other[0] == 2, other[1]
    file = next(checkpoint_path(run, 2).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    code, output = ftcli("export", checkpoint_path(run, 2), tmp_path / "e")
    assert code == 2 and f"{file} is damaged" in output
    assert [item.name for item in tmp_path.iterdir()] == ["run"]


def test_export_of_changed_final_weights_is_refused_without_a_stack_trace(
    runs: Callable[[str], Path], ftcli: Ftcli, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(runs("sft-tied"), tmp_path / "run"))
    weights = load_file(run / "final" / "model.safetensors")
    weights["model.norm.weight"] *= 1.1
    save_file(weights, run / "final" / "model.safetensors", metadata={"format": "pt"})
    code, output = ftcli("export", run, tmp_path / "e")
    assert code == 1 and "Traceback" not in output and f"{run / 'final'} or its base model was changed" in output
    assert [item.name for item in tmp_path.iterdir()] == ["run"]


def test_export_that_sigterm_ends_leaves_nothing(runs: Callable[[str], Path], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ftcli", "export", str(runs("sft-tied")), str(tmp_path / "e")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not list(tmp_path.glob("e.tmp-*/*")):
            time.sleep(0.01)
        process.terminate()
        _, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in errors, errors
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "file", "becomes", "problem"),
    [
        ("sft-tied", "model.safetensors", "pytorch_model.bin", "has pickled weights (pytorch_model.bin)"),
        ("sft-tied", "model.safetensors", None, "model.safetensors is missing"),
        ("sft-tied", "config.json", None, "config.json is missing"),
        ("text-lora", "adapter_model.safetensors", "adapter_model.bin", "has pickled weights (adapter_model.bin)"),
        ("text-lora", "adapter_model.safetensors", "adapter_model.safetensors", "damaged: it has no valid header"),
        ("text-lora", "adapter_config.json", None, "adapter_config.json is missing"),
    ],
)
def test_export_of_final_weights_in_other_files_is_refused(
    name: str, file: str, becomes: str | None, problem: str, runs: Callable[[str], Path], ftcli: Ftcli, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(runs(name), tmp_path / "run"))
    values = load_file(run / "final" / file) if file.endswith(".safetensors") else {}
    (run / "final" / file).unlink()
    if becomes is not None:
        torch.save(values, run / "final" / becomes)
    for merge in [[]] if name == "sft-tied" else [[], ["--merge"]]:
        code, output = ftcli("export", run, tmp_path / "e", *merge)
        assert code == 2 and problem in output and "export a checkpoint of the run" in output, output
    assert [item.name for item in tmp_path.iterdir()] == ["run"]


def test_export_of_a_checkpoint_without_row_facts_is_refused_with_a_remedy(
    runs: Callable[[str], Path], ftcli: Ftcli, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(runs("sft-tied"), tmp_path / "run"))
    data = read_state(checkpoint_path(run, 2))["data"]
    del data["facts"]
    update_state(checkpoint_path(run, 2), data=data)
    code, output = ftcli("export", checkpoint_path(run, 2), tmp_path / "e")
    assert code == 2 and "an older version of ftcli wrote" in output and "resume the run for one more step" in output
    assert [item.name for item in tmp_path.iterdir()] == ["run"]


EXPORTED = {"fsdp": "sft-lora", "zero2": "sft-untied", "zero3": "sft-tied"}


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "name"), EXPORTED.items())
def test_export_of_a_checkpoint_of_two_processes_equals_that_of_one(
    profile: str, name: str, inputs: Path, runs: Callable[[str], Path], ftcli: Ftcli, tmp_path: Path
) -> None:
    changes = {"checkpoint": {"every_steps": 2}}
    run_on_cpu(save_and_resume, inputs, [name], changes, tmp_path, [], 2, profile=profile)
    saved = checkpoint_path(tmp_path / name, 2)
    assert read_state(saved)["written_by"]["processes"] == 2
    code, output = ftcli("export", saved, tmp_path / "exported")
    assert code == 0, output
    assert distance(checkpoint_path(runs(name), 2), tmp_path / "exported") < 1e-5
    assert distance(checkpoint_path(runs(name), 4), tmp_path / "exported") > 1e-4


MEASURED = """
import gc, re, sys, threading, time
from pathlib import Path
import peft, safetensors.torch, torch
import ftcli.training.checkpointing, ftcli.checkpoint.export, transformers.models.llama.modeling_llama

def memory_in_use():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1e3

def watch():
    while True:
        peaks.append(memory_in_use())
        time.sleep(0.002)

peaks = [memory_in_use()]
threading.Thread(target=watch, daemon=True).start()
for number, one in enumerate(sys.argv[2:]):
    source, dtype, size = one.split("|")
    gc.collect()
    peaks[:] = [memory_in_use()]
    ftcli.checkpoint.export.export(source, f"{sys.argv[1]}/e{number}", dtype=dtype, shard_size=size)
    print(max(peaks) - peaks[0])
"""


def megabytes_held(folder: Path, *exports: tuple[Path, str, str]) -> list[float]:
    """Return the most memory that each (source, dtype, shard size) took beyond what its process held before.

    Files that are mapped do not count: the system takes their pages back when it needs them.
    """
    command = [sys.executable, "-c", MEASURED, str(folder), *("|".join(map(str, one)) for one in exports)]
    # Freed tensors go back to the system at once: what the heap keeps of one export would hide the next one's.
    settings = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    measured = subprocess.run(command, capture_output=True, text=True, env=settings)
    assert measured.returncode == 0, measured.stderr[-3000:]
    return [float(word) for word in measured.stdout.split()]


@pytest.mark.slow
def test_export_peak_memory_is_a_few_shards(inputs: Path, runs: Callable[[str], Path], tmp_path: Path) -> None:
    config = json.loads((inputs / "untied" / "config.json").read_text())
    config |= {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 12, "head_dim": 96}
    large = Path(shutil.copytree(inputs / "untied", tmp_path / "large"))
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(large)
    weights = sum(file.stat().st_size for file in large.glob("*.safetensors")) / 1e6
    assert weights > 70
    recipe = cell(inputs, "sft-untied", model={"name": str(large)}, train={"max_steps": 2})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe.model_dump(mode="json")))
    with pytest.raises(SystemExit) as end:
        main(["train", str(tmp_path / "recipe.yaml"), "--output", str(tmp_path / "run")])
    assert not end.value.code
    run, first, last = tmp_path / "run", checkpoint_path(runs("sft-tied"), 2), checkpoint_path(tmp_path / "run", 2)
    _, final, cut, whole = megabytes_held(
        tmp_path,
        (first, "float32", "1GB"),  # a tiny one: what is imported on the way is not the model's
        (run, "bfloat16", "2MB"),
        (last, "float32", "2MB"),
        (last, "float32", "1GB"),
    )
    assert final < weights / 4 and cut < weights / 4
    assert whole > 0.9 * weights  # what is measured can fail: one shard of everything is the whole model
    assert len(list((tmp_path / "e1").glob("model-*.safetensors"))) > 20
    assert len(list((tmp_path / "e2").glob("model-*.safetensors"))) > 40
