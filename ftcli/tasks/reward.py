"""Train a reward model, which scores answers, from comparisons, rankings or scores of answers.

Comparisons are rankings of two answers. Rankings have the Bradley-Terry loss, a mean over prompts. Scores have the
squared error, a mean over known scores. The score is read at the last token of an answer.
Shapes: R rows, A answers of them, P pairs of answers with different ranks, K attributes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ftcli.data.formats import convert
from ftcli.models.kernels.document_attention import (
    check_architecture,
    check_heads,
    confine_to_documents,
    is_flash,
    is_flat,
    prefers_flat,
)
from ftcli.models.positions import needs_left_padding
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks.protocol import COUNT_UNIT, ITEMS, NOTES, Batch, Row, Span, Term
from ftcli.tasks.shared import scored_answers as scored
from ftcli.tasks.shared.chat_tokenizer import load_chat_tokenizer, tokenizer_digest
from ftcli.tasks.shared.judged_answers import AsChat, ChatTemplate, encode_parsed, whole_row_problems
from ftcli.tasks.shared.label_options import check_distinct
from ftcli.tasks.shared.pair_reports import answer_spans, mean_by_weight
from ftcli.tasks.shared.pairs import pair_weights
from ftcli.tasks.shared.reward_losses import bradley_terry, centring, regression
from ftcli.tasks.shared.row_sums import sum_by_row

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe
    from ftcli.data.mixture import SourceRows

WEIGHTS, ANSWERS = "weights", "answers"  # names of counts: of weighted rows or scores, and of answers
RANKING, CENTRING, REGRESSION = "bradley_terry", "centring", "regression"  # names of terms
METRICS = ("loss", "accuracy", "margin", "mean_reward", "min_reward", "max_reward")
REWARD = "reward"  # name of the only score of a model that ranks


class Options(BaseModel):
    """Keys of task_options for reward."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    attributes: Annotated[list[str], AfterValidator(check_distinct)] | None = Field(
        None,
        min_length=1,
        description="Names of the scores that the model gives, in the order of its outputs, for rows with scores. "
        "Absent: the names found in the training rows, sorted.",
    )
    center: float = Field(
        0.0,
        ge=0,
        description="Weight of the squared sum of both scores of a pair, which pulls the mean score towards 0; for "
        "comparisons and rankings. 0.01 is the value of its paper.",
    )
    chat: AsChat = "auto"
    chat_template: ChatTemplate = None


class Task:
    """Training of scores for answers."""

    item: Literal["token", "sample"] = "sample"
    columns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ("compared", "ranked", "scored")
    packs = True
    auto_class = "AutoModelForSequenceClassification"
    peft_type: str | None = None
    pipeline_tag = "text-classification"
    adapter_task_type = "SEQ_CLS"
    needs_tokenizer = True
    answers_per_row = 2
    metric_names: tuple[str, ...] = METRICS
    uncompared_metrics: tuple[str, ...] = ("min_reward", "max_reward")  # rounding of one row is not averaged
    starting_recipe: Mapping[str, Mapping[str, Any]] = {
        "data": {"max_length": 1024},
        "batch": {"global_size": 32},
        "train": {"epochs": 1},
        "optimizer": {"learning_rate": 1e-5},
        "schedule": {"name": "cosine", "warmup_steps": 0.1},
    }

    recipe_problems = staticmethod(whole_row_problems)

    def __init__(self, recipe: Recipe, options: Options) -> None:
        self.recipe, self.options, self.is_flat = recipe, options, is_flat(recipe)
        self.tokenizer = load_chat_tokenizer(recipe, options.chat_template)
        self.variables = recipe.data.chat_template_kwargs
        self._declare({"attributes": [], "weighted": False})

    def _declare(self, facts: dict[str, Any]) -> None:
        """Declare terms, notes and metrics for rows with these facts."""
        self.attributes: list[str] = facts["attributes"]
        count = WEIGHTS if facts["weighted"] or len(self.attributes) > 1 else ITEMS
        self.terms = {REGRESSION if self.attributes else RANKING: Term(1.0, count)}
        self.notes = {"mean_reward": ANSWERS}
        self.metric_names = ("loss", "mean_reward", "min_reward", "max_reward")
        if not self.attributes:
            self.notes |= {"accuracy": ITEMS, "margin": ITEMS}
            self.metric_names = METRICS
            if self.options.center:
                self.terms[CENTRING] = Term(self.options.center, count)
                self.metric_names = (*METRICS, CENTRING)

    def fingerprint(self) -> str:
        """Return a digest of the tokenizer, its special tokens and its chat template."""
        return tokenizer_digest(self.tokenizer)

    def survey_parts(self, parts: list[SourceRows]) -> tuple[list[SourceRows], dict[str, Any]]:
        """Return the parts unchanged, and {"attributes", "weighted"}: names of scores, and whether rows have weights.

        Rows that are ranked or compared have no attributes.

        Raises:
            InputError: Some sources have scores, others are compared or ranked; or scores are to be centred.
        """
        attributes = scored.find_attributes(parts, self.formats, self.options.attributes)
        if attributes and self.options.center:
            raise InputError(
                "task_options.center is the weight of a term of pairs of answers, but the rows have scores",
                hint="delete task_options.center",
            )
        return parts, {
            "attributes": attributes,
            "weighted": any("weight" in part.rows.column_names for part in parts),
        }

    def encode(self, row: Row, facts: dict[str, Any]) -> list[Row]:
        """Return the prepared row of one row, with all answers, or none if it is too long and dropped.

        Raises:
            RowError: The row has another format, or an answer cannot be rendered.
        """
        (result,) = self.encode_rows([row], facts)
        if isinstance(result, RowError):
            raise result
        return result

    def encode_rows(self, rows: list[Row], facts: dict[str, Any]) -> list[list[Row] | RowError]:
        """Return the result of `encode` for each row, or its `RowError`. All answers are tokenized in one call."""
        arguments: dict[str, Any] = {
            "as_chat": self.options.chat == "auto",
            "variables": self.variables,
            "length": self.recipe.data.max_length,
            "policy": self.recipe.data.truncation or "truncate",
        }

        def encode(given: list[Row]) -> list[list[Row] | RowError]:
            if facts["attributes"]:
                return scored.encode_scored(self.tokenizer, given, facts["attributes"], **arguments)
            return scored.encode_ranked(self.tokenizer, given, **arguments)

        return encode_parsed(rows, lambda row: [self._checked(convert(row, self.formats), facts)], encode)

    def _checked(self, row: Row, facts: dict[str, Any]) -> Row:
        """Return a converted row as the task encodes it; raises `RowError` for a score among rows without scores."""
        if "scores" in row and not facts["attributes"]:
            raise RowError("has a score, but other rows have compared or ranked answers; train them in two runs")
        return scored.as_ranked(row)

    def load_model(self, facts: dict[str, Any], **kwargs: Any) -> tuple[nn.Module, list[str]]:
        """Return the model with a head of one score, or of one for each attribute, and the names of its new modules.

        Raises:
            InputError: The recipe requests flat rows or a kernel that the model does not support.
        """
        from ftcli.models.load import load_configuration, load_model

        self._declare(facts)
        if is_flat(self.recipe) or is_flash(self.recipe.model.attn_implementation):
            config = load_configuration(self.recipe.model)
            check_heads(config, self.recipe)
            check_architecture(config, self.recipe)
        head: dict[str, Any] = {"new_head": True, "labels": self.attributes or [REWARD], "problem_type": "regression"}
        return load_model(self.auto_class, self.recipe, **head, **kwargs)

    def finish_model(self, model: nn.Module) -> None:
        """Set the padding token, because a decoder scores the last token before padding; prepare flat rows.

        Raises:
            InputError: The model scores the last position, even where it is padding.
        """
        from ftcli.models.scores import score_documents

        if needs_left_padding(model.config):
            raise InputError(
                f"model.name: {self.recipe.model.name} scores the last position of a row, where answers have padding",
                hint="name a causal language model, such as a Llama or Qwen",
            )
        model.config.pad_token_id = self.tokenizer.pad_token_id  # type: ignore[union-attr]
        kernel = self.recipe.model.attn_implementation
        self.is_flat = prefers_flat(model, self.recipe)
        if self.is_flat:
            score_documents(model)
            if not is_flash(kernel):
                confine_to_documents(model, kernel)

    def blank(self, row: Row) -> Row:
        """Return the row as padding, with no weight."""
        return row | {"items": 0}

    def collate(self, rows: list[Row]) -> Batch:
        """Return the batch of all answers of R rows (`scored_answers.collate_answers`)."""
        return scored.collate_answers(
            rows,
            self.tokenizer.pad_token_id,
            is_flat=self.is_flat and rows[0]["training"],
            attn_implementation=self.recipe.model.attn_implementation,
        )

    def count(self, batch: Batch) -> dict[str, Any]:
        """Return the rows, the weights of rows or of known scores, and the answers."""
        units = batch["weight_units"]
        return {
            ITEMS: int((units > 0).sum()),
            WEIGHTS: int((units * scored.losses_of_rows(batch)).sum()) * COUNT_UNIT,
            ANSWERS: int((batch["answers"] * (units > 0)).sum()),
        }

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Any]:
        """Return the contributions to each term `[R]` float32, and the notes."""
        scores = self._scores(model, batch)
        return self._contributions(scores, batch) | {NOTES: self._notes(scores.detach(), batch)}

    def _scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the scores of all answers, `[A, K]` float32."""
        inputs = scored.model_inputs(batch)
        if "position_ids" in batch:
            flat: Tensor = model(**inputs, score_positions=batch["last_positions"])["scores"]
            return flat.float()
        padded: Tensor = model(**inputs).logits
        return padded.float()

    def _contributions(self, scores: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return the weighted contributions of each row to each term, `[R]`."""
        weights = pair_weights(batch)
        if self.attributes:
            return {REGRESSION: regression(scores, batch["scores"]).sum(-1) * weights}
        better, worse = scores[batch["better"], 0], scores[batch["worse"], 0]
        values = {RANKING: bradley_terry(better, worse, batch["margins"])}
        if self.options.center:
            values[CENTRING] = centring(better, worse)
        return {name: self._by_row(value * batch["shares"], batch) * weights for name, value in values.items()}

    def _by_row(self, values: Tensor, batch: Batch) -> Tensor:
        """Return the sum of the values of each row's pairs, `[R]` of `[P]`."""
        return sum_by_row(values, batch["row_index"], batch["row_of_item"])

    def _notes(self, scores: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return mean rewards by answer, and for rankings accuracy and margin by row, a mean over its pairs."""
        rewards = scores.mean(-1)
        notes = {"mean_reward": rewards * batch["is_real_answer"]}
        return notes if self.attributes else notes | self._of_pairs(rewards, batch)

    def _of_pairs(self, rewards: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return accuracy and margin of each row, `[R]`."""
        margins = rewards[batch["better"]] - rewards[batch["worse"]]
        values = {"accuracy": (margins > 0).to(margins.dtype), "margin": margins}
        return {name: self._by_row(value * batch["shares"], batch) for name, value in values.items()}

    def eval_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the values of each row, `[R]` float64. `items` are weights of the row, or of its known scores."""
        scores = self._scores(model, batch)
        first, *others = parts = self._contributions(scores, batch)
        values = {"loss": parts[first], "items": pair_weights(batch) * scored.losses_of_rows(batch)}
        values |= {name: parts[name] for name in others}
        rewards = scores.mean(-1)
        table = scored.table_of_answers(rewards, batch)  # [R, most answers], NaN where there is none
        values |= {"sum": table.nansum(-1), "answers": batch["answers"]}
        values |= {"min": table.nan_to_num(float("inf")).amin(-1), "max": table.nan_to_num(float("-inf")).amax(-1)}
        if not self.attributes:
            values |= self._of_pairs(rewards, batch)
        return {name: value.double() for name, value in values.items()}

    def metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the mean of each term, and rewards, accuracy and margin by the names that TRL has for them."""
        values = {
            "loss": mean_by_weight(rows["loss"], rows["items"]),
            "mean_reward": float(rows["sum"].sum() / rows["answers"].sum()),
            "min_reward": float(rows["min"].min()),
            "max_reward": float(rows["max"].max()),
        }
        if not self.attributes:
            values |= {name: float(rows[name].mean()) for name in ("accuracy", "margin")}
        if CENTRING in rows:
            values[CENTRING] = mean_by_weight(rows[CENTRING], rows["items"])
        return {name: values[name] for name in self.metric_names}

    def describe_row(self, row: Row, facts: dict[str, Any]) -> tuple[list[Span], dict[str, str]]:
        """Return the spans of the prompt and of all answers, and ranks or scores."""
        names, values = scored.describe_answers(row, facts["attributes"])
        return answer_spans(self.tokenizer, scored.answers_of([row]), names), values

    def save_processor(self, folder: str) -> None:
        """Write the tokenizer with its chat template."""
        from ftcli.data.tokenizer_files import save_tokenizer

        save_tokenizer(self.tokenizer, folder)

    def probe(self, batch: Batch) -> Batch:
        """Return the arguments with which the plain model computes the score of each row's first answer."""
        first = batch["answers"].cumsum(0) - batch["answers"]
        return {name: batch[name][first] for name in ("input_ids", "attention_mask")}
