"""Continue pretraining a causal language model on raw text. All tokens are trained; documents end with the end token.

A document is the `text` of a row. In a .txt file it is a line; empty lines are skipped. The loss is the negative
log-likelihood, summed over all tokens except the first of each row. Model, batches, loss and metrics are those of sft.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from ftcli.data.formats import convert
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks import sft
from ftcli.tasks.protocol import Row
from ftcli.tasks.shared.token_weights import LabelSmoothing, ZLoss

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe


class Options(BaseModel):
    """Keys of task_options for pretrain."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    label_smoothing: LabelSmoothing = 0.0
    z_loss: ZLoss = 0.0


class Task(sft.Task):
    """Continued pretraining; a text longer than data.max_length becomes several rows."""

    formats: tuple[str, ...] = ("text",)
    default_truncation = "split"
    starting_recipe: Mapping[str, Mapping[str, Any]] = {
        "data": {"max_length": 1024},
        "batch": {"global_size": 32},
        "train": {"epochs": 1},
        "optimizer": {"learning_rate": 2e-5},
        "schedule": {"name": "cosine", "warmup_steps": 0.05},
    }

    def __init__(self, recipe: Recipe, options: Options) -> None:
        super().__init__(recipe, sft.Options(label_smoothing=options.label_smoothing, z_loss=options.z_loss))
        if self.tokenizer.eos_token_id is None:
            raise InputError(
                f"the tokenizer of {recipe.model.name} has no end token, but documents must end with one",
                hint="set eos_token in its tokenizer_config.json",
            )

    def encode_rows(self, rows: list[Row], facts: dict[str, Any]) -> list[list[Row] | RowError]:
        """Return the prepared rows of each row, or its `RowError`. All texts are tokenized in one call."""
        examples: list[Row | RowError] = []
        for row in rows:
            try:
                examples.append(convert(row, self.formats or Task.formats))
            except RowError as error:
                examples.append(error)
        texts = [example["text"] for example in examples if not isinstance(example, RowError)]
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        encoded = iter(backend.encode_batch_fast(texts, add_special_tokens=True))
        end = self.tokenizer.eos_token_id
        return [
            example if isinstance(example, RowError) else self._rows_of_document(example, next(encoded).ids, end)
            for example in examples
        ]

    def _rows_of_document(self, example: Row, ids: list[int], end: int) -> list[Row]:
        """Return the prepared rows of one document."""
        ids = ids if ids[-1:] == [end] else [*ids, end]
        return self._fit(example, ids, [True] * len(ids))

    def answer_ends(self) -> list[int]:
        """Return the token that ends a document."""
        return [self.tokenizer.eos_token_id]

    def encode_prompt(self, prompt: str | list[dict[str, Any]], **options: Any) -> list[int]:
        """Return the tokens of a prompt, which is plain text: the beginning of a document."""
        from ftcli.data.chat.prompt import encode_prompt

        return encode_prompt(self.tokenizer, prompt, as_chat=False, **options)
