"""One process, or a whole copy of the model on each of several processes: DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn.parallel import DistributedDataParallel

from ftcli.hardware import weight_broadcast, weight_transfer
from ftcli.hardware.backend import Backend
from ftcli.runtime.patches import declare

if TYPE_CHECKING:
    from accelerate import Accelerator
    from torch import Tensor, nn
    from torch.optim import Optimizer


# Size in MiB of the buckets in which gradients are summed over the ranks during the backward pass. The sum of the last
# bucket cannot overlap with it. docs/explanation/performance.md has step times with other sizes.
BUCKET_MB = 128

PENDING_WORKS = declare(
    __name__,
    "nccl-pending-works",
    library="torch",
    versions=">=2.11,<2.14",
    purpose="Waits until NCCL's watchdog has finished with all collectives of a discarded run",
    without="Some gradients of such a run then stay in memory until the next run sends its first message.",
    alternative="`destroy_process_group`, after which Accelerate cannot start another run in the process.",
    apis=("torch.distributed:ProcessGroup._wait_for_pending_works",),
    measurement="A discarded run of 1B under DDP on two H200s leaves 0.06 GiB on a GPU, without it 1.08 and 4.67 GiB "
    "in two runs. The run after it frees them when it starts: its peak is 29.02 GiB both times.",
)


class DDP(Backend):
    """DistributedDataParallel. With one process, Accelerate does not wrap the model."""

    has_whole_weights: ClassVar[bool] = True

    def accelerator_options(self) -> dict[str, Any]:
        """Return the options of DistributedDataParallel.

        Gradients become views of the buckets when they are first summed. `static_graph` stays off. It would only save
        the search for unused parameters, which is off unless there may be some (`allow_unused`), and would require the
        graph of the first step in all steps.
        """
        from accelerate.utils import DistributedDataParallelKwargs

        kwargs = DistributedDataParallelKwargs(
            bucket_cap_mb=BUCKET_MB,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,  # frozen statistics are equal on every rank; trained ones must not be overwritten
        )
        return {"kwargs_handlers": [kwargs]}

    def allow_unused(self, accelerator: Accelerator) -> None:
        """Make DistributedDataParallel search each backward graph for parameters that it does not reach.

        Without the search a sum of gradients never completes, and the next forward pass fails.
        """
        if accelerator.ddp_handler is not None:
            accelerator.ddp_handler.find_unused_parameters = True

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside DistributedDataParallel."""
        return model.module if isinstance(model, DistributedDataParallel) else model

    def rebuild_ddp_buckets(self, accelerator: Accelerator, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        """Run one forward and backward pass, after which the layout of the buckets is final. A collective.

        DistributedDataParallel rebuilds its buckets once, in the order in which the first gradients arrive. The place
        of an element in its bucket determines the order in which the ranks are summed. Without this pass the first
        step of a resumed run would differ in its last bits.
        """
        self.backward(accelerator, loss(), 1.0)
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


class Replicas(DDP):
    """A whole copy of the model on each process under FSDP or ZeRO-3, for an adapter over weights that fit."""

    replaces_shards: ClassVar[bool] = True

    def before_prepare(self, accelerator: Accelerator, model: nn.Module) -> nn.Module:
        """Return the model on the device, or as it is if one rank has read the weights for all.

        transformers and peft would go on looking for shards of ZeRO-3.
        """
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        unset_hf_deepspeed_config()
        is_empty = any(parameter.is_meta for parameter in model.parameters())
        return model if is_empty else weight_transfer.move(model, accelerator.device)

    @contextmanager
    def broadcast_weights(self, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> Iterator[None]:
        """Send every rank the reading rank's weights, before the context is entered. A collective."""
        memory = weight_broadcast.HostMemory()
        for parameter in model.parameters():
            value = parameter.detach()
            is_reader = weight_broadcast.is_reader()
            whole = value.to(accelerator.device) if is_reader else torch.empty_like(value, device=accelerator.device)
            torch.distributed.broadcast(whole, src=weight_broadcast.READER_RANK)
            weight_broadcast.replace(parameter, whole)
            memory.release(value)
        weight_broadcast.share_buffers(model, accelerator.device)
        yield

    @contextmanager
    def preparing(self, accelerator: Accelerator) -> Iterator[None]:
        """Return a context in which `Accelerator.prepare` wraps the model as under ddp, instead of sharding it.

        Accelerate's state is shared by all runs of a process, so the type of distribution is set back.
        """
        from accelerate.utils import DistributedType

        state, on_cpu = accelerator.state, accelerator.device.type == "cpu"
        (accelerator.ddp_handler,) = self.accelerator_options()["kwargs_handlers"]
        before, state.distributed_type = state.distributed_type, DistributedType["MULTI_CPU" if on_cpu else "MULTI_GPU"]
        try:
            yield
        finally:
            state.distributed_type = before

    def no_sync(self, accelerator: Accelerator, model: Any) -> AbstractContextManager[None]:
        """Return a context without a sum of gradients, that of the wrapper. Accelerate would look for FSDP's."""
        context: AbstractContextManager[None] = model.no_sync()
        return context
