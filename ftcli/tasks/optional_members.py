"""Optional members of a task, beside those in protocol.py: preview, generated answers, companions and drawings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn

    from ftcli.tasks.protocol import Batch, Row, Span


class Showing(Protocol):
    """Optional members of a task for `ftcli preview`. Without them, rows are shown by their tokens or columns."""

    tokenizer: Any  # if prepared rows have input_ids
    answer_columns: tuple[str, ...]  # columns of a prepared row that are targets, such as the label

    def describe_row(self, row: Row, facts: dict[str, Any]) -> tuple[list[Span], dict[str, str]]:
        """Return (spans of the text, other values by name) of a prepared row; `facts` is the result of `survey`."""

    def count_answers(self, rows: Dataset, facts: dict[str, Any]) -> dict[str, int]:
        """Return the number of prepared rows with each possible answer, even for answers without rows."""


class Writes(Protocol):
    """Members of a task whose model generates text, so that it can answer prompts."""

    tokenizer: Any

    def encode_prompt(self, prompt: str | list[dict[str, Any]], **options: Any) -> list[int]:
        """Encode a prompt up to the start of the answer.

        Args:
            prompt: A text or messages.
            **options: `tools` and `chat_template_kwargs` of the prompt, if it has them (`prompts.Prompt`).

        Returns:
            The token ids.

        Raises:
            InputError: The model cannot answer the prompt.
        """


class Companions(Protocol):
    """Members of a task whose rows are collated with other rows of their split. Streams cannot have them."""

    def index_rows(self, rows: Dataset) -> Any:
        """Return what `companions` needs to know about all prepared rows of a split, such as their groups.

        Args:
            rows: The prepared rows. Read only the columns that you need.
        """

    def companions(self, row: Row, index: Any) -> list[int]:
        """Return the numbers of the rows that `collate` gets with a row, as the list `row["companions"]`.

        A number is the `id` of a prepared row in the same split. It may depend on (seed, `epoch`, `id`, `next`) alone,
        so that it is the same on any hardware and after a resume. A companion that is excluded from training is blank.

        Args:
            row: A prepared row with `epoch`, `id`, `training`, and `next`: the number of the next row of the step in
                training; None for padding, for the only row of a step, and in evaluations.
            index: The result of `index_rows`.
        """


class Draws(Protocol):
    """Members of a task that draws evaluation rows into files of the run folder."""

    drawn_rows: int  # number of the first evaluation rows in the batch of `draw`

    def draw(self, model: nn.Module, batch: Batch) -> dict[str, bytes]:
        """Return files by name, such as {"faces.png": ...}. Every process calls it, with the same batch.

        Args:
            model: The prepared model in evaluation mode, without gradient.
            batch: Tensors of the first `drawn_rows` evaluation rows on the device.
        """
