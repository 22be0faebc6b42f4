"""Loss terms and notes of a step: from what a task returns for a micro-batch to means over the global batch.

    total = sum over terms k of weight_k * S_k / D_k

S_k is the sum of a term's contributions over all micro-batches and ranks. D_k is its count over the same rows. Counts
are known on the host before the first backward pass. All sums of a step travel in one device tensor:

    [first term | first term by source | further terms | notes]

A task that declares neither terms nor notes has one term, `loss`, which is a mean over `items`. Names no task, no model
and no hardware.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ftcli.runtime.errors import InputError
from ftcli.tasks.protocol import COUNT_UNIT, DEFAULT_TERMS, ITEMS, NOTES, Term
from ftcli.training.batches.window import sum_by_source

if TYPE_CHECKING:
    from ftcli.tasks.protocol import Batch, Task
    from ftcli.training.batches.window import ControlMessage


@dataclass
class Contributions:
    """What a task's `loss` returned for one micro-batch.

    Attributes:
        terms: Contributions of each term, `[N_k]` float32, in the order of the declaration.
        notes: Values of each note, `[n]`, without gradient, in the order of the declaration.
        sums: Sum of each term's contributions, scalars with a gradient.
    """

    terms: list[Tensor]
    notes: list[Tensor]

    def __post_init__(self) -> None:
        self.sums = [part.sum() for part in self.terms]

    def scaled(self, factors: Iterable[float]) -> Tensor:
        """Return the scalar to compute gradients of: each term's sum times its factor, added up."""
        return reduce(add, [part * factor for part, factor in zip(self.sums, factors, strict=True)])

    def unscaled(self) -> Tensor:
        """Return the sum of all contributions, a scalar without gradient. It is finite if they are."""
        return reduce(add, [part.detach() for part in self.sums])


@dataclass(frozen=True)
class LossTerms:
    """The terms and notes of a task, and the sources that its first term is reported for.

    Attributes:
        terms: Terms by name. The first one is reported by source.
        notes: Name of a note -> name of the count that it is a mean over.
        sources: Names of the sources, where several are reported.
        is_declared: Whether the task declares terms. The means of terms are reported only then.
    """

    terms: Mapping[str, Term]
    notes: Mapping[str, str]
    sources: list[str]
    is_declared: bool

    @classmethod
    def of(cls, task: Task, sources: list[str]) -> LossTerms:
        """Return the terms and notes that a task declares.

        Args:
            task: The task.
            sources: Names of the sources of the training rows, if there are several.

        Raises:
            InputError: A declaration is invalid.
        """
        terms: Mapping[str, Term] = getattr(task, "terms", DEFAULT_TERMS)
        notes: Mapping[str, str] = getattr(task, "notes", {})
        _check(terms, notes)
        first = next(iter(terms.values()))
        # The items of each source are counted, no other count is.
        return cls(terms, notes, sources if first.count_name == ITEMS else [], terms is not DEFAULT_TERMS)

    @cached_property
    def further_counts(self) -> list[str]:
        """Names of the counts besides `items`, in the order in which the control message has them."""
        names = [*(term.count_name for term in self.terms.values()), *self.notes.values()]
        return [name for name in dict.fromkeys(names) if name != ITEMS]

    def count(self, task: Task, batches: list[Batch]) -> list[int]:
        """Return the counts of some micro-batches: `items`, then `further_counts` in units of `COUNT_UNIT`.

        Raises:
            InputError: The task's `count` did not return the counts that its terms and notes need.
        """
        totals = [0] * (1 + len(self.further_counts))
        for batch in batches:
            counts: Any = task.count(batch)
            by_name = counts if isinstance(counts, dict) else {ITEMS: counts}
            if next(iter(by_name), None) != ITEMS or not set(self.further_counts) <= set(by_name):
                needed = ", ".join([ITEMS, *self.further_counts])
                raise InputError(f"the task's `count` returned {list(by_name)}, but {needed} are needed")
            totals[0] += int(by_name[ITEMS])
            for place, name in enumerate(self.further_counts, start=1):
                totals[place] += _in_units(name, by_name[name])
        return totals

    def denominators(self, message: ControlMessage) -> dict[str, float]:
        """Return the counts of the whole step by name."""
        further = zip(self.further_counts, message.further_counts, strict=True)
        return {ITEMS: message.items} | {name: count * COUNT_UNIT for name, count in further}

    def factors(self, message: ControlMessage, repeats: int) -> list[float]:
        """Return what each term's sum in a micro-batch is multiplied by before the backward pass.

        Args:
            message: The control message of the step.
            repeats: Accumulation times processes: gradients are divided by both later.
        """
        counts = self.denominators(message)
        return [repeats / (counts[t.count_name] or 1) * _weight(t, counts) for t in self.terms.values()]

    def read(self, result: Any) -> Contributions:
        """Return what a task's `loss` returned, in the order of the declaration.

        Raises:
            InputError: A declared term or note is missing, or another one is returned.
        """
        if isinstance(result, Tensor):
            if len(self.terms) > 1 or self.notes:
                raise InputError(f"the task's `loss` returned a tensor, but {self._named()} are declared")
            return Contributions([result], [])
        notes = result.get(NOTES, {})
        if set(result) - {NOTES} != set(self.terms) or set(notes) != set(self.notes):
            returned = ", ".join([*(name for name in result if name != NOTES), *(f"note {name}" for name in notes)])
            raise InputError(f"the task's `loss` returned {returned or 'nothing'}, but {self._named()} are declared")
        return Contributions([result[name] for name in self.terms], [notes[name].detach() for name in self.notes])

    def _named(self) -> str:
        return ", ".join([*self.terms, *(f"note {name}" for name in self.notes)])

    def sums(self, contributions: Contributions, item_sources: Tensor | None) -> Tensor:
        """Return the sums of one micro-batch on the device, `[1 + S + K - 1 + M]` float32. No device sync.

        Args:
            contributions: Contributions and notes of the micro-batch.
            item_sources: Number of the source of each contribution of the first term, `[N]`; None for one source.

        Raises:
            InputError: The first term's contributions cannot be divided by source.
        """
        sources = item_sources if self.sources else None
        terms = [part.detach() for part in contributions.sums]
        first = sum_by_source(terms[0], contributions.terms[0].detach(), sources, len(self.sources))
        further = terms[1:] + [values.float().sum() for values in contributions.notes]
        return torch.cat([first, torch.stack(further).to(first)]) if further else first

    @property
    def width(self) -> int:
        """Number of sums of a step."""
        return len(self.sources) + len(self.terms) + len(self.notes)

    def means(self, sums: Tensor, message: ControlMessage) -> StepMeans:
        """Return the means of a step.

        Args:
            sums: Sums of all micro-batches and ranks, `[width]`, on the device.
            message: The control message of the step.
        """
        items = dict(zip(self.sources, message.source_items, strict=True))
        return StepMeans(self, sums, self.denominators(message), items)


@dataclass(frozen=True)
class StepMeans:
    """Sums and counts of one step over the whole global batch. Only reading a mean waits for the device.

    Attributes:
        declared: The terms and notes.
        sums: `[width]` float32 on the device.
        counts: Counts of the step by name.
        source_items: Items of each of several sources.
    """

    declared: LossTerms
    sums: Tensor
    counts: Mapping[str, float]
    source_items: dict[str, int]

    @cached_property
    def loss(self) -> Tensor:
        """The loss of the step, a scalar on the device: the sum of its weighted terms."""
        places = [0, *range(1 + len(self.source_items), len(self.source_items) + len(self.declared.terms))]
        return reduce(
            add,
            [
                _weighted(self.sums[place] / (self.counts[term.count_name] or 1), _weight(term, self.counts))
                for place, term in zip(places, self.declared.terms.values(), strict=True)
            ],
        )

    @property
    def source_sums(self) -> Tensor:
        """Summed loss of each source, `[S]` on the device."""
        return self.sums[1 : 1 + len(self.source_items)]

    @cached_property
    def _values(self) -> list[float]:
        """All sums on the host; waits for the device."""
        return self.sums.tolist()

    def source_losses(self) -> dict[str, float]:
        """Return the mean loss of each source that has items."""
        sums = zip(self.source_items.items(), self._values[1:], strict=False)
        return {name: total / items for (name, items), total in sums if items}

    def term_losses(self) -> dict[str, float]:
        """Return the mean of each declared term before its weight. A term whose count is 0 is left out."""
        if not self.declared.is_declared:
            return {}
        totals = [self._values[0], *self._values[1 + len(self.source_items) :]]
        counts = [self.counts[term.count_name] for term in self.declared.terms.values()]
        named = zip(self.declared.terms, totals, counts, strict=False)
        return {name: total / count for name, total, count in named if count}

    def notes(self) -> dict[str, float]:
        """Return the mean of each note. A note whose count is 0 is left out."""
        totals = self._values[len(self.source_items) + len(self.declared.terms) :]
        named = zip(self.declared.notes.items(), totals, strict=True)
        return {name: total / self.counts[count] for (name, count), total in named if self.counts[count]}


def _weight(term: Term, counts: Mapping[str, float]) -> float:
    """Return the weight of a term; 0 in a step where nothing of it is counted."""
    return term.weight if counts[term.count_name] else 0.0


def _weighted(value: Tensor, weight: float) -> Tensor:
    """Return a value times a weight, without an operation on the device for the weight 1."""
    return value if weight == 1.0 else value * weight


def _in_units(name: str, value: Any) -> int:
    """Return a count in units of `COUNT_UNIT`. Sums of integers do not depend on the order of ranks."""
    units = float(value) / COUNT_UNIT
    if not units.is_integer() or units < 0:
        raise InputError(
            f"the task's `count` returned {value} for {name}; counts are multiples of 2^-16, 0 or more",
            hint="round weights to multiples of ftcli.tasks.protocol.COUNT_UNIT, in the loss as well",
        )
    return int(units)


def _check(terms: Mapping[str, Term], notes: Mapping[str, str]) -> None:
    if not terms:
        raise InputError("the task declares no term of its loss", hint="remove `terms` to train one mean over `items`")
    if twice := set(terms) & set(notes):
        raise InputError(f"the task declares {', '.join(sorted(twice))} as terms and as notes")
    for name in [*terms, *notes]:
        if name == NOTES or name.endswith("/loss"):
            raise InputError(f"the task declares '{name}', which is the name of other values", hint="rename it")
    for name, term in terms.items():
        if not math.isfinite(term.weight):
            raise InputError(f"the weight of the term {name} is {term.weight}", hint="use a finite number")
