"""Describe one export: its sources, its form, and the tolerance for the logits of the exported model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ftcli.config.recipe import Recipe

# Largest relative distance |a - b| / |b| between logits of the same weights, by precision of the run.
TOLERANCES = {"fp32": 1e-4, "fp16": 5e-3, "bf16": 3e-2, "bf16_pure": 3e-2, "fp8": 3e-2}

# The same for weights that were rounded to a dtype in which the logits are computed.
ROUNDING_TOLERANCES = {"float32": 0.0, "float16": 1e-2, "bfloat16": 5e-2}

# Some models change more than that when they compute in 16 bits: as one with few logits, all near zero. The trained
# model's logits have such a rounding. A merge rounds its weights in another way, so there may be two of them.
ROUNDINGS = 2
LARGEST_ROUNDING = 0.1  # another base model is farther away

MERGED_TOLERANCE = 1e-3  # merging rounds W + BA to float32 once more


@dataclass(frozen=True)
class ExportJob:
    """One export.

    Attributes:
        recipe: The recipe of the run.
        auto_class: transformers' class of the model; empty if the task builds the module itself.
        final: Folder of the run's final weights; None exports `checkpoint`.
        checkpoint: Folder of the checkpoint; None exports `final`.
        probe: File with inputs and the logits of the trained model; None if the run has none for these weights.
        dtype: Name of the dtype of the exported weights.
        merge: Whether the adapter is merged into its base.
        most: Largest size of a shard in bytes.
    """

    recipe: Recipe
    auto_class: str
    final: Path | None
    checkpoint: Path | None
    probe: Path | None
    dtype: str
    merge: bool
    most: int

    @property
    def is_adapter(self) -> bool:
        """Whether the run trained an adapter."""
        return self.recipe.adapter.type != "none"

    @property
    def tolerance(self) -> float:
        """Largest relative distance from the logits of the trained model."""
        rounding = ROUNDING_TOLERANCES[self.dtype]
        return max(TOLERANCES[self.recipe.precision], rounding, MERGED_TOLERANCE if self.merge else 0.0)

    def tolerance_with(self, rounding: float) -> float:
        """Return the largest relative distance for a model that rounds more than others.

        Args:
            rounding: Relative distance between the logits of the reloaded model in float32 and in `compute`.
        """
        return max(self.tolerance, min(ROUNDINGS * rounding, LARGEST_ROUNDING))

    @property
    def compute(self) -> str | None:
        """Name of the 16-bit dtype in which the run computed; None for float32."""
        from ftcli.models.precision import COMPUTE

        name = str(COMPUTE[self.recipe.precision]).removeprefix("torch.")
        return None if name == "float32" else name

    @property
    def head_width(self) -> int:
        """Number of labels of a classifier, from its probe; 0 for a language model or without a probe."""
        from safetensors import safe_open

        if "Classification" not in self.auto_class or self.probe is None:
            return 0
        with safe_open(self.probe, framework="pt") as file:
            width: int = file.get_slice("logits").get_shape()[-1]
        return width
