"""Losses as sums in float32, and the one change made to a causal model: its forward returns them itself.

Shapes: B rows, T positions, H hidden, V vocabulary, N trained positions of a micro-batch. Every parameter is
touched inside the prepared module's own call; outside it the head would be a shard, or bypass DDP's reducer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .attention import ARCHITECTURES
from .base_model import base_model_of
from .errors import InputError
from .linear_nll import linear_nll

# Logits that are turned to float32 at once: 2^27 elements are 512 MiB. More are done in pieces, and again backward.
PIECE = 2**27

# model_type -> the setting by which a model changes logits after its head. The other architectures in attention.py's
# table leave them alone; a test holds both. In a model of any other type logits are left to its own forward.
AFTER_HEAD = {
    "gemma2": "final_logit_softcapping",
    "gemma3_text": "final_logit_softcapping",
    "granite": "logits_scaling",
    "cohere": "logit_scale",
    "cohere2": "logit_scale",
}


def cross_entropy_rows(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the negative log-likelihood `[N]` float32 of `targets [N]` under `logits [N, V]`; -100 gives 0."""
    return F.cross_entropy(logits.float(), targets, reduction="none", ignore_index=-100)


def token_nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Return `cross_entropy_rows` without ever holding float32 logits of more than `PIECE` elements."""
    rows = max(1, PIECE // logits.shape[-1])
    if logits.shape[0] <= rows:
        return cross_entropy_rows(logits, targets)
    pieces = zip(logits.split(rows), targets.split(rows), strict=True)
    return torch.cat([_again_backward(cross_entropy_rows, piece, target) for piece, target in pieces])


def _again_backward(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    result: Tensor = checkpoint(function, *tensors, use_reentrant=False)
    return result


def sum_by_source(loss: Tensor, parts: Tensor, sources: Tensor | None, count: int) -> Tensor:
    """Return `[1 + S]` float32: the `loss` of a micro-batch, a scalar, and behind it what each of S sources adds to it.

    `parts [N]` sum up to the loss, `sources [N]` are the numbers of their sources (-1: padding); None: nothing is told
    apart. A part that is not finite stays with its source. No device sync. Raises `InputError` where the two do not
    fit: the task gave a sum, or other parts than the protocol says.
    """
    if sources is None:
        return loss[None]
    if parts.shape != sources.shape:
        told = f"data.train has several sources, and the task's `loss` gave {_shape(parts)}, not {_shape(sources)}"
        hint = "return the loss of every item in the order of the rows, not a sum, so that sources can be told apart"
        raise InputError(told, hint=hint)
    numbers = torch.arange(count, dtype=sources.dtype, device=sources.device)
    by_source = torch.where(sources == numbers[:, None], parts, 0.0)  # [S, N]; added up in the same order each time
    return torch.cat([loss[None], by_source.sum(dim=1)])


def _shape(tensor: Tensor) -> str:
    return "a scalar" if tensor.dim() == 0 else f"values {list(tensor.shape)}"


def return_token_nll(model: nn.Module) -> None:
    """Change a causal model in place so that `model(**batch, positions=..., targets=...)` returns {"nll": [N]}.

    `positions [N]` index the flattened `[B * T]` hidden states that predict `targets [N]`; the head runs on those
    only, so no logits exist for prompt or padding. Where the head is a plain linear layer of a model that is known,
    its forward gives their negative log-likelihoods itself, and logits exist in pieces only; elsewhere all N rows of
    them do, and the model goes on with them as transformers wrote it. Called without `targets` the model answers as
    before. Parameter names stay.
    """
    inner = base_model_of(model)
    head = inner.get_output_embeddings()
    forward, head_forward = inner.forward, head.forward
    is_known, after = _is_known(inner, head), after_head(inner.config)
    asked: list[tuple[Tensor, Tensor]] = []  # positions and targets of the call in progress

    def at_wanted(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not asked:
            return head_forward(hidden, *args, **kwargs)
        positions, targets = asked[0]
        rows = hidden.flatten(0, -2)[positions]
        if is_known:
            return linear_nll(rows, head.weight, head.bias, targets, after)
        return head_forward(rows, *args, **kwargs)

    def nll(*args: Any, positions: Tensor | None = None, targets: Tensor | None = None, **kwargs: Any) -> Any:
        if positions is None or targets is None:
            return forward(*args, **kwargs)
        given: list[Tensor] = []
        asked.append((positions, targets))
        # The newest hook comes after those of backends, and before what the model does to logits.
        hook = head.register_forward_hook(lambda module, inputs, output: given.append(output))
        try:
            logits = forward(*args, use_cache=False, **kwargs).logits
        finally:
            hook.remove()
            asked.clear()
        if not is_known:
            return {"nll": token_nll(logits, targets)}
        if after is None and logits is not given[0]:
            raise RuntimeError(f"{type(inner).__name__} changes its logits after the head, which ftcli did not expect")
        return {"nll": given[0]}

    head.forward = at_wanted
    inner.forward = nll


def after_head(config: Any) -> Callable[[Tensor], Tensor] | None:
    """Return what a model of this configuration does to its head's output, in its own operations; None: nothing."""
    name = AFTER_HEAD.get(config.model_type)
    setting = None if name is None else getattr(config, name)
    if setting is None:
        return None
    if name == "final_logit_softcapping":
        return lambda logits: torch.tanh(logits / setting) * setting
    return (lambda logits: logits / setting) if name == "logits_scaling" else (lambda logits: logits * setting)


def _is_known(inner: Any, head: Any) -> bool:
    """Say whether the model's logits are known to be a linear layer's, but for `after_head`.

    Not with an adapter in the head, in 4 bits, with new rows trained alone: those are other modules.
    """
    return type(head) is nn.Linear and inner.config.model_type in {*ARCHITECTURES, *AFTER_HEAD}
