"""Add rows to embeddings and head for the recipe's new tokens.

A new row starts as the mean of the old rows (Hewitt 2021, "Initializing new word embeddings for pretrained language
models"). The logit of the mean row is the average of the other logits. The logit of a random row could be large and
take probability from all other tokens. Nothing is drawn, so the rows are equal on every hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from ftcli.config.recipe import Recipe


def resize_embeddings(model: Any, recipe: Recipe) -> Any:
    """Resize embeddings to a row for every token of the tokenizer. Models with spare rows keep their size.

    Args:
        model: A transformers model; its weights may be on the meta device.
        recipe: The recipe with `model.new_tokens`.

    Returns:
        The same model.
    """
    if recipe.model.new_tokens:
        tokens = max(_new_ids(recipe)) + 1
        if tokens > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(tokens, mean_resizing=False)
    return model


def initialise_new_rows(model: Any, recipe: Recipe) -> None:
    """Set the rows of new tokens, including the head's bias, to the mean of the rows before them."""
    import torch

    if not recipe.model.new_tokens:
        return
    ids = _new_ids(recipe)
    with torch.no_grad():
        for module in _embedding_modules(model).values():
            for parameter in module.parameters(recurse=False):
                parameter[ids] = parameter[: min(ids)].float().mean(dim=0).to(parameter.dtype)


def new_token_rows(model: Any, recipe: Recipe) -> dict[str, list[int]]:
    """Return the rows that an adapter run trains for new tokens.

    Args:
        model: The model without adapter.
        recipe: The recipe of the run.

    Returns:
        Indices of rows by module name. A tied head is left out, and so are modules that the adapter saves whole.
    """
    if not recipe.model.new_tokens:
        return {}
    saved = tuple(f".{ending}" for ending in recipe.adapter.modules_to_save)
    return {name: _new_ids(recipe) for name in _embedding_modules(model) if not (saved and f".{name}".endswith(saved))}


def _new_ids(recipe: Recipe) -> list[int]:
    """Return the ids of the recipe's new tokens."""
    from ftcli.models.tokenizer import load_tokenizer

    ids: list[int] = load_tokenizer(recipe.model).convert_tokens_to_ids(list(recipe.model.new_tokens))
    return ids


def _embedding_modules(model: Any) -> dict[str, nn.Module]:
    """Return the modules of embeddings and untied head, by name."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    ends = [inputs] if outputs is None or outputs.weight is inputs.weight else [inputs, outputs]
    return {name: module for name, module in model.named_modules() if any(module is end for end in ends)}
