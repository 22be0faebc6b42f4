"""Losses of reward models as pure functions of scores, and the pairs that a ranking of several answers holds.

P: pairs. Functions return float32 (float64 for float64 input); the loop divides sums by counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor


def bradley_terry(chosen: Tensor, rejected: Tensor, margin: Tensor | None = None) -> Tensor:
    """Return the negative log-likelihood `[P]` that the chosen answer wins: Bradley and Terry 1952.

    As a loss of reward models: Ouyang et al. 2022 (arXiv 2203.02155); with a margin: Touvron et al. 2023 (Llama 2,
    arXiv 2307.09288).

    Args:
        chosen: `[P]` scores of the chosen answers.
        rejected: `[P]` scores of the rejected answers.
        margin: `[P]`, by how much the chosen score must be higher; None: 0.
    """
    from torch.nn.functional import logsigmoid

    difference = _wide(chosen) - _wide(rejected)
    return -logsigmoid(difference if margin is None else difference - _wide(margin))


def centring(chosen: Tensor, rejected: Tensor) -> Tensor:
    """Return the square `[P]` of the sum of both scores, which pulls the mean score towards 0.

    Eisenstein et al. 2023 (arXiv 2312.09244). Bradley-Terry leaves the mean open: it sees differences only.
    """
    return (_wide(chosen) + _wide(rejected)).square()


class RankedPairs(NamedTuple):
    """Pairs of answers, all prompts of a micro-batch together.

    Attributes:
        better: `[P]` int64, numbers of the better answers, counted over all prompts.
        worse: `[P]` int64, numbers of the worse answers.
        weights: `[P]` float32, 1 / (pairs of the same prompt): the weights of each prompt add up to 1.
    """

    better: NDArray[np.int64]
    worse: NDArray[np.int64]
    weights: NDArray[np.float32]


def ranked_pairs(ranks: Sequence[Sequence[float]]) -> RankedPairs:
    """Return all pairs of answers of each prompt whose ranks differ: Ouyang et al. 2022 (arXiv 2203.02155).

    Args:
        ranks: For each prompt the ranks of its answers, 1 for the best. Equal ranks make no pair.
    """
    import numpy as np

    better, worse, weights, first = [], [], list[float](), 0
    for of_prompt in ranks:
        values = np.asarray(of_prompt, dtype=np.float64)
        left, right = np.nonzero(values[:, None] < values[None, :])
        better.append(first + left)
        worse.append(first + right)
        weights += [1 / max(1, len(left))] * len(left)
        first += len(values)
    none = np.empty(0, dtype=np.int64)
    return RankedPairs(
        np.concatenate([none, *better]), np.concatenate([none, *worse]), np.asarray(weights, dtype=np.float32)
    )


def ranking(scores: Tensor, better: Tensor, worse: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted Bradley-Terry loss `[P]` of ranked pairs, whose sum counts every prompt once.

    Args:
        scores: `[A]` scores of the answers of all prompts.
        better: `[P]` int64 of `ranked_pairs`.
        worse: `[P]` int64 of `ranked_pairs`.
        weights: `[P]` float32 of `ranked_pairs`.
    """
    return bradley_terry(scores[better], scores[worse]) * weights


def regression(scores: Tensor, targets: Tensor) -> Tensor:
    """Return squared errors, of the shape of `targets`: Wang et al. 2024 (HelpSteer2, arXiv 2406.08673).

    Args:
        scores: `[R]`, or `[R, A]` for A attributes.
        targets: The same shape; NaN where an attribute of a row is unknown, which gives 0 and no gradient.
    """
    import torch

    targets, scores = _wide(targets), _wide(scores)
    is_known = ~targets.isnan()
    return torch.where(is_known, scores - torch.where(is_known, targets, scores.detach()), 0.0).square()


def _wide(value: Tensor) -> Tensor:
    """Return float64 as it is, and everything else as float32."""
    import torch

    return value if value.dtype == torch.float64 else value.float()
