"""Losses of single answers that are desirable or not, and the balance of the two kinds.

R: rows of a micro-batch. r: log-ratio of a row, that is the log-probability of its answer under the policy less that
under the reference. Functions return `[R]`, float32 (float64 for float64 input).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BALANCED = (1.0, 4 / 3)
"""Ratio of weight times rows, desirable to undesirable: Ethayarajh et al. 2024 (arXiv 2402.01306), eq. 8."""


def kto(
    log_ratios: Tensor,
    is_desirable: Tensor,
    *,
    beta: float,
    baseline: Tensor | float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return the KTO loss: Ethayarajh et al. 2024 (arXiv 2402.01306), eq. 7.

    Args:
        log_ratios: `[R]`, r of each row.
        is_desirable: `[R]` bool.
        beta: How fast the value of an answer saturates.
        baseline: The reference point z0 of the step, a scalar (`kto_baseline`). No gradient goes through it.
        desirable_weight: The paper's lambda_D.
        undesirable_weight: The paper's lambda_U.

    Returns:
        `[R]` contributions.
    """
    import torch

    baseline = baseline.detach() if isinstance(baseline, torch.Tensor) else baseline
    above = beta * (log_ratios if log_ratios.dtype == torch.float64 else log_ratios.float()) - beta * baseline
    desirable, undesirable = desirable_weight * (-above).sigmoid(), undesirable_weight * above.sigmoid()
    return torch.where(is_desirable, desirable, undesirable)


def apo_zero_unpaired(
    log_ratios: Tensor,
    is_desirable: Tensor,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """Return APO-zero for single answers: D'Oosterlinck et al. 2024 (arXiv 2408.06266), eq. 7 by answer.

    It is the KTO loss with a reference point of 0. Arguments and result are those of `kto`.
    """
    return kto(
        log_ratios,
        is_desirable,
        beta=beta,
        baseline=0.0,
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )


def kto_baseline(mismatched_sum: Tensor, rows: int) -> Tensor:
    """Return the reference point z0: the mean of r over mismatched prompts and answers of the step, 0 at least.

    It is the estimate of the KL divergence of Ethayarajh et al. 2024 (arXiv 2402.01306).

    Args:
        mismatched_sum: Scalar, the sum of r over all rows of the global batch with the answers of their partners.
        rows: The rows of the global batch.
    """
    return mismatched_sum.detach().clamp(min=0) / rows


def balance_ratio(desirable: int, undesirable: int, desirable_weight: float, undesirable_weight: float) -> float:
    """Return the total weight of desirable rows over that of undesirable rows; infinity without undesirable rows."""
    if not undesirable * undesirable_weight:
        return float("inf")
    return desirable * desirable_weight / (undesirable * undesirable_weight)


def balancing_weights(desirable: int, undesirable: int) -> tuple[float, float]:
    """Return (desirable_weight, undesirable_weight), both at least 1, whose balance ratio is within `BALANCED`.

    Raises:
        ValueError: There are no rows of one kind, so no weight balances them.
    """
    if not desirable or not undesirable:
        raise ValueError("rows of one kind only cannot be balanced")
    ratio = desirable / undesirable
    low, high = BALANCED
    if ratio < low:
        return low / ratio, 1.0
    return (1.0, 1.0) if ratio <= high else (1.0, ratio / high)


def describe_balance(desirable: int, undesirable: int, desirable_weight: float, undesirable_weight: float) -> str:
    """Return a log line about the balance of both kinds, with weights that would balance them if they are not."""
    rows = f"{desirable:,} desirable and {undesirable:,} undesirable answers"
    if not desirable or not undesirable:
        return f"{rows}: only one kind, which no weight can balance"
    ratio = balance_ratio(desirable, undesirable, desirable_weight, undesirable_weight)
    low, high = BALANCED
    line = f"{rows}: the ratio of weight times rows is {ratio:.3g}"
    if low - 1e-9 <= ratio <= high + 1e-9:
        return line
    first, second = balancing_weights(desirable, undesirable)
    return f"{line}; desirable_weight {first:.3g} and undesirable_weight {second:.3g} bring it into 1 to 4/3"
