"""Add rows to embeddings and head for the recipe's new tokens.

A new row starts as the mean of the old rows (Hewitt 2021, "Initializing new word embeddings for pretrained language
models"). The logit of the mean row is the average of the other logits. The logit of a random row could be large and
take probability from all other tokens. Nothing is drawn, so the rows are equal on every hardware.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ftcli.runtime.errors import InputError

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

    Raises:
        InputError: The adapter saves a tied head whole, but not the embeddings, whose new rows peft would train in it.
    """
    if not recipe.model.new_tokens:
        return {}
    saved = tuple(f".{ending}" for ending in recipe.adapter.modules_to_save)
    rows = {name: _new_ids(recipe) for name in _embedding_modules(model) if not (saved and f".{name}".endswith(saved))}
    head = model.get_output_embeddings()
    names = [name for name, module in model.named_modules() if module is head]
    if saved and names and f".{names[0]}".endswith(saved) and names[0] not in _embedding_modules(model) and rows:
        raise InputError(
            f"adapter.modules_to_save names {names[0]}, which is tied to {next(iter(rows))}, and model.new_tokens "
            "trains the new rows of both",
            hint=f"remove {names[0]} from adapter.modules_to_save, or add {next(iter(rows))} to it",
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
