"""Decide on the host whether a micro-batch needs an attention mask, so that no model reads the mask on the device.

transformers reads the values of an attention mask to decide whether it can be dropped. The host then waits for the
device once per forward pass, and padded rows get a dense mask `[B, 1, T, T]` in every layer. This module reads the mask
before it is copied to the device:

- Without padding there is no mask, as in transformers.
- With padding at the end of rows, causal attention has no mask: no token attends to later tokens, and padding is no
  target. This allows the fastest kernels.
- With padding at the end of rows, bidirectional attention gets the mask, without a test on the device.
- Other padding, and batches with several masks, are left to transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from ftcli.runtime.patches import declare
from ftcli.runtime.process_settings import on_restore

if TYPE_CHECKING:
    from ftcli.tasks.protocol import Batch


MASKS = declare(
    __name__,
    "padding-masks",
    library="transformers",
    versions=">=5.17,<5.25",
    purpose="Replaces transformers' mask functions for sdpa and eager attention until the run ends",
    without="Each forward pass then waits for the device once, and padded rows get a dense mask.",
    alternative="None: the registry of masks is public, and no public function drops a mask without reading it.",
    apis=(
        "transformers.masking_utils:ALL_MASK_ATTENTION_FUNCTIONS",
        *(
            f"transformers.masking_utils:{function}.{name}"
            for function in ("sdpa_mask", "eager_mask")
            for name in ("q_length", "kv_length", "attention_mask")
        ),
        "transformers.masking_utils:sdpa_mask.allow_is_causal_skip",
        "transformers.masking_utils:sdpa_mask.allow_is_bidirectional_skip",
    ),
    measurement="15.1 ms a step, without it 14.1 ms, 3.6 GiB both times: BERT-base, 32 rows of up to 128 tokens, CUDA "
    "graphs, one H100. Graphs do not wait for the host. On a CPU, "
    "[1,127 ms](../explanation/our-own-code.md#padding-masks) a step of a small Llama shape, without it 1,193 ms.",
)


class Padding(NamedTuple):
    """The padding in an attention mask `[B, T]`."""

    where: Literal["nowhere", "at the end"]
    shape: tuple[int, ...]


# The padding of the current micro-batch and its mask on the device. It is not a context variable, because autograd
# recomputes layers in other threads.
_current: list[tuple[Padding, torch.Tensor]] = []


def padding_of(batch: Batch) -> Padding | None:
    """Return the padding of a batch.

    Args:
        batch: Tensors on the host.

    Returns:
        The padding; None if the batch does not have exactly one mask `[B, T]`, or if its padding is not at the end.
    """
    masks = [name for name in batch if name.endswith("mask")]
    mask = batch.get("attention_mask")
    if masks != ["attention_mask"] or not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.is_floating_point():
        return None
    values = mask.numpy()
    if values.all():
        return Padding("nowhere", values.shape)
    return Padding("at the end", values.shape) if (values[:, :-1] >= values[:, 1:]).all() else None


def padding_of_mask(mask: Any) -> Padding | None:
    """Return the padding of the current micro-batch, if this is its mask on the device; None otherwise."""
    return _current[0][0] if _current and mask is _current[0][1] else None


@contextmanager
def use_padding(padding: Padding | None, mask: torch.Tensor | None) -> Iterator[None]:
    """Use the padding of a batch for attention masks within this context.

    Args:
        padding: The padding; None to read the mask on the device, as in transformers.
        mask: The mask of the batch on the device. Only this tensor is replaced.
    """
    _current[:] = [] if padding is None or mask is None else [(padding, mask)]
    try:
        yield
    finally:
        _current.clear()


def replace_mask_functions(model: torch.nn.Module) -> None:
    """Replace transformers' mask functions for sdpa and eager attention, so that they support `use_padding`.

    Outside `use_padding` the functions return the same masks as before. The original functions are restored when the
    run ends. Call this after all attention functions are registered. Further calls have no effect.

    Args:
        model: The model. Its forward ignores `use_padding` if a task passes another mask than that of the batch.
    """
    if not MASKS.is_usable():
        return
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask

    for name, function in dict(ALL_MASK_ATTENTION_FUNCTIONS).items():
        if function in (sdpa_mask, eager_mask):
            AttentionMaskInterface.register(name, _with_padding(function))
            on_restore(partial(AttentionMaskInterface.register, name, function))
    model.register_forward_pre_hook(_clear_for_other_mask, with_kwargs=True)


def _clear_for_other_mask(model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    """Clear the padding if a model gets another mask than that of the batch."""
    if _current and kwargs.get("attention_mask") is not _current[0][1]:
        _current.clear()


def _with_padding(function: Any) -> Any:
    """Return a mask function of transformers that uses the current padding instead of the values of the mask."""

    def mask(*args: Any, **kwargs: Any) -> Any:
        attention_mask = kwargs.get("attention_mask")
        if attention_mask is None and kwargs.get("allow_is_bidirectional_skip") and kwargs.get("local_size") is None:
            # As transformers does outside of a CUDA graph. While one is captured, 5.17 builds a mask of ones, with
            # which attention is slower.
            return None
        if _current and attention_mask is not None and not args:
            where, shape = _current[0][0]
            if tuple(attention_mask.shape) == shape and kwargs["q_length"] == kwargs["kv_length"] == shape[1]:
                if where == "nowhere" or kwargs.get("allow_is_causal_skip", True):
                    kwargs["attention_mask"] = None
                else:
                    kwargs["allow_is_bidirectional_skip"] = False
        return function(*args, **kwargs)

    return mask
