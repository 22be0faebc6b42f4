"""Replacements of attributes on ranks, which end with the function that needs them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest


def patching(function: Callable[..., Any]) -> Callable[..., Any]:
    """Give a function a `pytest.MonkeyPatch` as its first argument and undo what it replaced when the function ends.

    The result is importable by name, so that it can run on ranks (`run_on_cpu`) several times in one launch.
    """

    @functools.wraps(function)
    def patched(*arguments: Any, **options: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            return function(patch, *arguments, **options)

    return patched
