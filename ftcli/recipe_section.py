"""What every section of a recipe is: strict and frozen, with bounds and words that recur. Knows no key.

This module never imports torch.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

PositiveInt = Annotated[int, Field(ge=1)]
MACHINE_HINT = "Machine hint: must not move the curve."


class Section(BaseModel):
    """A mapping of a recipe: unknown keys are errors, types are strict, values never change."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, validate_default=True, allow_inf_nan=False)
