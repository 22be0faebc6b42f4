"""Train a causal language model on single answers that are desirable or not: KTO, or APO-zero for single answers.

The loss is a mean over rows. KTO's baseline is estimated from prompts with answers of other rows, over the whole global
batch. The log-probabilities of the reference are columns that the starting weights give. Shape: R rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ftcli.data.formats import convert
from ftcli.data.preference_formats import split_pair
from ftcli.runtime.errors import RowError
from ftcli.tasks import sft
from ftcli.tasks.protocol import COUNT_UNIT, ITEMS, NOTES, Batch, Row, Seen, Span, Term
from ftcli.tasks.shared import labelled_answers as labelled
from ftcli.tasks.shared.judged_answers import AsChat, ChatTemplate, encode_parsed, reference_nll, whole_row_problems
from ftcli.tasks.shared.mismatched import LabelCounts, add_mismatched_answers
from ftcli.tasks.shared.pair_reports import ACCURACIES, PAIR_METRICS, answer_pairs, is_right, mean_by_weight
from ftcli.tasks.shared.pairs import model_inputs, pair_weights, side_sums
from ftcli.tasks.shared.unpaired_losses import describe_balance, kto, kto_baseline

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset
    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe
    from ftcli.data.mixture import SourceRows

WEIGHTS, DESIRABLE, UNDESIRABLE = "weights", "desirable", "undesirable"  # names of counts
MISMATCHED = ".mismatched"  # end of the batch's keys for mismatched answers
PLACES = ("row_sources", "row_numbers")  # where in the data an answer came from
REFERENCE, MISMATCHED_REFERENCE = "ref_logps", "ref_mismatched_logps"  # derived columns


class Options(BaseModel):
    """Keys of task_options for unpaired_preference."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    loss: Literal["kto", "apo_zero_unpaired"] = Field(
        "kto", description="kto: rewards are compared with a baseline of the step; apo_zero_unpaired: with 0."
    )
    beta: float = Field(0.1, gt=0, description="Scale of the rewards.")
    desirable_weight: float = Field(1.0, gt=0, description="Factor of the loss of desirable answers.")
    undesirable_weight: float = Field(1.0, gt=0, description="Factor of the loss of undesirable answers.")
    chat: AsChat = "auto"
    chat_template: ChatTemplate = None


class Task(sft.Task):
    """Training on single answers with a label. Answers are trained; prompts are context."""

    item: Literal["token", "sample"] = "sample"
    formats: tuple[str, ...] = ("labelled", "compared")
    answers_per_row = 2  # with the mismatched answer
    makes_several_rows = True  # of a pair
    answer_columns: tuple[str, ...] = ("label",)
    metric_names: tuple[str, ...] = PAIR_METRICS
    uncompared_metrics: tuple[str, ...] = (ACCURACIES,)
    options: Any
    starting_recipe: Mapping[str, Mapping[str, Any]] = {
        **sft.Task.starting_recipe,
        "batch": {"global_size": 32},
        "optimizer": {"learning_rate": 5e-6},
        "schedule": {"name": "cosine", "warmup_steps": 0.1},
    }

    recipe_problems = staticmethod(whole_row_problems)

    def __init__(self, recipe: Recipe, options: Options) -> None:
        super().__init__(recipe, sft.Options(chat=options.chat, chat_template=options.chat_template))
        self.options = options
        self.has_baseline = options.loss == "kto"
        if self.has_baseline:  # other modules look for this attribute
            self.first_pass = self._mismatched_ratios
        self._declare({"weighted": False, "pairs": False})

    def _declare(self, facts: dict[str, Any]) -> None:
        """Declare the term, the notes and the metrics for rows with these facts."""
        self.terms = {self.options.loss: Term(1.0, WEIGHTS if facts["weighted"] else ITEMS)}
        self.metric_names = tuple(name for name in PAIR_METRICS if name != ACCURACIES or facts["pairs"])
        counts = {"chosen": DESIRABLE, "rejected": UNDESIRABLE}
        self.notes = {f"{name}/{kind}": count for name in ("rewards", "logps") for kind, count in counts.items()}
        if self.has_baseline:
            self.notes["kl"] = ITEMS

    def survey_parts(self, parts: list[SourceRows]) -> tuple[list[SourceRows], dict[str, Any]]:
        """Return the parts with a mismatched answer for each row, and facts of the training rows.

        Returns:
            The parts, and {"weighted", "pairs", "desirable", "undesirable"}: whether rows have weights, whether
            evaluation rows came from pairs, and the training rows of each kind in an epoch.

        Raises:
            InputError: One prompt has too many of the rows.
        """
        parts, counts, paired = add_mismatched_answers(
            parts, self._labelled, seed=self.recipe.seed, needed=self.has_baseline
        )
        weighted = any("weight" in part.rows.column_names for part in parts)
        return parts, {"weighted": weighted, "pairs": "eval" in paired, **counts.get("train", LabelCounts())._asdict()}

    def describe_rows(self, facts: dict[str, Any]) -> list[str]:
        """Return a log line about the balance of both kinds of answers."""
        options = self.options
        weights = (options.desirable_weight, options.undesirable_weight)
        return [describe_balance(facts[DESIRABLE], facts[UNDESIRABLE], *weights)]

    def _labelled(self, row: Row) -> list[dict[str, Any]]:
        """Return the labelled answers of one row, two for a pair; raises `RowError` for an invalid row."""
        converted = convert(row, self.formats)
        return split_pair(converted) if "chosen" in converted else [converted]

    def encode_rows(self, rows: list[Row], facts: dict[str, Any]) -> list[list[Row] | RowError]:
        """Return the prepared rows of each row, two for a pair, or its `RowError`. All are tokenized in one call."""
        encode = partial(
            labelled.encode_labelled,
            self.tokenizer,
            as_chat=self.options.chat == "auto",
            variables=self.variables,
            length=self.recipe.data.max_length,
            policy=self.recipe.data.truncation or self.default_truncation,
        )
        return encode_parsed(rows, lambda row: labelled.with_mismatched(self._labelled(row), row), encode)

    def load_model(self, facts: dict[str, Any], **kwargs: Any) -> tuple[nn.Module, list[str]]:
        """Return the causal language model, and the names of its new modules, of which there are none."""
        self._declare(facts)
        return super().load_model(facts, **kwargs)

    def blank(self, row: Row) -> Row:
        """Return the row as padding, with no trained token and no weight."""
        return labelled.blank_labelled(row)

    def collate(self, rows: list[Row]) -> Batch:
        """Return the batch of the own answers (`collate_labelled`), and under other keys that of mismatched ones.

        It also has `row_sources` and `row_numbers`, both `[R]` int64: the row of the data that each answer came from.
        """
        import torch

        is_flat = self.is_flat and rows[0]["training"]
        arguments: dict[str, Any] = {"is_flat": is_flat, "attn_implementation": self.recipe.model.attn_implementation}
        padding = self.tokenizer.pad_token_id
        batch = labelled.collate_labelled(rows, labelled.own_sides(rows), padding, **arguments)
        if self.has_baseline:
            others = labelled.collate_labelled(rows, labelled.mismatched_sides(rows), padding, **arguments)
            batch |= {name + MISMATCHED: value for name, value in others.items()}
        for name in (REFERENCE, MISMATCHED_REFERENCE):
            if name in rows[0]:
                batch[name] = torch.tensor([row[name] if row["items"] else 0.0 for row in rows], dtype=torch.float64)
        for name, column in zip(PLACES, ("source", "row"), strict=True):
            batch[name] = torch.tensor([int(row.get(column, 0)) for row in rows], dtype=torch.int64)
        return batch

    def count(self, batch: Batch) -> dict[str, Any]:  # type: ignore[override]
        """Return the rows, their weights, and the rows of each kind."""
        units, is_desirable = batch["weight_units"], batch["is_desirable"]
        return {
            ITEMS: int((units > 0).sum()),
            WEIGHTS: int(units.sum()) * COUNT_UNIT,
            DESIRABLE: int(((units > 0) & is_desirable).sum()),
            UNDESIRABLE: int(((units > 0) & ~is_desirable).sum()),
        }

    def derive(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the log-probabilities of the answers under the reference: new columns of each row."""
        own, others = _own(batch), _others(batch)
        columns = {REFERENCE: -side_sums(reference_nll(model, model_inputs(own), self.recipe), own)}
        if self.has_baseline:
            nll = reference_nll(model, model_inputs(others), self.recipe)
            columns[MISMATCHED_REFERENCE] = -side_sums(nll, others)
        return columns

    def derived_from(self) -> list[str]:
        """Return the loss, the only option that decides which columns there are."""
        return [self.options.loss]

    def _mismatched_ratios(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return, as the first pass of a step, the log-ratio of each mismatched answer."""
        others = _others(batch)
        logps = -side_sums(model(**model_inputs(others))["nll"], others)
        return {"mismatched": logps - batch[MISMATCHED_REFERENCE]}

    def loss(self, model: nn.Module, batch: Batch, seen: Seen | None = None) -> dict[str, Any]:
        """Return the contributions to the loss `[R]` float32, and the notes."""
        baseline: Tensor | float = 0.0
        if seen is not None:
            ratios = seen.values["mismatched"]
            baseline = kto_baseline(ratios.sum(), len(ratios))
        logps, ratios = self._log_ratios(model, batch)
        is_desirable, real = batch["is_desirable"], batch["weight_units"] > 0
        notes: dict[str, Tensor] = {}
        for name, wide in (("rewards", self.options.beta * ratios.detach()), ("logps", logps.detach())):
            values = wide.float()
            notes |= {f"{name}/chosen": values * (real & is_desirable)}
            notes |= {f"{name}/rejected": values * (real & ~is_desirable)}
        if self.has_baseline:
            notes["kl"] = (baseline * real).float()
        losses = self._values(ratios, is_desirable, baseline) * pair_weights(batch)
        return {self.options.loss: losses.float(), NOTES: notes}

    def _log_ratios(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the log-probability of each answer, and its difference to that under the reference."""
        own = _own(batch)
        logps = -side_sums(model(**model_inputs(own))["nll"], own)
        return logps, logps - batch[REFERENCE]

    def _values(self, ratios: Tensor, is_desirable: Tensor, baseline: Tensor | float) -> Tensor:
        """Return the loss of each row, without its weight."""
        options = self.options
        return kto(
            ratios,
            is_desirable,
            beta=options.beta,
            baseline=baseline,
            desirable_weight=options.desirable_weight,
            undesirable_weight=options.undesirable_weight,
        )

    def eval_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the values of each row, `[R]` float64. `items` are the weights.

        The baseline is that of all rows, which only `metrics` has. So `loss` is the loss without a baseline.
        """
        logps, ratios = self._log_ratios(model, batch)
        weights, is_desirable = pair_weights(batch), batch["is_desirable"]
        values = {"loss": self._values(ratios, is_desirable, 0.0) * weights, "items": weights}
        values |= {"logps": logps, "ratios": ratios, "is_desirable": is_desirable}
        values |= {name: batch[name] for name in PLACES}
        if self.has_baseline:
            values |= self._mismatched_ratios(model, batch)
        return {name: value.double() for name, value in values.items()}

    def loss_of_rows(self, rows: dict[str, np.ndarray]) -> np.ndarray:
        """Return the loss of each row with the baseline of all rows, times its weight, `[N]` float64."""
        import torch

        baseline: Tensor | float = 0.0
        if self.has_baseline:
            mismatched = torch.from_numpy(rows["mismatched"])
            baseline = kto_baseline(mismatched.sum(), len(mismatched))
        ratios, is_desirable = torch.from_numpy(rows["ratios"]), torch.from_numpy(rows["is_desirable"] > 0)
        losses: np.ndarray = self._values(ratios, is_desirable, baseline).numpy()
        return losses * rows["items"]

    def metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the loss per row, with the baseline of all rows, and rewards and log-probabilities by TRL's names.

        The accuracy is a mean over pairs of which both answers are evaluated. Values of a kind of answers without rows
        are left out.
        """
        is_desirable = rows["is_desirable"] > 0
        results = {"loss": mean_by_weight(self.loss_of_rows(rows), rows["items"])}
        for name, values in (("rewards", self.options.beta * rows["ratios"]), ("logps", rows["logps"])):
            for kind, there in (("chosen", is_desirable), ("rejected", ~is_desirable)):
                if there.any():
                    results[f"{name}/{kind}"] = float(values[there].mean())
        if len(set(is_desirable.tolist())) == 2:
            results["rewards/margins"] = results["rewards/chosen"] - results["rewards/rejected"]
        if ACCURACIES in self.metric_names:
            first = answer_pairs([rows[name] for name in PLACES], is_desirable)
            margins = self.options.beta * (rows["ratios"][first] - rows["ratios"][first + 1])
            logps = rows["logps"][first] + rows["logps"][first + 1]
            if len(first):
                results[ACCURACIES] = float(is_right(margins, logps, self.options.beta).mean())
        return {name: results[name] for name in self.metric_names if name in results}

    def describe_row(self, row: Row, facts: dict[str, Any]) -> tuple[list[Span], dict[str, str]]:
        """Return the spans of the prompt with its own answer, and with the mismatched one; and the label."""
        return labelled.describe_labelled(self.tokenizer, row)

    def count_answers(self, rows: Dataset, facts: dict[str, Any]) -> dict[str, int]:
        """Return the number of prepared rows of each kind."""
        desirable = int(sum(rows.with_format("numpy")["label"][:]))
        return {DESIRABLE: desirable, UNDESIRABLE: len(rows) - desirable}


def _own(batch: Batch) -> Batch:
    """Return the part of a batch with the own answers."""
    names = (REFERENCE, MISMATCHED_REFERENCE)
    return {name: value for name, value in batch.items() if not name.endswith(MISMATCHED) and name not in names}


def _others(batch: Batch) -> Batch:
    """Return the part of a batch with the mismatched answers."""
    return {name.removesuffix(MISMATCHED): value for name, value in batch.items() if name.endswith(MISMATCHED)}
