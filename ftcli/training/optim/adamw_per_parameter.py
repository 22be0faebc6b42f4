"""Iterate over the parameters of AdamW variants whose step is a formula for one weight: bfloat16 and 8 bits.

Weights may be whole tensors, shards or flat partitions. This module is independent of the backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ftcli.hardware.moments_8bit import local_shard

if TYPE_CHECKING:
    from torch import Tensor


class PerParameterAdamW(torch.optim.AdamW, ABC):
    """AdamW with torch's parameter groups and options, which steps one weight after another.

    The entry `kinds` of a group gives the dtype of each state tensor.

    Attributes:
        kinds: Default of the entry `kinds`. optimizer_state.py creates missing state from it.
    """

    kinds: ClassVar[Mapping[str, torch.dtype]]

    def __init__(self, groups: Any, **options: Any) -> None:
        super().__init__([{"kinds": self.kinds} | group for group in groups], fused=False, foreach=False, **options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every weight that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                if not state:
                    kinds = group["kinds"].items()
                    state.update({kind: torch.zeros_like(weight, dtype=dtype) for kind, dtype in kinds})
                    state["step"] = torch.zeros(())  # on the host, so that reading it does not wait for the device
                state["step"] += 1
                if local_shard(weight).numel():  # empty if this rank has no part of a sharded weight
                    self.step_weight(group, weight, state)

    @abstractmethod
    def step_weight(self, group: dict[str, Any], weight: Tensor, state: dict[str, Any]) -> None:
        """Step one weight in place. `state["step"]` already includes this step."""
