"""Read whole numbers that a user wrote. `str.isdigit` accepts signs such as ², and `int` refuses 4,301 digits."""

from __future__ import annotations

MOST_DIGITS = 18  # so that the number has at most 64 bits


def whole_number(text: str) -> int | None:
    """Return the number of a text of ASCII digits, with white space around it; None for any other text.

    Args:
        text: The text. More than `MOST_DIGITS` digits are no number.
    """
    digits = text.strip()
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) <= MOST_DIGITS else None
