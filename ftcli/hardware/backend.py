"""The interface of a distributed backend. The defaults are correct for a model that is whole on every process.

A backend overrides the methods in which it differs. `ddp.py`, `fsdp.py` and `deepspeed.py` each have one subclass.
Subclasses add no public methods, because `interface.py` calls only those of `Backend`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

from ftcli.hardware import precision, weight_transfer
from ftcli.hardware.gradient_clipping import clip_grads_with_norm, get_total_norm, unscale_gradients
from ftcli.hardware.optimizer_state import OptimizerSlot, StateShard, open_state, trained_parameters

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from ftcli.config.plan import Plan
    from ftcli.config.recipe import Recipe
    from ftcli.hardware.collectives import Ranks
    from ftcli.hardware.missing_gradients import MissingGradients


class Backend:
    """What differs between distributed backends. Instances have no state.

    Attributes:
        sync_every_micro_batch: Whether gradients are summed over the ranks after each micro-batch. If False, they are
            summed once per accumulation window.
        replaces_shards: Whether the model is whole on each process although the profile shards models.
        has_whole_weights: Whether each process has all weights, which stay at the same place in memory.
    """

    sync_every_micro_batch: ClassVar[bool] = False
    replaces_shards: ClassVar[bool] = False
    has_whole_weights: ClassVar[bool] = False

    # Before there is an Accelerator

    def accelerator_options(self) -> dict[str, Any]:
        """Return additional keyword arguments for `Accelerator`."""
        return {}

    def reads_weights_once(self) -> bool:
        """Return whether the profile requires one rank to read the weights for all ranks.

        By default each rank reads them. Processes on one machine share the memory pages of the file.
        """
        return False

    def load_whole_weights(self) -> AbstractContextManager[None]:
        """Return a context in which transformers and peft load whole weights, regardless of the profile."""
        return nullcontext()

    # Before `Accelerator.prepare`

    def configure(self, accelerator: Accelerator, recipe: Recipe, plan: Plan) -> None:
        """Write values of the recipe and the plan into the configuration of a new Accelerator."""

    def allow_unused(self, accelerator: Accelerator) -> None:
        """Let a micro-batch leave trained parameters without a gradient, where a backend would refuse that."""

    def before_prepare(self, accelerator: Accelerator, model: nn.Module) -> nn.Module:
        """Return the model in the place and form that `Accelerator.prepare` needs.

        Args:
            accelerator: The Accelerator of this process.
            model: The model with its adapter, on the host.

        Returns:
            The model on the device of this process.
        """
        return weight_transfer.move(model, accelerator.device)

    def may_compile(self, model: nn.Module) -> bool:
        """Return whether layers of an unprepared model may be compiled; hooks inside layers prevent this."""
        return True

    def offloads(self, accelerator: Accelerator) -> bool:
        """Return whether the optimizer updates weights on the host instead of on the device."""
        return False

    def broadcast_weights(
        self, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer
    ) -> AbstractContextManager[None]:
        """Return a context for `Accelerator.prepare` that sends the weights read by one rank to all ranks.

        A collective. It is called only if `reads_weights_once` is true.

        Args:
            accelerator: The Accelerator of this process.
            model: The unprepared model; except on the reading rank its parameters are on the meta device.
            optimizer: The unprepared optimizer of the model.
        """
        return nullcontext()

    def shard_small_params(
        self, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, dtype: torch.dtype | None
    ) -> None:
        """Shard parameters that must stay float32, so that `Accelerator.prepare` shards only the others.

        Args:
            accelerator: The Accelerator of this process.
            model: The unprepared model.
            optimizer: The unprepared optimizer of the model.
            dtype: The autocast dtype, in which the other parameters are sent; None without autocast.
        """

    def preparing(self, accelerator: Accelerator) -> AbstractContextManager[None]:
        """Return a context for `Accelerator.prepare`."""
        return nullcontext()

    # After `Accelerator.prepare`

    def after_prepare(self, model: nn.Module, dtype: torch.dtype | None, *, skips: bool) -> None:
        """Configure communication of the prepared model. No parameter changes its value.

        Args:
            model: The prepared model.
            dtype: The autocast dtype; None without autocast.
            skips: Whether a step whose gradient is not finite must leave the weights unchanged.
        """

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model without the wrapper that `Accelerator.prepare` added."""
        return model

    def rebuild_ddp_buckets(self, accelerator: Accelerator, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        """Rebuild the gradient buckets of a resumed run, as after the first step of a new run. A collective.

        Only DistributedDataParallel rebuilds its buckets. Other backends do nothing and do not call `loss`.

        Args:
            accelerator: The Accelerator of this process.
            model: The prepared model.
            loss: Computes the loss of any batch, a scalar tensor.
        """

    # One optimizer step

    def share_weight_casts(self, accelerator: Accelerator) -> AbstractContextManager[None]:
        """Return a context for the micro-batches of a window, in which each weight is cast to 16 bits once.

        No weight may change inside the context.
        """
        return precision.cast_once(accelerator.device.type)

    def no_sync(self, accelerator: Accelerator, model: nn.Module) -> AbstractContextManager[None]:
        """Return a context in which backward passes do not sum gradients over the ranks."""
        context: AbstractContextManager[None] = accelerator.no_sync(model)
        return context

    def backward(self, accelerator: Accelerator, loss: Tensor, factor: float) -> None:
        """Add the gradients of `loss * factor`. A collective in the last micro-batch of a window.

        Args:
            accelerator: The Accelerator of this process.
            loss: The loss of a micro-batch, a float32 scalar tensor.
            factor: The loss scale; `clip_grad_norm` divides the gradients by it.
        """
        loss, steps = loss if factor == 1.0 else loss * factor, accelerator.gradient_accumulation_steps
        # As `Accelerator.backward`, which would divide by 1 too, and look for DeepSpeed's engine under its profiles.
        (loss if steps == 1 else loss / steps).backward()

    def clip_grad_norm(
        self, accelerator: Accelerator, parameters: list[nn.Parameter], max_norm: float | None, factor: float
    ) -> Tensor:
        """Divide the gradients by `factor`, then clip them to a global 2-norm, both in place. May be a collective.

        Args:
            accelerator: The Accelerator of this process.
            parameters: All trained parameters, or the shards of them on this rank.
            max_norm: Largest norm allowed; None does not clip.
            factor: The factor that was passed to `backward`.

        Returns:
            The norm before clipping, a float32 scalar tensor that is equal on all ranks.
        """
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        unscale_gradients(gradients, factor)
        norm = get_total_norm(gradients, accelerator.device)
        clip_grads_with_norm(gradients, norm, max_norm)
        return norm

    def step(self, optimizer: Any, missing: MissingGradients) -> None:
        """Update the weights and drop their gradients, without the wrapper of Accelerate.

        At each step the wrapper searches for an optional package on disk and inspects a signature. Both are
        unnecessary: the loop steps only at the end of a window, and there is no gradient scaler.

        Args:
            optimizer: The prepared optimizer.
            missing: Fills in the gradients that a step does not have.
        """
        inner = optimizer.optimizer
        missing.fill(inner)
        inner.step()
        inner.zero_grad()

    # Reading weights and optimizer state

    def flush(self, model: nn.Module) -> None:
        """Finish pending communication of the prepared model, so that its parameters can be read. Local."""

    def full_parameter(self, parameter: nn.Parameter) -> Tensor:
        """Return the whole value of a parameter on every rank. A collective where parameters are sharded."""
        return parameter.data

    def optimizer_slots(self, model: nn.Module, optimizer: Any) -> list[OptimizerSlot]:
        """Return the tensors of this rank that the optimizer updates, each with its state.

        Args:
            model: The prepared model.
            optimizer: The prepared optimizer.
        """
        inner = optimizer.optimizer  # inside the wrapper of Accelerate
        return [OptimizerSlot(group, p, inner.state[p]) for group in inner.param_groups for p in group["params"]]

    def state_shards(
        self, model: nn.Module, optimizer: Any, ranks: Ranks, names: Collection[str]
    ) -> Iterator[StateShard]:
        """Yield the shards of trained parameters and their optimizer state that this rank holds. Local.

        By default each rank yields whole parameters. The elements to save are divided equally among the ranks.

        Args:
            model: The prepared model.
            optimizer: The prepared optimizer.
            ranks: The processes of the run.
            names: Names of the trained parameters in the unprepared model.
        """
        parameters = list(trained_parameters(self.unwrap(model), names))
        total = sum(parameter.numel() for _, parameter in parameters)
        first, last = total * ranks.rank // ranks.world, total * (ranks.rank + 1) // ranks.world
        before = 0
        for name, parameter in parameters:
            size = parameter.numel()
            saved = slice(min(max(first - before, 0), size), min(max(last - before, 0), size))
            with open_state(parameter, optimizer.optimizer.state[parameter]) as tensors:
                yield StateShard(name, 0, tensors, saved)
            before += size

    def release(self, model: nn.Module) -> None:
        """Free the memory of a prepared model that is no longer used. A collective."""
