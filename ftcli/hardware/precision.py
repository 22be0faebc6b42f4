"""One dtype policy for every backend, so that a profile does not change the curve.

                weights, moments    forward and backward    sum of gradients over ranks    loss
    fp32        float32             float32                 float32                        float32
    bf16        float32             autocast to bfloat16    float32                        float32
    fp16        float32             autocast to float16     float32, of a scaled loss      float32
    bf16_pure   bfloat16 *          bfloat16                bfloat16                       float32
    fp8         float32             as bf16, but float8.py  float32                        float32

* The optimizer also stores the low bits of the weights, and the second moment in float32 (adamw_bf16.py).
Frozen weights keep the dtype they are loaded in. The precision settings of Accelerate and DeepSpeed are off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from ftcli.models.precision import AUTOCAST, COMPUTE, load_dtype, trained_dtype
from ftcli.models.structure import base_model_of
from ftcli.runtime import process_settings
from ftcli.runtime.patches import declare

if TYPE_CHECKING:
    from torch import nn

    from ftcli.config.recipe import Recipe

FLOAT32 = declare(
    __name__,
    "float32-modules",
    library="transformers",
    versions=">=5.17,<5.25",
    purpose="Finds whether transformers keeps some frozen weights of a model in float32",
    without="The dtype of frozen weights is then not checked.",
    alternative="None: models name these modules in private attributes.",
    apis=(
        "transformers:PreTrainedModel._keep_in_fp32_modules",
        "transformers:PreTrainedModel._keep_in_fp32_modules_strict",
    ),
    unmeasured="It is part of a check, and makes no run faster or smaller.",
)


def compute_in(model: nn.Module, recipe: Recipe, device_type: str) -> None:
    """Run the forward pass of an unprepared model under autocast if the recipe's precision uses it.

    In fp32 convolutions compute in float32 too, until the run ends.

    The backward pass uses the dtypes of the forward pass. FSDP2's own mixed precision, which sends all weights in
    bfloat16, would be cheaper but changes the curve. Near 1.0 the spacing of bfloat16 is 4e-3. The weights of a norm
    would therefore not change in the forward pass for many updates. docs/explanation/precision.md has figures.
    """
    if recipe.precision == "fp32":
        _forbid_tf32_convolutions()
    if recipe.precision in AUTOCAST:
        inner = base_model_of(model)
        inner.forward = torch.autocast(device_type, dtype=AUTOCAST[recipe.precision])(inner.forward)


def _forbid_tf32_convolutions() -> None:
    """Let cuDNN compute convolutions in float32, without rounding their inputs to the 10 bits of TF32.

    PyTorch rounds them by default, and does not round matrix products. The error depends on the algorithm that cuDNN
    chooses, so curves of two profiles would differ.
    """
    try:
        process_settings.change(torch.backends.cudnn, "allow_tf32", False)
    except RuntimeError:  # the caller has set torch's newer options, which exclude this one, and has chosen
        return


@contextmanager
def cast_once(device_type: str) -> Iterator[None]:
    """Return a context in which forward passes share their 16-bit casts of float32 weights.

    No weight may change inside the context. Autocast caches the cast of a trained weight until its outermost region
    ends. Without this context each forward pass is such a region, and each micro-batch casts all weights again. The
    region that this function adds casts nothing itself. Backward passes may use a cast several times. Recomputed
    layers use the casts too if the backward pass runs on this thread.
    """
    with torch.autocast(device_type, enabled=False):
        yield


@contextmanager
def casting_again(ranks: int) -> Iterator[None]:
    """Return a context for a micro-batch whose gradients are summed over ranks; its forward pass casts weights again.

    Autograd runs newer operations first. The gradients of casts that an earlier micro-batch made would therefore
    arrive after those of all layers, and nothing could be sent while the backward pass computes.

    Args:
        ranks: Number of processes. With one process the casts of earlier micro-batches are used.
    """
    if ranks > 1:
        torch.clear_autocast_cache()
    yield


class LossScale:
    """Dynamic loss scaling, which keeps small float16 gradients from becoming zero.

    The algorithm is that of Micikevicius et al. 2018, section 3.2, with the numbers of `torch.amp.GradScaler`. If a
    gradient is not finite, the step is skipped and the scale is halved. After `growth_interval` good steps the scale
    is doubled. The class is used on every backend, because the scalers of the backends differ. That of DeepSpeed 0.19
    clips gradients before unscaling them.
    """

    def __init__(self, scale: float = 2.0**16, growth_interval: int = 2000) -> None:
        self.scale, self.growth_interval, self.good_steps, self.skipped = scale, growth_interval, 0, 0

    def update(self, *, finite: bool) -> None:
        """Adjust the scale after one optimizer step.

        Args:
            finite: Whether all gradients of the step are finite.

        Raises:
            RuntimeError: The gradients are not finite at any scale.
        """
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
        """Return the values that a checkpoint stores."""
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def restore(self, state: dict[str, float]) -> None:
        """Restore the values that `state` returned."""
        self.scale = state["scale"]
        self.good_steps, self.skipped = int(state["good_steps"]), int(state["skipped"])


def check(model: nn.Module, recipe: Recipe) -> str:
    """Compare the dtypes of a model with the recipe's precision.

    Returns:
        The dtypes as one line of text.

    Raises:
        RuntimeError: A parameter has another dtype; the message names the first one.
    """
    dtype, frozen_dtype = trained_dtype(recipe), load_dtype(recipe)
    # Transformers keeps the frozen weights of these modules in float32.
    modules = getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != dtype:
            raise RuntimeError(f"trained weight {name} is {parameter.dtype} after prepare, not {dtype}")
        if not parameter.requires_grad and parameter.dtype != frozen_dtype and not modules and FLOAT32.is_usable():
            raise RuntimeError(f"frozen weight {name} is {parameter.dtype} after prepare, not {frozen_dtype}")
    compute, stored = (str(one).removeprefix("torch.") for one in (COMPUTE[recipe.precision], dtype))
    frozen = sorted({str(p.dtype).removeprefix("torch.") for p in model.parameters() if not p.requires_grad})
    rest = f", frozen weights {'/'.join(frozen)}" if frozen else ""
    return f"weights {stored}, compute {compute}, gradients {stored}, loss float32{rest}"
