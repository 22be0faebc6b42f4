"""What a capture of the passes of a model needs: contexts, lengths of texts, and the tensors of an output."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ftcli.models.kernels.padding_masks import Padding, use_padding
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

FIRST_LENGTHS = 16  # tokens between two lengths to which texts are padded; more for longer texts
HINT = "set cuda_graphs to false"


def always_padded(inputs: dict[str, Tensor]) -> AbstractContextManager[None]:
    """Return a context in which texts have a mask, even if none of a micro-batch is shorter than the others."""
    mask = inputs.get("attention_mask")
    return nullcontext() if mask is None else use_padding(Padding("at the end", tuple(mask.shape)), mask)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
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
def leaves_of_their_own(model: nn.Module) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
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


def fill_inputs(targets: dict[str, Tensor], inputs: dict[str, Tensor], filler: int) -> None:
    """Copy a micro-batch into the memory of its shape. Shorter texts are padded.

    Args:
        targets: The memory, by name of the input.
        inputs: The micro-batch.
        filler: Id of the padding token.
    """
    for name, target in targets.items():
        value = inputs[name]
        if value.shape == target.shape:
            target.copy_(value)
        else:
            target[:, : value.shape[1]].copy_(value)
            target[:, value.shape[1] :].fill_(filler if name == "input_ids" else 0)


def padded_length(length: int) -> int:
    """Return the length to which texts of some tokens are padded, above 256 tokens at most an eighth more."""
    step = FIRST_LENGTHS
    while 16 * step < length:
        step *= 2
    return -(-length // step) * step


def tensors_of(output: Any) -> dict[str, Tensor]:
    """Return the tensors of a model's output by name.

    Raises:
        InputError: The output is no output class of transformers, or has parts that are not trained tensors.
    """
    named = dict(output.items()) if hasattr(output, "items") else {}
    if not named or not all(isinstance(value, torch.Tensor) and value.requires_grad for value in named.values()):
        message = f"model.cuda_graphs: the model returns {type(output).__name__}, with other parts than trained tensors"
        raise InputError(message, hint=HINT)
    return named
