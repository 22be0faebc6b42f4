"""Explain that a device has run out of memory: where, with how many rows, and which changes keep the loss curve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ftcli.config.profile import advise_profile
from ftcli.models.estimates.shape import OF_WHOLE_LAYERS
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from ftcli.training.run import Run


@contextmanager
def explain_out_of_memory(run: Run) -> Iterator[None]:
    """Raise `InputError` with remedies instead of torch's error if the device runs out of memory inside the block."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        peak = f"; peak so far {torch.cuda.max_memory_allocated() / 1e9:.2f} GB" if torch.cuda.is_available() else ""
        passes = run.plan.passes
        rows = f"{run.plan.micro_size} rows" if passes is None else f"up to {passes.tokens} tokens"
        rank, beat, first = run.hardware.ranks.rank, run.heartbeat.now, (str(error).splitlines() or [""])[0]
        raise InputError(
            f"rank {rank} ran out of memory in {beat.phase} (step {beat.step}) with {rows} in each "
            f"forward pass{peak}: {first}",
            hint="\n    ".join([*_free_the_device(), *_remedies(run)]),
        ) from error


def _free_the_device() -> list[str]:
    """Return a remedy if other processes hold a large part of this process's device."""
    if not torch.cuda.is_available():
        return []
    free, total = torch.cuda.mem_get_info()
    return describe_other_processes(free=free, total=total, own=torch.cuda.memory_reserved())


def describe_other_processes(*, free: int, total: int, own: int) -> list[str]:
    """Return a remedy if more than a tenth of a device is neither free nor this process's.

    Args:
        free: Bytes of the device that nobody uses.
        total: Bytes of the device.
        own: Bytes that this process has reserved. CUDA and NCCL need up to 2 GB more, so a tenth is allowed.
    """
    others = total - free - own
    if others <= total / 10:
        return []
    return [f"end the other processes on this device: about {others / 1e9:.0f} GB of {total / 1e9:.0f} GB are theirs"]


def _remedies(run: Run) -> list[str]:
    """Return changes of recipe and profile that need less memory and keep the loss curve."""
    plan = run.plan
    rows_per_step = plan.global_size // plan.processes
    most = plan.micro_size if plan.passes is None else rows_per_step // 2 + 1
    sizes = [str(size) for size in range(1, most) if rows_per_step % size == 0]
    smaller = f"set batch.micro_size to {' or '.join(sizes)}: batch.global_size {plan.global_size} and the curve stay"
    if (mode := run.recipe.model.batch_norm) != "frozen":
        smaller += f", except for the statistics of model.batch_norm: {mode}, which are those of a forward pass"
    remedies = [smaller if sizes else "batch.micro_size is 1 row already"]
    saving = run.memory_saving
    stronger = {"none": "full", "selective": "full", "full": "tiled"}.get(saving.mode)
    if saving.mode in OF_WHOLE_LAYERS and not saving.offloads:
        remedies.append("set model.activation_offloading to true: less memory of the device, the same curve")
    if stronger is not None:
        remedies.append(f"set model.gradient_checkpointing to {stronger}: less memory, more time, the same curve")
    if run.hardware.backend.replaces_shards:  # more GPUs would not help
        return [*remedies, "set model.shard_frozen to true: the GPUs share the frozen weights, the same curve"]
    return [*remedies, advise_profile(run.hardware.distributed_type)]
