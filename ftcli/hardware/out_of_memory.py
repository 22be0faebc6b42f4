"""A device that ran out of memory, told as what can be done about it: micro sizes first, for they move no curve."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..errors import InputError

if TYPE_CHECKING:
    from ..run import Run


@contextmanager
def out_of_memory_told(run: Run) -> Iterator[None]:
    """Raise `InputError` instead of torch's error when the device runs out of memory inside the block."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        peak = f"; peak so far {torch.cuda.max_memory_allocated() / 1e9:.2f} GB" if torch.cuda.is_available() else ""
        rank, beat, first = run.hardware.ranks.rank, run.heart.now, (str(error).splitlines() or [""])[0]
        raise InputError(
            f"rank {rank} ran out of memory in {beat.phase} (step {beat.step}) with {run.plan.micro_size} rows in each "
            f"forward pass{peak}: {first}",
            hint="\n    ".join(_remedies(run)),
        ) from error


def _remedies(run: Run) -> list[str]:
    plan = run.plan
    share = plan.global_size // plan.processes
    sizes = [str(size) for size in range(1, plan.micro_size) if share % size == 0]
    told = [f"set batch.micro_size to {' or '.join(sizes)}: batch.global_size {plan.global_size} and the curve stay"]
    found = told if sizes else ["batch.micro_size is 1 row already"]
    if run.recomputed != "full":
        found.append("set model.gradient_checkpointing to full: less memory, more time, the same curve")
    if run.hardware.distributed_type not in ("FSDP", "DEEPSPEED"):
        found.append("train with --profile fsdp or zero3 on several GPUs: they share weights and optimizer state")
    else:
        found.append("use more GPUs, or --profile fsdp_offload or zero3_offload: optimizer state on the host")
    return found
