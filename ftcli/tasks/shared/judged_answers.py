"""What tasks on judged answers share: options, limits of the recipe, encoding, and the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ftcli.runtime.errors import Problem, RowError
from ftcli.tasks.protocol import Batch, Row

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe
    from ftcli.config.yaml_document import Keys


AsChat = Annotated[
    Literal["auto", "never"],
    Field(
        description="auto: a text prompt and each of its answers become a user's and an assistant's turns when the "
        "tokenizer has a chat template; never: they are joined as plain text."
    ),
]
ChatTemplate = Annotated[
    str | None,
    Field(
        min_length=1,
        description="File with the Jinja chat template to use instead of the tokenizer's, as in sft.",
    ),
]


def whole_row_problems(recipe: Recipe, where: Callable[[Keys], str]) -> Iterator[Problem]:
    """Yield a problem if the recipe splits rows, and one if it reads a stream: `recipe_problems` of the tasks.

    Args:
        recipe: The recipe.
        where: Returns file and line of a key.
    """
    if recipe.data.truncation == "split":
        message = f"data.truncation: {recipe.task} does not support split, because part of an answer cannot be judged"
        yield Problem(message, where(("data", "truncation")), "set it to truncate or drop")
    if recipe.data.streaming:
        message = f"data.streaming: {recipe.task} needs all rows before the first step"
        yield Problem(message, where(("data", "streaming")), "set data.streaming to false")


def encode_parsed(
    rows: list[Row],
    parse: Callable[[Row], list[Row]],
    encode: Callable[[list[Row]], list[list[Row] | RowError]],
) -> list[list[Row] | RowError]:
    """Parse all rows and encode the results in one call.

    Args:
        rows: Rows of a source.
        parse: Returns the examples of one row; raises `RowError` for an invalid row.
        encode: Returns the prepared rows of each example, or its `RowError`.

    Returns:
        The prepared rows of each row, or the `RowError` of the row or of one of its examples.
    """
    results: list[Any] = []
    examples: list[tuple[int, Row]] = []
    for number, row in enumerate(rows):
        try:
            examples += [(number, example) for example in parse(row)]
            results.append([])
        except RowError as error:
            results.append(error)
    encoded = encode([example for _, example in examples])
    for (number, _), result in zip(examples, encoded, strict=True):
        if isinstance(result, RowError):
            results[number] = result
        elif not isinstance(results[number], RowError):
            results[number] += result
    return results


def reference_nll(model: nn.Module, inputs: Batch, recipe: Recipe) -> Tensor:
    """Return the negative log-likelihood `[N]` of trained tokens under the reference, without gradient.

    The reference is the model that training starts from. A new adapter does not change the model, so it is switched
    off, which gives adapters of any rank one reference. An adapter of `adapter.path` does change it, and stays on.

    Args:
        model: The model with its starting weights.
        inputs: Arguments of the model.
        recipe: The recipe.
    """
    nll: Tensor
    if recipe.adapter.type == "none" or recipe.adapter.path is not None:
        nll = model(**inputs)["nll"]
        return nll
    from ftcli.models.adapters import disable_adapter

    with disable_adapter(model):
        nll = model(**inputs)["nll"]
    return nll
