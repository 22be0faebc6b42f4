"""Read numbers and weights of rows and messages.

Pure functions on plain values, without heavy imports.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from ftcli.runtime.errors import RowError, shortened

LARGEST = 1e38  # slightly below the largest float32


def row_weight(row: Mapping[str, Any]) -> dict[str, float]:
    """Return {"weight": w} of a row, the factor of its loss; empty for a row without one.

    Raises:
        RowError: The weight is not a number, or below 0.
    """
    value = row.get("weight")
    if value is None or (isinstance(value, str) and not value.strip()):
        return {}
    return {"weight": weight_of(value, "`weight` is")}


def weight_of(value: Any, what: str) -> float:
    """Return a weight, 0 or above.

    Args:
        value: A value of a row or a message.
        what: The beginning of messages, such as "`weight` is".

    Raises:
        RowError: It is not a number, or below 0.
    """
    try:
        weight = number_of(value, "weight")
    except RowError:
        weight = -1.0
    if weight < 0:
        raise RowError(f"{what} {shortened(repr(value), 40)}; it must be a number, 0 or above, and below {LARGEST:g}")
    return weight


def number_of(value: Any, name: str) -> float:
    """Return a finite number. Text is converted, because fields of tables have no type.

    Args:
        value: A value of a row.
        name: Its name in messages.

    Raises:
        RowError: It is no number, or not a finite float32.
    """
    number = float(value) if isinstance(value, Decimal) else value  # typed tables have decimals
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            raise RowError(f"{name} is {value!r}, not a number") from None
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise RowError(f"{name} is {value!r}, not a number")
    if isinstance(number, int):  # JSON has integers of any size
        number = float(max(-LARGEST, min(LARGEST, number)))
    if not math.isfinite(number) or abs(number) >= LARGEST:
        raise RowError(f"{name} is {shortened(str(value), 40)}; it must be a finite float32")
    return number
