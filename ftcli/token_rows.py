"""Rows of the embeddings, and of the head, for tokens that a recipe adds to the tokenizer.

A new row starts as the mean of the model's own rows. A drawn one would do for embeddings, but in the head its logit
could be anything at first, and take probability from every other token; the mean row's logit is the average of theirs
(Hewitt 2021, "Initializing new word embeddings for pretrained language models"). Nothing is drawn, so it is the same on
every hardware. Knows no task and no adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from .recipe import Recipe


def make_room(model: Any, recipe: Recipe) -> Any:
    """Return the model with a row for every token of the tokenizer; works on weights without values, too.

    A model that has rows to spare, as many do, keeps its size.
    """
    if recipe.model.new_tokens:
        tokens = max(_new_ids(recipe)) + 1
        if tokens > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(tokens, mean_resizing=False)
    return model


def fill_new_rows(model: Any, recipe: Recipe) -> None:
    """Give the rows of new tokens, a head's bias included, the mean of those of the tokens before them."""
    import torch

    if not recipe.model.new_tokens:
        return
    ids = _new_ids(recipe)
    with torch.no_grad():
        for module in _modules(model).values():
            for parameter in module.parameters(recurse=False):
                parameter[ids] = parameter[: min(ids)].float().mean(dim=0).to(parameter.dtype)


def new_rows(model: Any, recipe: Recipe) -> dict[str, list[int]]:
    """Return module name -> indices of the rows that new tokens have; a head that is tied is not named.

    Modules that the recipe's adapter saves in full anyway are left out.
    """
    if not recipe.model.new_tokens:
        return {}
    whole = tuple(f".{ending}" for ending in recipe.adapter.modules_to_save)
    return {name: _new_ids(recipe) for name in _modules(model) if not (whole and f".{name}".endswith(whole))}


def _new_ids(recipe: Recipe) -> list[int]:
    from .models import load_tokenizer

    ids: list[int] = load_tokenizer(recipe.model).convert_tokens_to_ids(list(recipe.model.new_tokens))
    return ids


def _modules(model: Any) -> dict[str, nn.Module]:
    """Return name -> module of the embeddings and, where its weight is another one, of the head."""
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    wanted = [inputs] if outputs is None or outputs.weight is inputs.weight else [inputs, outputs]
    return {name: module for name, module in model.named_modules() if any(module is item for item in wanted)}
