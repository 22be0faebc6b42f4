"""One dtype policy on every backend, made here and not by them, so that a profile cannot move the curve.

                weights, moments    forward and backward    sum of gradients over ranks    loss
    fp32        float32             float32                 float32                        float32
    bf16        float32             autocast to bfloat16    float32                        float32
    fp16        float32             autocast to float16     float32, of a scaled loss      float32
    bf16_pure   bfloat16 *          bfloat16                bfloat16                       float32
    fp8         float32             as bf16, but float8.py  float32                        float32

* Lower bits of the weights beside them, and the second moment in float32 (adamw_bf16.py).
Frozen weights keep the dtype they are loaded in. Accelerate and DeepSpeed are told to leave precision alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ..base_model import base_model_of

if TYPE_CHECKING:
    from torch import nn

    from ..recipe import Recipe

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
COMPUTE = {"fp32": torch.float32, "bf16_pure": torch.bfloat16, **AUTOCAST}


def trained_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype that trained weights, their gradients' sums and their moments are held in."""
    return torch.bfloat16 if recipe.precision == "bf16_pure" else torch.float32


def frozen_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype that frozen weights are held in."""
    if recipe.model.dtype == "auto":
        return COMPUTE[recipe.precision]
    found: torch.dtype = getattr(torch, recipe.model.dtype)
    return found


def load_dtype(recipe: Recipe) -> torch.dtype:
    """Return the dtype that weights are loaded in: that of trained weights where all are trained."""
    return trained_dtype(recipe) if recipe.adapter.type == "none" else frozen_dtype(recipe)


def compute_in(model: nn.Module, recipe: Recipe, device_type: str) -> None:
    """Let the forward of an unprepared model compute in the recipe's precision; backward follows forward.

    Weights that travelled in bfloat16 (FSDP2's own mixed precision) would be cheaper, but move the curve: beside 1.0
    a bfloat16 step is 4e-3, so a norm's weights would stand still in the forward pass for many updates (seen on
    H200s: 1.4e-3 of the loss after 20 steps of a 0.6B shape at learning rate 1e-4, where the others differ by 1e-4).
    """
    if recipe.precision in AUTOCAST:
        inner = base_model_of(model)
        inner.forward = torch.autocast(device_type, dtype=AUTOCAST[recipe.precision])(inner.forward)


@contextmanager
def cast_once(device_type: str) -> Iterator[None]:
    """Let the forward passes of the block share their casts of float32 weights: no weight may change inside.

    Autocast keeps the cast of a trained weight until its outermost region ends. A forward pass by itself is one, so
    every micro-batch would read and write all weights anew; the region around the block, in which nothing else is
    cast, outlives it. Backward passes go through the shared casts again and again: they keep nothing that the first
    could have freed. Recomputed layers use them too, where the backward pass runs on this thread.
    """
    with torch.autocast(device_type, enabled=False):
        yield


class LossScale:
    """The factor that keeps small float16 gradients from becoming zero; found by doubling and halving.

    Dynamic loss scaling (Micikevicius et al. 2018, section 3.2) with torch.amp.GradScaler's numbers: halved when a
    gradient is not finite, and that step is skipped; doubled after `growth_interval` good steps. It is the same on
    every backend, because backends' own scalers differ, and DeepSpeed 0.19's clips gradients before unscaling them.
    """

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale, self.growth_interval, self.good_steps, self.skipped = scale, growth_interval, 0, 0

    def update(self, *, finite: bool) -> None:
        """Take note of one optimizer step; raises `RuntimeError` when gradients are not finite at any scale."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.skipped += 1
            self.scale /= 2
            if self.scale < 1:
                raise RuntimeError(
                    "the gradient is not finite even when the loss is not scaled up; use precision: bf16"
                )
        elif self.good_steps == self.growth_interval:
            self.scale, self.good_steps = self.scale * 2, 0

    def state(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def restore(self, state: dict[str, float]) -> None:
        """Go on from what `state` returned."""
        self.scale = state["scale"]
        self.good_steps, self.skipped = int(state["good_steps"]), int(state["skipped"])


def check(model: nn.Module, recipe: Recipe) -> str:
    """Return the policy as one line; raises `RuntimeError` naming the first weight of another dtype."""
    wanted, frozen_wanted = trained_dtype(recipe), load_dtype(recipe)
    kept = getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != wanted:
            raise RuntimeError(f"trained weight {name} is {parameter.dtype} after prepare, not {wanted}")
        if not parameter.requires_grad and parameter.dtype != frozen_wanted and not kept:
            raise RuntimeError(f"frozen weight {name} is {parameter.dtype} after prepare, not {frozen_wanted}")
    compute, held = (str(dtype).removeprefix("torch.") for dtype in (COMPUTE[recipe.precision], wanted))
    frozen = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if not p.requires_grad})
    rest = f", frozen weights {'/'.join(frozen)}" if frozen else ""
    return f"weights {held}, compute {compute}, gradients {held}, loss float32{rest}"
