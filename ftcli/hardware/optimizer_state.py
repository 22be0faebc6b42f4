"""One view of model and optimizer state for every backend, which checkpoints use.

A backend yields `StateShard`s: ranges of flattened parameters with the live tensors of this process. Saving copies
from these tensors and loading copies into them. Neither gathers parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ftcli.runtime.patches import declare

if TYPE_CHECKING:
    from torch import Tensor, nn


MOMENTS = ("exp_avg", "exp_avg_sq")  # state of AdamW for each element, besides one step count per parameter
MOMENTUM = "momentum_buffer"  # state of SGD for each element, besides one step count per parameter
# All kinds that an optimizer may have; remainder: low bits of a bfloat16 weight.
STATE_KINDS = (*MOMENTS, MOMENTUM, "remainder")
NO_ELEMENTS = slice(0, 0)

VERSIONS = declare(
    __name__,
    "tensor-versions",
    library="torch",
    versions=">=2.11,<2.14",
    purpose="Finds whether a checkpoint has changed unpacked 8-bit moments",
    without="Moments are then packed again after each read, with the same bytes.",
    alternative="A comparison with a copy, which takes the memory of the copy.",
    apis=("torch:Tensor._version",),
    measurement="A checkpoint of the 135M shape reads weights and moments in 0.27 s, without it in 17.1 s: one CPU "
    "thread. On one H200 the same takes 15.6 ms, without it 117.2 ms.",
)


@dataclass(frozen=True)
class StateShard:
    """Elements [start, start + n) of one parameter or buffer, flattened in row-major order, on this process.

    Attributes:
        name: Name of the parameter or buffer in the unprepared model.
        start: Index of the first element.
        tensors: Live tensors of n elements and any shape, by kind: weight, a moment, or buffer.
        saved: The range of the n elements that this process saves. Each element is saved by one process.
    """

    name: str
    start: int
    tensors: dict[str, Tensor]
    saved: slice


@dataclass(frozen=True)
class OptimizerSlot:
    """One tensor that the optimizer updates, with its state.

    Attributes:
        group: The parameter group of the tensor.
        tensor: A parameter, a shard of one, or a flat partition of many.
        state: The optimizer's state of the tensor; empty before the first step.
        has_int_step: Whether the step count is an int, as in DeepSpeed's AdamW for the CPU, instead of a tensor.
    """

    group: dict[str, Any]
    tensor: Tensor
    state: dict[str, Any]
    has_int_step: bool = False


def trained_parameters(model: nn.Module, names: Collection[str]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter) of the trained parameters; a tied parameter once, under its first name.

    `requires_grad` is not read, because the code of a task may change it during the run. An example is peft's
    `disable_adapter`: under FSDP2 the change remains after its context.

    Args:
        model: The model without wrapper.
        names: The names that `Hardware.before_prepare` recorded.
    """
    return ((name, p) for name, p in model.named_parameters() if name in names)


def state_tensors(weight: Tensor, state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weight and the state tensors that the optimizer has created for it, by kind."""
    return {"weight": weight} | {kind: state[kind] for kind in STATE_KINDS if kind in state}


@contextmanager
def open_state(weight: Tensor, state: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
    """Return a context with the tensors of `state_tensors`, in which 8-bit moments are float32 copies.

    At the end of the context, copies that were modified are packed into the state.
    """
    tensors = state_tensors(weight, state)
    packed = [kind for kind, tensor in tensors.items() if tensor.dtype == torch.uint8]
    if not packed:
        yield tensors
        return
    from ftcli.hardware.moments_8bit import pack, unpack

    copies = {kind: unpack(state, kind) for kind in packed}
    versions = {kind: copy._version for kind, copy in copies.items()} if VERSIONS.is_usable() else {}
    yield tensors | copies
    for kind, copy in copies.items():
        if kind not in versions or copy._version != versions[kind]:
            pack(state, kind, copy)


def create_missing_state(slots: list[OptimizerSlot]) -> None:
    """Create the state of slots without one, as the optimizer does at its first step."""
    for slot in slots:
        if slot.state:
            continue
        kinds = slot.group.get("kinds", dict.fromkeys(MOMENTS))  # kind -> dtype; None: that of the weight
        slot.state.update({kind: torch.zeros_like(slot.tensor, dtype=dtype) for kind, dtype in kinds.items()})
        if slot.has_int_step:
            slot.state["step"] = 0
            continue
        on_device = slot.group.get("fused") or slot.group.get("capturable")
        slot.state["step"] = torch.zeros((), device=slot.tensor.device if on_device else "cpu")


def start_slots(slots: list[OptimizerSlot], count: int) -> None:
    """Create missing state, and set the step count of every slot, as after `count` steps."""
    create_missing_state(slots)
    set_update_count(slots, count)


def count_updates(slots: list[OptimizerSlot]) -> int:
    """Return how many times the optimizer has stepped; 0 without state. Waits for the device.

    Raises:
        RuntimeError: The slots have different step counts.
    """
    counts = {int(slot.state["step"]) for slot in slots if slot.state}
    if len(counts) > 1:
        raise RuntimeError(f"the optimizer's parameters were stepped {sorted(counts)} times, not equally often")
    return counts.pop() if counts else 0


def set_update_count(slots: list[OptimizerSlot], count: int) -> None:
    """Set the step count of every slot; each must have a state."""
    for slot in slots:
        step = slot.state["step"]
        slot.state["step"] = step.fill_(count) if isinstance(step, torch.Tensor) else count
