"""The tokenizer of a task whose rows are chats, with the chat template of the recipe."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from ftcli.data.chat.encode import load_template
from ftcli.data.chat.template_variables import check_variables, texts_of

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


def load_chat_tokenizer(recipe: Recipe, chat_template: str | None) -> Any:
    """Load the tokenizer of the recipe's model.

    Args:
        recipe: The recipe. Its `data.chat_template_kwargs` are checked against the templates.
        chat_template: File or name of the template that replaces the tokenizer's; None keeps it.

    Returns:
        The tokenizer of transformers.

    Raises:
        InputError: The template cannot be read, or it does not use a variable of the recipe.
    """
    from ftcli.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(recipe.model, fast=True)
    if chat_template is not None:
        load_template(tokenizer, chat_template)
    check_variables(recipe.data.chat_template_kwargs, texts_of(tokenizer.chat_template))
    return tokenizer


def tokenizer_digest(tokenizer: Any) -> str:
    """Return a digest of a tokenizer, its special tokens and its chat template."""
    text = f"{tokenizer.backend_tokenizer.to_str()}{tokenizer.chat_template}"
    return hashlib.sha256(f"{text}{tokenizer.special_tokens_map}".encode()).hexdigest()
