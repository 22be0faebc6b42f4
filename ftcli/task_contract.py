"""Check the contract of tasks: sums that add up, counts that equal the mask, padding without effect.

ftcli's tests apply these checks to the shipped tasks. Apply them to your own task with
`ftcli.testing.check_task("my_recipe.yaml")`, or with pytest. The model must be small, because it runs on the CPU.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_my_task(check):
        check(TaskCase("my_recipe.yaml"))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ftcli.config.task_registry import refresh_task
from ftcli.models.own_model import probe_tensor
from ftcli.runtime.errors import InputError
from ftcli.tasks.protocol import derives_columns, has_first_pass

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ftcli.config.recipe import Recipe
    from ftcli.training.terms import Contributions


IDS = "first pass ids"  # key of a batch under which this module keeps the ids of its rows, for a first pass
ROWS = 5  # training rows that the checks use
CLOSE = 1e-5  # relative tolerance, for sums in another order


class TaskCase:
    """A task with the rows and the model of its recipe. The model is in evaluation mode, so that dropout is off."""

    def __init__(self, recipe: Recipe | str | Path) -> None:
        """Load the recipe, prepare its rows and load its model in float32.

        Raises:
            InputError: For an invalid recipe, or one with fewer than `ROWS` training rows.
        """
        import torch

        from ftcli.config.load import load_recipe
        from ftcli.data.cache import prepare_rows
        from ftcli.tasks.build import build_task
        from ftcli.training.batches.dataloaders import Rows
        from ftcli.training.terms import LossTerms

        self.recipe = load_recipe(recipe) if isinstance(recipe, str | Path) else recipe
        refresh_task(self.recipe.task)
        self.task = build_task(self.recipe)
        prepared = prepare_rows(self.recipe, self.task)
        if len(prepared.train) < ROWS:
            raise InputError(f"the contract needs {ROWS} training rows, and the recipe has {len(prepared.train)}")
        self.facts = prepared.facts
        self.model: Any = self.task.load_model(prepared.facts, dtype=torch.float32)[0]
        self.task.finish_model(self.model)
        self.model.eval()
        self.terms = LossTerms.of(self.task, [])
        self.rows = Rows(prepared.train, self.task, training=False)
        if derives_columns(self.task):
            self.rows.columns = self._derived_columns()

    def _derived_columns(self) -> dict[str, Any]:
        """Return the columns that the task derives from the first `ROWS` rows, the rest left out, made 10 % smaller.

        They then differ from the values of `self.model`, as after some steps of a run. If they were equal, the
        difference of a value and its derived column would consist of rounding errors only.
        """
        import torch

        task: Any = self.task
        with torch.no_grad():
            columns = task.derive(self.model, task.collate([self.rows[0, index][0] for index in range(ROWS)]))
        return {name: (0.9 * value if value.is_floating_point() else value).numpy() for name, value in columns.items()}

    def batch(self, *indices: int) -> dict[str, Any]:
        """Return the collated batch of some training rows. The index `ftcli.runtime.seeds.PADDING` is a padding row."""
        rows = [document for index in indices for document in self.rows[0, index]]
        ids = {IDS: [row["id"] for row in rows]} if has_first_pass(self.task) else {}
        return self.task.collate(rows) | ids

    def plain_batch(self, *indices: int) -> dict[str, Any]:
        """Return the batch of some training rows as a task is given it."""
        return {name: value for name, value in self.batch(*indices).items() if name != IDS}

    def contributions(self, batch: dict[str, Any]) -> Contributions:
        """Return the contributions to each term of a batch, and its notes."""
        return self.contributions_of(self.task, self.model, batch)

    def contributions_of(self, task: Any, model: nn.Module, batch: dict[str, Any]) -> Contributions:
        """Return the contributions of a batch under another task or model.

        For a task with a first pass the step is always that of the first `ROWS` rows, under this case's own model.
        """
        if not has_first_pass(task):
            return self.terms.read(task.loss(model, batch))
        import numpy as np
        import torch

        from ftcli.training.first_pass import values_of

        given, step, own_task = dict(batch), self.batch(*range(ROWS)), cast("Any", self.task)
        ids, every_id = np.asarray(given.pop(IDS)), np.asarray(step.pop(IDS))
        with torch.no_grad():
            values = values_of(own_task.first_pass(self.model, step), every_id)
        return self.terms.read(task.loss(model, given, values.seen_by(ids)))

    def total(self, batch: dict[str, Any]) -> Tensor:
        """Return the weighted sum of all contributions of a batch, a scalar."""
        return self.contributions(batch).scaled(term.weight for term in self.terms.terms.values())

    def first(self, *indices: int) -> Tensor:
        """Return the contributions of some training rows to the first term, without gradient."""
        return self.contributions(self.batch(*indices)).terms[0].detach()

    def counts(self, *indices: int) -> list[int]:
        """Return all counts of some training rows, the items first."""
        return self.terms.count(self.task, [self.batch(*indices)])

    def loss(self, *indices: int) -> float:
        """Return the loss of some training rows, summed over all values."""
        return float(self.total(self.batch(*indices)).detach())


def check_task(recipe: Recipe | str | Path) -> None:
    """Apply all contract checks to the task of a recipe.

    Args:
        recipe: A recipe, or its file, with a small model and at least `ROWS` training rows.

    Raises:
        AssertionError: Checks failed. The message has one line for each.
        InputError: The recipe is invalid, or has too few training rows.

    Example:
        >>> check_task("my_recipe.yaml")
    """
    case, failed = TaskCase(recipe), []
    for check in CHECKS:
        try:
            check(case)
        except AssertionError as error:
            failed.append(f"{check.__name__}: {error}")
    if failed:
        raise AssertionError("\n".join(failed))


def loss_is_additive(case: TaskCase) -> None:
    """Check that the loss of all rows is the sum of the losses of two groups of them, and above zero."""
    together, first = case.loss(0, 1, 2, 3, 4), case.loss(0, 1)
    _expect_close(together, first + case.loss(2, 3, 4), "the loss of five rows and the sum of those of two and three")
    _expect(together > first > 0, f"the loss of five rows is {together}, and that of the first two {first}")


def count_is_additive(case: TaskCase) -> None:
    """Check that counts add up, and equal the `items` of the prepared rows."""
    each = [case.counts(index) for index in range(3)]
    added = [sum(counts) for counts in zip(*each, strict=True)]
    _expect_equal(case.counts(0, 1, 2), added, "the count of three rows and the sum of their counts")
    items = [sum(int(row["items"]) for row in case.rows[0, index]) for index in range(3)]
    _expect_equal([counts[0] for counts in each], items, "the counts and the `items` of the prepared rows")


def padding_has_no_effect(case: TaskCase) -> None:
    """Check that rows of padding change neither loss nor count."""
    from ftcli.runtime.seeds import PADDING

    _expect_equal(case.counts(0, 1, PADDING, PADDING), case.counts(0, 1), "counts with padding")
    _expect_close(case.loss(0, 1, PADDING, PADDING), case.loss(0, 1), "losses with and without padding")
    _expect_equal([row["id"] for row in case.rows[0, PADDING]], [PADDING], "ids of padding")


def padding_alone_is_zero(case: TaskCase) -> None:
    """Check that a batch of padding rows only has loss 0 and zero gradients."""
    from ftcli.runtime.seeds import PADDING

    loss = case.total(case.batch(PADDING, PADDING))
    _expect(float(loss.detach()) == 0.0, f"padding alone has loss {float(loss.detach())}")
    loss.backward()
    bad = [name for name, p in case.model.named_parameters() if p.grad is not None and p.grad.any()]
    case.model.zero_grad()
    _expect_equal(bad, [], "parameters that padding alone gives a gradient")


def parts_are_in_row_order(case: TaskCase) -> None:
    """Check that the values of the loss are in the order of the rows, so that they can be assigned to sources."""
    from ftcli.runtime.seeds import PADDING
    from ftcli.training.batches.dataloaders import Collate
    from ftcli.training.batches.window import sum_by_source

    indices = (3, PADDING, 0, 2, 4)
    rows = [[row | {"source": source} for row in case.rows[0, index]] for source, index in enumerate(indices)]
    batch = Collate(case.task, sources=True)(rows)
    ids = batch.pop("sample_ids")
    sources = batch.pop("item_sources")
    values = case.contributions(batch | ({IDS: ids.numpy()} if has_first_pass(case.task) else {})).terms[0].detach()
    if values.ndim == 0:  # a task may return the sum, for recipes with one source
        return
    each, shape = "item" if case.task.item == "token" else "row", list(values.shape)
    remedy = f"return one value per {each}, in the order of the rows, or their sum"
    _expect(values.shape == sources.shape, f"`loss` returned shape {shape}, not {list(sources.shape)}: {remedy}")
    by_row = sum_by_source(values.sum(), values, sources, len(indices))[1:].tolist()
    for index, row_loss in zip(indices, by_row, strict=True):
        expected = 0.0 if index == PADDING else float(case.first(index).sum())
        _expect_close(row_loss, expected, f"the values of the loss for row {index} and its loss alone", close=1e-4)


def trained_parameters_have_gradients(case: TaskCase) -> None:
    """Check that every trained parameter gets a gradient, except in modules that the task lists in `sparse`."""
    case.total(case.batch(0, 1, 2, 3)).backward()
    sparse = tuple(getattr(case.task, "sparse", ()))
    without = [
        name
        for name, parameter in case.model.named_parameters()
        if parameter.requires_grad and parameter.grad is None and not any(part in name for part in sparse)
    ]
    case.model.zero_grad()
    _expect_equal(without, [], "trained parameters without a gradient")


def evaluation_adds_up_to_the_loss(case: TaskCase) -> None:
    """Check that `eval_step` returns values for each row, and that the sums are the loss and the count."""
    import torch

    with torch.no_grad():
        rows = case.task.eval_step(case.model, case.plain_batch(0, 1, 2))
    sizes = {name: tuple(value.shape[:1]) for name, value in rows.items()}
    _expect_equal(sizes, dict.fromkeys(rows, (3,)), "rows of eval_step for three rows")
    first = float(case.first(0, 1, 2).sum())  # other terms are means over other counts
    _expect_close(float(rows["loss"].sum()), first, "the losses of eval_step and `loss`")
    _expect_equal(int(rows["items"].sum()), case.counts(0, 1, 2)[0], "items of eval_step and `count`")


def metrics_are_pure(case: TaskCase) -> None:
    """Check that `metrics` returns floats, the same each time, and weights rows by their items."""
    import torch

    with torch.no_grad():
        values = case.task.eval_step(case.model, case.plain_batch(0, 1, 2, 3))
    rows = {name: value.numpy() for name, value in values.items()}
    metrics = case.task.metrics(rows)
    if "loss" in metrics:
        mean = float(rows["loss"].sum() / rows["items"].sum())
        _expect_close(metrics["loss"], mean, "the metric loss and the mean over items")
    _expect_equal(case.task.metrics(rows), metrics, "metrics of the same rows")
    _expect(all(isinstance(value, float) for value in metrics.values()), f"not all metrics are floats: {metrics}")
    declared = getattr(case.task, "metric_names", None)
    if declared is not None:
        _expect_equal(tuple(metrics), declared, "names of metrics and `metric_names`")


def probe_gives_plain_logits(case: TaskCase) -> None:
    """Check that the model returns finite logits for the inputs of `probe`, which verify exports."""
    import torch

    if not hasattr(case.task, "probe"):  # optional for models outside transformers
        return
    with torch.no_grad():
        logits = probe_tensor(case.task, case.model(**case.task.probe(case.plain_batch(0, 1))))
    if logits is None:  # exports are then compared by their weights
        return
    _expect_equal(logits.shape[0], 2, "rows of the logits of two rows")
    _expect(bool(torch.isfinite(logits).all()), "logits that are not finite")


def flat_rows_equal_padded_rows(case: TaskCase) -> None:
    """Check, for a task with `packs`, that concatenated rows have the same loss and gradients as padded rows.

    Also check that no document attends to another, and that this check would fail if one did.
    """
    import torch

    from ftcli.tasks.shared.batches import ALIGNED

    if not getattr(case.task, "packs", False):
        return
    recipe = case.recipe
    data = recipe.data.model_copy(update={"padding_free": True})
    flat = type(case.task)(recipe.model_copy(update={"data": data}), case.task.options)  # type: ignore[attr-defined]
    rows = [case.rows[0, index][0] | {"training": True} for index in range(ROWS)]
    model: Any = flat.load_model(case.facts, dtype=torch.float32)[0]
    flat.finish_model(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    batch, padded = flat.collate(rows), case.batch(*range(ROWS))
    total = int(padded["attention_mask"].sum())  # of the documents that the loss is on
    _expect_equal(tuple(batch["input_ids"].shape), (1, total + -total % ALIGNED), "the shape of flat rows")
    _expect_equal(flat.count(batch), case.task.count(padded), "counts of flat and padded rows")
    ids = {IDS: padded[IDS]} if IDS in padded else {}
    parts, expected = case.contributions_of(flat, model, batch | ids), case.contributions(padded)
    for mine, other in zip([*parts.terms, *parts.notes], [*expected.terms, *expected.notes], strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)
        _expect_close(float(mine.detach().sum()), float(other.detach().sum()), "losses of flat and padded rows")
    weights = [term.weight for term in case.terms.terms.values()]
    parts.scaled(weights).backward()
    expected.scaled(weights).backward()
    for (name, ours), theirs in zip(model.named_parameters(), case.model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-4, rtol=1e-4, msg=name)
    case.model.zero_grad()
    _expect(_reaches_next_document(case, model, rows, flat, [0, -1]), "boundaries that are ignored do not show")
    _expect(not _reaches_next_document(case, model, rows, flat, slice(None)), "a document sees the one before it")


def _reaches_next_document(case: TaskCase, model: nn.Module, rows: Sequence[Any], task: Any, bounds: Any) -> bool:
    """Return whether other tokens in the first row change the loss of later rows at all."""
    import torch

    length = len(rows[0]["input_ids"])
    ids = {IDS: [row["id"] for row in rows]} if has_first_pass(task) else {}
    losses = []
    for documents in (list(rows), [rows[0] | {"input_ids": [5] * length}, *rows[1:]]):
        batch = task.collate(documents)
        batch["attention_mask"] = batch["attention_mask"][..., bounds]
        with torch.no_grad():
            first = case.contributions_of(task, model, batch | ids).terms[0]
        skipped = 1 if task.item == "sample" else int((batch["positions"] < length).sum())
        losses.append(first[skipped:])
    return not torch.equal(*losses)


def _expect(condition: bool, message: str) -> None:
    if not condition:
        raise AssertionError(message)


def _expect_equal(actual: object, expected: object, what: str) -> None:
    _expect(actual == expected, f"{what} are not equal: {actual} and {expected}")


def _expect_close(actual: float, expected: float, what: str, close: float = CLOSE) -> None:
    _expect(math.isclose(actual, expected, rel_tol=close, abs_tol=1e-12), f"{what} are {actual} and {expected}")


CHECKS: tuple[Callable[[TaskCase], None], ...] = (
    loss_is_additive,
    count_is_additive,
    padding_has_no_effect,
    padding_alone_is_zero,
    parts_are_in_row_order,
    trained_parameters_have_gradients,
    evaluation_adds_up_to_the_loss,
    metrics_are_pure,
    probe_gives_plain_logits,
    flat_rows_equal_padded_rows,
)
