"""Train a causal language model on pairs of answers, of which one is preferred: DPO, ORPO, SimPO and others.

The losses are those of shared/preference_losses.py, alone or mixed. Each is a mean over pairs. The log-probabilities of
a reference are columns that the starting weights give. Shapes: P pairs, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from ftcli.data.formats import convert
from ftcli.runtime.errors import InputError, RowError
from ftcli.tasks import sft
from ftcli.tasks.protocol import COUNT_UNIT, ITEMS, NOTES, Batch, Row, Seen, Span, Term
from ftcli.tasks.shared import pairs
from ftcli.tasks.shared.judged_answers import AsChat, ChatTemplate, encode_parsed, reference_nll, whole_row_problems
from ftcli.tasks.shared.pair_reports import (
    ACCURACIES,
    PAIR_METRICS,
    describe_pair,
    is_right,
    mean_by_weight,
    pair_metrics,
    pair_notes,
    source_counts,
    source_notes,
)
from ftcli.tasks.shared.preference_losses import PairLogps, implicit_rewards, match_ranks
from ftcli.tasks.shared.preference_options import PREFERENCE_LOSSES, WEIGHT, check_losses_are_mappings, loss_options

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe
    from ftcli.data.mixture import SourceRows

LIKELIHOOD = "nll"  # name of the likelihood term
WEIGHTS, TOKENS = "weights", "chosen_tokens"  # names of counts: of weighted pairs, and of trained tokens
REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")


class Options(BaseModel):
    """Keys of task_options for preference."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    losses: dict[str, dict[str, float]] = Field(
        {"sigmoid": {"beta": 0.1}},
        min_length=1,
        description=f"Losses by name, each with its options: {', '.join(PREFERENCE_LOSSES)}. Several are added up, "
        "each times its option `weight`, 1 by default. The other options are in docs/explanation/preference-losses.md.",
    )
    likelihood: float | None = Field(
        None,
        ge=0,
        description="Weight of the negative log-likelihood of the chosen answers, a mean over their tokens. Absent: 1 "
        "with cpo or orpo, whose papers add it, else 0.",
    )
    chat: AsChat = "auto"
    chat_template: ChatTemplate = None

    @field_validator("losses", mode="before")
    @classmethod
    def _check_mappings(cls, losses: Any) -> Any:
        try:
            check_losses_are_mappings(losses)
        except InputError as error:
            raise ValueError(_text_of(error)) from None
        return losses

    @field_validator("losses")
    @classmethod
    def _check_losses(cls, losses: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
        for name, given in losses.items():
            if not 0 < given.get(WEIGHT, 1.0) < inf:
                raise ValueError(f"the weight of {name} is {given[WEIGHT]:g}; it must be above 0")
            try:
                _options_of(name, given)
            except InputError as error:
                raise ValueError(_text_of(error)) from None
        return losses


class Task(sft.Task):
    """Training on pairs of answers. Answers are trained; prompts are context."""

    item: Literal["token", "sample"] = "sample"
    formats: tuple[str, ...] = ("compared",)
    answers_per_row = pairs.SIDES
    metric_names: tuple[str, ...] = PAIR_METRICS
    uncompared_metrics: tuple[str, ...] = (ACCURACIES,)
    options: Any
    starting_recipe: Mapping[str, Mapping[str, Any]] = {
        **sft.Task.starting_recipe,
        "batch": {"global_size": 16},
        "optimizer": {"learning_rate": 5e-6},
        "schedule": {"name": "cosine", "warmup_steps": 0.1},
    }

    recipe_problems = staticmethod(whole_row_problems)

    def __init__(self, recipe: Recipe, options: Options) -> None:
        super().__init__(recipe, sft.Options(chat=options.chat, chat_template=options.chat_template))
        self.options = options
        self.losses = {name: PREFERENCE_LOSSES[name] for name in options.losses}
        self.values = {name: _options_of(name, given) for name, given in options.losses.items()}
        # Rewards are on the scale of the first loss.
        self.beta = next(iter(self.values.values()))["beta"]
        adds = 1.0 if any(loss.adds_likelihood for loss in self.losses.values()) else 0.0
        self.likelihood = adds if options.likelihood is None else options.likelihood
        self.needs_reference = any(loss.needs_reference for loss in self.losses.values())
        self.needs_ranks = any(loss.needs_ranks for loss in self.losses.values())
        further = [*list(self.losses)[1:], *([LIKELIHOOD] if self.likelihood else [])]
        self.metric_names = (*PAIR_METRICS, *further)
        self._take_facts({"weighted": False, "given": False, "sources": {}})

    def _take_facts(self, facts: dict[str, Any]) -> None:
        """Declare terms, notes, the first pass and derived columns for rows with these facts."""
        self.facts = facts
        per_pair = WEIGHTS if facts["weighted"] else ITEMS
        self.terms = {name: Term(given.get(WEIGHT, 1.0), per_pair) for name, given in self.options.losses.items()}
        if self.likelihood:
            self.terms[LIKELIHOOD] = Term(self.likelihood, TOKENS)
        self.sources = facts["sources"].get("train", [])
        self.notes = pair_notes(self.sources)
        # Other modules look for these attributes, so they are absent where they are not needed.
        if self.needs_ranks:
            self.first_pass = self._differences
        if self.needs_reference and not facts["given"]:
            self.derive = self._reference
        else:
            vars(self).pop("derive", None)

    def survey_parts(self, parts: list[SourceRows]) -> tuple[list[SourceRows], dict[str, Any]]:
        """Return the parts unchanged, and whether rows have weights or log-probabilities of a reference.

        Returns:
            The parts, and {"weighted", "given", "sources"}: the last are the names of several sources by split.
        """
        names = [set(part.rows.column_names) for part in parts]
        labels = {split: [part.label for part in parts if part.split == split] for split in ("train", "eval")}
        facts = {
            "weighted": any("weight" in columns for columns in names),
            "given": self.needs_reference and any(set(REFERENCE) & columns for columns in names),
            "sources": {split: names for split, names in labels.items() if len(names) > 1},
        }
        return parts, facts

    def encode_rows(self, rows: list[Row], facts: dict[str, Any]) -> list[list[Row] | RowError]:
        """Return the prepared row of each pair, or its `RowError`. All answers are tokenized in one call."""
        encode = partial(
            pairs.encode_pairs,
            self.tokenizer,
            as_chat=self.options.chat == "auto",
            variables=self.variables,
            length=self.recipe.data.max_length,
            policy=self.recipe.data.truncation or self.default_truncation,
        )
        return encode_parsed(rows, lambda row: [self._checked(convert(row, self.formats), facts)], encode)

    def _checked(self, pair: Row, facts: dict[str, Any]) -> Row:
        """Return a pair without columns that no loss of the recipe reads; raises `RowError` for a missing one."""
        if facts["given"] and REFERENCE[0] not in pair:
            raise RowError(f"has no {' and '.join(REFERENCE)}, but the data has these columns: fill or delete them")
        if "margin" in pair and not any(loss.takes_margin for loss in self.losses.values()):
            raise RowError(f"has a margin, which the losses {', '.join(self.losses)} do not use; sigmoid does")
        return pair if facts["given"] else {name: value for name, value in pair.items() if name not in REFERENCE}

    def load_model(self, facts: dict[str, Any], **kwargs: Any) -> tuple[nn.Module, list[str]]:
        """Return the causal language model, and the names of its new modules, of which there are none."""
        self._take_facts(facts)
        return super().load_model(facts, **kwargs)

    def blank(self, row: Row) -> Row:
        """Return the pair as padding, with no trained token and no weight."""
        return pairs.blank_pair(row)

    def collate(self, rows: list[Row]) -> Batch:
        """Return a batch of both sides of all pairs (`pairs.collate_pairs`), with the number of each pair's source."""
        import torch

        batch = pairs.collate_pairs(
            rows,
            self.tokenizer.pad_token_id,
            is_flat=self.is_flat and rows[0]["training"],
            attn_implementation=self.recipe.model.attn_implementation,
        )
        return batch | {"pair_sources": torch.tensor([int(row.get("source", 0)) for row in rows])}

    def count(self, batch: Batch) -> dict[str, Any]:  # type: ignore[override]
        """Return the pairs, their weights, the weighted tokens of chosen answers, and the pairs of each source."""
        units = batch["weight_units"]
        tokens = batch["side_tokens"].view(-1, pairs.SIDES)[:, 0]
        return {
            ITEMS: int((units > 0).sum()),
            WEIGHTS: int(units.sum()) * COUNT_UNIT,
            TOKENS: int((units * tokens).sum()) * COUNT_UNIT,
            **source_counts(batch["pair_sources"], units > 0, self.sources),
        }

    def loss(self, model: nn.Module, batch: Batch, seen: Seen | None = None) -> dict[str, Any]:
        """Return the contributions to each term and the notes: `[P]` float32, for the likelihood term `[N]`."""
        nll = model(**pairs.model_inputs(batch))["nll"]
        logps, matched = pairs.pair_logps(nll, batch), None
        if seen is not None:
            matched = match_ranks(seen.values["policy"], seen.values["reference"])[seen.positions]
        return self._contributions(nll, batch, logps, matched) | {NOTES: self._notes(batch, logps)}

    def _contributions(self, nll: Tensor, batch: Batch, logps: PairLogps, matched: Tensor | None) -> dict[str, Tensor]:
        """Return the contributions to each term."""
        weights = pairs.pair_weights(batch)
        parts: dict[str, Tensor] = {}
        for name, loss in self.losses.items():
            further = {"matched": matched} if loss.needs_ranks else {}
            parts[name] = (loss.function(logps, **self.values[name], **further) * weights).float()
        if self.likelihood:
            parts[LIKELIHOOD] = nll * pairs.token_weights(batch)
        return parts

    def _notes(self, batch: Batch, logps: PairLogps) -> dict[str, Tensor]:
        """Return rewards and log-probabilities of each pair, in total and by source."""
        values = self._values(logps)
        real = batch["weight_units"] > 0
        values = {name: value.float() * real for name, value in values.items()}
        return values | source_notes(values, batch["pair_sources"], self.sources)

    def _values(self, logps: PairLogps) -> dict[str, Tensor]:
        """Return the values that are watched, each `[P]` without gradient."""
        first = next(iter(self.losses.values()))
        chosen, rejected = logps.chosen.detach(), logps.rejected.detach()
        rewards = implicit_rewards(logps, self.beta)
        if first.compares_means:
            chosen, rejected = (value.detach() for value in logps.mean_logps())
            rewards = (self.beta * chosen, self.beta * rejected)
        margins = rewards[0] - rewards[1]
        right = is_right(margins, chosen + rejected, self.beta)
        values = (rewards[0], rewards[1], right.to(margins.dtype), margins, chosen, rejected)
        return dict(zip(PAIR_METRICS[1:], values, strict=True))

    def _differences(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return, as the first pass of a step, what `match_ranks` needs of each pair."""
        logps = pairs.pair_logps(model(**pairs.model_inputs(batch))["nll"], batch)
        assert logps.ref_chosen is not None and logps.ref_rejected is not None
        return {"policy": logps.chosen - logps.rejected, "reference": logps.ref_chosen - logps.ref_rejected}

    def _reference(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the log-probabilities of both answers under the reference: new columns of each pair."""
        nll = reference_nll(model, pairs.model_inputs(batch), self.recipe)
        logps = pairs.pair_logps(nll, batch)
        return dict(zip(REFERENCE, (logps.chosen, logps.rejected), strict=True))

    def derived_from(self) -> list[str]:
        """Return no options: the reference depends on none, so a run with another loss finds it."""
        return []

    def eval_step(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return the values of each pair, `[P]` float64. `items` are the weights; `loss` is that of the first term.

        aot compares pairs with equal ranks. The ranks of all rows are known to `metrics` only, so its values here are
        those of each pair with its own reference.
        """
        nll = model(**pairs.model_inputs(batch))["nll"]
        logps = pairs.pair_logps(nll, batch)
        own = {}
        if self.needs_ranks:
            assert logps.ref_chosen is not None and logps.ref_rejected is not None
            own = {"policy": logps.chosen - logps.rejected, "reference": logps.ref_chosen - logps.ref_rejected}
        parts = self._contributions(nll, batch, logps, own.get("reference"))
        first, *others = (name for name in parts if name != LIKELIHOOD)
        values = {"loss": parts[first], "items": pairs.pair_weights(batch), **{name: parts[name] for name in others}}
        if self.likelihood:
            tokens = batch["side_tokens"].view(-1, pairs.SIDES)[:, 0]
            values |= {"chosen_nll": -logps.chosen * values["items"], TOKENS: tokens * values["items"]}
        values |= {**self._values(logps), **own, "pair_sources": batch["pair_sources"]}
        return {name: value.double() for name, value in values.items()}

    def metrics(self, rows: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the mean of each term, and rewards and log-probabilities by the names that TRL has for them."""
        labels = self.facts["sources"].get("eval", [])
        losses = {name: self._losses(name, rows) for name in self.losses}
        first, *others = self.losses
        values = {"loss": mean_by_weight(losses[first], rows["items"])} | pair_metrics(rows, labels)
        extra = {name: mean_by_weight(losses[name], rows["items"]) for name in others}
        if self.likelihood:
            extra[LIKELIHOOD] = mean_by_weight(rows["chosen_nll"], rows[TOKENS])
        by_source = {name: values.pop(name) for name in list(values) if name not in PAIR_METRICS}
        return values | extra | by_source

    def loss_of_rows(self, rows: dict[str, np.ndarray]) -> np.ndarray:
        """Return the first loss of each row times its weight, `[N]` float64. One that compares ranks needs all rows."""
        return self._losses(next(iter(self.losses)), rows)

    def _losses(self, name: str, rows: dict[str, np.ndarray]) -> np.ndarray:
        """Return a loss of each row times its weight, `[N]` float64."""
        if self.losses[name].needs_ranks:
            return self._ranked(name, rows) * rows["items"]
        return rows["loss" if name == next(iter(self.losses)) else name]

    def _ranked(self, name: str, rows: dict[str, np.ndarray]) -> np.ndarray:
        """Return the values of a loss that compares ranks, over all evaluation rows, `[rows]` float64."""
        import torch

        policy, reference = (torch.from_numpy(rows[key]) for key in ("policy", "reference"))
        zeros, ones = torch.zeros_like(policy), torch.ones_like(policy)
        logps = PairLogps(policy, zeros, ones, ones)
        matched = match_ranks(policy, reference)
        value: np.ndarray = self.losses[name].function(logps, **self.values[name], matched=matched).numpy()
        return value

    def describe_row(self, row: Row, facts: dict[str, Any]) -> tuple[list[Span], dict[str, str]]:
        """Return the spans of the prompt and of both answers, and further columns of the pair."""
        return describe_pair(self.tokenizer, row)

    def probe(self, batch: Batch) -> Batch:
        """Return the arguments with which the plain model computes the logits of the chosen answers."""
        return {name: batch[name][:: pairs.SIDES] for name in ("input_ids", "attention_mask")}


def _options_of(name: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return the value of every option of a loss, without its weight."""
    return loss_options(name, {option: value for option, value in values.items() if option != WEIGHT}, "")


def _text_of(error: InputError) -> str:
    """Return the problems of an error and their hints as one text."""
    return "; ".join(f"{one.what}; {one.hint}" if one.hint else one.what for one in error.problems)
