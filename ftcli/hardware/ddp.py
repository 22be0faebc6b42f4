"""One process, or a whole copy of the model on each of several processes: DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ftcli.hardware.backend import Backend
from ftcli.runtime.patches import declare

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn


# Size in MiB of the buckets in which gradients are summed over the ranks during the backward pass. The sum of the last
# bucket cannot overlap with it. docs/explanation/performance.md has step times with other sizes.
BUCKET_MB = 128

PENDING_WORKS = declare(
    __name__,
    "nccl-pending-works",
    library="torch",
    versions=">=2.11,<2.14",
    purpose="Waits until NCCL's watchdog has finished with all collectives of a discarded run",
    without="The gradients of such a run then stay in memory during the next run.",
    alternative="`destroy_process_group`, after which Accelerate cannot start another run in the process.",
    apis=("torch.distributed:ProcessGroup._wait_for_pending_works",),
)


class DDP(Backend):
    """DistributedDataParallel. With one process, Accelerate does not wrap the model."""

    def accelerator_options(self) -> dict[str, Any]:
        """Return the options of DistributedDataParallel.

        Gradients become views of the buckets when they are first summed. `static_graph` stays off. It would only save
        the search for unused parameters, which is off, and would require the graph of the first step in all steps.
        """
        from accelerate.utils import DistributedDataParallelKwargs

        kwargs = DistributedDataParallelKwargs(
            bucket_cap_mb=BUCKET_MB,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # frozen statistics are equal on every rank; trained ones must not be overwritten
        )
        return {"kwargs_handlers": [kwargs]}

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside DistributedDataParallel."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def rebuild_ddp_buckets(self, accelerator: Accelerator, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        """Run one forward and backward pass, after which the layout of the buckets is final. A collective.

        DistributedDataParallel rebuilds its buckets once, in the order in which the first gradients arrive. The place
        of an element in its bucket determines the order in which the ranks are summed. Without this pass the first
        step of a resumed run would differ in its last bits.
        """
        accelerator.backward(loss())
        model.zero_grad(set_to_none=True)

    def release(self, model: nn.Module) -> None:
        """Make NCCL drop its references to the gradients of the last step. A collective.

        DistributedDataParallel waits for the future of an all-reduce, not for the work itself. ProcessGroupNCCL then
        keeps the buckets (`shelvesToUnstash_`) until its watchdog has seen the work finish and another collective
        begins. The buckets are a whole copy of the gradients.
        """
        if isinstance(model, DistributedDataParallel) and model.process_group.name() == "nccl":
            if PENDING_WORKS.is_usable():
                model.process_group._wait_for_pending_works()  # the watchdog polls ten times per second
            device = next(model.parameters()).device
            torch.distributed.all_reduce(torch.zeros((), device=device), group=model.process_group)
