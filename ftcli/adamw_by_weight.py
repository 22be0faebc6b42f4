"""AdamW whose step is a formula for one weight after another: the walk that adamw_bf16.py and adamw_8bit.py share.

Knows neither formula and no backend; weights may be whole, shards or flat partitions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from torch import Tensor


class AdamWByWeight(torch.optim.AdamW, ABC):
    """AdamW over torch's own groups and options; a group says by `kinds` what is kept of each element, and how."""

    # Of groups that do not say; hardware/state.py makes missing state from it.
    kinds: ClassVar[Mapping[str, torch.dtype]]

    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__([{"kinds": self.kinds} | group for group in groups], fused=False, foreach=False, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Make one step on every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    kinds = group["kinds"].items()
                    state.update({kind: torch.zeros_like(weight, dtype=dtype) for kind, dtype in kinds})
                    state["step"] = torch.zeros(())  # on the host, so that nobody waits to read it
                state["step"] += 1
                if here(weight).numel():  # else a shard that this rank has no part of
                    self.step_weight(group, weight, state)

    @abstractmethod
    def step_weight(self, group: dict[str, Any], weight: Tensor, state: dict[str, Any]) -> None:
        """Step one weight in place; `state["step"]` counts this step already."""


def here(tensor: Tensor) -> Tensor:
    """Return the part of a tensor that this process holds."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
