"""Attention of padded rows or of one document. Shapes: B rows, H heads, T tokens, K features of a head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def attend_single(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **extras: Any
) -> tuple[Tensor, None]:
    """Compute attention with transformers' sdpa, or in full with soft-capping or sinks, which sdpa does not support.

    Args:
        module: The attention layer.
        query: `[B, H, T, K]`.
        key: `[B, heads, T, K]`, with as many heads as `query` or fewer.
        value: Like `key`.
        attention_mask: A mask, or None for causal attention.
        **extras: `softcap` and `s_aux`, and the arguments of transformers' sdpa function.

    Returns:
        `[B, T, H, K]`, and None instead of attention weights.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    softcap, sinks = extras.pop("softcap"), extras.pop("s_aux")
    if softcap is None and sinks is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **extras)
    dropout = extras["dropout"] if module.training else 0.0
    return _attend_eager(query, key, value, attention_mask, extras["scaling"], softcap, sinks, dropout), None


def _attend_eager(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    """Return attention `[B, T, H, K]` from a full score matrix, soft-capped (Gemma 2) or with sinks `[H]` (gpt-oss)."""
    import torch

    groups, length, seen = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    key, value = (tensor.repeat_interleave(groups, dim=1) for tensor in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is None and length > 1:
        mask = torch.ones(length, seen, dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)[..., :seen]
    weights = torch.nn.functional.dropout(weights, dropout) if dropout else weights
    return (weights @ value.to(weights.dtype)).transpose(1, 2).contiguous()


def sliding_window_mask(length: int, sliding_window: int | None, like: Tensor) -> Tensor | None:
    """Return the mask `[1, 1, T, T]` of a document that is longer than the sliding window; else None (causal)."""
    import torch

    if sliding_window is None or length <= sliding_window:
        return None
    causal = torch.ones(length, length, dtype=torch.bool, device=like.device).tril()
    return causal.triu(1 - sliding_window)[None, None]
