"""Replay the forward and the backward pass of image models as CUDA graphs.

A small image model launches about a thousand kernels in a pass, and the host needs as long to launch them as the device
to compute. Beside busy loader processes it needs longer, and the device waits. A CUDA graph launches all of them at
once. It repeats the same kernels on the same addresses, so results are equal in all bits. It fits images because all
micro-batches have the same shape.

The first micro-batch is captured: one graph for the forward pass, one for the backward pass. These run as without
graphs: micro-batches of another shape, evaluation, a second forward pass before the backward pass of the first, and all
passes after the memory of a weight was replaced.
PyTorch's `torch.cuda.make_graphed_callables` cannot add gradients of several micro-batches, because the gradient of a
weight then is the memory that the next replay overwrites.
"""

from __future__ import annotations

from functools import update_wrapper
from typing import TYPE_CHECKING, Any

import torch

from ftcli.models.architectures import architecture_of
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe


WARM_UP = 3  # passes before a capture, in which libraries choose their kernels and allocate their workspaces


def use_cuda_graphs(
    model: nn.Module, recipe: Recipe, device: str, *, recomputed: str, is_whole: bool, processes: int
) -> list[str]:
    """Replay training passes of a model as CUDA graphs, where the recipe and this machine allow it.

    Args:
        model: The model, not yet prepared.
        recipe: The recipe with `model.torch_compile` decided.
        device: Type of the device, such as "cuda".
        recomputed: What the backward pass computes again: none, selective, full or tiled.
        is_whole: Whether the backend keeps whole weights at the same place on every device.
        processes: Number of processes. Where the recipe leaves it open, only a single one uses graphs.

    Returns:
        One line for the log, or none without graphs.

    Raises:
        InputError: `model.cuda_graphs` is true, and this run cannot have graphs.
    """
    wanted = recipe.model.cuda_graphs
    if wanted is False:
        return []
    kind = getattr(getattr(model, "config", None), "model_type", None)
    problem = _problem(model, recipe, device, recomputed=recomputed, is_whole=is_whole)
    if wanted and problem:
        raise InputError(f"model.cuda_graphs: {problem}", hint="delete it, and graphs are used where they can be")
    if problem or not (wanted or (architecture_of(kind).captures_passes and processes == 1)):
        return []
    model.forward = CapturedPass(model)
    return ["CUDA graphs: forward and backward pass of micro-batches like the first one"]


def _problem(model: nn.Module, recipe: Recipe, device: str, *, recomputed: str, is_whole: bool) -> str | None:
    """Return why the passes of a model cannot be replayed, or None."""
    if device != "cuda":
        return "it needs an NVIDIA GPU"
    if not is_whole:
        return "this profile shards weights, which then have no fixed place"
    if recipe.adapter.type != "none" or recipe.model.quantization is not None:
        return "it is for models whose weights are all trained, without an adapter"
    if recipe.model.torch_compile:
        return "it cannot be combined with torch_compile"
    if recomputed != "none" or recipe.model.activation_offloading:
        return "it cannot be combined with the memory saving of this run"
    if recipe.model.batch_norm == "sync":
        return "batch_norm: sync exchanges statistics within a pass"
    if any("BatchNorm" in type(module).__name__ and module.momentum is None for module in model.modules()):
        return "a batch norm without momentum reads its number of steps from the device"
    if any(_dropout_rates(model)):
        return "the model has dropout, whose random numbers a graph would not draw from the seed of a step"
    return None


def _dropout_rates(model: nn.Module) -> Iterator[float]:
    """Yield the probabilities with which a model drops something in training."""
    config: Any = getattr(model, "config", None)
    for key, value in config.to_dict().items() if config is not None else ():
        if "drop" in key and isinstance(value, (int, float)):
            yield float(value)
    for module in model.modules():
        if isinstance(rate := getattr(module, "p", None), float) and "drop" in type(module).__name__.lower():
            yield rate


class CapturedPass:
    """The forward function of a model, with graphs of its passes after the first call in training.

    Attributes:
        model: The model.
        plain: Its own forward function.
        shapes: Names, shapes, dtypes and formats of the arguments that were captured; None before.
        is_pending: Whether the last replayed forward pass still awaits its backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.plain = model, model.forward
        update_wrapper(self, model.forward)  # its signature too
        self.shapes: tuple[Any, ...] | None = None
        self.is_pending = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, from a replay where the arguments are like the captured ones."""
        if args or not self._can_replay(kwargs):
            return self.plain(*args, **kwargs)
        shapes = tuple((name, value.shape, value.dtype, value.stride()) for name, value in sorted(kwargs.items()))
        if self.shapes is None:
            self._capture(kwargs)
            self.shapes = shapes
        if shapes != self.shapes or self.places != [weight.data_ptr() for weight in self.weights]:
            return self.plain(**kwargs)
        for name, value in kwargs.items():
            self.inputs[name].copy_(value)
        self.is_pending = True
        return self.as_output(_Replay.apply(self, *self.weights))

    def _can_replay(self, kwargs: dict[str, Any]) -> bool:
        """Return whether this is a training pass of tensors on the GPU that need no gradient themselves."""
        if self.is_pending or not self.model.training or not torch.is_grad_enabled():
            return False
        return all(isinstance(one, torch.Tensor) and one.is_cuda and not one.requires_grad for one in kwargs.values())

    def _capture(self, kwargs: dict[str, Any]) -> None:
        """Capture a forward and a backward pass for arguments like these.

        Autocast keeps casts of weights from one forward pass to the next. A graph must not use one that was made
        outside, so the captured pass casts all weights.
        """
        self.weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        self.places = [weight.data_ptr() for weight in self.weights]
        self.inputs = {name: value.clone() for name, value in kwargs.items()}
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]  # running statistics of batch norm
        dtype, is_on = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        with torch.autocast("cuda", dtype, enabled=is_on, cache_enabled=False):
            self._warm_up()
            self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            # Other threads, of NCCL and of pinned memory, may go on calling CUDA.
            how: dict[str, Any] = {"pool": torch.cuda.graph_pool_handle(), "capture_error_mode": "thread_local"}
            with torch.cuda.graph(self.forward_graph, **how):
                output = self.plain(**self.inputs)
            self.as_output, self.outputs = _taken_apart(output)
            self.output_gradients = [torch.zeros_like(one) for one in self.outputs]
            with torch.cuda.graph(self.backward_graph, **how):
                self.gradients = self._gradients(self.outputs, self.output_gradients)
        self.outputs = [one.detach() for one in self.outputs]  # drops the graph of autograd
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    def _warm_up(self) -> None:
        """Run some passes on a stream of their own, as PyTorch requires before a capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                _, outputs = _taken_apart(self.plain(**self.inputs))
                self._gradients(outputs, [torch.ones_like(one) for one in outputs])
        torch.cuda.current_stream().wait_stream(stream)

    def _gradients(self, outputs: list[Tensor], gradients: list[Tensor]) -> list[Tensor | None]:
        """Return the gradients of the weights, None for those that the outputs do not depend on. Adds up nothing."""
        found: Any = torch.autograd.grad(outputs, self.weights, gradients, allow_unused=True)
        return list(found)


def _taken_apart(output: Any) -> tuple[Callable[[tuple[Tensor, ...]], Any], list[Tensor]]:
    """Return a function that makes an output of the same kind from tensors, and the tensors of this one."""
    named = {name: value for name, value in output.items() if isinstance(value, torch.Tensor) and value.requires_grad}
    if len(named) != len(output):
        raise RuntimeError(f"{type(output).__name__} of a captured pass has entries that are not trained tensors")
    return lambda tensors: type(output)(**dict(zip(named, tensors, strict=True))), list(named.values())


class _Replay(torch.autograd.Function):
    """A replayed forward pass, whose backward pass is replayed too. Autograd sees it as one function of the weights."""

    @staticmethod
    def forward(ctx: Any, passes: CapturedPass, *weights: Tensor) -> tuple[Tensor, ...]:
        """Return copies of the outputs, because the next replay overwrites them."""
        ctx.passes = passes
        passes.forward_graph.replay()
        return tuple(output.clone() for output in passes.outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the weights.

        They are the tensors that the next replay overwrites. Autograd copies them or adds them up, because `passes`
        holds them too.
        """
        passes = ctx.passes
        for target, gradient in zip(passes.output_gradients, gradients, strict=True):
            target.copy_(gradient)
        passes.backward_graph.replay()
        passes.is_pending = False
        return (None, *passes.gradients)
