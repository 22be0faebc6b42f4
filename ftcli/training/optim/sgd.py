"""SGD of torch with the state that checkpoints of every backend need: a momentum and a step count for each weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

# State tensors by their names in checkpoints, with their dtypes. Without momentum there is none.
KINDS: Mapping[str, torch.dtype] = {"momentum_buffer": torch.float32}


class CountingSGD(torch.optim.SGD):
    """SGD (Robbins & Monro 1951) with momentum, plain or Nesterov's (Sutskever et al. 2013), as in torch.

        gradient = gradient + weight_decay * weight
        momentum_buffer = momentum * momentum_buffer + gradient
        weight = weight - lr * momentum_buffer        (nesterov: gradient + momentum * momentum_buffer)

    torch's class copies the first gradient into the momentum. Here the momentum starts as zeros, which has the same
    result, so that a checkpoint has a place to be loaded into before the first step.

    Args:
        groups: Parameter groups.
        options: Options of torch's class.
    """

    def __init__(self, groups: Any, **options: Any) -> None:
        kinds = KINDS if options["momentum"] else {}
        super().__init__([{"kinds": kinds} | group for group in groups], **options)  # optimizer_state.py reads kinds

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    state.update({kind: torch.zeros_like(weight, dtype=dt) for kind, dt in group["kinds"].items()})
                    state["step"] = torch.zeros(())  # on the host, so that reading it does not wait for the device
                state["step"] += 1
        super().step()
