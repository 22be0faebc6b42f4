"""Switch off the truncation and padding of a tokenizer's file, and restore both when the tokenizer is saved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def set_file_settings_aside(tokenizer: Any) -> None:
    """Switch off the truncation and padding of a tokenizer's file, and store both for `with_file_settings`.

    Args:
        tokenizer: A tokenizer of transformers.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        tokenizer.file_settings = (backend.truncation, backend.padding)
        backend.no_truncation()
        backend.no_padding()


@contextmanager
def with_file_settings(tokenizer: Any) -> Iterator[None]:
    """Restore the truncation and padding of a tokenizer's file within this context.

    Args:
        tokenizer: A tokenizer from `load_tokenizer`.
    """
    truncation, padding = getattr(tokenizer, "file_settings", (None, None))
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if truncation is not None:
        backend.enable_truncation(**truncation)
    if padding is not None:
        backend.enable_padding(**padding)
    try:
        yield
    finally:
        if backend is not None:
            backend.no_truncation()
            backend.no_padding()


def save_tokenizer(tokenizer: Any, folder: str) -> None:
    """Write a tokenizer into a folder, with the truncation and padding of its file.

    Args:
        tokenizer: A tokenizer from `load_tokenizer`.
        folder: The folder.
    """
    with with_file_settings(tokenizer):
        tokenizer.save_pretrained(folder)
