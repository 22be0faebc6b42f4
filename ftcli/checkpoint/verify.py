"""Verify that an exported folder loads without ftcli, in a new process that uses transformers and peft only.

The new process compares the digest of every weight and, if the run has a probe, the logits with those of the trained
model. Weights stay memory-mapped files there unless their dtype changes.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config.trust import NO_CWD, REFUSAL, consent_needed
from ftcli.models.adapter_folder import LABEL_KEYS
from ftcli.runtime.errors import ExportError, shortened

if TYPE_CHECKING:
    from torch import Tensor

    from ftcli.checkpoint.export_job import ExportJob


RELOAD = """
import hashlib, json, os, sys
import torch, transformers
from safetensors.torch import load_file
request = json.loads(sys.stdin.read())
auto, dtype, folder = getattr(transformers, request["auto_class"]), getattr(torch, request["dtype"]), request["folder"]
trust = {"trust_remote_code": request["trusted"]}  # never None: transformers would ask on a terminal
try:
    config = json.load(open(folder + "/adapter_config.json"))
except FileNotFoundError:
    model, info = auto.from_pretrained(folder, dtype=dtype, output_loading_info=True, **trust)
    different = sorted(info["missing_keys"] | info["unexpected_keys"])
    assert not different, f"missing or unexpected in the files: {different[:3]}"
else:
    from peft import PeftModel
    options = {"num_labels": request["labels"], "ignore_mismatched_sizes": True} if request["labels"] else {}
    if os.path.exists(folder + "/base_config"):
        settings = json.load(open(folder + "/base_config/config.json"))
        if "auto_map" in settings:  # transformers does not look for the model's code in a subfolder
            options = {key: settings[key] for key in request["label_keys"] if settings.get(key) is not None}
        else:
            options = {"config": transformers.AutoConfig.from_pretrained(folder, subfolder="base_config", **trust)}
        options["ignore_mismatched_sizes"] = True
    options |= {"revision": config["revision"]} if config.get("revision") else {}
    base = auto.from_pretrained(
        config["base_model_name_or_path"], dtype=torch.float32 if request["probe"] else "auto", **trust, **options
    )
    if os.path.exists(folder + "/tokenizer_config.json"):
        tokens = len(transformers.AutoTokenizer.from_pretrained(folder, **trust))
        if tokens > base.get_input_embeddings().num_embeddings:
            head = base.get_output_embeddings()
            if head is not None and head.weight is not base.get_input_embeddings().weight:
                base.config.tie_word_embeddings = False  # resizing would tie them
            base.resize_token_embeddings(tokens, mean_resizing=False)
    model = PeftModel.from_pretrained(base, folder, autocast_adapter_dtype=False)
if any(getattr(module, "attn_logit_softcapping", None) for module in model.modules()):
    model.set_attn_implementation("eager")  # the default of transformers before 5.21 is sdpa, which ignores the cap
names = {str(index): name for index, name in getattr(model.config, "id2label", {}).items()}
assert request["names"] in (None, names), f"wrong label names: {list(names.values())[:3]}"
weights = dict(model.named_parameters()) | dict(model.named_buffers())
parameters = dict(model.named_parameters())
bad = [name for name, p in parameters.items() if p.numel() == 0 or not torch.isfinite(p).all()]
assert not bad, f"empty or not finite: {bad[:3]}"
def digest(value):
    value = value.detach().to(dtype) if value.is_floating_point() else value.detach()
    return hashlib.sha256(value.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
digests = request["digests"]
wrong = [name for name, expected in digests.items() if name not in weights or digest(weights[name]) != expected]
assert not wrong, f"these weights differ from the trained ones: {wrong[:3]}"
untrained = sorted(parameters.keys() - digests.keys()) if request["whole"] else []
assert not untrained, f"weights that were not trained: {untrained[:3]}"
distance = rounding = 0.0
if request["probe"]:
    inputs = load_file(request["probe"])
    expected = inputs.pop("logits")
    width = next(model.parameters()).dtype
    inputs = {k: v.to(width) if v.is_floating_point() else v for k, v in inputs.items()}
    real = inputs["attention_mask"].bool() if expected.ndim == 3 else slice(None)
    def logits_in(compute):
        context = torch.autocast("cpu", getattr(torch, compute or "bfloat16"), enabled=compute is not None)
        with torch.no_grad(), context:
            output = model.eval()(**inputs)
        logits = getattr(output, "logits", None)
        return (output.last_hidden_state if logits is None else logits).float()[real]
    def distance_of(logits):
        return float(torch.linalg.vector_norm(logits) / torch.linalg.vector_norm(expected[real]))
    logits = logits_in(None)
    distance = distance_of(logits - expected[real])
    if request["compute"] and not distance <= request["tolerance"]:
        rounding = distance_of(logits_in(request["compute"]) - logits)
print(distance, rounding)
"""


@dataclass(frozen=True)
class ExpectedModel:
    """The properties that a reloaded model must have.

    Attributes:
        auto_class: transformers' class of the model.
        dtype: Dtype of the exported weights.
        labels: Number of labels of a head that is part of the adapter; 0 for other models.
        names: Names of the labels by index; None if they are not known.
        probe: File with inputs and the logits of the trained model; None without a probe.
        digests: sha256 of weights and buffers in `dtype`, by name in the model.
        whole: Whether `digests` has every weight of the model.
        trusted: Whether the user trusts the model's own code.
        source: The folder that was exported, for messages. The export itself is a temporary folder.
        compute: Name of the 16-bit dtype in which the run computes; None if it computes in float32.
        tolerance: Distance to the probe from which on the rounding in `compute` is measured.
        distance: Relative distance between its logits and those of the assembled model (proof.py); None without.
    """

    auto_class: str
    dtype: str
    labels: int = 0
    names: dict[int, str] | None = None
    probe: Path | None = None
    digests: dict[str, str] = field(default_factory=dict)
    whole: bool = False
    trusted: bool = False
    source: Path | None = None
    compute: str | None = None
    tolerance: float = 0.0
    distance: float | None = None

    @classmethod
    def of(cls, job: ExportJob, *, labels: int, names: dict[int, str] | None) -> ExpectedModel:
        """Return the properties that follow from an export, as yet without digests.

        Args:
            job: The export.
            labels: Number of labels of a head; 0 for other models.
            names: Names of the labels by index; None if they are not known.
        """
        return cls(
            job.auto_class,
            job.dtype,
            labels=labels,
            names=names,
            probe=job.probe,
            trusted=job.recipe.model.trust_remote_code,
            source=job.final,
            compute=job.compute,
            tolerance=job.tolerance,
        )


def digest(value: Tensor) -> str:
    """Return the sha256 of a tensor's bytes on the host."""
    import torch

    return hashlib.sha256(value.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def reload_in_fresh_process(folder: Path, expected: ExpectedModel) -> tuple[float, float]:
    """Load an exported folder in a new process that does not import ftcli, and compare it with the trained model.

    Args:
        folder: The exported folder.
        expected: The properties that the model must have.

    Returns:
        The relative distance between its logits in float32 and the probe, 0 without a probe; and the relative distance
        between its logits in float32 and in `expected.compute`, 0 unless the first one is above `expected.tolerance`.

    Raises:
        ExportError: The folder does not load, or its weights differ.
        InputError: The model has code of its own, which the user does not trust.
    """
    request: dict[str, Any] = {
        "auto_class": expected.auto_class,
        "dtype": expected.dtype,
        "labels": expected.labels,
        "label_keys": LABEL_KEYS,
        "names": expected.names,
        "folder": str(folder),
        "probe": None if expected.probe is None else str(expected.probe),
        "digests": expected.digests,
        "whole": expected.whole,
        "trusted": expected.trusted,
        "compute": expected.compute,
        "tolerance": expected.tolerance,
    }
    command = [sys.executable, "-c", NO_CWD + RELOAD]
    result = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True)
    if result.returncode:
        if not expected.trusted and REFUSAL in result.stderr:
            raise consent_needed(_refused_model(folder, expected, result.stderr))
        raise ExportError(f"the export does not load in plain transformers: {_last_error(result.stderr)}")
    distance, rounding = map(float, result.stdout.split()[-2:])
    return distance, rounding


def _last_error(text: str) -> str:
    """Return the message of the exception that ended a process, without its stack trace."""
    start = max(
        (found.end() for found in re.finditer(r"^Traceback \(most recent call last\):$", text, re.M)), default=0
    )
    message = re.search(r"^[\w.]+(?:: .*)?$", text[start:], re.M | re.S)
    return shortened((message[0] if message else text).strip().removeprefix("AssertionError: "))


def _refused_model(folder: Path, expected: ExpectedModel, message: str) -> str:
    """Return the name of the model whose code was refused: the base of an adapter, or the folder that was exported."""
    adapter = folder / "adapter_config.json"
    if adapter.exists() and str(folder) not in message:  # transformers names the model with the code
        return str(json.loads(adapter.read_text(encoding="utf-8"))["base_model_name_or_path"])
    return str(expected.source or folder)
