"""Add rows to embeddings and head for the recipe's new tokens.

A new row starts as the mean of the old rows (Hewitt 2021, "Initializing new word embeddings for pretrained language
models"). The logit of the mean row is the average of the other logits. The logit of a random row could be large and
take probability from all other tokens. Nothing is drawn, so the rows are equal on every hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftcli.models.adapter_targets import adapted_rows_error, is_named
from ftcli.runtime.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from ftcli.config.recipe import Recipe


ROWS_BEFORE = "ftcli_rows_before"  # attribute of a model


def resize_embeddings(model: Any, recipe: Recipe) -> Any:
    """Resize embeddings to a row for every token of the tokenizer. Models with spare rows keep their size.

    A resized model gets an attribute with the number of rows before, for `rows_before`.

    Args:
        model: A transformers model; its weights may be on the meta device.
        recipe: The recipe with `model.new_tokens`.

    Returns:
        The same model.
    """
    if recipe.model.new_tokens:
        tokens = max(_new_ids(recipe)) + 1
        rows = model.get_input_embeddings().num_embeddings
        if tokens > rows:
            model.resize_token_embeddings(tokens, mean_resizing=False)
            setattr(model, ROWS_BEFORE, rows)
    return model


def rows_before(model: Any) -> int | None:
    """Return the rows of the embeddings before `resize_embeddings` resized them; None if it did not.

    Args:
        model: A model, without adapter.
    """
    return getattr(model, ROWS_BEFORE, None)


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

    Raises:
        InputError: The adapter saves only one of the tied embeddings and head whole. peft would train the new rows of
            the embeddings in a head that is saved, and save no new rows of a head that is not. Or it trains rows of a
            head with a bias, which peft then leaves out of the logits. Or a tied head has an adapter, whose new rows
            would not be those of the embeddings.
    """
    if not recipe.model.new_tokens:
        return {}
    saved = tuple(f".{ending}" for ending in recipe.adapter.modules_to_save)
    ends = list(_embedding_modules(model))
    rows = {name: _new_ids(recipe) for name in ends if not (saved and f".{name}".endswith(saved))}
    head = model.get_output_embeddings()
    tied = [name for name, module in model.named_modules() if module is head and name not in ends]
    pair = [*ends, *tied]
    whole = [name for name in pair if saved and f".{name}".endswith(saved)]
    if tied and len(whole) == 1:
        other = next(name for name in pair if name not in whole)
        raise InputError(
            f"adapter.modules_to_save names {whole[0]}, which is tied to {other}, and model.new_tokens "
            "trains the new rows of both",
            hint=f"remove {whole[0]} from adapter.modules_to_save, or add {other} to it",
        )
    # peft refuses an adapter on rows of tokens itself, except on a head that is tied to the embeddings.
    left_out = tuple(f".{ending}" for ending in recipe.adapter.exclude_modules)
    if any(is_named(recipe.adapter, name) and not f".{name}".endswith(left_out) for name in tied if rows):
        raise adapted_rows_error()
    rows_in = [*rows, *(tied if rows else [])]
    biased = [name for name in rows_in if getattr(model.get_submodule(name), "bias", None) is not None]
    if biased:
        raise InputError(
            f"model.new_tokens: {biased[0]} has a bias, which peft leaves out where an adapter trains rows of tokens",
            hint=f"train it whole: add {biased[0]} to adapter.modules_to_save",
        )
    return rows


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
