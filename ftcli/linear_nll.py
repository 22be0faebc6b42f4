"""Negative log-likelihoods under a linear head, without its logits: they exist for a piece of the rows at a time.

Logits `[N, V]` are the largest tensor of a training step: 16,384 tokens of a vocabulary of 128,256 are 4 GiB in
bfloat16 and 8 in float32, and as much again for their gradient. Here a piece is made, turned into log-probabilities in
float32 and, still in the forward pass, into its part of the gradients, then dropped. So the head is multiplied three
times, as with whole logits; making each piece anew in the backward pass would be a fourth. Gradients of the forward
pass are those of a plain sum, so that happens only where they do not serve: where the loss weighs tokens unequally and
the head is trained, and in float16, whose small numbers need the loss scale from the start.
Knows no model, no task and no backend. Shapes: N rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .memory import PIECE

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight and bias
After = Callable[[Tensor], Tensor]  # what a model does to logits, elementwise


def linear_nll(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, after: After | None = None
) -> Tensor:
    """Return the negative log-likelihood `[N]` float32 of `targets [N]` under `after(hidden @ weight.T + bias)`.

    `hidden [N, H]`, `weight [V, H]` and `bias [V]` are multiplied in autocast's dtype where that is on, else in the
    weight's; softmax and sums are float32. A target of -100 gives 0. Any upstream gradient is followed; there is no
    second derivative.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias)):
        found: Tensor = _LinearNll.apply(hidden, weight, bias, targets, after, dtype)
        return found
    return _in_pieces(hidden, weight, bias, targets, after, dtype, None)[0]


class _LinearNll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        after: After | None,
        dtype: torch.dtype,
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.after, ctx.dtype = after, dtype
        ones = None if dtype == torch.float16 else torch.ones_like(targets, dtype=torch.float32)
        nll, ahead = _in_pieces(hidden, weight, bias, targets, after, dtype, ones, ctx.needs_input_grad[:3])
        ctx.ahead = None if ones is None else ahead
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        ahead, ctx.ahead = ctx.ahead, None  # changed in place, so they serve once
        if ahead is not None and (_is_of_a_sum(upstream) or not any(wanted[1:])):
            found = _scaled(ahead, upstream)
        else:
            found = _in_pieces(hidden, weight, bias, targets, ctx.after, ctx.dtype, upstream, wanted)[1]
        pairs = zip(found, (hidden, weight, bias), strict=True)
        return *(None if gradient is None else gradient.to(x.dtype) for gradient, x in pairs), None, None, None


def _is_of_a_sum(upstream: Tensor) -> bool:
    """Say whether an upstream gradient is one number for all rows; autograd expands it, so no value is looked at."""
    return upstream.numel() > 0 and upstream.stride() == (0,)


def _scaled(ahead: Gradients, upstream: Tensor) -> Gradients:
    """Return the gradients for `upstream [N]` from those of the sum of all rows, which are lost."""
    hidden, weight, bias = ahead
    return (
        None if hidden is None else hidden * upstream[:, None],
        None if weight is None else weight.float().mul_(upstream[0]),
        None if bias is None else bias.mul_(upstream[0]),
    )


def _in_pieces(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    after: After | None,
    dtype: torch.dtype,
    factors: Tensor | None,
    wanted: tuple[bool, ...] = (),
) -> tuple[Tensor, Gradients]:
    """Return nll `[N]`, and those gradients of the sum of `factors [N]` times nll that are `wanted`; no factors: none.

    A gradient of the weight or the bias that is summed over several pieces is float32.
    """
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = max(1, PIECE // weight.shape[0])
    nll, of_hidden = [], []
    of_weight: Tensor | None = None
    of_bias: Tensor | None = None
    for start in range(0, max(1, len(targets)), rows):
        piece, target = hidden[start : start + rows].to(dtype), targets[start : start + rows]
        logits = F.linear(piece, weight, bias)
        log_p = torch.log_softmax(logits if after is None else after(logits), dim=-1, dtype=torch.float32)
        nll.append(F.nll_loss(log_p, target, reduction="none", ignore_index=-100))
        if factors is None:
            continue
        of_logits = _gradient_of_logits(logits, log_p, target, factors[start : start + rows], after)
        del logits, log_p
        if wanted[0]:
            of_hidden.append(of_logits @ weight)
        if wanted[1]:
            product = of_logits.T @ piece
            of_weight = product if of_weight is None else of_weight.float().add_(product)
        if wanted[2]:
            total = of_logits.sum(dim=0, dtype=torch.float32)
            of_bias = total if of_bias is None else of_bias.add_(total)
    return torch.cat(nll), (torch.cat(of_hidden) if of_hidden else None, of_weight, of_bias)


def _gradient_of_logits(logits: Tensor, log_p: Tensor, targets: Tensor, factors: Tensor, after: After | None) -> Tensor:
    """Return the gradient `[n, V]` with respect to logits: (p - 1 at the target) times factor; both are overwritten."""
    known = targets != -100
    gradient = log_p.exp_()
    at = targets.where(known, 0)[:, None]
    gradient.scatter_add_(1, at, torch.full_like(at, -1, dtype=gradient.dtype))
    factors = (factors * known)[:, None]
    if after is None:
        return torch.mul(gradient, factors, out=logits)  # rounds while it writes
    with torch.enable_grad():
        before = logits.detach().requires_grad_()
        shaped = after(before)
    (result,) = torch.autograd.grad(shaped, before, gradient.mul_(factors).to(shaped.dtype))
    return result
