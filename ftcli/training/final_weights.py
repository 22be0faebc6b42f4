"""Write the final weights of a run, and the probe that an export is compared with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftcli.checkpoint.answer_ends import write_answer_ends
from ftcli.checkpoint.final import PROBE, last_metrics, model_card, write_model
from ftcli.checkpoint.foreign_files import remove_rewritten, set_aside
from ftcli.checkpoint.hf_shards import WEIGHT_NAMES
from ftcli.models.adapter_folder import write_adapter
from ftcli.models.own_model import probe_tensor
from ftcli.runtime.durable_files import sync, sync_tree
from ftcli.runtime.errors import InputError
from ftcli.runtime.run_folder import explain_disk_errors
from ftcli.tasks.protocol import properties_of

if TYPE_CHECKING:
    from torch import Tensor

    from ftcli.training.run import Run


PROBE_ROWS = 2


def save_final(run: Run) -> None:
    """Write final/ and the probe into the folder of a run. A collective.

    The main rank holds at most one file of the weights in memory.

    Args:
        run: The run.

    Raises:
        DiskError: The weights cannot be written. On the main rank.
        InputError: The run has no folder. On every rank.
    """
    if run.folder is None:
        raise InputError("the run has no folder to write into", hint="name one: ftcli.prepare(recipe, output=FOLDER)")
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    # An adapter of a quantised model is exported for the unquantised model, whose logits differ.
    probe = probe_of(run) if run.recipe.model.quantization is None else None
    temporary = run.folder.path / "final.tmp"
    is_main, is_adapter = run.hardware.ranks.is_main, run.recipe.adapter.type != "none"
    if is_main:
        run.folder.ensure()
        leftovers = [set_aside(temporary)]
    values = run.hardware.parameters(run.model, trained_only=is_adapter)
    if not is_main:
        for _ in values:  # takes part in gathering each one
            pass
        return
    model: Any = run.hardware.unwrap(run.model)
    auto_class, properties = getattr(run.task, "auto_class", None) or "", properties_of(run.task)
    gathered = ((name, value) for name, value in values if value is not None)  # all values, on the main rank
    with explain_disk_errors(run.folder.final, SafetensorError):
        temporary.mkdir()
        if is_adapter:
            write_adapter(model, dict(gathered), temporary, properties.adapter_task_type)
        else:
            write_model(run.task, model, gathered, temporary)
        write_answer_ends(run.task, model, temporary)
        run.task.save_processor(str(temporary))
        card = model_card(
            run.recipe, last_metrics(run.folder), model, auto_class, properties.pipeline_tag, task=run.task
        )
        (temporary / "README.md").write_text(card, encoding="utf-8")
        if probe is not None:
            save_file(probe, run.folder.path / PROBE, metadata={"step": str(run.position)})
            sync(run.folder.path / PROBE)
        sync_tree(temporary)
        leftovers.append(set_aside(run.folder.final))  # of an earlier launch that ended at an earlier step
        temporary.rename(run.folder.final)
        for leftover in leftovers:
            remove_rewritten(leftover, run.folder.final)
        sync(run.folder.path)


def probe_of(run: Run) -> dict[str, Tensor] | None:
    """Return fixed inputs and the prepared model's output for them. A collective.

    Every rank runs the same forward pass.

    Returns:
        The task's probe inputs and `logits` in float32, on the host. None if the task has no probe.
    """
    import torch

    if not hasattr(run.task, "probe"):
        return None
    rows = [run.rows.train[i] | {"epoch": 0, "training": False} for i in range(min(PROBE_ROWS, len(run.rows.train)))]
    inputs = run.task.probe(run.task.collate(rows))
    run.model.eval()
    with torch.no_grad():
        logits = probe_tensor(run.task, run.model(**run.to_device(inputs)))
    if logits is None:
        return None
    output = {"logits": logits.float().cpu().contiguous()}
    return {name: value.contiguous() for name, value in inputs.items()} | output


def check_saving(run: Run) -> None:
    """Check before the first step that the weights of a run can be written. A collective.

    For models that transformers does not load with a head, the probe is computed once as a test.

    Raises:
        InputError: The task does not provide what saving needs, or a parameter name contains "@".
    """
    auto_class = getattr(run.task, "auto_class", None)
    if run.folder is not None and auto_class is not None:
        WEIGHT_NAMES.require()
    if run.folder is None or (isinstance(auto_class, str) and "For" in auto_class):
        return

    if auto_class is not None:
        import transformers

        if not hasattr(transformers, auto_class):
            raise InputError(
                f"auto_class of the task is {auto_class}, which transformers does not have",
                hint="name one of transformers' Auto classes, or None for a module that the task builds",
            )
    for name in (name for name, _ in run.hardware.unwrap(run.model).named_parameters()):
        if "@" in name:
            raise InputError(f"the parameter {name} cannot be saved: @ separates names in checkpoints")
    probe_of(run)
    run.hardware.train(run.model)
