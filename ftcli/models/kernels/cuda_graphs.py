"""Replay the forward and the backward pass of image models as CUDA graphs.

A small image model launches about a thousand kernels in a pass, and the host needs as long to launch them as the device
to compute. Beside busy loader processes it needs longer, and the device waits. A CUDA graph launches all of them at
once. It repeats the same kernels on the same addresses, so results are equal in all bits. It fits images because all
micro-batches have the same shape.

The second micro-batch in a row of one shape is captured: one graph for the forward pass, one for the backward pass.
These run as without graphs: micro-batches of another shape, evaluation, a second forward pass before the backward pass
of the first, and all passes after the memory of a weight was replaced.
PyTorch's `torch.cuda.make_graphed_callables` cannot add gradients of several micro-batches, because the gradient of a
weight then is the memory that the next replay overwrites.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ftcli.models.load import largest_dropout
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from ftcli.config.recipe import Recipe


WARM_UP = 3  # passes before a capture, in which libraries choose their kernels and allocate their workspaces
HINT = "set cuda_graphs to false"


def use_cuda_graphs(
    model: nn.Module, recipe: Recipe, device: str, *, recomputed: str, is_whole: bool, processes: int
) -> list[str]:
    """Replay training passes of a model as CUDA graphs, if the recipe sets `model.cuda_graphs`.

    Args:
        model: The model, not yet prepared.
        recipe: The recipe with `model.torch_compile` decided.
        device: Type of the device, such as "cuda".
        recomputed: What the backward pass computes again: none, selective, full or tiled.
        is_whole: Whether the backend keeps whole weights at the same place on every device.
        processes: Number of processes.

    Returns:
        One line for the log, or none without graphs.

    Raises:
        InputError: This run cannot have graphs.
    """
    if not recipe.model.cuda_graphs:
        return []
    problem = _problem_of_run(device, recomputed, is_whole=is_whole, processes=processes)
    if (problem := problem or _problem_of_model(model)) is not None:
        raise InputError(f"model.cuda_graphs: {problem}", hint=HINT)
    model.forward = CapturedPass(model)
    return ["CUDA graphs: forward and backward passes of micro-batches of one shape"]


def _problem_of_run(device: str, recomputed: str, *, is_whole: bool, processes: int) -> str | None:
    """Return why a run cannot replay passes, or None. The recipe itself has been checked (config/recipe.py)."""
    if device != "cuda":
        return "it needs an NVIDIA GPU"
    if not is_whole:
        return "this profile shards weights, which then have no fixed place"
    if processes > 1:
        return "it was not tried with several processes yet"
    if recomputed != "none":
        return "this run recomputes activations to save memory"
    return None


def _problem_of_model(model: nn.Module) -> str | None:
    """Return why the passes of a model cannot be replayed, or None.

    What the host decides for each batch, such as whether a mask is needed, would be decided once for all.
    """
    if getattr(model, "main_input_name", None) != "pixel_values":
        return "it is for models whose only input are images"
    if largest_dropout(model) > 0 or any(map(_drops, model.modules())):
        return "the model has dropout, whose random numbers a graph would not draw from the seed of a step"
    if any("BatchNorm" in type(module).__name__ and module.momentum is None for module in model.modules()):
        return "a batch norm without momentum reads its number of steps from the device"
    return None


def _drops(module: nn.Module) -> bool:
    """Return whether a module drops elements or paths in training."""
    rates = (
        getattr(module, "drop_prob", None),
        getattr(module, "p", None) if "Drop" in type(module).__name__ else None,
    )
    return any(isinstance(rate, (int, float)) and rate > 0 for rate in rates)


class CapturedPass:
    """The forward function of a model, with graphs of its training passes.

    Attributes:
        model: The model.
        plain: Its own forward function.
        last: Shape, dtype and format of the images of the last training pass; None before the first.
        captured: The same of the captured pass; None before the capture.
        pending: Refers to the last replayed forward pass until its backward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model, self.plain = model, model.forward
        update_wrapper(self, model.forward)  # its signature too
        self.last: tuple[Any, ...] | None = None
        self.captured: tuple[Any, ...] | None = None
        self.pending: weakref.ref[Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, from a replay where the images are like the captured ones."""
        if args or not self._can_replay(kwargs):
            return self.plain(*args, **kwargs)
        images = kwargs["pixel_values"]
        last, self.last = self.last, (images.shape, images.dtype, images.stride())
        if self.captured is None and self.last == last:
            self._capture(images)
            self.captured = self.last
        if self.last != self.captured or self.places != [weight.data_ptr() for weight in self.weights]:
            return self.plain(*args, **kwargs)
        self.images.copy_(images)
        outputs = _Replay.apply(self, *self.weights)
        return self.kind(**dict(zip(self.names, outputs, strict=True)))

    def _can_replay(self, kwargs: dict[str, Any]) -> bool:
        """Return whether this is a training pass of images on the GPU, and no replayed one awaits its backward pass."""
        if set(kwargs) != {"pixel_values"} or not self.model.training or not torch.is_grad_enabled():
            return False
        images = kwargs["pixel_values"]
        is_pending = self.pending is not None and self.pending() is not None
        return bool(images.is_cuda and not images.requires_grad and not is_pending)

    def _capture(self, images: Tensor) -> None:
        """Capture a forward and a backward pass for images like these.

        Autocast keeps casts of weights from one forward pass to the next. A graph must not use one that was made
        outside, so the captured pass casts all weights. The garbage collector stands still meanwhile: it may find the
        graph of an earlier run, and no graph can be destroyed while another is captured.
        """
        self.images = images.clone()
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]  # running statistics of batch norm
        dtype, is_on = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        try:
            with (
                torch.autocast("cuda", dtype, enabled=is_on, cache_enabled=False),
                _no_garbage_collection(),
                _leaves_of_their_own(self.model) as pairs,
            ):
                self.weights, leaves = [weight for weight, _ in pairs], [leaf for _, leaf in pairs]
                self.places = [weight.data_ptr() for weight in self.weights]
                self._warm_up(leaves)
                self._record(leaves)
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    def _warm_up(self, leaves: list[nn.Parameter]) -> None:
        """Run some passes on a stream of their own, as PyTorch requires before a capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                outputs = list(_tensors_of(self.plain(pixel_values=self.images)).values())
                _gradients(outputs, leaves, [torch.ones_like(one) for one in outputs])
        torch.cuda.current_stream().wait_stream(stream)

    def _record(self, leaves: list[nn.Parameter]) -> None:
        """Record both graphs. Other threads, of NCCL and of pinned memory, may go on calling CUDA."""
        self.forward_graph, self.backward_graph = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        how: dict[str, Any] = {"pool": torch.cuda.graph_pool_handle(), "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self.forward_graph, **how):
            output = self.plain(pixel_values=self.images)
        named = _tensors_of(output)
        self.kind, self.names, outputs = type(output), list(named), list(named.values())
        self.output_gradients = [torch.zeros_like(one) for one in outputs]
        with torch.cuda.graph(self.backward_graph, **how):
            self.gradients = _gradients(outputs, leaves, self.output_gradients)
        self.outputs = [one.detach() for one in outputs]  # without the graph of autograd


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Return a context without automatic garbage collection, which begins with a collection."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def _leaves_of_their_own(model: nn.Module) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
    """Give a model other leaves of autograd with the memory of its trained weights, until the context ends.

    Hooks of a weight, such as those of its user or of DistributedDataParallel, must run once per backward pass, outside
    of the graph. They stay with the weight.

    Yields:
        Pairs of a weight and its leaf. A tied weight comes once.
    """
    leaves: dict[nn.Parameter, nn.Parameter] = {}
    replaced = []
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False, remove_duplicate=False):
            if weight.requires_grad:
                replaced.append((module, name, weight))
                leaves.setdefault(weight, nn.Parameter(weight.detach()))
    try:
        for module, name, weight in replaced:
            setattr(module, name, leaves[weight])
        yield list(leaves.items())
    finally:
        for module, name, weight in replaced:
            setattr(module, name, weight)


def _gradients(outputs: list[Tensor], leaves: list[nn.Parameter], gradients: list[Tensor]) -> list[Tensor | None]:
    """Return the gradients of the leaves, None for those that the outputs do not depend on. Adds up nothing."""
    found: Any = torch.autograd.grad(outputs, leaves, gradients, allow_unused=True)
    return list(found)


def _tensors_of(output: Any) -> dict[str, Tensor]:
    """Return the tensors of a model's output by name.

    Raises:
        InputError: The output is no output class of transformers, or has parts that are not trained tensors.
    """
    named = dict(output.items()) if hasattr(output, "items") else {}
    if not named or not all(isinstance(value, torch.Tensor) and value.requires_grad for value in named.values()):
        message = f"model.cuda_graphs: the model returns {type(output).__name__}, with other parts than trained tensors"
        raise InputError(message, hint=HINT)
    return named


class _Replay(torch.autograd.Function):
    """A replayed forward pass, whose backward pass is replayed too. Autograd sees it as one function of the weights."""

    @staticmethod
    def forward(ctx: Any, passes: CapturedPass, *weights: Tensor) -> tuple[Tensor, ...]:
        """Return copies of the outputs, because the next replay overwrites them."""
        ctx.passes = passes
        passes.pending = weakref.ref(ctx)  # it dies with the outputs, if they are dropped without a backward pass
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
        passes.pending = None
        return (None, *passes.gradients)
