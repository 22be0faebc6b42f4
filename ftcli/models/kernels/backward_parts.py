"""Divide the backward pass of a chain of layers into parts, each with the gradients of some of the weights.

A CUDA graph delivers its gradients when it has ended. With one graph for each part, DistributedDataParallel sums the
gradients of one part over the processes while the next part is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from torch import Tensor

PARTS = 4  # at most; the gradients of the last one are summed after the backward pass


class Part(NamedTuple):
    """A part of the backward pass.

    Attributes:
        outputs: The tensors at which it begins.
        boundary: The tensor at which the next part begins; empty for the last part.
        weights: Numbers of the weights whose gradients it computes.
    """

    outputs: list[Tensor]
    boundary: list[Tensor]
    weights: list[int]

    def gradients(
        self, leaves: list[nn.Parameter], gradients: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the gradient of the boundary, and those of the weights; None for a weight without one.

        Args:
            leaves: All weights.
            gradients: The gradients of the outputs.
        """
        inputs = [*self.boundary, *(leaves[number] for number in self.weights)]
        found: Any = torch.autograd.grad(self.outputs, inputs, gradients, allow_unused=True)
        return list(found[: len(self.boundary)]), list(found[len(self.boundary) :])


@contextmanager
def boundaries_of(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the inputs of some layers that divide a model's weights about equally, in the order of their calls.

    Yields:
        A list to which each forward pass appends.
    """
    inputs: list[Tensor] = []

    def collect(module: nn.Module, args: Any, kwargs: Any) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        if isinstance(hidden, torch.Tensor) and hidden.grad_fn is not None:
            inputs.append(hidden)

    hooks = [layer.register_forward_pre_hook(collect, with_kwargs=True) for layer in _first_layers(model)]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _first_layers(model: nn.Module) -> list[nn.Module]:
    """Return the first layer of each part but the first."""
    chains = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    if not chains:
        return []
    sizes = [[sum(weight.numel() for weight in layer.parameters()) for layer in chain] for chain in chains]
    chain, counts = max(zip(chains, sizes, strict=True), key=lambda pair: sum(pair[1]))
    found: list[nn.Module] = []
    passed, total = 0, sum(counts)
    for layer, count in zip(chain, counts, strict=True):
        if passed >= (len(found) + 1) * total / PARTS:
            found.append(layer)
        passed += count
    return found


def parts_of(outputs: list[Tensor], boundaries: list[Tensor], leaves: list[nn.Parameter]) -> list[Part]:
    """Return the parts of a backward pass, the last layers first.

    If anything leads around a boundary, such as a tied weight or a skip connection, all is one part.

    Args:
        outputs: The tensors whose gradients are given.
        boundaries: Tensors that the forward pass computed one after the other.
        leaves: The weights.
    """
    numbers = {id(leaf): number for number, leaf in enumerate(leaves)}
    starts = [outputs, *([boundary] for boundary in reversed(boundaries))]
    parts, seen = [], set[int]()
    for start, following in zip(starts, [*starts[1:], []], strict=True):
        reached, is_met = _weights_behind(start, following)
        weights = [numbers[leaf] for leaf in reached if leaf in numbers]
        if not is_met or not seen.isdisjoint(weights):
            return [Part(outputs, [], list(range(len(leaves))))]
        seen |= set(weights)
        parts.append(Part(start, following, weights))
    unused = [number for number in range(len(leaves)) if number not in seen]
    return [*parts[:-1], parts[-1]._replace(weights=parts[-1].weights + unused)]


def _weights_behind(tensors: Iterable[Tensor], stop: list[Tensor]) -> tuple[list[int], bool]:
    """Return the ids of the leaves that tensors depend on without `stop`, and whether `stop` is all between the two.

    It is not if they do not depend on it, or if they use another output of the operation that computed it.
    """
    ends = {one.grad_fn: one.output_nr for one in stop}
    queue: list[tuple[Any, int]] = [(one.grad_fn, one.output_nr) for one in tensors]
    visited, are_met = set[Any](), not ends
    leaves: list[int] = []
    while queue:
        node, output = queue.pop()
        if node in ends:
            if ends[node] != output:
                return leaves, False
            are_met = True
        elif node is not None and node not in visited:
            visited.add(node)
            if (leaf := getattr(node, "variable", None)) is not None:
                leaves.append(id(leaf))
            queue.extend(node.next_functions)
    return leaves, are_met
