"""Write the final weights of a run, and the probe that an export is compared with."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ftcli.checkpoint.answer_ends import trained_answer_ends, write_answer_ends
from ftcli.checkpoint.final import last_metrics, write_model
from ftcli.checkpoint.foreign_files import remove_rewritten, set_aside
from ftcli.checkpoint.hf_shards import WEIGHT_NAMES
from ftcli.checkpoint.model_card import model_card
from ftcli.checkpoint.task_errors import explain_task_errors, task_frame
from ftcli.hardware.batch_norm import average_statistics
from ftcli.models.adapter_folder import write_adapter
from ftcli.models.own_model import exported_part, probe_tensor
from ftcli.models.trained_on import write_trained_on
from ftcli.runtime.checkpoint_names import PROBE
from ftcli.runtime.durable_files import sync, sync_tree
from ftcli.runtime.errors import InputError, Problem, RunError
from ftcli.runtime.run_folder import explain_disk_errors
from ftcli.tasks.protocol import properties_of
from ftcli.training.batches.dataloaders import Collate, Rows

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
        RunError: A method of a user's task raised an exception. On the main rank.
    """
    if run.folder is None:
        raise InputError("the run has no folder to write into", hint="name one: ftcli.prepare(recipe, output=FOLDER)")
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    average_statistics(run.hardware.unwrap(run.model), run.recipe.model.batch_norm, run.hardware.ranks)
    # An adapter of a quantised model is exported for the unquantised model, whose logits differ.
    probe = probe_of(run) if run.recipe.model.quantization is None else None
    temporary = run.folder.path / "final.tmp"
    is_main, is_adapter = run.hardware.ranks.is_main, run.recipe.adapter.type != "none"
    if is_main:
        run.folder.ensure()
        leftovers = set_aside(temporary)
    auto_class, properties = getattr(run.task, "auto_class", None) or "", properties_of(run.task)
    part = "" if is_adapter else properties.exported_part
    values = run.hardware.parameters(run.model, trained_only=is_adapter, part=part)
    if not is_main:
        for _ in values:  # takes part in gathering each one
            pass
        return
    model: Any = run.hardware.unwrap(run.model)
    gathered = ((name, value) for name, value in values if value is not None)  # all values, on the main rank
    with _explain_lost_weights(run), explain_disk_errors(run.folder.final, SafetensorError):
        temporary.mkdir()
        if is_adapter:
            write_adapter(model, dict(gathered), temporary, properties.adapter_task_type)
            write_trained_on(temporary, run.base)
        else:
            write_model(run.task, exported_part(run.task, model), gathered, temporary)
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
        leftovers += set_aside(run.folder.final)  # of an earlier launch that ended at an earlier step
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
    rows = Rows(run.rows.train, run.task, training=False)
    batch = Collate(run.task)([rows[0, number] for number in range(min(PROBE_ROWS, len(rows)))])
    inputs = run.task.probe({name: value for name, value in batch.items() if name != "sample_ids"})
    run.model.eval()
    with torch.no_grad():
        logits = probe_tensor(run.task, run.model(**run.to_device(inputs)))
    if logits is None:
        return None
    output = {"logits": logits.float().cpu().contiguous()}
    return {name: value.contiguous() for name, value in inputs.items()} | output


def check_saving(run: Run) -> None:
    """Check before the first step that the weights of a run can be written. A collective.

    For models that transformers does not load with a head, the probe is computed once as a test. Methods of a user's
    task are called once, with a temporary folder.

    Raises:
        InputError: The task does not provide what saving needs or raises an exception, or a parameter name contains
            "@".
    """
    auto_class = getattr(run.task, "auto_class", None)
    if run.folder is not None and auto_class is not None:
        WEIGHT_NAMES.require()
    if run.folder is None:
        return

    _try_writing(run)
    if isinstance(auto_class, str) and "For" in auto_class:
        if not _are_users_own(run.task, "probe", "probe_output"):
            return
    elif auto_class is not None:
        import transformers

        if not hasattr(transformers, auto_class):
            raise InputError(
                f"auto_class of the task is {auto_class}, which transformers does not have",
                hint="name one of transformers' Auto classes, or None for a module that the task builds",
            )
    for name in (name for name, _ in run.hardware.unwrap(run.model).named_parameters()):
        if "@" in name:
            raise InputError(f"the parameter {name} cannot be saved: @ separates names in checkpoints")
    with explain_task_errors(run.task, "it is called before the first step, because final weights need it"):
        probe_of(run)
    run.hardware.train(run.model)


def _try_writing(run: Run) -> None:
    """Call the methods of a user's task that write files, with a temporary folder on the main rank. A collective.

    Raises:
        InputError: A method raised an exception. On every rank.
    """
    writes_model = run.recipe.adapter.type == "none" and _are_users_own(run.task, "save_model")
    writes_processor = _are_users_own(run.task, "save_processor", "answer_ends")
    problems: list[Problem] = []
    if run.hardware.ranks.is_main and (writes_model or writes_processor):
        with tempfile.TemporaryDirectory() as folder:
            try:
                with explain_task_errors(run.task, "it is called before the first step, because final weights need it"):
                    if writes_model:
                        run.task.save_model(run.hardware.unwrap(run.model), folder)  # type: ignore[attr-defined]
                    if writes_processor:
                        run.task.save_processor(folder)
                        trained_answer_ends(run.task)
            except InputError as error:
                problems = error.problems
    if problems := run.hardware.ranks.collect(problems)[0]:
        raise InputError(problems)


def _are_users_own(task: Any, *names: str) -> bool:
    """Return whether a task has one of the methods from a file outside of ftcli."""
    methods = [getattr(task, name) for name in names if hasattr(task, name)]
    return any(not (getattr(method, "__module__", None) or "").startswith("ftcli.") for method in methods)


@contextmanager
def _explain_lost_weights(run: Run) -> Iterator[None]:
    """Convert an exception of a user's task while final weights are written: the last checkpoint has the weights."""
    try:
        yield
    except (InputError, RunError, OSError):
        raise
    except Exception as error:
        frame = task_frame(run.task, error)
        if frame is None:
            raise
        raise RunError(
            f"final weights were not written: {frame.filename}:{frame.lineno}: the task's method {frame.name} raised "
            f"{type(error).__name__}: {error}. The newest checkpoint has the trained weights: correct the method and "
            "export the checkpoint with `ftcli export RUN FOLDER`"
        ) from error
