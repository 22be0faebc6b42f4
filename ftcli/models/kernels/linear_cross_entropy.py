"""Negative log-likelihoods under a linear head, computed in chunks of rows without storing all logits.

Logits `[N, V]` are the largest tensor of a training step: 16,384 tokens with a vocabulary of 128,256 take 4 GiB in
bfloat16, and their gradient as much. Each chunk of logits is turned into float32 likelihoods and, still in the forward
pass, into gradients of hidden states and weight. The chunk is then dropped. The head takes three matrix products, as
with whole logits; recomputing each chunk in the backward pass would take four.

Gradients of the forward pass are those of the unweighted sum. The backward pass recomputes the chunks if those
gradients cannot be used: if the loss weights tokens unequally and the head is trained, and in float16, whose small
numbers need the loss scale from the start.

Shapes: N rows, n rows of a chunk, H hidden features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ftcli.models.estimates.memory_estimate import MAX_LOGITS_PER_CHUNK
from ftcli.models.kernels.fused import Fused

OptionalGradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of hidden, weight and bias
LogitTransform = Callable[[Tensor], Tensor]  # an elementwise change of logits after the head
TILE_ROWS = 128  # rows of a GPU's matrix tile; chunks are multiples of it
MIN_LOGITS_TO_COMPILE = 2**26  # logits of a micro-batch above which compiling for a few seconds saves time


def linear_nll(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, after: LogitTransform | None = None
) -> Tensor:
    """Return the negative log-likelihoods of targets under `after(hidden @ weight.T + bias)`.

    Matrix products use the autocast dtype, or without autocast that of the weight. Softmax and sums are float32. There
    is no second derivative.

    Args:
        hidden: `[N, H]`.
        weight: `[V, H]`.
        bias: `[V]`, or None.
        targets: `[N]` int64; -100 gives 0.
        after: An elementwise function of the logits, such as soft-capping; or None.

    Returns:
        `[N]` float32.
    """
    dtype = product_dtype(hidden, weight)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (hidden, weight, bias)):
        nll: Tensor = _LinearNll.apply(hidden, weight, bias, targets, after, dtype)
        return nll
    return _chunked_nll(hidden, weight, bias, targets, after, dtype, None)[0]


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the head's matrix products: that of autocast, or without autocast that of the weight."""
    device_type = hidden.device.type
    has_autocast = torch.is_autocast_enabled(device_type)
    return torch.get_autocast_dtype(device_type) if has_autocast else weight.dtype


class _LinearNll(torch.autograd.Function):
    """The autograd function of `linear_nll`, whose forward pass computes the gradients of the sum."""

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
        """Return the likelihoods `[N]`, and store the gradients of their sum."""
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.after, ctx.dtype = after, dtype
        ones = None if dtype == torch.float16 else torch.ones_like(targets, dtype=torch.float32)
        nll, gradients = _chunked_nll(hidden, weight, bias, targets, after, dtype, ones, ctx.needs_input_grad[:3])
        ctx.gradients = None if ones is None else gradients
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients for `upstream [N]`: the stored ones, scaled, or recomputed ones."""
        hidden, weight, bias, targets = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        of_sum, ctx.gradients = ctx.gradients, None  # scaled in place below, so they can be used once
        dtypes = tuple(torch.float32 if x is None else x.dtype for x in (hidden, weight, bias))
        if of_sum is not None and (_is_uniform(upstream) or not any(needed[1:])):
            gradients = _scale_gradients(of_sum, upstream, dtypes)
        else:
            gradients = _chunked_nll(hidden, weight, bias, targets, ctx.after, ctx.dtype, upstream, needed)[1]
        pairs = zip(gradients, dtypes, strict=True)
        return *(None if gradient is None else gradient.to(dtype) for gradient, dtype in pairs), None, None, None


def _is_uniform(upstream: Tensor) -> bool:
    """Return whether an upstream gradient is one number for all rows, without reading it: its stride is then 0."""
    return upstream.numel() > 0 and upstream.stride() == (0,)


def _scale_gradients(of_sum: OptionalGradients, upstream: Tensor, dtypes: tuple[torch.dtype, ...]) -> OptionalGradients:
    """Return the gradients for `upstream [N]` from those of the sum of all rows, which may be overwritten."""
    hidden, weight, bias = of_sum
    return (
        None if hidden is None else _multiply(hidden, upstream[:, None], dtypes[0]),
        None if weight is None else _multiply(weight, upstream[:1], dtypes[1]),
        None if bias is None else _multiply(bias, upstream[:1], dtypes[2]),
    )


def _multiply(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `gradient` times a float32 `factor` in `dtype`; `gradient` is overwritten if it has that dtype."""
    out = gradient if gradient.dtype == dtype else torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, factor, out=out)


def _chunked_nll(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    after: LogitTransform | None,
    dtype: torch.dtype,
    factors: Tensor | None,
    needed: tuple[bool, ...] = (),
) -> tuple[Tensor, OptionalGradients]:
    """Compute likelihoods and gradients in chunks of rows.

    Args:
        hidden: `[N, H]`.
        weight: `[V, H]`.
        bias: `[V]`, or None.
        targets: `[N]`.
        after: An elementwise function of the logits, or None.
        dtype: Dtype of the matrix products.
        factors: `[N]` float32, weights of the likelihoods in the sum to differentiate; None computes no gradients.
        needed: Whether hidden, weight and bias need a gradient.

    Returns:
        Likelihoods `[N]` float32, and the gradients. Those of weight and bias are float32 if there are several chunks.
    """
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    rows = rows_per_chunk(weight)
    token_nll = _nll if len(targets) * weight.shape[0] >= MIN_LOGITS_TO_COMPILE else plain_nll
    nll, gradients = [], HeadGradients(needed, is_one=rows >= len(targets))
    for start in range(0, max(1, len(targets)), rows):
        chunk, target = hidden[start : start + rows].to(dtype), targets[start : start + rows]
        logits = F.linear(chunk, weight, bias)
        factor = None if factors is None else factors[start : start + rows]
        if after is None:
            nll.append(token_nll(logits, target, factor))
            of_logits = logits
        else:
            log_p = torch.log_softmax(after(logits), dim=-1, dtype=torch.float32)
            nll.append(F.nll_loss(log_p, target, reduction="none", ignore_index=-100))
            of_logits = logits
            if factor is not None:
                of_logits = gradient_before_transform(logits, after, _logit_gradient(log_p, target, factor))
            del log_p
        del logits
        if factor is not None:
            gradients.add(of_logits, chunk, weight)
        del of_logits  # before the logits of the next chunk are computed
    return torch.cat(nll), gradients.all()


def rows_per_chunk(weight: Tensor) -> int:
    """Return how many rows of logits are computed at once under a head `[V, H]`."""
    rows = max(1, MAX_LOGITS_PER_CHUNK // weight.shape[0])
    return rows - (rows % TILE_ROWS if weight.is_cuda and rows > TILE_ROWS else 0)


class HeadGradients:
    """Gradients of the hidden features, the weight and the bias of a head, added up over chunks of rows.

    Those of weight and bias are float32 if there are several chunks.
    """

    def __init__(self, needed: tuple[bool, ...], *, is_one: bool) -> None:
        """Start without gradients.

        Args:
            needed: Whether hidden, weight and bias need a gradient.
            is_one: Whether there is one chunk only.
        """
        self.needed, self.is_one = needed, is_one
        self.of_hidden: list[Tensor] = []
        self.of_weight: Tensor | None = None
        self.of_bias: Tensor | None = None

    def add(self, of_logits: Tensor, chunk: Tensor, weight: Tensor) -> None:
        """Add those of one chunk: the gradient of its logits `[n, V]`, its rows `[n, H]`, the weight `[V, H]`."""
        if self.needed[0]:
            self.of_hidden.append(of_logits @ weight)
        if self.needed[1]:
            self.of_weight = add_product(self.of_weight, of_logits.T, chunk, is_one=self.is_one)
        if self.needed[2]:
            total = of_logits.sum(dim=0, dtype=torch.float32)
            self.of_bias = total if self.of_bias is None else self.of_bias.add_(total)

    def all(self) -> OptionalGradients:
        """Return the gradients of hidden `[N, H]`, weight `[V, H]` and bias `[V]`; None where none is needed."""
        return torch.cat(self.of_hidden) if self.of_hidden else None, self.of_weight, self.of_bias


def plain_nll(logits: Tensor, targets: Tensor, factors: Tensor | None) -> Tensor:
    """Return the negative log-likelihoods of one chunk. With factors, overwrite the logits with their gradient.

    Args:
        logits: `[n, V]`.
        targets: `[n]` int64; -100 gives 0.
        factors: `[n]` float32, what each loss is multiplied by in the gradient; None: compute no gradient.

    Returns:
        `[n]` float32.
    """
    log_p = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
    nll = F.nll_loss(log_p, targets, reduction="none", ignore_index=-100)
    if factors is not None:
        gradient, by = _logit_gradient(log_p, targets, factors)
        torch.mul(gradient, by, out=logits)  # rounds while it writes
    return nll


def nll_by_kernel(logits: Tensor, targets: Tensor, factors: Tensor | None) -> Tensor:
    """Compute `plain_nll` with a Triton kernel. A target outside the vocabulary gives NaN instead of an error."""
    from ftcli.models.kernels.nll_kernel import nll_and_gradient  # imports Triton

    return nll_and_gradient(logits, targets, factors)


_nll = Fused(nll_by_kernel, plain_nll, has_kernel=True)


def _logit_gradient(log_p: Tensor, targets: Tensor, factors: Tensor) -> tuple[Tensor, Tensor]:
    """Return p minus the one-hot target `[n, V]`, which overwrites `log_p`, and the factors of its rows `[n, 1]`."""
    known = targets != -100
    gradient = log_p.exp_()
    at = targets.where(known, 0)[:, None]
    gradient.scatter_add_(1, at, torch.full_like(at, -1, dtype=gradient.dtype))
    return gradient, (factors * known)[:, None]


def gradient_before_transform(logits: Tensor, after: LogitTransform, after_gradient: tuple[Tensor, Tensor]) -> Tensor:
    """Return the gradient of the logits before `after`, from the result of `_logit_gradient`."""
    gradient, by = after_gradient
    with torch.enable_grad():
        before = logits.detach().requires_grad_()
        shaped = after(before)
    (result,) = torch.autograd.grad(shaped, before, gradient.mul_(by).to(shaped.dtype))
    return result


def add_product(total: Tensor | None, left: Tensor, right: Tensor, *, is_one: bool) -> Tensor:
    """Return `total + left @ right`, which overwrites `total`; float32 unless the product is the only one."""
    if not is_one and can_accumulate_in_float32(left.device.type, left.dtype):
        size = (left.shape[0], right.shape[1])
        out = torch.empty(size, device=left.device) if total is None else total
        beta = 0 if total is None else 1  # 0: nothing is read
        return torch.addmm(out, left, right, beta=beta, out_dtype=torch.float32, out=out)
    product = left @ right
    return product if total is None else total.float().add_(product)


@cache
def can_accumulate_in_float32(kind: str, dtype: torch.dtype) -> bool:
    """Return whether a 16-bit matrix product can be accumulated in float32: on GPUs, with newer versions of torch.

    Otherwise the product is rounded to 16 bits, written, and read again.

    Args:
        kind: Type of the device.
        dtype: Dtype of the factors.
    """
    if kind != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    some, sums = torch.ones(16, 16, dtype=dtype, device=kind), torch.ones(16, 16, device=kind)
    try:
        torch.addmm(sums, some, some, out_dtype=torch.float32, out=sums)
    except (RuntimeError, TypeError):
        return False
    return True
