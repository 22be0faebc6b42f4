"""Capture the forward and the backward pass of a model as CUDA graphs, and replay them.

A replay repeats the same kernels on the same addresses, so results are equal in all bits.

The second micro-batch of a shape is captured, the forward and the backward pass in graphs of their own. Texts are
padded to one of a few lengths, so that few graphs serve all micro-batches. These run as without graphs: the first
micro-batch of a shape, evaluation, a second forward pass before the backward pass of the first, and all passes after
the memory of a weight was replaced. All graphs share one pool of memory, because only one is between its forward and
its backward pass.
Under DistributedDataParallel each process captures its own passes. The backward pass has a graph for each of a few
parts (backward_parts.py), so that the gradients of one part are summed while the next one is computed.
PyTorch's `torch.cuda.make_graphed_callables` cannot add gradients of several micro-batches, because the gradient of a
weight then is the memory that the next replay overwrites.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ftcli.models.kernels.backward_parts import boundaries_of, parts_of
from ftcli.models.kernels.padding_masks import Padding, padding_of_mask, use_padding
from ftcli.runtime.errors import InputError
from ftcli.runtime.reader_errors import first_line

if TYPE_CHECKING:
    from torch import Tensor


WARM_UP = 3  # passes before a capture, in which libraries choose their kernels and allocate their workspaces
MOST_GRAPHS = 40  # further shapes run as without graphs; texts of up to 512 tokens have 24 lengths
FIRST_LENGTHS = 16  # tokens between two lengths to which texts are padded; more for longer texts
IMAGES, TEXTS = {"pixel_values"}, {"input_ids", "attention_mask", "token_type_ids"}
HINT = "set cuda_graphs to false"


class CapturedPass:
    """The forward function of a model, with graphs of its training passes.

    Attributes:
        model: The model.
        plain: Its own forward function.
        spares_memory: Whether nothing is captured in a run that needs more than half of the device's memory, because
            the activations of graphs stay in memory. Such a run has micro-batches for which the host is fast enough.
        captures: Graphs by the shape of the micro-batch; None for a shape that was seen once.
        gradients: The memory in which every backward graph leaves the gradients, and `weights` and their `places`.
        filler: Id of the padding token.
        pending: Refers to the last replayed forward pass until its backward pass.
    """

    def __init__(self, model: nn.Module, *, spares_memory: bool = False) -> None:
        self.model, self.plain, self.spares_memory = model, model.forward, spares_memory
        update_wrapper(self, model.forward)  # its signature too
        config: Any = model.config
        self.filler: int = getattr(config, "pad_token_id", None) or 0
        self.captures: dict[tuple[Any, ...], _Capture | None] = {}
        self.weights: list[nn.Parameter] = []
        self.places: list[int] = []
        self.gradients: list[Tensor | None] = []
        self.pool: Any = None
        self.pending: weakref.ref[Any] | None = None

    @property
    def graphs(self) -> int:
        """The number of shapes that have been captured."""
        return sum(capture is not None for capture in self.captures.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, from a replay where the micro-batch has the shape of a captured one."""
        inputs = {name: value for name, value in kwargs.items() if value is not None}
        if args or not self._can_replay(inputs):
            return self.plain(*args, **kwargs)
        padding = padding_of_mask(inputs.get("attention_mask"))
        if "attention_mask" in inputs and padding is None:
            return self.plain(**kwargs)
        shape = self._shape_of(inputs)
        if shape not in self.captures:
            self.captures[shape] = None
            return self.plain(**kwargs)
        capture = self.captures[shape]
        if capture is None and self.graphs < MOST_GRAPHS and self._weights_stay() and self._has_room():
            self.captures[shape] = capture = self._capture(inputs, shape)
        if capture is None or not self._weights_stay():
            return self.plain(**kwargs)
        capture.fill(inputs)
        start = torch.empty(0, device=capture.outputs[0].device)
        for part in reversed(range(len(capture.backward))):
            weights = [self.weights[number] for number in capture.backward[part][1]]
            *outputs, start = _Replay.apply(self, capture, part, start, *weights)
        return capture.kind(**dict(zip(capture.names, outputs, strict=True)))

    def _can_replay(self, inputs: dict[str, Any]) -> bool:
        """Return whether this is a training pass on the GPU, and no replayed one awaits its backward pass."""
        names = set(inputs)
        is_known = names == IMAGES or ({"input_ids", "attention_mask"} <= names <= TEXTS)
        if not is_known or not self.model.training or not torch.is_grad_enabled():
            return False
        is_pending = self.pending is not None and self.pending() is not None
        return not is_pending and all(value.is_cuda and not value.requires_grad for value in inputs.values())

    def _shape_of(self, inputs: dict[str, Tensor]) -> tuple[Any, ...]:
        """Return what two micro-batches have in common if a graph of one serves the other."""
        if "pixel_values" in inputs:
            images = inputs["pixel_values"]
            return (images.shape, images.dtype, images.stride())
        rows, length = inputs["input_ids"].shape
        return (rows, self._length_for(length), *sorted(inputs))

    def _length_for(self, length: int) -> int:
        """Return the length to which texts are padded. A text with as many tokens as the model takes stays as it is."""
        padded = padded_length(length)
        config: Any = self.model.config
        most: int | None = getattr(config, "max_position_embeddings", None)
        # Some models, such as RoBERTa, do not use their first positions.
        return length if most is not None and padded > most - self.filler - 1 else padded

    def _weights_stay(self) -> bool:
        """Return whether the weights are still where the graphs read them."""
        return self.places == [weight.data_ptr() for weight in self.weights]

    def _has_room(self) -> bool:
        """Return whether another graph may be captured."""
        return not self.spares_memory or 2 * torch.cuda.max_memory_reserved() < torch.cuda.mem_get_info()[1]

    def _capture(self, inputs: dict[str, Tensor], shape: tuple[Any, ...]) -> _Capture:
        """Capture a forward and a backward pass for micro-batches like this one.

        Autocast keeps casts of weights from one forward pass to the next. A graph must not use one that was made
        outside, so the captured pass casts all weights. The garbage collector stands still meanwhile: it may find the
        graph of an earlier run, and no graph can be destroyed while another is captured. Afterwards running statistics
        and the state of the random generator are as before.
        """
        static = {name: value.clone() for name, value in inputs.items()}  # keeps the format of images
        if "input_ids" in inputs:
            static = {name: value.new_zeros(shape[:2]) for name, value in inputs.items()}
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]  # running statistics of batch norm
        dtype, is_on = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        mask = static.get("attention_mask")
        always = nullcontext() if mask is None else use_padding(Padding("at the end", tuple(mask.shape)), mask)
        try:
            with (
                torch.random.fork_rng([torch.cuda.current_device()]),
                torch.autocast("cuda", dtype, enabled=is_on, cache_enabled=False),
                _no_garbage_collection(),
                _leaves_of_their_own(self.model) as pairs,
                always,
            ):
                if not self.weights:
                    self.weights = [weight for weight, _ in pairs]
                    self.places = [weight.data_ptr() for weight in self.weights]
                    self.pool = torch.cuda.graph_pool_handle()
                leaves = [leaf for _, leaf in pairs]
                self._warm_up(static, leaves)
                return self._record(static, leaves)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            problem = f"the forward pass of {type(self.model).__name__} cannot be captured: {first_line(error)}"
            raise InputError(f"model.cuda_graphs: {problem}", hint=HINT) from error
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    def _warm_up(self, static: dict[str, Tensor], leaves: list[nn.Parameter]) -> None:
        """Run some passes on a stream of their own, as PyTorch requires before a capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                outputs = list(_tensors_of(self.plain(**static)).values())
                found = torch.autograd.grad(
                    outputs, leaves, [torch.ones_like(one) for one in outputs], allow_unused=True
                )
            if not self.gradients:
                self.gradients = [None if one is None else torch.empty_like(one) for one in found]
        torch.cuda.current_stream().wait_stream(stream)

    def _record(self, static: dict[str, Tensor], leaves: list[nn.Parameter]) -> _Capture:
        """Record the graphs. Other threads, of NCCL and of pinned memory, may go on calling CUDA."""
        how: dict[str, Any] = {"pool": self.pool, "capture_error_mode": "thread_local"}
        forward = torch.cuda.CUDAGraph()
        with boundaries_of(self.model) as boundaries, torch.cuda.graph(forward, **how):
            output = self.plain(**static)
        named = _tensors_of(output)
        outputs = list(named.values())
        output_gradients = gradients = [torch.zeros_like(one) for one in outputs]
        backward = []
        for part in parts_of(outputs, boundaries, leaves):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, **how):
                gradients, found = part.gradients(leaves, gradients)
                for number, gradient in zip(part.weights, found, strict=True):
                    if (target := self.gradients[number]) is not None and gradient is not None:
                        target.copy_(gradient)
            backward.append((graph, part.weights))
        plain = [one.detach() for one in outputs]  # without the graph of autograd
        return _Capture(static, forward, backward, type(output), list(named), plain, output_gradients, self.filler)


class _Capture(NamedTuple):
    """The graphs of one shape.

    Attributes:
        inputs: The memory that the forward graph reads, by name.
        forward: The graph of the forward pass.
        backward: The graphs of the parts of the backward pass, with the numbers of the weights of each.
        kind, names: The class of the model's output and the names of its tensors.
        outputs: The memory in which the forward graph leaves them.
        output_gradients: The memory from which the backward graph reads their gradients.
        filler: Id of the padding token.
    """

    inputs: dict[str, Tensor]
    forward: torch.cuda.CUDAGraph
    backward: list[tuple[torch.cuda.CUDAGraph, list[int]]]
    kind: Any
    names: list[str]
    outputs: list[Tensor]
    output_gradients: list[Tensor]
    filler: int

    def fill(self, inputs: dict[str, Tensor]) -> None:
        """Copy a micro-batch to where the forward graph reads it. Shorter texts are padded."""
        for name, target in self.inputs.items():
            value = inputs[name]
            if value.shape == target.shape:
                target.copy_(value)
            else:
                target[:, : value.shape[1]].copy_(value)
                target[:, value.shape[1] :].fill_(self.filler if name == "input_ids" else 0)


def padded_length(length: int) -> int:
    """Return the length to which texts of some tokens are padded, above 256 tokens at most an eighth more."""
    step = FIRST_LENGTHS
    while 16 * step < length:
        step *= 2
    return -(-length // step) * step


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
    """A part of a replayed pass, which autograd sees as a function of the part before and of its weights.

    The first part replays the forward pass. In the backward pass each part replays its own graph, the last part first.
    """

    @staticmethod
    def forward(
        ctx: Any, passes: CapturedPass, capture: _Capture, part: int, start: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        """Return copies of the outputs in the last part, because the next replay overwrites them; and `start`."""
        ctx.passes, ctx.capture, ctx.part = passes, capture, part
        if part == len(capture.backward) - 1:
            capture.forward.replay()
        outputs: tuple[Tensor, ...] = ()
        if part == 0:
            passes.pending = weakref.ref(ctx)  # it dies with the outputs, if they are dropped without a backward pass
            outputs = tuple(output.clone() for output in capture.outputs)
        return (*outputs, start.clone())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the weights.

        They are the tensors that the next replay overwrites. Autograd copies them or adds them up, because `passes`
        holds them too.
        """
        if ctx.part == 0:
            for target, gradient in zip(ctx.capture.output_gradients, gradients[:-1], strict=True):
                target.copy_(gradient)
        graph, numbers = ctx.capture.backward[ctx.part]
        graph.replay()
        if ctx.part == len(ctx.capture.backward) - 1:
            ctx.passes.pending = None
        return (None, None, None, gradients[-1], *(ctx.passes.gradients[number] for number in numbers))
