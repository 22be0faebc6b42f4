"""Check values that were parsed from JSON text, and describe the errors of the parser."""

from __future__ import annotations

import json
from typing import Any

HALF_PAIR = "contains half of a surrogate pair, which is not valid text"  # it is valid JSON


def json_error(error: Exception) -> str:
    """Return the reason of a JSON error in one line."""
    if isinstance(error, json.JSONDecodeError):
        return error.msg
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).partition(";")[0]


def has_half_pair(text: str, value: Any) -> bool:
    """Return whether a value that was parsed from JSON text contains half of a surrogate pair."""
    return ("\\ud" in text or "\\uD" in text) and not is_encodable(value)


def is_encodable(value: Any) -> bool:
    """Return whether all texts of a JSON value are valid. Tokenizers fail on half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
