"""Find the largest micro-batch that fits into the devices, for `batch.micro_size: auto`.

Sizes are measured with a separate run that is prepared like any other and then discarded. It trains accumulation
windows of the longest rows. None of its numbers reaches the real run. Memory grows linearly with the number of rows, so
two measurements predict the next size to try, at most four times as large. Devices are not filled until they fail,
because a rank that fails inside a collective leaves the others waiting. The result is a divisor of each process's rows
per step, so the loss curve does not change.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from ftcli.config.plan import AUTO_SIZE
from ftcli.config.profile import profile_of_process
from ftcli.data.packing import lengths_of
from ftcli.data.paths import model_folder
from ftcli.models.estimates.memory_saving import MemorySaving
from ftcli.models.estimates.shape import Shape, measure_model
from ftcli.runtime.errors import InputError
from ftcli.runtime.process import local_rank, world_size
from ftcli.runtime.run_folder import RunFolder
from ftcli.runtime.torn_files import read_object
from ftcli.training.batches.dataloaders import Collate, Rows
from ftcli.training.batches.prefetch import DevicePrefetcher
from ftcli.training.out_of_memory import explain_out_of_memory
from ftcli.training.size_search import largest_that_fits

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.tasks.protocol import Batch
    from ftcli.training.batches.passes import RowSizes
    from ftcli.training.run import Run


RESULT_FILE = "micro_size.json"  # in the run folder
RESERVED_FRACTION = 0.06  # of a device's memory, which a window must leave free for fragmentation


class Prepare(Protocol):
    """Prepares the run that is measured and then discarded."""

    def __call__(self, recipe: Recipe) -> Run:
        """Return the run. A collective."""


class Meter(Protocol):
    """Measures the memory of one process.

    Attributes:
        limit: Bytes that a window may use.
    """

    limit: int

    def start(self) -> None:
        """Reset the peak."""

    def held(self) -> int:
        """Return the bytes that are allocated now."""

    def peak(self) -> int:
        """Return the largest number of bytes that were allocated since `start`."""


class DeviceMeter:
    """Measures this process's GPU. The limit leaves out memory of the driver, of NCCL and of other processes."""

    def __init__(self) -> None:
        free, total = torch.cuda.mem_get_info()
        others = total - free - torch.cuda.memory_reserved()
        self.limit = int((1 - RESERVED_FRACTION) * total) - others

    def start(self) -> None:
        """Reset the peak."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def held(self) -> int:
        """Return the bytes of all tensors."""
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """Return the largest number of bytes of tensors since `start`, after waiting for the device."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


def choose_micro_batch_size(
    recipe: Recipe,
    trial: Prepare,
    *,
    output: str | Path | None,
    cpu: bool,
    weights: Path | None,
    sizes: RowSizes | None = None,
) -> tuple[Recipe, list[str]]:
    """Replace `batch.micro_size: auto` by a number, unless passes can be formed by tokens. A collective.

    Passes are formed by tokens if the tokens of the rows are known and, on GPUs, the memory that a token takes.
    Otherwise the number is measured on GPUs, once for a run folder and its hardware; a resumed run takes it from the
    run folder. Without a GPU, and to evaluate finished weights, it is a fixed number.

    Args:
        recipe: The recipe.
        trial: Prepares the run that is measured and discarded.
        output: The run folder, or None.
        cpu: Whether the run trains on the CPU.
        weights: A folder of trained weights that are only evaluated, or None.
        sizes: The tokens of the training rows; None if they are not known.

    Returns:
        The recipe, and log lines about the origin of a number.

    Raises:
        InputError: One row does not fit, or a rank has a smaller device than the one of the stored result.
    """
    on_gpu = not cpu and torch.cuda.is_available()
    if recipe.batch.micro_size != "auto" or (sizes is not None and not (on_gpu and _shape_of(recipe) is None)):
        return recipe, []
    if not on_gpu or weights is not None:
        return with_micro_size(recipe, AUTO_SIZE), [
            f"batch.micro_size auto: at most {AUTO_SIZE} rows, not measured, because no GPU trains"
        ]
    key = _conditions_digest(recipe)
    if output is not None and (stored := _read_result(Path(output) / RESULT_FILE, key)) is not None:
        size, saving = stored["micro_size"], MemorySaving(**stored["memory_saving"])
        return with_micro_size(recipe, size, saving), [f"batch.micro_size auto: {size} rows, from {RESULT_FILE}"]
    size, saving, line = find_micro_batch_size(recipe, DeviceMeter, trial)
    if output is not None and local_rank() == 0:  # on each machine, because machines may not share the folder
        result = {"micro_size": size, "memory_saving": asdict(saving), "found": line, "for": key}
        RunFolder(output).write_json(RESULT_FILE, result | {"device_bytes": _device_bytes()})
    return with_micro_size(recipe, size, saving), [line]


def _shape_of(recipe: Recipe) -> Shape | None:
    """Return the shape of the recipe's model from its files; None if the memory of a token cannot be estimated."""
    folder = model_folder(recipe.model.name)
    return None if folder is None else measure_model(folder, recipe).shape


def _read_result(path: Path, key: str) -> dict[str, Any] | None:
    """Return the stored result for the same conditions; None if there is none.

    All ranks must decide the same, and they cannot communicate yet. So only the size of the device is compared. If it
    is smaller than before, a single rank measures again, and several ranks raise `InputError`.
    """
    stored = read_object(path) or {}
    if stored.get("for") != key or "memory_saving" not in stored:  # of an earlier version
        return None
    if _device_bytes() >= 0.98 * stored["device_bytes"]:
        return stored
    if world_size() == 1:
        return None
    before, now = stored["device_bytes"] / 1e9, _device_bytes() / 1e9
    raise InputError(
        f"batch.micro_size auto was measured on devices of {before:.0f} GB, but this device has {now:.0f} GB",
        where=str(path),
        hint="delete that file to measure again, or set batch.micro_size to a number",
    )


def _device_bytes() -> int:
    """Return the memory of this rank's GPU, before torch has selected it."""
    index = local_rank() % torch.cuda.device_count()
    return int(torch.cuda.get_device_properties(index).total_memory)


def find_micro_batch_size(
    recipe: Recipe, meter_of: Callable[[], Meter], trial: Prepare
) -> tuple[int, MemorySaving, str]:
    """Measure micro-batch sizes with a run that is then discarded. A collective.

    What the recipe leaves to auto is as a single row needs it.

    Args:
        recipe: The recipe.
        meter_of: Creates the meter of this process.
        trial: Prepares the run.

    Returns:
        The largest number of rows that fits on every rank, how memory is saved, and a line for the log.

    Raises:
        InputError: One row does not fit.
    """
    # A replayed pass allocates nothing, so nothing could be measured.
    no_graphs = recipe.model_copy(update={"model": recipe.model.model_copy(update={"cuda_graphs": False})})
    result = _measure_run(trial(with_micro_size(no_graphs, 1)), meter_of)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def _measure_run(run: Run, meter_of: Callable[[], Meter]) -> tuple[int, MemorySaving, str]:
    """Measure micro-batch sizes with a prepared run, and release it. See `find_micro_batch_size`."""
    ranks, rows_per_step = run.hardware.ranks, run.plan.global_size // run.plan.processes
    run.hardware.start_from_update(run.model, run.optimizer, 0)  # allocates the optimizer state, as the first step does
    meter = meter_of()
    limit, rows = min(ranks.collect(meter.limit)), _longest_rows(run, rows_per_step)

    def measure(size: int) -> int | None:
        run.plan = replace(run.plan, micro_size=max(size, 1))  # for the message of `explain_out_of_memory`
        meter.start()
        try:
            allocated = _train_window(run, rows, max(size, 1), 2 if size < rows_per_step else 1, meter)
        except torch.OutOfMemoryError:
            if size <= 1 or ranks.world > 1:  # the others may wait in a collective, so all ranks must end
                raise
            run.optimizer.zero_grad()
            return None
        return max(ranks.collect(meter.peak() if size else allocated))

    with explain_out_of_memory(run):
        sizes = [n for n in range(1, rows_per_step + 1) if rows_per_step % n == 0]
        size, measured = largest_that_fits(sizes, measure, limit)
    peaks = {n: "too much" if peak is None else f"{peak / 1e9:.2f}" for n, peak in measured.items() if n}
    listed = ", ".join(f"{n}: {peak}" for n, peak in peaks.items())
    run.hardware.release(run.model)
    line = f"batch.micro_size auto: {size} rows fit into {limit / 1e9:.2f} GB (GB by number of rows: {listed})"
    return size, run.memory_saving, line


def _train_window(run: Run, rows: list[Any], size: int, count: int, meter: Meter) -> int:
    """Make one optimizer step of `count` micro-batches of `size` rows, as the loop does.

    Returns the most bytes that are allocated after a backward pass: weights, gradients and optimizer state.
    """
    hardware, model = run.hardware, run.model
    batch: Batch = Collate(run.task)(rows[:size])
    del batch["sample_ids"]
    model.train()
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0
    scale = 1 / max(
        run.terms.count(run.task, [batch])[0], 1
    )  # equals the loop's scale if all micro-batches of all ranks are equal
    allocated = 0
    batches = DevicePrefetcher(hardware.accelerator.device).ahead([batch] * count)
    for micro, micro_batch in enumerate(hardware.micro_batches(batches)):
        with hardware.accumulating(model, is_last=micro == count - 1):
            loss = run.loss_of(micro_batch)
            hardware.backward(loss * scale)
        del loss
        allocated = max(allocated, meter.held())  # the last backward pass of ZeRO-3 frees the gradients
    hardware.clip_grad_norm(hardware.trained(model), run.recipe.optimizer.max_grad_norm)
    hardware.step(run.optimizer)
    return allocated


def _longest_rows(run: Run, count: int) -> list[Any]:
    """Return the longest training rows, the longest first. For a stream return rows of the maximum length."""
    rows, length = run.rows, run.recipe.data.max_length
    dataset = Rows(rows.train, run.task, training=True, bins=rows.bins, columns=rows.derived["train"])
    if rows.streamed:
        first = dataset[(0, 0)]
        return [[_repeat_tokens(document, length) for document in first[:1]]] * count
    if "input_ids" not in rows.train.column_names:
        return [dataset[(0, index % len(dataset))] for index in range(count)]
    lengths = lengths_of(rows.train)
    if rows.bins is not None:
        lengths = np.add.reduceat(lengths[rows.bins.documents], rows.bins.starts[:-1])
    longest = np.argsort(-lengths, kind="stable")[:count].tolist()
    return [dataset[(0, longest[index % len(longest)])] for index in range(count)]


def _repeat_tokens(document: dict[str, Any], length: int) -> dict[str, Any]:
    """Return a document of `length` tokens, made by repeating the tokens of the given one."""
    tokens = len(document["input_ids"])
    columns = {k: v for k, v in document.items() if isinstance(v, list) and len(v) == tokens}
    return document | {key: (value * (length // tokens + 1))[:length] for key, value in columns.items()}


def with_micro_size(recipe: Recipe, size: int, saving: MemorySaving | None = None) -> Recipe:
    """Return a recipe with a micro-batch size, and with a way to save memory unless it is None."""
    sized = recipe.model_copy(update={"batch": recipe.batch.model_copy(update={"micro_size": size})})
    return sized if saving is None else saving.applied_to(sized)


def _conditions_digest(recipe: Recipe) -> str:
    """Return a digest of everything that decides how many rows fit and that is equal on every rank."""
    values = profile_of_process(os.environ).values
    conditions = {
        "recipe": recipe.model_dump(
            mode="json",
            include={"task", "task_options", "precision", "model", "adapter", "data", "batch", "optimizer"},
        ),
        "profile": {key: value for key, value in values.items() if key != "machine_rank"},
        "world": str(world_size()),
        "torch": torch.__version__,
    }
    return hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:32]
