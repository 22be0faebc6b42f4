"""Negative log-likelihoods under a linear head, without its logits: they exist for a piece of the rows at a time.

Logits `[N, V]` are the largest tensor of a training step: 16,384 tokens of a vocabulary of 128,256 are 4 GiB in
bfloat16 and 8 in float32, and as much again for their gradient. Here a piece is made, turned into likelihoods in
float32 and, still in the forward pass, into its part of the gradients, then dropped: on GPUs by one kernel, which goes
over the logits twice. So the head is multiplied three times, as with whole logits; making each piece anew in the
backward pass would be a fourth. Gradients of the forward pass are those of a plain sum, so that happens only where they
do not serve: where the loss weighs tokens unequally and the head is trained, and in float16, whose small numbers need
the loss scale from the start.
Knows no model, no task and no backend. Shapes: N rows, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .fused import Fused
from .memory import PIECE

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight and bias
After = Callable[[Tensor], Tensor]  # what a model does to logits, elementwise
TILE = 128  # rows that a GPU multiplies together; a piece of whole tiles leaves none half empty
# Logits of a micro-batch from which on a few seconds of compiling pay: the passes it saves over so many take half a
# millisecond on an H200.
WORTH = 2**26


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
        dtypes = tuple(torch.float32 if x is None else x.dtype for x in (hidden, weight, bias))
        if ahead is not None and (_is_of_a_sum(upstream) or not any(wanted[1:])):
            found = _scaled(ahead, upstream, dtypes)
        else:
            found = _in_pieces(hidden, weight, bias, targets, ctx.after, ctx.dtype, upstream, wanted)[1]
        pairs = zip(found, dtypes, strict=True)
        return *(None if gradient is None else gradient.to(dtype) for gradient, dtype in pairs), None, None, None


def _is_of_a_sum(upstream: Tensor) -> bool:
    """Say whether an upstream gradient is one number for all rows; autograd expands it, so no value is looked at."""
    return upstream.numel() > 0 and upstream.stride() == (0,)


def _scaled(ahead: Gradients, upstream: Tensor, dtypes: tuple[torch.dtype, ...]) -> Gradients:
    """Return the gradients for `upstream [N]` from those of the sum of all rows, which are lost."""
    hidden, weight, bias = ahead
    return (
        None if hidden is None else _times(hidden, upstream[:, None], dtypes[0]),
        None if weight is None else _times(weight, upstream[:1], dtypes[1]),
        None if bias is None else _times(bias, upstream[:1], dtypes[2]),
    )


def _times(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `gradient` times a float32 `factor`, rounded while it is written; it is overwritten where it can be."""
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, factor, out=out)


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
    rows -= rows % TILE if hidden.is_cuda and rows > TILE else 0
    token_nll = _nll if len(targets) * weight.shape[0] >= WORTH else plain_nll
    nll, of_hidden = [], []
    of_weight: Tensor | None = None
    of_bias: Tensor | None = None
    for start in range(0, max(1, len(targets)), rows):
        piece, target = hidden[start : start + rows].to(dtype), targets[start : start + rows]
        logits = F.linear(piece, weight, bias)
        part = None if factors is None else factors[start : start + rows]
        if after is None:
            nll.append(token_nll(logits, target, part))
            of_logits = logits
        else:
            log_p = torch.log_softmax(after(logits), dim=-1, dtype=torch.float32)
            nll.append(F.nll_loss(log_p, target, reduction="none", ignore_index=-100))
            of_logits = logits if part is None else _before(logits, after, _of_log_p(log_p, target, part))
            del log_p
        if part is None:
            continue
        del logits
        if wanted[0]:
            of_hidden.append(of_logits @ weight)
        if wanted[1]:
            of_weight = _plus_product(of_weight, of_logits.T, piece, is_one=rows >= len(targets))
        if wanted[2]:
            total = of_logits.sum(dim=0, dtype=torch.float32)
            of_bias = total if of_bias is None else of_bias.add_(total)
    return torch.cat(nll), (torch.cat(of_hidden) if of_hidden else None, of_weight, of_bias)


def plain_nll(logits: Tensor, targets: Tensor, factors: Tensor | None) -> Tensor:
    """Return nll `[n]` of logits `[n, V]`, which become their gradient where `factors [n]` are given."""
    log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    nll = F.nll_loss(log_p, targets, reduction="none", ignore_index=-100)
    if factors is not None:
        gradient, by = _of_log_p(log_p, targets, factors)
        torch.mul(gradient, by, out=logits)  # rounds while it writes
    return nll


def nll_in_one_pass(logits: Tensor, targets: Tensor, factors: Tensor | None) -> Tensor:
    """Do what `plain_nll` does, made for the compiler: logits are read for their sum, read again and overwritten.

    The plain form writes float32 log-probabilities and goes over them again and again. Here a target outside the
    vocabulary gives NaN; there it is an error. Its logit is found by comparing, as reading at an index would keep the
    compiler from making one kernel.
    """
    known, vocabulary = targets != -100, logits.shape[1]
    is_target = torch.arange(vocabulary, device=logits.device) == targets[:, None]
    wide = logits.float()
    most = wide.amax(dim=-1, keepdim=True)
    log_sum = (wide - most).exp().sum(dim=-1, keepdim=True).log() + most
    nll = (log_sum - torch.where(is_target, wide, 0.0).sum(dim=-1, keepdim=True))[:, 0]
    nll = torch.where((targets >= 0) & (targets < vocabulary), nll, torch.nan).where(known, 0.0)
    if factors is not None:
        logits.copy_(((wide - log_sum).exp() - is_target.float()) * (factors * known)[:, None])
    return nll


_nll = Fused(nll_in_one_pass, plain_nll)


def _of_log_p(log_p: Tensor, targets: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return p - 1 at the target `[n, V]`, which overwrites `log_p`, and what its rows are multiplied by `[n, 1]`."""
    known = targets != -100
    gradient = log_p.exp_()
    at = targets.where(known, 0)[:, None]
    gradient.scatter_add_(1, at, torch.full_like(at, -1, dtype=gradient.dtype))
    return gradient, (factors * known)[:, None]


def _before(logits: Tensor, after: After, found: tuple[Tensor, Tensor]) -> Tensor:
    """Return the gradient with respect to what `after` was given, from what `_of_log_p` returned."""
    gradient, by = found
    with torch.enable_grad():
        before = logits.detach().requires_grad_()
        shaped = after(before)
    (result,) = torch.autograd.grad(shaped, before, gradient.mul_(by).to(shaped.dtype))
    return result


def _plus_product(total: Tensor | None, left: Tensor, right: Tensor, *, is_one: bool) -> Tensor:
    """Return `total + left @ right`, in float32 unless `is_one`: there is no other product; `total` is overwritten."""
    if not is_one and adds_in_float32(left.device.type, left.dtype):
        size = (left.shape[0], right.shape[1])
        out = torch.empty(size, device=left.device) if total is None else total
        beta = 0 if total is None else 1  # 0: nothing is read
        return torch.addmm(out, left, right, beta=beta, out_dtype=torch.float32, out=out)
    product = left @ right
    return product if total is None else total.float().add_(product)


@cache
def adds_in_float32(kind: str, dtype: torch.dtype) -> bool:
    """Say whether a product of 16 bits can be added to a float32 sum as it is made: on GPUs, in newer torch.

    Else it is rounded, written, and read again.
    """
    if kind != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    some, sums = torch.ones(16, 16, dtype=dtype, device=kind), torch.ones(16, 16, device=kind)
    try:
        torch.addmm(sums, some, some, out_dtype=torch.float32, out=sums)
    except (RuntimeError, TypeError):
        return False
    return True
