"""Declare the recipe section of the data.

recipe_model.py and recipe_training.py declare the other sections. Light: never imports torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, GetJsonSchemaHandler, JsonValue, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from ftcli.config.section import MACHINE_HINT, CountInt, PathText, PositiveInt, Section


class Source(Section):
    """A source of rows. A bare string in a recipe is read as its path."""

    path: PathText = Field(
        min_length=1,
        description="Local file (jsonl, json, csv, tsv, parquet, txt), image folder, asset:NAME/FILE, or name on the "
        "hub. Each line of a .txt file is a document; empty lines are skipped. Fields of a .csv file are separated by "
        "the first of comma, semicolon, tab and | that its header contains; an empty field is missing, and any other "
        "field is text. Such files of a data set on the hub are read in the same way. Hidden files of an image folder "
        "are skipped.",
    )
    name: str | None = Field(None, description="Configuration of a data set on the hub.")
    split: str = Field("train", min_length=1, description="Split of a data set on the hub.")
    revision: str | None = Field(None, min_length=1, description="Branch, tag or commit of a data set on the hub.")
    label: str | None = Field(
        None, min_length=1, description="Name in reports and metrics; absent: the file's name without its ending."
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="Column map of this source, instead of data.columns."
    )
    max_rows: PositiveInt | None = Field(
        None, description="Maximum number of rows to use, chosen by the seed; null: all."
    )
    weight: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="An epoch contains round(weight x rows) rows of this source, chosen by the seed. Below 1 each "
        "epoch has the same rows; above 1 rows occur several times. Training rows only.",
    )

    @model_validator(mode="before")
    @classmethod
    def _from_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        section = handler.resolve_ref_schema(handler(core_schema))
        return {"anyOf": [{"type": "string", "minLength": 1}, section]}


Sources = Annotated[list[Source], Field(min_length=1)]


class Data(Section):
    """The training and evaluation rows."""

    train: Source | Sources = Field(
        description="Training rows: one source, or a list of sources. Each source of a list has its own loss "
        "(`train/<label>/loss`)."
    )
    eval: Source | Sources | None = Field(
        None,
        description="Evaluation rows: one source, or a list of sources. Each source of a list has its own loss "
        "(`eval/<label>/loss`).",
    )
    eval_rows: CountInt = Field(
        0,
        ge=0,
        description="Rows held out of data.train for evaluation, chosen by the seed; only without data.eval.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Name the task expects -> name in the file, for instance {text: body, label: category}.",
    )
    drop_last: bool = Field(
        True,
        description="true: an epoch ends with the last complete step of batch.global_size rows; false: the remaining "
        "rows make one smaller step with exact weights.",
    )
    max_length: CountInt = Field(1024, ge=2, description="Longest row, in tokens. Text tasks only.")
    chat_template_kwargs: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Variables of the chat template, for instance {enable_thinking: false}, as in apply_chat_template. "
        "They apply to rows, prompts and answers. A row's column `chat_template_kwargs` overrides them.",
    )
    truncation: Literal["truncate", "drop", "split"] | None = Field(
        None,
        description="Handling of rows longer than max_length. truncate: the end is cut off; drop: the row is left out; "
        "split: it becomes several rows, and no trained token is lost. null: the default of the task; "
        "most tasks truncate, raw text is split. The log gives the number of rows.",
    )
    max_bad_rows: CountInt = Field(
        0,
        ge=0,
        description="Maximum number of unusable rows (another format, no answer), over all sources. They are left out, "
        "and the log gives their row numbers. One more is an error. Rows of a stream are counted while its first pass "
        "is read; a line that cannot be read counts too.",
    )
    packing: bool = Field(
        False,
        description="true: rows of max_length tokens hold several whole documents (best-fit decreasing), without "
        "attention between documents. batch.global_size then counts packed rows. Language-model tasks only. Evaluation "
        "rows are not packed.",
    )
    padding_free: bool | None = Field(
        None,
        description="true: the rows of a micro-batch are concatenated without padding, and without attention between "
        "rows. Packed rows always are. Language-model tasks only. null: if a kernel supports it (a GPU, 16-bit "
        f"precision, a supported architecture). {MACHINE_HINT}",
    )
    group_by_length: bool = Field(
        False,
        description="true: each step has rows of similar length, chosen among the rows of 50 steps. This saves padding "
        "and changes the order of the rows. Not with packing.",
    )
    streaming: bool = Field(
        False,
        description="true: rows of data.train are read and tokenized during training, for corpora larger than the "
        "disk. The path may also be a pattern (data/*.jsonl), a folder of data files, or an address that fsspec "
        "supports (https://, s3://, hf://). Files may be compressed (.gz, .bz2, .xz, .zst). Language-model tasks with "
        "one source and train.max_steps only. The order of the rows depends on the files, the seed and "
        "batch.global_size, not on the number of processes. Rows without trained tokens are left out and counted "
        "(untrained_rows). Among the first 256 rows, which show the format, more than 1 % of them are an error before "
        "training, unless max_bad_rows allows more: raise max_length, or fix the rows or data.columns.",
    )
    shuffle_buffer: PositiveInt | None = Field(
        None,
        description="Number of rows of a stream that are shuffled (and packed) together, over all files; null: 10000. "
        "Only with streaming.",
    )
    workers: int = Field(
        0,
        ge=0,
        le=64,
        description=f"Loader processes per training process; 0: the training process loads rows. {MACHINE_HINT}",
    )

    @property
    def train_sources(self) -> list[Source]:
        """Sources of the training rows, at least one."""
        return self.train if isinstance(self.train, list) else [self.train]

    @property
    def eval_sources(self) -> list[Source]:
        """Sources of the evaluation rows; empty without evaluation rows, or if they are held out of data.train."""
        return self.eval if isinstance(self.eval, list) else [] if self.eval is None else [self.eval]

    def named_sources(self, split: Literal["train", "eval"]) -> list[tuple[str, Source]]:
        """Return the sources of a split with their keys, such as "data.train", or "data.eval.1" in a list of several.

        Args:
            split: The key whose sources are returned.
        """
        sources = self.train_sources if split == "train" else self.eval_sources
        if len(sources) == 1:
            return [(f"data.{split}", sources[0])]
        return [(f"data.{split}.{index}", source) for index, source in enumerate(sources)]

    def columns_of(self, source: Source) -> dict[str, str]:
        """Return the column map of a source: its own map, else `data.columns`."""
        return source.columns or self.columns

    @model_validator(mode="after")
    def _check_evaluation_rows(self) -> Data:
        if self.eval is not None and self.eval_rows:
            raise ValueError("eval and eval_rows exclude each other: keep one of the two")
        if any(source.weight != 1 for source in self.eval_sources):
            raise ValueError("eval: a weight is for training rows only; set max_rows to evaluate fewer rows")
        return self

    @model_validator(mode="after")
    def _check_streaming(self) -> Data:
        if not self.streaming:
            if self.shuffle_buffer is not None:
                raise ValueError("shuffle_buffer is for streams: set streaming to true, or delete it")
            return self
        source = self.train_sources[0]
        conflicts = {
            "eval_rows, which are held out of all rows: name evaluation rows with data.eval": self.eval_rows > 0,
            "several sources: name one, which may be a pattern or a folder": len(self.train_sources) > 1,
            "a weight: all rows of its one source are read": source.weight != 1,
            "max_rows: train.max_steps limits the rows that are read": source.max_rows is not None,
            "group_by_length: it needs the lengths of all rows": self.group_by_length,
            "more than one of workers: a second would read the same rows": self.workers > 1,
        }
        if present := [text for text, is_present in conflicts.items() if is_present]:
            raise ValueError(f"streaming cannot be combined with {'; nor with '.join(present)}")
        return self

    @model_validator(mode="after")
    def _check_packing(self) -> Data:
        if self.packing and self.group_by_length:
            raise ValueError("packing and group_by_length exclude each other: all packed rows have max_length tokens")
        return self
