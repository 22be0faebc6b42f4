"""Hardware of a run, independent of the backend. `build` selects the backend from the launcher's environment."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from ftcli.hardware import cpu_simulation, environment, precision, weight_broadcast
from ftcli.hardware.backend import Backend
from ftcli.hardware.collectives import Ranks
from ftcli.hardware.gradient_clipping import ClipsGradients, clip_factor
from ftcli.hardware.missing_gradients import MissingGradients
from ftcli.hardware.optimizer_state import StateShard, count_updates, start_slots, trained_parameters
from ftcli.hardware.requested_backend import BACKENDS, is_quantised, reads_weights_once, requested_backend
from ftcli.models import precision as models_precision
from ftcli.models.structure import full_shape, saved_buffers

if TYPE_CHECKING:
    import torch
    from accelerate import Accelerator
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.utils.data import DataLoader

    from ftcli.config.plan import Plan
    from ftcli.config.recipe import Recipe


T = TypeVar("T")


@dataclass
class Hardware:
    """The accelerator, the backend and the ranks of a run.

    Attributes:
        accelerator: Accelerate's accelerator.
        backend: What differs between DDP, FSDP2 and DeepSpeed.
        ranks: The processes of the run.
        distributed_type: Name of Accelerate's `DistributedType`, with MULTI_CPU distinguished from MULTI_GPU.
        loss_scale: The dynamic loss scale under fp16; else None.
        skips: Whether a step that is not finite leaves the weights unchanged.
        autocast_dtype: Dtype to which autocast casts matrix products; None without autocast.
        trained_names: Names of the trained parameters, which `before_prepare` records for the run.
        missing: The trained tensors that have had no gradient yet.
        clipping: The optimizer of the prepared model, if its step clips gradients. DeepSpeed's optimizer clips itself.
    """

    accelerator: Accelerator
    backend: Backend
    ranks: Ranks
    distributed_type: str
    loss_scale: precision.LossScale | None
    skips: bool
    autocast_dtype: torch.dtype | None
    trained_names: set[str] = field(default_factory=set)
    missing: MissingGradients = field(default_factory=MissingGradients)
    clipping: ClipsGradients | None = None

    def may_compile(self, model: nn.Module) -> bool:
        """Return whether layers of an unprepared model may be compiled."""
        return self.backend.may_compile(model)

    def replicate(self) -> None:
        """Put the whole model on each process, although the profile shards it. Called before `before_prepare`."""
        self.backend = BACKENDS["REPLICAS"]

    def allow_unused(self) -> None:
        """Let a micro-batch leave trained parameters without a gradient. Called before `prepare`."""
        self.backend.allow_unused(self.accelerator)

    @property
    def steps_on_gpu(self) -> bool:
        """Whether the optimizer will update weights on a GPU."""
        return bool(self.accelerator.device.type == "cuda" and not self.backend.offloads(self.accelerator))

    def before_prepare(self, model: nn.Module, recipe: Recipe) -> nn.Module:
        """Make an unprepared model compute in the recipe's precision, in the form that the backend needs.

        Also records the names of the trained parameters for the run. A collective if one rank reads the weights.

        Args:
            model: The model with its adapter, on the host.
            recipe: The recipe of the run.

        Returns:
            The model to build the optimizer for.
        """
        if reads_weights_once() and not is_quantised(model):
            weight_broadcast.match_reader(model)
        model = self.backend.before_prepare(self.accelerator, model)
        precision.compute_in(model, recipe, self.accelerator.device.type)
        self.trained_names.update(name for name, parameter in model.named_parameters() if parameter.requires_grad)
        return model

    def prepare(
        self, model: nn.Module, optimizer: Optimizer, loaders: Iterable[DataLoader | None]
    ) -> tuple[nn.Module, Optimizer, list[Any]]:
        """Pass model, optimizer and loaders through `Accelerator.prepare`, in one call. A collective.

        The order is fixed by what each stage needs:

        1. Wait for the slowest rank, because each rank may have read the weights from its own disk.
        2. Broadcast the weights if one rank has read them. FSDP2 sends the values after `Accelerator.prepare`, because
           it shards a model without values; ZeRO-3 sends and shards them before.
        3. Shard the parameters that stay float32, so that `Accelerator.prepare` shards only the others.
        4. Call `Accelerator.prepare`, which wraps or shards the model.
        5. Configure the communication of the prepared model.

        Args:
            model: The model that `before_prepare` returned.
            optimizer: Its optimizer.
            loaders: Data loaders; None for a loader that the run does not have.

        Returns:
            The prepared model, optimizer and loaders, with None where a loader was None.
        """
        loaders = list(loaders)
        broadcast: AbstractContextManager[None] = nullcontext()
        self.ranks.wait_for_slowest()
        if reads_weights_once() and not is_quantised(model):
            broadcast = self.backend.broadcast_weights(self.accelerator, model, optimizer)
        with broadcast, self.backend.preparing(self.accelerator):
            self.backend.shard_small_params(self.accelerator, model, optimizer, self.autocast_dtype)
            present = [loader for loader in loaders if loader is not None]
            model, optimizer, *present = self.accelerator.prepare(model, optimizer, *present)
        inner = getattr(optimizer, "optimizer", None)
        self.clipping = inner if isinstance(inner, ClipsGradients) else None
        self.backend.after_prepare(model, self.autocast_dtype, skips=self.skips or self.loss_scale is not None)
        return model, optimizer, [None if loader is None else present.pop(0) for loader in loaders]

    def micro_batches(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the micro-batches of a window. Until the last one is done, casts of whole weights are shared."""
        with self.backend.share_weight_casts(self.accelerator):
            yield from batches

    def accumulating(self, model: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
        """Return the context of one micro-batch. The last one of a window sums gradients over ranks.

        With `Backend.sync_every_micro_batch` each one does. Accelerate does not count: windows differ.
        """
        self.accelerator.sync_gradients = is_last
        is_silent = not (is_last or self.backend.sync_every_micro_batch)
        no_sync = self.backend.no_sync
        return no_sync(self.accelerator, model) if is_silent else precision.casting_again(self.ranks.world)

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of a micro-batch. The last one of a window sums them over the ranks, a collective.

        If bad steps are skipped and the loss is not finite, all gradients become NaN. The gradient norm then shows
        bad losses and bad gradients.

        Args:
            loss: A float32 scalar tensor.
        """
        if self.skips:
            loss = loss * (1 + 0 * loss.detach())  # times 1, or times NaN
        self.backend.backward(self.accelerator, loss, self._loss_factor)

    @property
    def _loss_factor(self) -> float:
        """Factor of the loss under fp16, else 1.

        It is divided by the number of ranks. Ranks are averaged later, and float16 gradients must have the same
        magnitude with any number of ranks.
        """
        return 1.0 if self.loss_scale is None else self.loss_scale.scale / self.ranks.world

    def trained(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the trained parameters of a prepared model, or the shards of them on this rank, in model order.

        Each call returns the same objects.
        """
        inner = self.unwrap(model)
        self.backend.flush(model)
        return [parameter for _, parameter in trained_parameters(inner, self.trained_names)]

    def clip_grad_norm(self, parameters: list[nn.Parameter], max_norm: float | None) -> Tensor:
        """Clip the gradients of all trained parameters to a global 2-norm. May be a collective.

        They are clipped in place, or by `step` if the optimizer clips while it reads them.
        Under fp16, and if bad steps are skipped, this method waits for the device. If the norm is not finite, it then
        drops the gradients, so that the optimizer step changes nothing.

        Args:
            parameters: The result of `trained`. A search through the model would take as long as the clipping.
            max_norm: Largest norm allowed; None does not clip.

        Returns:
            The norm before clipping, a float32 scalar tensor.
        """
        in_place = None if self.clipping else max_norm
        norm = self.backend.clip_grad_norm(self.accelerator, parameters, in_place, self._loss_factor)
        if self.clipping and max_norm is not None:
            self.clipping.clip_factor = clip_factor(norm, max_norm)
        if self.loss_scale is not None or self.skips:
            finite = bool(norm.isfinite())
            if self.loss_scale is not None:
                self.loss_scale.update(finite=finite)
            if not finite:
                for parameter in parameters:
                    parameter.grad = None
        return norm

    def reseed(self, seed: int) -> None:
        """Seed PyTorch's generators of the host and of this process's device."""
        environment.seed_generators(self.accelerator.device, seed)

    def step(self, optimizer: Optimizer) -> None:
        """Update the weights and drop the gradients at the end of a window. A missing gradient counts as zero."""
        self.backend.step(optimizer, self.missing)

    def train(self, model: nn.Module) -> None:
        """Put a prepared model into training mode unless it is in it, because `Module.train` visits all modules."""
        if not (model.training and self.unwrap(model).training):
            model.train()

    def unwrap(self, model: nn.Module) -> nn.Module:
        """Return the model inside the wrapper that `prepare` added."""
        return self.backend.unwrap(model)

    def parameters(
        self, model: nn.Module, *, trained_only: bool, part: str = ""
    ) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the whole value of every parameter, one at a time. A collective: every rank iterates to the end.

        The other ranks wait up to a day for the main process, which may write a file between two parameters.

        Args:
            model: The prepared model.
            trained_only: Whether to leave out frozen parameters.
            part: Name of a submodule, whose parameters alone are gathered; default: the whole model.

        Yields:
            Name in the unprepared model, or in its part, and value on the host; the value is None except on the main
            process. A tied parameter comes once, under its first name.
        """
        inner, prefix = self.unwrap(model), f"{part}." if part else ""
        self.backend.flush(model)
        for name, parameter in inner.named_parameters():
            if name.startswith(prefix) and (name in self.trained_names or not trained_only):
                self.ranks.wait_for_slowest()
                value = self.backend.full_parameter(parameter)
                yield name.removeprefix(prefix), value.detach().cpu() if self.ranks.is_main else None

    def trained_shapes(self, model: nn.Module) -> dict[str, list[int]]:
        """Return the whole shape of every trained parameter of a prepared model, by name. Local."""
        inner = self.unwrap(model)
        self.backend.flush(model)
        return {name: list(full_shape(parameter)) for name, parameter in trained_parameters(inner, self.trained_names)}

    def state_shards(self, model: nn.Module, optimizer: Optimizer) -> Iterator[StateShard]:
        """Yield what a checkpoint contains of this rank: trained weights, moments, persistent buffers. Local.

        Args:
            model: The prepared model.
            optimizer: The prepared optimizer.
        """
        inner = self.unwrap(model)
        self.backend.flush(model)
        yield from self.backend.state_shards(model, optimizer, self.ranks, self.trained_names)
        for name, buffer in saved_buffers(inner).items():
            saved = slice(0, buffer.numel() if self.ranks.is_main else 0)
            yield StateShard(name, 0, {"buffer": buffer}, saved)

    def updates(self, model: nn.Module, optimizer: Optimizer) -> int:
        """Return how many times the optimizer has stepped: fewer than the run's steps after float16 overflows."""
        return count_updates(self.backend.optimizer_slots(model, optimizer))

    def start_from_update(self, model: nn.Module, optimizer: Optimizer, count: int) -> None:
        """Create missing optimizer state and set its step count; `state_shards` then yields tensors for the values."""
        start_slots(self.backend.optimizer_slots(model, optimizer), count)

    def rebuild_ddp_buckets(self, model: nn.Module, loss: Callable[[], Tensor]) -> None:
        """Rebuild DDP's gradient buckets, so that a resumed run sums gradients in the order of an uninterrupted one.

        Under DDP on more than two ranks this runs one forward and backward pass and drops its gradients. Two ranks
        have only one order of summation. A collective: call it on all ranks.

        Args:
            model: The prepared model.
            loss: Computes the loss of any batch, a scalar tensor.
        """
        if self.ranks.world > 2:
            self.backend.rebuild_ddp_buckets(self.accelerator, model, loss)

    def check_dtypes(self, model: nn.Module, recipe: Recipe) -> str:
        """Return the dtypes of a prepared model as one line of text.

        Raises:
            RuntimeError: A parameter does not have the dtype of the recipe's precision.
        """
        return precision.check(self.unwrap(model), recipe)

    def release(self, model: nn.Module) -> None:
        """Free the memory of a run, so that another run can follow in this process. A collective."""
        self.backend.release(model)

    def close(self) -> None:
        """Wait for all ranks, then destroy the process group. A collective."""
        self.ranks.close()


def build(recipe: Recipe, plan: Plan, *, cpu: bool, trackers: list[str], folder: str | None) -> Hardware:
    """Create the Accelerator, the process group and the hardware of this process. A collective.

    Precision and accumulation come from recipe and plan. Accelerate reads the profile from the launcher's environment.

    Args:
        recipe: The recipe of the run.
        plan: The plan of the run.
        cpu: Whether to run on CPU processes over gloo. Machines without an accelerator always do.
        trackers: Names of Accelerate's trackers.
        folder: Folder for the trackers.
    """
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin

    cpu_simulation.reset_accelerate_state()
    if cpu or not environment.has_accelerator():
        cpu_simulation.start_on_cpu()
    requested = requested_backend()
    options = requested.accelerator_options()
    accelerator = Accelerator(
        mixed_precision="no",  # precision.py applies the recipe's precision instead
        device_placement=False,  # the batches of a whole window must not be on the device
        dataloader_config=DataLoaderConfiguration(even_batches=False, dispatch_batches=False),
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=plan.accumulation,
            sync_with_dataloader=False,
            sync_each_batch=requested.sync_every_micro_batch,
        ),
        rng_types=[],  # every process seeds itself from (seed, step, rank)
        log_with=trackers or None,
        project_dir=folder,
        **options,
    )
    distributed_type = str(accelerator.distributed_type).rpartition(".")[2]
    backend = BACKENDS[distributed_type]
    backend.configure(accelerator, recipe, plan)
    skips = recipe.faults.non_finite == "skip"
    loss_scale = precision.LossScale() if recipe.precision == "fp16" else None
    autocast_dtype = models_precision.AUTOCAST.get(recipe.precision)
    return Hardware(accelerator, backend, Ranks(accelerator), distributed_type, loss_scale, skips, autocast_dtype)
