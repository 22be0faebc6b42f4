"""Define the types that the survey, the preview and the findings share."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

from ftcli.tasks.protocol import Span

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.data.cache import PreparedRows
    from ftcli.tasks.protocol import Task


Level = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One problem of the rows.

    Attributes:
        level: error, warning or note.
        what: The problem.
        hint: What to do about it.
    """

    level: Level
    what: str
    hint: str = ""

    def as_dict(self) -> dict[str, str]:
        """Return the finding as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class Prepared:
    """A recipe with its prepared rows.

    Attributes:
        name: Path of the recipe, or its task.
        recipe: The recipe.
        task: Its task, with the processor loaded.
        rows: Its rows.
    """

    name: str
    recipe: Recipe
    task: Task
    rows: PreparedRows


@dataclass(frozen=True)
class ShownAnswer:
    """One of several answers to the prompt of a row.

    Attributes:
        name: Its name.
        spans: Its text. The middle of a long one is replaced by a span without tokens.
    """

    name: str
    spans: list[Span]


@dataclass(frozen=True)
class ShownRow:
    """One prepared row as the model reads it. The middle of a long row may be left out.

    Attributes:
        source: Name of the source.
        number: Number of the row in its source, from 1.
        step: Optimizer step of the first epoch that trains the row; None if no step does; 0 for a stream.
        tokens: Number of tokens.
        trained: Number of tokens with a loss.
        head: Text before the part that is left out.
        tail: Text after it.
        left_out: Number of tokens that are left out.
        left_out_trained: Number of trained tokens among them.
        facts: Values that are not part of the text, such as a label.
        answers: Several answers that the text before them has, if the row has some.
        split: "train" or "eval".
    """

    source: str
    number: int
    step: int | None
    tokens: int
    trained: int
    head: list[Span]
    tail: list[Span] = field(default_factory=list)
    left_out: int = 0
    left_out_trained: int = 0
    facts: dict[str, str] = field(default_factory=dict)
    split: str = "train"
    answers: list[ShownAnswer] = field(default_factory=list)
