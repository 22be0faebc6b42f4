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


def may_have_half_pair(text: str | bytes) -> bool:
    """Return whether JSON text writes a surrogate as an escape. Few texts do, so that few values are searched."""
    if isinstance(text, bytes):
        return b"\\ud" in text or b"\\uD" in text
    return "\\ud" in text or "\\uD" in text


def has_half_pair(value: Any) -> bool:
    """Return whether a text of a JSON value contains half of a surrogate pair. Tokenizers fail on it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False
