"""Rebuild the model of an export by its task, and compare it with the trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.checkpoint.conversion import cast_values
from ftcli.models.own_model import exported_part, load_weights, probe_tensor, read_tensors
from ftcli.runtime.errors import ExportError

if TYPE_CHECKING:
    from torch import nn

    from ftcli.checkpoint.export_job import ExportJob
    from ftcli.checkpoint.verify import ExpectedModel


def rebuild_by_task(job: ExportJob, folder: Path, expected: ExpectedModel) -> float:
    """Build the model of an export by its task, and compare weights and output with the trained model.

    Args:
        job: The export.
        folder: The exported folder.
        expected: The expected weights.

    Returns:
        The relative distance between the probe and the output of the model; 0 without a probe.

    Raises:
        ExportError: A weight in `folder` differs from the trained one.
    """
    import torch

    from ftcli.checkpoint.verify import digest
    from ftcli.tasks.build import build_task

    if job.is_adapter:
        return _rebuild_adapter(job, folder, expected)
    dtype, stored = getattr(torch, job.dtype), dict(read_tensors(folder))
    digests = expected.digests or {
        name: digest(cast_values(value, dtype)) for name, value in (read_tensors(job.final) if job.final else ())
    }
    names = [*digests, *(name for name in stored if name not in digests)]
    if wrong := [name for name in names if name not in stored or digests.get(name) != digest(stored[name])]:
        raise ExportError(f"these weights differ from the trained ones: {wrong[:3]}")
    if job.probe is None:
        return 0.0
    task = build_task(job.recipe)
    model, _ = task.load_model(_dataset_info(job, task), dtype=torch.float32)
    task.finish_model(model)
    load_weights(exported_part(task, model), folder)
    return _probe_distance(task, model, job.probe)


def _rebuild_adapter(job: ExportJob, folder: Path, expected: ExpectedModel) -> float:
    """Build the base of an exported adapter by the task, load the adapter, and compare it with the trained one."""
    import torch
    from safetensors.torch import load_file

    from ftcli.checkpoint.assemble import build_model
    from ftcli.checkpoint.verify import digest
    from ftcli.models.adapters import WEIGHTS, load_adapter_weights
    from ftcli.tasks.build import build_task

    dtype, task = getattr(torch, job.dtype), build_task(job.recipe)
    model = build_model(job.recipe, task, _dataset_info(job, task))
    load_adapter_weights(model, folder)  # raises an error for a tensor that is missing or unexpected
    tensors = {name: value.detach() for name, value in (*model.named_parameters(), *model.named_buffers())}
    pairs = [(name, cast_values(tensors[name], dtype), sha) for name, sha in expected.digests.items()]
    if job.final is not None:
        exported = load_file(folder / WEIGHTS)
        trained = load_file(job.final / WEIGHTS)
        pairs += [(name, exported[name], digest(cast_values(value, dtype))) for name, value in trained.items()]
    if wrong := [name for name, value, sha in pairs if digest(value) != sha]:
        raise ExportError(f"these weights differ from the trained ones: {wrong[:3]}")
    return 0.0 if job.probe is None else _probe_distance(task, model, job.probe)


def _dataset_info(job: ExportJob, task: Any) -> dict[str, Any]:
    """Return the task's results from the rows, from the checkpoint or by preparing the rows."""
    from ftcli.checkpoint.folder import read_state
    from ftcli.data.cache import prepare_rows

    if job.checkpoint is None:
        return prepare_rows(job.recipe, task).facts
    facts: dict[str, Any] = read_state(job.checkpoint)["data"]["facts"]
    return facts


def _probe_distance(task: Any, model: nn.Module, probe: Path) -> float:
    """Return the relative distance between a run's probe and the output of a model."""
    import torch
    from safetensors.torch import load_file

    inputs = load_file(probe)
    logits = inputs.pop("logits")
    with torch.no_grad():
        output = probe_tensor(task, model.eval()(**inputs))
    assert output is not None
    return float(torch.linalg.vector_norm(output.float() - logits) / torch.linalg.vector_norm(logits))
