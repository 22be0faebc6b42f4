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

import sys
from functools import update_wrapper
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ftcli.models.hub import attention_of
from ftcli.models.kernels.backward_parts import boundaries_of, parts_of
from ftcli.models.kernels.capture_setting import (
    HINT,
    always_padded,
    fill_inputs,
    leaves_of_their_own,
    no_garbage_collection,
    padded_length,
    tensors_of,
)
from ftcli.models.kernels.padding_masks import padding_of_mask
from ftcli.models.kernels.replayed_pass import Capture, Replay
from ftcli.models.positions import learned_positions
from ftcli.runtime.errors import InputError
from ftcli.runtime.log import log_line
from ftcli.runtime.reader_errors import first_line

if TYPE_CHECKING:
    import weakref

    from torch import Tensor


BACKWARD = 1.5  # bytes of a forward and a backward pass, for each byte of the activations
WARM_UP = 3  # passes before a capture, in which libraries choose their kernels and allocate their workspaces
MOST_GRAPHS = 40  # further shapes run as without graphs; texts of up to 512 tokens have 24 lengths
IMAGES, TEXTS = {"pixel_values"}, {"input_ids", "attention_mask", "token_type_ids"}


class CapturedPass:
    """The forward function of a model, with graphs of its training passes.

    Args:
        model: The model.
        is_optional: Whether passes run without graphs where memory is scarce or a capture fails. Otherwise a capture
            that fails is an error.
        first: Passes before the first capture, those of the first step. Then the optimizer has its memory, and DDP has
            the order of its buckets from a pass without graphs, as after a resume.
        longest: Tokens of the longest text that may come; None if it is not known.

    Attributes:
        model: The model.
        plain: Its own forward function.
        captures: Graphs by the shape of the micro-batch; None for a shape that gets none.
        activations: Bytes that a forward pass of a shape keeps for its backward pass, of each shape that was seen.
        gradients: The memory in which every backward graph leaves the gradients, and `weights` and their `places`.
        filler: Id of the padding token.
        limit: The number of learned positions, which is the most tokens of a text; None without a limit.
        pending: Refers to the last replayed forward pass until its backward pass.
    """

    def __init__(
        self, model: nn.Module, *, is_optional: bool = False, first: int = 0, longest: int | None = None
    ) -> None:
        self.model, self.plain, self.is_optional, self.first = model, model.forward, is_optional, first
        update_wrapper(self, model.forward)  # its signature too
        config: Any = model.config
        self.filler: int = getattr(config, "pad_token_id", None) or 0
        self.limit, self.longest = learned_positions(model), longest
        self.lacks_memory = False  # whether the log says that a shape has no graphs because memory is scarce
        self._forget()

    def _forget(self) -> None:
        """Drop all graphs and their memory."""
        self.captures: dict[tuple[Any, ...], Capture | None] = {}
        self.activations: dict[tuple[Any, ...], int] = {}
        self.weights: list[nn.Parameter] = []
        self.places: list[int] = []
        self.gradients: list[Tensor | None] = []
        self.pool: Any = None
        self.pending: weakref.ref[Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of the model has: everything but the graphs, which cannot be copied."""
        other = CapturedPass.__new__(CapturedPass)
        vars(other).update(vars(self))
        other._forget()
        return vars(other)

    @property
    def graphs(self) -> int:
        """The number of shapes that have been captured."""
        return sum(capture is not None for capture in self.captures.values())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output, from a replay where the micro-batch has the shape of a captured one."""
        inputs = {name: value for name, value in kwargs.items() if value is not None}
        if args or not self._can_replay(inputs):
            return self.plain(*args, **kwargs)
        if "attention_mask" in inputs and padding_of_mask(inputs["attention_mask"]) is None:
            return self.plain(**kwargs)
        shape = self._shape_of(inputs)
        if shape in self.activations and shape not in self.captures and self.first <= 0:
            self.captures[shape] = self._try_to_capture(inputs, shape) if self._may_capture(shape) else None
        capture = self.captures.get(shape)
        if capture is None or not self._weights_stay():
            return self._pass_without_graph(inputs, shape)
        fill_inputs(capture.inputs, inputs, self.filler)
        start = torch.empty(0, device=capture.outputs[0].device)
        for part in reversed(range(len(capture.backward))):
            weights = [self.weights[number] for number in capture.backward[part][1]]
            *outputs, start = Replay.apply(self, capture, part, start, *weights)
        return capture.kind(**dict(zip(capture.names, outputs, strict=True)))

    def _pass_without_graph(self, inputs: dict[str, Tensor], shape: tuple[Any, ...]) -> Any:
        """Return the output of a pass with the inputs that a graph would have.

        Padding changes the last bits of a result. A resumed run, which sees its shapes anew, must have the same ones.
        """
        self.first -= 1
        if "input_ids" in inputs:
            padded = self._space_for(inputs, shape)
            fill_inputs(padded, inputs, self.filler)
            inputs = padded
        is_new = shape not in self.activations
        before = torch.cuda.memory_allocated() if is_new else 0
        with always_padded(inputs):
            output = self.plain(**inputs)
        if is_new:
            self.activations[shape] = torch.cuda.memory_allocated() - before
        return output

    def _space_for(self, inputs: dict[str, Tensor], shape: tuple[Any, ...]) -> dict[str, Tensor]:
        """Return memory for the inputs of a shape, with images in the format of these."""
        if "input_ids" in inputs:
            return {name: value.new_zeros(shape[:2]) for name, value in inputs.items()}
        return {name: value.clone() for name, value in inputs.items()}

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
        """Return the length to which texts are padded, at most what the model takes."""
        padded = padded_length(length)
        return padded if self.limit is None else max(length, min(padded, self.limit))

    def _weights_stay(self) -> bool:
        """Return whether the weights are still where the graphs read them."""
        return self.places == [weight.data_ptr() for weight in self.weights]

    def _may_capture(self, shape: tuple[Any, ...]) -> bool:
        """Return whether a shape may be captured. It is asked once for each."""
        return self.graphs < MOST_GRAPHS and self._weights_stay() and (not self.is_optional or self._has_room(shape))

    def _has_room(self, shape: tuple[Any, ...]) -> bool:
        """Return whether the device has memory for the graphs of a shape beside a pass of the longest text.

        The graphs keep the activations of a pass. The gradients need memory twice, once for the graphs.
        """
        longer = max(1.0, self.longest / shape[1]) if self.longest is not None and "input_ids" in shape else 1.0
        if attention_of(self.model) == "eager":
            longer **= 2
        weights = sum(weight.nbytes for weight in self.model.parameters() if weight.requires_grad)
        needed = BACKWARD * (1 + longer) * self.activations[shape] + 2 * weights
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if needed < 0.9 * free:
            return True
        if not self.lacks_memory:
            log_line("some passes have no CUDA graphs, because memory is scarce: model.cuda_graphs true asks for them")
        self.lacks_memory = True
        return False

    def _try_to_capture(self, inputs: dict[str, Tensor], shape: tuple[Any, ...]) -> Capture | None:
        """Return the graphs for micro-batches like this one; None if they are optional and fail."""
        try:
            return self._capture(inputs, shape)
        except (InputError, torch.OutOfMemoryError) as error:
            if not self.is_optional:
                raise
            self._forget()
            self.first = sys.maxsize  # never again
            torch.cuda.empty_cache()
            log_line(f"no CUDA graphs from here on: {first_line(error)}")
            return None

    def _capture(self, inputs: dict[str, Tensor], shape: tuple[Any, ...]) -> Capture:
        """Capture a forward and a backward pass for micro-batches like this one.

        Autocast casts a weight once for all its uses in a forward pass, and may keep the result for the next pass. A
        graph must not use one from outside, so each pass here begins and ends without any. The garbage collector stands
        still meanwhile: it may find the graph of an earlier run, and no graph can be destroyed while another is
        captured. Afterwards running statistics and the state of the random generator are as before.
        """
        static = self._space_for(inputs, shape)
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]  # running statistics of batch norm
        dtype, is_on = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
        try:
            with (
                torch.random.fork_rng([torch.cuda.current_device()]),
                torch.autocast("cuda", dtype, enabled=is_on),
                no_garbage_collection(),
                leaves_of_their_own(self.model) as pairs,
                always_padded(static),
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
            torch.clear_autocast_cache()
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)

    def _warm_up(self, static: dict[str, Tensor], leaves: list[nn.Parameter]) -> None:
        """Run some passes on a stream of their own, as PyTorch requires before a capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                outputs = list(tensors_of(self._pass_with_casts(static)).values())
                found = torch.autograd.grad(
                    outputs, leaves, [torch.ones_like(one) for one in outputs], allow_unused=True
                )
            if not self.gradients:
                self.gradients = [None if one is None else torch.empty_like(one) for one in found]
        torch.cuda.current_stream().wait_stream(stream)

    def _pass_with_casts(self, static: dict[str, Tensor]) -> Any:
        """Return the output of a forward pass with casts of weights that no other pass shares."""
        torch.clear_autocast_cache()
        try:
            return self.plain(**static)
        finally:
            torch.clear_autocast_cache()

    def _record(self, static: dict[str, Tensor], leaves: list[nn.Parameter]) -> Capture:
        """Record the graphs. Other threads, of NCCL and of pinned memory, may go on calling CUDA."""
        how: dict[str, Any] = {"pool": self.pool, "capture_error_mode": "thread_local"}
        forward = torch.cuda.CUDAGraph()
        with boundaries_of(self.model) as boundaries, torch.cuda.graph(forward, **how):
            output = self._pass_with_casts(static)
        named = tensors_of(output)
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
        return Capture(static, forward, backward, type(output), list(named), plain, output_gradients)
