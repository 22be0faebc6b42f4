"""Label smoothing and z-loss under a linear head, computed in chunks of rows without storing all logits.

For a token with logits `x`, target `y` and `log Z = logsumexp(x)` over V tokens of the vocabulary:

    nll            log Z - x[y]
    uniform        mean over v of -log p(v) = log Z - mean(x): the cross-entropy of a uniform distribution
    squared_log_z  (log Z)^2

Label smoothing with e is `(1 - e) nll + e uniform`: Szegedy et al. 2016 (arXiv 1512.00567), section 7, with a uniform
prior. The z-loss is the mean of `(log Z)^2`: Chowdhery et al. 2022 (PaLM, arXiv 2204.02311), section 5; for routers
Zoph et al. 2022 (ST-MoE, arXiv 2202.08906).

The three values have gradients of their own, so the gradient of the head is computed in the backward pass, from logits
that are computed again. The head takes four matrix products in place of three. Shapes: N rows, n rows of a chunk, H
hidden features, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftcli.models.kernels.fused import Fused
from ftcli.models.kernels.linear_cross_entropy import (
    MIN_LOGITS_TO_COMPILE,
    HeadGradients,
    LogitTransform,
    OptionalGradients,
    gradient_before_transform,
    product_dtype,
    rows_per_chunk,
)

NAMES = ("nll", "uniform", "squared_log_z")  # of the columns of results


def regularized_rows(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the three values of each row, `[N, 3]` float32, from logits `[N, V]`; a target of -100 gives 0."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    known = targets != -100
    log_z = wide.logsumexp(dim=-1)
    of_target = wide.gather(-1, targets.where(known, 0)[:, None])[:, 0]
    values = torch.stack([log_z - of_target, log_z - wide.mean(dim=-1), log_z.square()], dim=-1)
    return torch.where(known[:, None], values, 0.0)


def linear_regularized(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, after: LogitTransform | None = None
) -> Tensor:
    """Return the values of `regularized_rows` under `after(hidden @ weight.T + bias)`.

    Dtypes are those of `linear_nll`. There is no second derivative.

    Args:
        hidden: `[N, H]`.
        weight: `[V, H]`.
        bias: `[V]`, or None.
        targets: `[N]` int64; -100 gives 0.
        after: An elementwise function of the logits, such as soft-capping; or None.

    Returns:
        `[N, 3]` float32, columns in the order of `NAMES`.
    """
    result: Tensor = _LinearRegularized.apply(hidden, weight, bias, targets, after, product_dtype(hidden, weight))
    return result


class _LinearRegularized(torch.autograd.Function):
    """The autograd function of `linear_regularized`. Its backward pass computes the logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        after: LogitTransform | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return the values `[N, 3]`."""
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.after, ctx.dtype = after, dtype
        return _in_chunks(hidden, weight, bias, targets, after, dtype, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for `upstream [N, 3]`."""
        hidden, weight, bias, targets = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        _, gradients = _in_chunks(hidden, weight, bias, targets, ctx.after, ctx.dtype, upstream, needed)
        pairs = zip(gradients, (hidden, weight, bias), strict=True)
        return *(None if g is None or x is None else g.to(x.dtype) for g, x in pairs), None, None, None


def _in_chunks(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    after: LogitTransform | None,
    dtype: torch.dtype,
    factors: Tensor | None,
    needed: tuple[bool, ...] = (),
) -> tuple[Tensor, OptionalGradients]:
    """Compute values and gradients in chunks of rows.

    Args:
        hidden: `[N, H]`.
        weight: `[V, H]`.
        bias: `[V]`, or None.
        targets: `[N]`.
        after: An elementwise function of the logits, or None.
        dtype: Dtype of the matrix products.
        factors: `[N, 3]` float32, weights of the values in the sum to differentiate; None computes no gradients.
        needed: Whether hidden, weight and bias need a gradient.

    Returns:
        Values `[N, 3]` float32, and the gradients.
    """
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = rows_per_chunk(weight)
    losses = _losses if len(targets) * weight.shape[0] >= MIN_LOGITS_TO_COMPILE else regularized_in_one_pass
    values, gradients = [], HeadGradients(needed, is_one=rows >= len(targets))
    for start in range(0, max(1, len(targets)), rows):
        chunk, target = hidden[start : start + rows].to(dtype), targets[start : start + rows]
        logits = F.linear(chunk, weight, bias)
        shaped = logits if after is None else after(logits)
        factor = None if factors is None else factors[start : start + rows]
        values.append(losses(shaped, target, factor))
        if factor is not None and after is not None:
            shaped = gradient_before_transform(logits, after, (shaped, shaped.new_ones(())))
        del logits
        if factor is not None:
            gradients.add(shaped, chunk, weight)
        del shaped  # before the logits of the next chunk are computed
    return torch.cat(values), gradients.all()


def regularized_in_one_pass(logits: Tensor, targets: Tensor, factors: Tensor | None) -> Tensor:
    """Compute the values of a chunk, and write the gradient of their weighted sum over its logits.

    The logit of the target is selected by comparison, because the compiler does not fuse an indexed read. A target
    outside the vocabulary gives NaN.

    Args:
        logits: `[n, V]`. With factors they are overwritten by the gradient.
        targets: `[n]`; -100 gives 0.
        factors: `[n, 3]` float32, or None.

    Returns:
        `[n, 3]` float32.
    """
    known, vocabulary = targets != -100, logits.shape[1]
    is_target = torch.arange(vocabulary, device=logits.device) == targets[:, None]
    wide = logits.float()
    highest = wide.amax(dim=-1, keepdim=True)
    log_z = (wide - highest).exp().sum(dim=-1, keepdim=True).log() + highest
    of_target = torch.where(is_target, wide, 0.0).sum(dim=-1, keepdim=True)
    uniform = log_z - wide.mean(dim=-1, keepdim=True)
    values = torch.cat([log_z - of_target, uniform, log_z.square()], dim=-1)
    values = torch.where(((targets >= 0) & (targets < vocabulary))[:, None], values, torch.nan)
    if factors is not None:
        of_nll, of_uniform, of_square = torch.where(known[:, None], factors, 0.0).split(1, dim=-1)
        by_p = of_nll + of_uniform + 2 * of_square * log_z
        spread = of_uniform / vocabulary
        logits.copy_((wide - log_z).exp() * by_p - torch.where(is_target, of_nll, 0.0) - spread)
    return torch.where(known[:, None], values, 0.0)


_losses = Fused(regularized_in_one_pass)
