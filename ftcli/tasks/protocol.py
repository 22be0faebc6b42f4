"""Define the interface of a task. A task is one file, without a base class and without registration.

The module of a task has `Options` (a pydantic model with the keys of `task_options`) and `Task`, which implements the
protocol below. B: rows of a micro-batch, T: tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Protocol

from ftcli.runtime.errors import RowError as RowError

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe

Batch = dict[str, Any]
Row = dict[str, Any]

ITEMS = "items"  # name of the first count of every task
NOTES = "notes"  # key of the notes in the result of `loss`
COUNT_UNIT = 2.0**-16  # counts other than `items` are whole multiples of it, so that their sums are exact


@dataclass(frozen=True)
class Term:
    """One term of a loss: `weight` times the mean of its contributions over a count of the global batch.

    Attributes:
        weight: Factor of the mean in the loss.
        count_name: Name of the count, a key of the result of `count`.
    """

    weight: float = 1.0
    count_name: str = ITEMS


@dataclass(frozen=True)
class Seen:
    """Results of the first pass over a step, for the loss of one micro-batch.

    Attributes:
        values: Results of `first_pass` for all R rows of the step on all ranks: `[R, ...]` by name. The rows are sorted
            by id, and equal on every rank. Padding is left out.
        positions: Indices of the rows of this micro-batch in `values`, `[B]` int64. Padding has the index of any row.
    """

    values: dict[str, Tensor]
    positions: Tensor


DEFAULT_TERMS: Mapping[str, Term] = {"loss": Term()}


class Task(Protocol):
    """Converts rows to tensors, tensors to loss contributions, and evaluation rows to metrics.

    **Packing.** A task whose rows are documents of a language model may set `packs = True`. `collate` then concatenates
    training rows if the recipe sets data.packing or data.padding_free (`tasks.shared.batches.flat_batch`), and
    `finish_model` restricts attention to each document (`models.kernels.document_attention`). Without `packs` both keys
    are errors.

    **Sparse modules.** `sparse: tuple[str, ...]` lists modules that not every row uses. Their tensors may have no
    gradient for many steps, which counts as a gradient of zeros. Under FSDP and ZeRO all processes must run the same
    modules in each forward pass: where no row of a micro-batch uses a module, multiply its output by 0.

    **Terms.** A loss may have several terms. The task then has `terms`, name -> `Term`, set in the class or by
    `__init__` from its options, and `loss` returns {name of the term: contributions}. The loss of a step is the sum of
    all terms. A term is its weight times the sum of its contributions in the global batch, divided by its count. It is
    0 in a step where its count is 0. Only the first term is reported by source, if it is a mean over `items`.

    **Notes.** A task may log values that are not trained. It then has `notes`, name -> name of a count, and `loss`
    returns {..., "notes": {name: values}}. A note is logged as the sum of its values in the global batch, divided by
    the count. A standard deviation needs two notes, of x and of x^2.

    **First pass.** A loss may depend on all rows of a step, for instance a contrastive loss. The task then has
    `first_pass(model, batch)`, which returns values by row, `[B, ...]` by name, and its loss is
    `loss(model, batch, seen)`, with a `Seen`. The first pass runs under `no_grad` over all micro-batches of a step,
    before the first gradient. Both passes over a micro-batch have the same dropout masks.

    **Derived columns.** `derive(model, batch)` returns new columns, `[B, ...]` by name, for instance log-probabilities
    under the initial weights. They are computed once for all rows before training, without gradient and in evaluation
    mode, and cached. The rows of `collate` have them, except while they are computed. The cache is used again while
    rows, starting weights, precision, the adapter's type and `task_options` (or what `derived_from()` returns) stay.

    **Companions.** A row may be trained together with others, for instance the two images of a pair, or two images of a
    step that are mixed. The task then has `index_rows` and `companions` (optional_members.py). The rows of `collate`
    have them as `row["companions"]`.

    **Helper networks.** A loss may need frozen networks, for instance a recogniser of faces. They are submodules of the
    model with an attribute `is_helper = True`, without trained weights. Profiles shard or copy them like other weights.
    They are in no optimizer, no checkpoint and no export. `helper_options` and `exported_part` are in `TaskProperties`.

    To compute without the adapter, use `with ftcli.disable_adapter(model):` in `loss` or `eval_step`.

    Example:
        # my_task.py
        from torch.nn.functional import cross_entropy
        from ftcli.tasks import text_classification
        from ftcli.tasks.text_classification import Options as Options


        class Task(text_classification.Task):
            def loss(self, model, batch):
                logits = model(**self.probe(batch)).logits.float()
                return cross_entropy(logits, batch["targets"], reduction="none", label_smoothing=0.1)

            def eval_step(self, model, batch):  # its losses must be those of `loss`
                return super().eval_step(model, batch) | {"loss": self.loss(model, batch)}
    """

    item: Literal["token", "sample"]  # unit of the loss contributions
    auto_class: str | None  # class of transformers that loads the model; None: `load_model` builds its own module
    peft_type: str | None  # peft's name of the task, for the files of an adapter
    columns: tuple[str, ...]  # required columns of a row; empty: the task recognises several formats
    # Optional: file_columns: tuple[str, ...], columns of prepared rows with paths of files that `collate` reads. The
    # contents of these files are part of the data fingerprint, their sizes and times are part of the cache key.
    # Optional: text_columns: tuple[str, ...], columns whose fields stay text in a table (.csv, .tsv), even digits.
    # Optional: recipe_problems(recipe, where) -> Iterator[Problem], a static method: options that do not fit other keys
    # of the recipe. `where(("task_options", "key"))` is the place of a key. `ftcli check` reports them.
    # Optional: metric_names: tuple[str, ...], the keys of `metrics`; another metric in a recipe is an error.
    # Optional: the attributes of `TaskProperties` below, which other modules read without importing torch.
    # Optional: encode_rows(rows, facts) -> list[list[Row] | RowError], the results of `encode` for many rows, faster.
    # Optional: describe_rows(facts) -> list[str], log lines about the training rows.
    # Optional: use_facts(facts), called by `ftcli evaluate` after `load_model`, with the facts of the trained rows.
    # Optional: answer_ends() -> list[int], tokens that end a trained answer, for generation_config.json and the card.
    # Optional: loss_of_rows(rows) -> np.ndarray, the loss of each evaluation row `[N]` if it depends on all rows, which
    # are those of `metrics`. Losses of sources are computed from it; without it, from those of `eval_step`.
    # Optional: facts_of_rows(rows, facts) -> facts, for those that depend on the prepared training rows. No streams.
    # Optional: survey_parts(parts) -> (parts, facts), called instead of `survey` with the rows of all sources and
    # splits. It is not used for a derived class that overrides only `survey`.
    # Optional, for models that are not part of transformers (own_model.py):
    # save_model(model, folder) writes everything except the weights; default: `save_pretrained` of the model, if any.
    # probe_output(output) -> Tensor, by which an export is compared; default: logits, or last_hidden_state, or the
    # output itself if it is a tensor. Without any of them, and without `probe`, exports are compared by their weights.
    # `load_model` builds such a model again, and its weights are loaded by name.

    def __init__(self, recipe: Recipe, options: Any) -> None: ...

    def fingerprint(self) -> str:
        """Return a text that changes whenever `encode` could return another result for the same row."""

    def survey(self, rows: Dataset) -> dict[str, Any]:
        """Return JSON values by name on which rows and model depend, such as label names.

        Args:
            rows: The task's columns of all training sources. Without columns, the rows of one source per call.
        """

    def encode(self, row: Row, facts: dict[str, Any]) -> list[Row]:
        """Encode one row.

        Args:
            row: A row of a source, with columns renamed.
            facts: Result of `survey`.

        Returns:
            Prepared rows: one, several if the row is split, or none if it is too long. The key `items` is the
            contribution of a prepared row to `count`; rows with 0 items are left out. Further keys are not
            stored: `cut: True` marks a shortened row, `is_piece: False` one of several rows that are not parts of a
            longer one, `has_no_weight: True` a row with weight 0, `never_trained: True` a shortened row that had
            nothing to train before either.

        Raises:
            RowError: The row cannot be used.
        """

    def load_model(self, facts: dict[str, Any], **kwargs: Any) -> tuple[nn.Module, list[str]]:
        """Load the model.

        Args:
            facts: Result of `survey`.
            **kwargs: Arguments for `models.load.load_model`.

        Returns:
            (model, names of its modules with new weights).
        """

    def finish_model(self, model: nn.Module) -> None:
        """Change the model and its adapter in place before `Accelerator.prepare`, for instance its forward."""

    def blank(self, row: Row) -> Row:
        """Return a prepared row as padding: with the same shape, and adding 0 to loss and counts."""

    def collate(self, rows: list[Row]) -> Batch:
        """Return the tensors of a micro-batch on the host.

        Args:
            rows: B prepared rows, with `epoch` and `id` for seeded augmentation.
        """

    def count(self, batch: Batch) -> int | dict[str, Any]:
        """Return the number of items over which the loss of a batch is summed.

        A task whose terms or notes are means over other counts returns all counts by name, `items` first. They are
        integers, or multiples of `COUNT_UNIT` for sums of weights.

        Args:
            batch: Tensors on the host.
        """

    def loss(self, model: nn.Module, batch: Batch) -> Tensor | dict[str, Any]:
        """Return the contributions to the loss. May call the model several times.

        Args:
            model: The prepared model. Its parameters may be used only inside its own call.
            batch: Tensors on the device.

        Returns:
            Contributions `[N]` float32, or a dictionary of terms and notes. N is the number of items in the order of
            rows if `item` is token, else the number of rows, where padding has 0. With one training source
            a scalar, the sum, is enough.
        """

    def eval_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Evaluate a batch.

        Args:
            model: The prepared model in evaluation mode.
            batch: Tensors on the device.

        Returns:
            Values by row, `[B, ...]` by name, with `loss` (a sum) and `items`.
        """

    def metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the metrics of an evaluation. A pure function, in float64.

        Args:
            rows: Results of `eval_step` for all N evaluation rows, `[N, ...]` by name.
        """

    def save_processor(self, folder: str) -> None:
        """Write the tokenizer or image processor into a folder."""

    def probe(self, batch: Batch) -> Batch:
        """Return the tensors of a batch that the model needs for logits. Optional for models outside transformers."""


def has_first_pass(task: object) -> bool:
    """Return whether the loss of a task needs a first pass over the rows of a step."""
    return hasattr(task, "first_pass")


def derives_columns(task: object) -> bool:
    """Return whether a task has columns that the model computes before training."""
    return hasattr(task, "derive")


def has_companions(task: object) -> bool:
    """Return whether rows of a task are collated with other rows of their split."""
    return hasattr(task, "companions")


@dataclass(frozen=True)
class Span:
    """A part of the text of a row.

    Attributes:
        text: The text.
        is_trained: Whether the loss is on it.
        is_special: Whether it is a special token.
        ids: Its tokens; empty for text without tokens.
        part: Name of one of several answers that it belongs to, which a preview shows side by side; "": of no answer.
    """

    text: str
    is_trained: bool = False
    is_special: bool = False
    ids: tuple[int, ...] = ()
    part: str = ""


CAUSAL_LM = "AutoModelForCausalLM"  # class of transformers for models that answer prompts
# Defaults of `pipeline_tag` and `adapter_task_type`, by the class of transformers that loads the model.
PIPELINE_TAGS = {
    CAUSAL_LM: "text-generation",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForImageClassification": "image-classification",
}
ADAPTER_TASK_TYPES = {
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
}


@dataclass(frozen=True)
class TaskProperties:
    """Optional class attributes of a task, with their defaults.

    Attributes:
        formats: Kinds of rows (data/formats.py) that a task without `columns` recognises.
        optional_columns: Columns that rows of a task with `columns` may have besides.
        usual_names: Column -> name in public data sets, for sources with such names only (data/formats.py).
        reads_text: Whether rows are text. Otherwise keys of the recipe for texts are errors.
        needs_tokenizer: Whether the folder of a local model must have a tokenizer.
        uses_vocabulary_logits: Whether the loss needs logits over the whole vocabulary, for the estimate of memory.
        answers_per_row: Usual number of documents of at most `data.max_length` tokens in a prepared row. A prepared row
            with several has the columns `sides`, their number, and `longest`, the tokens of the longest.
        makes_several_rows: Whether a row may become several although it is not split.
        default_truncation: The value of `data.truncation: null`: truncate, drop or split.
        starting_recipe: Sections of the recipe that `ftcli init` writes, where they differ from its general values.
        pipeline_tag: The name of the task in a model card. Default: by `auto_class`.
        adapter_task_type: peft's name of the task in adapters if `peft_type` is None. Default: by `auto_class`.
        helper_options: Keys of task_options that name frozen helper models, as model.name does. `fetch` downloads them,
            their files are checked before a run, and a resumed run must have the same ones. "random" names no files.
        has_fixed_forward: Whether the host decides nothing in the model's forward pass but by the shapes and padding of
            its inputs, so that `model.cuda_graphs` may replay it.
        exported_part: Name of the submodule that final weights and exports contain. The rest of the model only serves
            the training. Default: the whole model.
        uncompared_metrics: Metrics of an evaluation that rounding may change by any amount: counts of rows (accuracy),
            ranks, values of one row, exp(loss). `ftcli parity` does not compare them, nor with a source or a label.
    """

    formats: tuple[str, ...] = ()
    optional_columns: tuple[str, ...] = ()
    usual_names: tuple[Mapping[str, str], ...] = ()
    reads_text: bool = True
    needs_tokenizer: bool = False
    uses_vocabulary_logits: bool = False
    answers_per_row: int = 1
    makes_several_rows: bool = False
    default_truncation: str = "truncate"
    starting_recipe: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pipeline_tag: str | None = None
    adapter_task_type: str | None = None
    helper_options: tuple[str, ...] = ()
    has_fixed_forward: bool = False
    exported_part: str = ""
    uncompared_metrics: tuple[str, ...] = ()


def properties_of(task: object) -> TaskProperties:
    """Return the properties of a task.

    Args:
        task: A task, or its class; None for a task that may not be imported, whose properties are the defaults.
    """
    auto_class = getattr(task, "auto_class", None) or ""
    values: dict[str, Any] = {"pipeline_tag": PIPELINE_TAGS.get(auto_class)}
    values["adapter_task_type"] = ADAPTER_TASK_TYPES.get(auto_class)
    values |= {one.name: getattr(task, one.name) for one in fields(TaskProperties) if hasattr(task, one.name)}
    return TaskProperties(**values)
