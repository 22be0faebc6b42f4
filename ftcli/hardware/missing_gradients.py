"""Trained tensors without a gradient in a step: parts of a model that no row of the step uses."""

from __future__ import annotations

from typing import Any

import torch


class MissingGradients:
    """Gives tensors without a gradient one of zeros, and remembers those that have never had another one.

    PyTorch's optimizers leave out a tensor without a gradient. DeepSpeed steps it with zeros: its moments and its
    weight decay. A run has the same result on all profiles, and one number of updates for all tensors in its
    checkpoints, only if they all do the same.
    """

    def __init__(self) -> None:
        self._never: set[int] | None = None  # ids of tensors; None before the first step

    def fill(self, optimizer: torch.optim.Optimizer) -> None:
        """Set missing gradients to zeros, before a step of the optimizer. Without any gradient nothing is set.

        No gradient at all means that the step was dropped because it is not finite.
        """
        groups = optimizer.param_groups
        missing = [weight for group in groups for weight in group["params"] if weight.grad is None]
        if len(missing) == sum(len(group["params"]) for group in groups):
            return
        for weight in missing:
            weight.grad = torch.zeros_like(weight)
        if self._never is None:
            self._never = {id(weight) for weight in missing}
        elif self._never:
            self._never &= {id(weight) for weight in missing}

    def never_had(self, weight: Any) -> bool:
        """Return whether a tensor has had no gradient in any step of this launch. Under DeepSpeed it is not known."""
        return id(weight) in (self._never or ())
