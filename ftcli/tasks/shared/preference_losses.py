"""Losses of preference pairs as pure functions: log-probabilities of both answers to one contribution per pair.

P: pairs of a micro-batch. lp: sum of the log-probabilities of an answer's trained tokens; n: their number. r: lp under
the policy less lp under the reference, the log-ratio. Every function returns `[P]`, float32 (float64 for float64
input), and is finite for finite input. Nothing is averaged here: the loop divides the sum over all ranks by the pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, log1p
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LN_2 = log(2)


@dataclass(frozen=True)
class PairLogps:
    """What a loss may use of P pairs. All tensors are `[P]`; rows that are padding have 0 everywhere.

    Attributes:
        chosen: lp of the chosen answers under the policy.
        rejected: lp of the rejected answers under the policy.
        chosen_tokens: Trained tokens of the chosen answers.
        rejected_tokens: Trained tokens of the rejected answers.
        ref_chosen: lp of the chosen answers under the reference; None for a loss without a reference.
        ref_rejected: lp of the rejected answers under the reference.
        margin: How much better the chosen answer must be, in units of the reward; None: 0.
    """

    chosen: Tensor
    rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    ref_chosen: Tensor | None = None
    ref_rejected: Tensor | None = None
    margin: Tensor | None = None

    def log_ratios(self) -> tuple[Tensor, Tensor]:
        """Return r of the chosen and of the rejected answers `[P]`; raises `ValueError` without a reference."""
        if self.ref_chosen is None or self.ref_rejected is None:
            raise ValueError("this loss needs log-probabilities under a reference model")
        return _wide(self.chosen) - _wide(self.ref_chosen), _wide(self.rejected) - _wide(self.ref_rejected)

    def log_ratio_differences(self) -> Tensor:
        """Return r of the chosen answer less r of the rejected one `[P]`."""
        chosen, rejected = self.log_ratios()
        return chosen - rejected

    def mean_logps(self) -> tuple[Tensor, Tensor]:
        """Return lp / n of the chosen and of the rejected answers `[P]`."""
        return (
            _wide(self.chosen) / self.chosen_tokens.clamp(min=1),
            _wide(self.rejected) / self.rejected_tokens.clamp(min=1),
        )

    def mean_log_ratios(self) -> tuple[Tensor, Tensor]:
        """Return r / n of the chosen and of the rejected answers `[P]`."""
        chosen, rejected = self.log_ratios()
        return chosen / self.chosen_tokens.clamp(min=1), rejected / self.rejected_tokens.clamp(min=1)


def sigmoid(pairs: PairLogps, *, beta: float, label_smoothing: float) -> Tensor:
    """Return the DPO loss: Rafailov et al. 2023 (arXiv 2305.18290), eq. 7.

    `label_smoothing` is the probability that a label is flipped: conservative DPO (Mitchell 2023, "A note on DPO with
    noisy preferences", eq. 3). A margin is subtracted from the difference of rewards: Amini et al. 2024 (arXiv
    2402.10571).
    """
    logits = beta * pairs.log_ratio_differences()
    return _smoothed(logits if pairs.margin is None else logits - _wide(pairs.margin), label_smoothing)


def robust(pairs: PairLogps, *, beta: float, label_smoothing: float) -> Tensor:
    """Return robust DPO, whose expectation over flipped labels is the DPO loss of the true labels.

    Chowdhury et al. 2024 (arXiv 2403.00409), the loss of rDPO. `label_smoothing` is the share of flipped labels.
    """
    logits = beta * pairs.log_ratio_differences()
    right, flipped = -_logsigmoid(logits), -_logsigmoid(-logits)
    return ((1 - label_smoothing) * right - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def hinge(pairs: PairLogps, *, beta: float) -> Tensor:
    """Return the rank calibration loss of SLiC-HF (Zhao et al. 2023, arXiv 2305.10425) on log-ratios.

    The form normalised by a reference is hinge-norm of Liu et al. 2023 (RSO, arXiv 2309.06657).
    """
    return (1 - beta * pairs.log_ratio_differences()).relu()


def ipo(pairs: PairLogps, *, beta: float) -> Tensor:
    """Return the IPO loss: Azar et al. 2023 (arXiv 2310.12036), eq. 17, whose tau is `beta`.

    Log-ratios are means over tokens. The paper has sums; its authors use means, so that tau does not depend on length.
    """
    chosen, rejected = pairs.mean_log_ratios()
    return (chosen - rejected - 1 / (2 * beta)).square()


def exo_pair(pairs: PairLogps, *, beta: float, label_smoothing: float) -> Tensor:
    """Return the EXO loss of pairs: Ji et al. 2024 (arXiv 2402.00856), eq. 16.

    Reverse KL divergence from the policy's distribution over the two answers to (1 - e, e), e = `label_smoothing`.
    """
    logits = beta * pairs.log_ratio_differences()
    chosen = logits.sigmoid() * (_logsigmoid(logits) - log1p(-label_smoothing))
    return chosen + (-logits).sigmoid() * (_logsigmoid(-logits) - log(label_smoothing))


def nca_pair(pairs: PairLogps, *, beta: float) -> Tensor:
    """Return the NCA loss of pairs: Chen et al. 2024 (arXiv 2402.05369), the loss for preference data."""
    chosen, rejected = (beta * ratios for ratios in pairs.log_ratios())
    return -_logsigmoid(chosen) - 0.5 * _logsigmoid(-chosen) - 0.5 * _logsigmoid(-rejected)


def bco_pair(pairs: PairLogps, *, beta: float) -> Tensor:
    """Return the loss of a binary classifier of answers: Jung et al. 2024 (BCO, arXiv 2404.04656).

    Without the paper's reward shift, a running mean over earlier batches that would be state of the run.
    """
    chosen, rejected = (beta * ratios for ratios in pairs.log_ratios())
    return -_logsigmoid(chosen) - _logsigmoid(-rejected)


def sppo_hard(pairs: PairLogps, *, beta: float) -> Tensor:
    """Return the SPPO loss for certain preferences: Wu et al. 2024 (arXiv 2405.00675), eq. 4.7.

    P is 1 for the chosen and 0 for the rejected answer; `beta` is 1 / eta of the paper.
    """
    chosen, rejected = pairs.log_ratios()
    return (chosen - 0.5 / beta).square() + (rejected + 0.5 / beta).square()


def apo_zero(pairs: PairLogps, *, beta: float) -> Tensor:
    """Return APO-zero: D'Oosterlinck et al. 2024 (arXiv 2408.06266), eq. 7, plus 1 so that it is never negative.

    For chosen answers that are better than the model's own.
    """
    chosen, rejected = (beta * ratios for ratios in pairs.log_ratios())
    return (-chosen).sigmoid() + rejected.sigmoid()


def apo_down(pairs: PairLogps, *, beta: float) -> Tensor:
    """Return APO-down: D'Oosterlinck et al. 2024 (arXiv 2408.06266), eq. 8, plus 1 so that it is never negative.

    For chosen answers that are worse than the model's own.
    """
    chosen, rejected = (beta * ratios for ratios in pairs.log_ratios())
    return chosen.sigmoid() + (rejected - chosen).sigmoid()


def discopop(pairs: PairLogps, *, beta: float, tau: float) -> Tensor:
    """Return the log-ratio modulated loss (DiscoPOP): Lu et al. 2024 (arXiv 2406.08414), eq. 5.

    The product exp(-x) sigmoid(x / tau) is computed as one exponential of a sum, because its factors overflow and
    underflow.
    """
    logits = beta * pairs.log_ratio_differences()
    exponential = (_logsigmoid(logits / tau) - logits).exp()
    return -_logsigmoid(logits) * (-logits / tau).sigmoid() + exponential


def sigmoid_norm(pairs: PairLogps, *, beta: float) -> Tensor:
    """Return length-normalised DPO: Lambert et al. 2024 (Tulu 3, arXiv 2411.15124)."""
    chosen, rejected = pairs.mean_log_ratios()
    return -_logsigmoid(beta * (chosen - rejected))


def simpo(pairs: PairLogps, *, beta: float, gamma: float) -> Tensor:
    """Return the SimPO objective: Meng et al. 2024 (arXiv 2405.14734); `gamma` is the target reward margin."""
    chosen, rejected = pairs.mean_logps()
    return -_logsigmoid(beta * (chosen - rejected) - gamma)


def cpo(pairs: PairLogps, *, beta: float, label_smoothing: float) -> Tensor:
    """Return the preference part of CPO: Xu et al. 2024 (arXiv 2401.08417), eq. 3, with smoothed labels.

    The method adds the negative log-likelihood of the chosen answers, a term of its own.
    """
    return _smoothed(beta * (_wide(pairs.chosen) - _wide(pairs.rejected)), label_smoothing)


def orpo(pairs: PairLogps, *, beta: float) -> Tensor:
    """Return the odds-ratio part of ORPO: Hong et al. 2024 (arXiv 2403.07691), eq. 4 and 7, times `beta`.

    `beta` is the paper's lambda. The method adds the negative log-likelihood of the chosen answers, a term of its own.
    """
    chosen, rejected = pairs.mean_logps()
    return -beta * _logsigmoid(log_odds(chosen) - log_odds(rejected))


def aot(pairs: PairLogps, *, beta: float, label_smoothing: float, matched: Tensor) -> Tensor:
    """Return the paired AOT loss: Melnyk et al. 2024 (arXiv 2406.05882), the logistic form for paired data.

    Args:
        pairs: P pairs; the reference's log-probabilities are not read.
        beta: Temperature of the logistic loss.
        label_smoothing: Probability that a label is flipped.
        matched: `[P]`, for each pair the reference's difference of equal rank (`match_ranks`).
    """
    difference = _wide(pairs.chosen) - _wide(pairs.rejected)
    return _smoothed(beta * (difference - _wide(matched)), label_smoothing)


def match_ranks(policy: Tensor, reference: Tensor) -> Tensor:
    """Return, for each pair of the global batch, the reference's difference with the rank of the policy's difference.

    Args:
        policy: `[M]` differences lp(chosen) - lp(rejected) under the policy, of all pairs of the step in order.
        reference: `[M]` the same under the reference.

    Returns:
        `[M]` values of `reference`, without gradient. Equal values keep the order of the pairs.
    """
    ranks = policy.detach().argsort(stable=True).argsort(stable=True)
    matched: Tensor = reference.detach().sort(stable=True).values[ranks]
    return matched


def log_odds(log_probability: Tensor) -> Tensor:
    """Return log(p / (1 - p)) of log p <= 0, in any shape; a probability of 1 is taken for the next smaller number."""
    import torch

    wide = _wide(log_probability)
    nearest_to_1 = -torch.finfo(wide.dtype).eps
    return wide.clamp(max=nearest_to_1) - log1mexp(wide)


def log1mexp(value: Tensor) -> Tensor:
    """Return log(1 - exp(value)) of values below 0, exact on both ends.

    The two branches are those of Maechler 2012 ("Accurately computing log(1 - exp(-|a|))"). Values above -eps are taken
    for -eps. Each branch is given values of its own range only, so that the other branch never adds 0 times infinity to
    a gradient.
    """
    import torch

    wide = _wide(value)
    wide = wide.clamp(max=-torch.finfo(wide.dtype).eps)
    is_small = wide > -LN_2
    near = (-wide.clamp(min=-LN_2).expm1()).log()
    far = (-wide.clamp(max=-LN_2).exp()).log1p()
    return torch.where(is_small, near, far)


def implicit_rewards(pairs: PairLogps, beta: float) -> tuple[Tensor, Tensor]:
    """Return the rewards of the chosen and of the rejected answers `[P]`, without gradient.

    They are beta times r, the implicit reward of Rafailov et al. 2023; without a reference beta times lp.
    """
    ratios = (_wide(pairs.chosen), _wide(pairs.rejected)) if pairs.ref_chosen is None else pairs.log_ratios()
    return beta * ratios[0].detach(), beta * ratios[1].detach()


def _smoothed(logits: Tensor, label_smoothing: float) -> Tensor:
    """Return the logistic loss `[P]` of logits whose label is flipped with probability `label_smoothing`."""
    if not label_smoothing:
        return -_logsigmoid(logits)
    return -(1 - label_smoothing) * _logsigmoid(logits) - label_smoothing * _logsigmoid(-logits)


def _logsigmoid(value: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(value)


def _wide(value: Tensor) -> Tensor:
    """Return float64 as it is, and everything else as float32."""
    import torch

    return value if value.dtype == torch.float64 else value.float()
