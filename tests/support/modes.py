"""Runs that differ only in what the forward pass saves for the backward pass, and how much they may differ.

On a GPU no two runs are alike: the backward pass of variable-length attention adds up in any order, and steps make
more of it. So the plain run is made three times, and what these are apart is the measure for the others. Besides losses
and norms, gradients themselves are compared (Adam's first moment, which every backend has): a fault in one layer that
a norm does not show, they do.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cells import cell

if TYPE_CHECKING:
    from torch import Tensor

    from ftcli.training.run import Run

PLAIN = ("none", "none again", "none once more")
MODES: dict[str, dict[str, Any]] = {
    **{name: {"gradient_checkpointing": "none"} for name in PLAIN},
    "selective": {"gradient_checkpointing": "selective"},
    "full": {"gradient_checkpointing": "full"},
    "full, on the host": {"gradient_checkpointing": "full", "activation_offloading": True},
    "none, on the host": {"gradient_checkpointing": "none", "activation_offloading": True},
}
TIMES = 5  # what plain runs are apart, others may be so many times
ROUNDING = {"fp32": 2.0**-24, "bf16": 2.0**-9}  # of one number
# Of sums over many numbers whose roundings differ: a loss is a mean over tokens, so most of theirs goes out of it.
GRADIENTS = {"fp32": 64 * ROUNDING["fp32"], "bf16": ROUNDING["bf16"]}
LOSSES = {"fp32": 16 * ROUNDING["fp32"], "bf16": ROUNDING["bf16"] / 16}
FIRST = 1e-6  # of the loss before any step, in every precision: the forward pass is the same


@dataclass
class Curve:
    """One run: loss and norm of each step, and how far its gradients are from those of the first plain run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    apart: list[float] = field(default_factory=list)  # relative 2-norm, of this rank's part; at the first and last step


def curves(folder: Path, rate: float, precision: str, modes: list[str], **sections: dict[str, Any]) -> dict[str, Curve]:
    """Return mode -> curve of this rank; `sections` are those of a cell, each mode adds its own keys to the model's."""
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    results: dict[str, Curve] = {}
    plain: list[Tensor] = []
    for name in modes:
        model = sections["model"] | MODES[name]
        optimizer = {"learning_rate": rate, "weight_decay": 0.1}
        run = prepare(cell(folder, "sft-tied", **sections | {"model": model}, optimizer=optimizer, precision=precision))
        curve = results[name] = Curve()
        for step in steps(run):
            curve.losses.append(step.loss)
            curve.norms.append(step.grad_norm)
            if step.number in (1, run.steps):
                moments = first_moments(run)
                if name == modes[0]:
                    plain.append(moments)
                expected = plain[len(curve.apart)]
                curve.apart.append(float((moments - expected).norm() / expected.norm()))
        run.hardware.release(run.model)
    return results


def first_moments(run: Run) -> Tensor:
    """Return Adam's running means of gradients as this rank holds them, a copy in one row."""
    import torch

    shards = run.hardware.state_shards(run.model, run.optimizer)
    return torch.cat([p.tensors["exp_avg"].detach().float().flatten() for p in shards if "exp_avg" in p.tensors])


def apart(actual: Curve, expected: Curve) -> dict[str, float]:
    """Return the largest relative difference between a run and the plain run, for each quantity."""

    def largest(a: list[float], b: list[float]) -> float:
        return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))

    return {
        "loss before any step": largest(actual.losses[:1], expected.losses[:1]),
        "gradients of the first step": max(actual.apart[0], largest(actual.norms[:1], expected.norms[:1])),
        "losses": largest(actual.losses, expected.losses),
        "gradients to the last step": max(actual.apart[-1], largest(actual.norms, expected.norms)),
    }


def what_differs(actual: dict[str, Curve], precision: str) -> list[str]:
    """Return a line for each mode and comparison that is further from the plain run than plain runs are."""
    plain, *again = (actual[name] for name in PLAIN)
    repeats = [apart(curve, plain) for curve in again]
    least = {
        "loss before any step": FIRST,
        "gradients of the first step": GRADIENTS[precision],
        "losses": LOSSES[precision],
        "gradients to the last step": GRADIENTS[precision],
    }
    lines = []
    for name in actual.keys() - set(PLAIN):
        for what, far in apart(actual[name], plain).items():
            noise = max(repeat[what] for repeat in repeats)
            bound = max(least[what], TIMES * noise)
            if not far <= bound:  # NaN is apart as well
                lines.append(f"{name}, {precision}, {what}: {far:.1e} apart, plain runs {noise:.1e}, bound {bound:.1e}")
    return sorted(lines)
