"""Load a tokenizer with a padding token and the new tokens of the recipe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftcli.data.tokenizer_files import set_file_settings_aside
from ftcli.models.hub import load_from_hub
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from ftcli.config.recipe_model import Model


def load_tokenizer(section: Model, *, fast: bool = False) -> Any:
    """Return the model's tokenizer with a padding token and the recipe's new tokens.

    Truncation and padding of the tokenizer's file are switched off here. Otherwise the first encoding switches them
    off, and a digest of the tokenizer would depend on whether it has encoded. `tokenizer_files.save_tokenizer` writes
    them back.

    Args:
        section: The model section of the recipe.
        fast: Whether the caller needs a tokenizer of the library tokenizers.

    Raises:
        InputError: The tokenizer is not a fast one, has neither a padding nor an end token, or a new token exists.
    """
    from transformers import AutoTokenizer

    tokenizer = load_from_hub(AutoTokenizer, section)
    if fast and not tokenizer.is_fast:
        raise InputError(
            f"the tokenizer of {section.name} is a {type(tokenizer).__name__}, which has no fast version. This task "
            "needs one, which knows the place of each token in a text",
            hint="choose a model with a tokenizer.json",
        )
    set_file_settings_aside(tokenizer)
    _add_tokens(tokenizer, section)
    if tokenizer.pad_token_id is None:  # masks depend on positions only, so any token can be padding
        tokenizer.pad_token = tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise InputError(
            f"the tokenizer of {section.name} has neither a padding nor an end token",
            hint="add pad_token to its tokenizer_config.json",
        )
    return tokenizer


def _add_tokens(tokenizer: Any, section: Model) -> None:
    """Add the recipe's new tokens; raises `InputError` for a token that the tokenizer has."""
    known = set(tokenizer.get_vocab())
    for token in section.new_tokens:
        if token in known:
            raise InputError(f"model.new_tokens: the tokenizer already has {token}", hint="remove it from the list")
        known.add(token)
    tokenizer.add_tokens(section.new_tokens)
