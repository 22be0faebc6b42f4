"""What the host knows of the padding of a micro-batch, so that no model has to ask the device for it.

transformers looks at the values of an attention mask to see whether it may be left out, which makes the host wait for
the device once a forward pass, and where a row is padded it gives every layer a dense mask `[B, 1, T, T]`. Here the
mask is looked at before it leaves the host. Nothing padded: no mask, as there. Padded at the ends of rows: attention
that is causal needs none either, because no token sees what follows it, and what stands on padding is nobody's target;
so the fastest kernels stay possible. Attention in both directions gets its mask unasked. Padding of any other kind, and
whatever comes with a mask of its own, is left to transformers. Knows no model and no task.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

if TYPE_CHECKING:
    from .tasks.protocol import Batch


class Padding(NamedTuple):
    """What is known of an attention mask `[B, T]`."""

    where: Literal["nowhere", "at the end"]
    shape: tuple[int, ...]


# What is known of the micro-batch that a model is computing, and its mask as the model is given it. Not a context
# variable, because of autograd's threads.
_told: list[tuple[Padding, torch.Tensor]] = []


def padding_of(batch: Batch) -> Padding | None:
    """Return what is known of a batch on the host; None where it has no mask, several, or one of another kind."""
    masks = [name for name in batch if name.endswith("mask")]
    mask = batch.get("attention_mask")
    if masks != ["attention_mask"] or not isinstance(mask, torch.Tensor) or mask.dim() != 2 or mask.is_floating_point():
        return None
    values = mask.numpy()
    if values.all():
        return Padding("nowhere", values.shape)
    return Padding("at the end", values.shape) if (values[:, :-1] >= values[:, 1:]).all() else None


@contextmanager
def told(padding: Padding | None, mask: torch.Tensor | None) -> Iterator[None]:
    """Let models know in this block how the batch with this very `mask` (on its device) is padded."""
    _told[:] = [] if padding is None or mask is None else [(padding, mask)]
    try:
        yield
    finally:
        _told.clear()


def listen(model: torch.nn.Module) -> None:
    """Let transformers' masks for PyTorch's attention heed what is `told`; without that they are what they were.

    To be called when every attention that a model may use is registered; again does no harm. A model that is given
    another mask than that of its batch, by a task that changes it, is told nothing.
    """
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask

    for name, function in dict(ALL_MASK_ATTENTION_FUNCTIONS).items():
        if function in (sdpa_mask, eager_mask):
            AttentionMaskInterface.register(name, _heeding(function))
    model.register_forward_pre_hook(_forget_another, with_kwargs=True)


def _forget_another(model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
    if _told and kwargs.get("attention_mask") is not _told[0][1]:
        _told.clear()


def _heeding(function: Any) -> Any:
    """Return a mask function of transformers that does not look at the values of a mask that is known."""

    def mask(*args: Any, **kwargs: Any) -> Any:
        given = kwargs.get("attention_mask")
        if _told and given is not None and not args:
            where, shape = _told[0][0]
            if tuple(given.shape) == shape and kwargs["q_length"] == kwargs["kv_length"] == shape[1]:
                if where == "nowhere" or kwargs.get("allow_is_causal_skip", True):
                    kwargs["attention_mask"] = None
                else:
                    kwargs["allow_is_bidirectional_skip"] = False
        return function(*args, **kwargs)

    return mask
