"""A forward and a backward pass that were captured as CUDA graphs, and their replay as functions of autograd."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch import Tensor

    from ftcli.models.kernels.captured_pass import CapturedPass


class Capture(NamedTuple):
    """The graphs of one shape.

    Attributes:
        inputs: The memory that the forward graph reads, by name.
        forward: The graph of the forward pass.
        backward: The graphs of the parts of the backward pass, with the numbers of the weights of each.
        kind, names: The class of the model's output and the names of its tensors.
        outputs: The memory in which the forward graph leaves them.
        output_gradients: The memory from which the backward graph reads their gradients.
    """

    inputs: dict[str, Tensor]
    forward: torch.cuda.CUDAGraph
    backward: list[tuple[torch.cuda.CUDAGraph, list[int]]]
    kind: Any
    names: list[str]
    outputs: list[Tensor]
    output_gradients: list[Tensor]


class Replay(torch.autograd.Function):
    """A part of a replayed pass, which autograd sees as a function of the part before and of its weights.

    The first part replays the forward pass. In the backward pass each part replays its own graph, the last part first.
    """

    @staticmethod
    def forward(
        ctx: Any, passes: CapturedPass, capture: Capture, part: int, start: Tensor, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        """Return copies of the outputs in the last part, because the next replay overwrites them; and `start`."""
        ctx.passes, ctx.capture, ctx.part, ctx.is_done = passes, capture, part, False
        if part == len(capture.backward) - 1:
            capture.forward.replay()
        outputs: tuple[Tensor, ...] = ()
        if part == 0:
            passes.pending = weakref.ref(ctx)  # it dies with the outputs, if they are dropped without a backward pass
            outputs = tuple(output.clone() for output in capture.outputs)
        return (*outputs, start.clone())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the weights.

        They are the tensors that the next replay overwrites. Autograd copies them or adds them up, because `passes`
        holds them too.

        Raises:
            RuntimeError: The backward pass has run already. It has overwritten its own activations.
        """
        if ctx.is_done:
            raise RuntimeError("a replayed pass has one backward pass: set model.cuda_graphs to false")
        ctx.is_done = True
        if ctx.part == 0:
            for target, gradient in zip(ctx.capture.output_gradients, gradients[:-1], strict=True):
                target.copy_(gradient)
        graph, numbers = ctx.capture.backward[ctx.part]
        graph.replay()
        if ctx.part == len(ctx.capture.backward) - 1:
            ctx.passes.pending = None
        return (None, None, None, gradients[-1], *(ctx.passes.gradients[number] for number in numbers))
