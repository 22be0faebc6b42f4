"""Tokenizers of transformers: those without a fast version are loaded, but not for tasks that need one."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import ByT5Tokenizer, LlamaConfig

from ftcli.config.recipe_model import Model
from ftcli.models.tokenizer import load_tokenizer
from ftcli.runtime.errors import InputError


def test_load_tokenizer_without_a_fast_version_is_refused_only_where_one_is_needed(tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path)
    LlamaConfig().save_pretrained(tmp_path)
    section = Model(name=str(tmp_path))
    assert load_tokenizer(section)("ab")["input_ids"] == [100, 101, 1]
    with pytest.raises(InputError, match="is a ByT5Tokenizer, which has no fast version"):
        load_tokenizer(section, fast=True)
