"""Losses of several terms, with notes, a first pass and a derived column: the same on every profile and micro size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli.testing import run_on_cpu

from ...support.cells import write_inputs
from ...support.two_terms import DERIVED, TWO_TERMS, two_terms

MICRO_SIZES = (1, 2, 4)
FAULT = "notes are averaged by micro-batch"
CLOSE = 1e-5  # relative


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    for source in (TWO_TERMS, DERIVED):
        two_terms(folder, source)  # before ranks read the files
    return folder


def curve(folder: Path, micro: int, source: str = DERIVED) -> list[dict[str, Any]]:
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    recipe = two_terms(folder, source, batch={"global_size": 8, "micro_size": micro})
    fields = ("items", "samples", "loss", "grad_norm", "term_losses", "notes")
    return [{name: getattr(step, name) for name in fields} for step in steps(prepare(recipe, cpu=True))]


def columns(folder: Path) -> dict[str, Any]:
    """Return the key of the derived columns, the column that was found, and the column as this profile computes it."""
    from ftcli.training.derived_columns import _compute
    from ftcli.training.setup import prepare

    run = prepare(two_terms(folder, DERIVED, batch={"global_size": 8, "micro_size": 2}), cpu=True)
    here = {split: _compute(run, split)["start_nll"].tolist() for split in ("train", "eval")}
    columns_found = {split: run.rows.derived[split]["start_nll"].tolist() for split in here}
    return {"key": run.derived, "found": columns_found, "computed": here}


def curves(folder: Path) -> dict[Any, list[dict[str, Any]]]:
    """Return the curve at every micro size, one without a first pass, and one that averages means of micro-batches."""
    from ftcli.training.terms import Contributions, LossTerms, StepMeans

    results: dict[Any, list[dict[str, Any]]] = {micro: curve(folder, micro) for micro in MICRO_SIZES}
    results["two terms"] = curve(folder, 2, TWO_TERMS)
    results["columns"] = [columns(folder)]
    read, notes = LossTerms.read, StepMeans.notes

    def means(self: LossTerms, contributions: Any) -> Contributions:
        right = read(self, contributions)
        return Contributions(right.terms, [values.float().mean() for values in right.notes])

    LossTerms.read = means  # type: ignore[method-assign]
    StepMeans.notes = lambda self: {"nll": float(self.sums[-3]) / 8}  # type: ignore[method-assign]
    results[FAULT] = curve(folder, 1, TWO_TERMS)
    LossTerms.read, StepMeans.notes = read, notes  # type: ignore[method-assign]
    return results


@pytest.fixture(scope="module")
def single(inputs: Path) -> dict[Any, list[dict[str, Any]]]:
    return run_on_cpu(curves, inputs, processes=1, profile="single")[0]


@pytest.fixture(
    scope="module", params=[*(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp")), "zero3"]
)
def actual(request: pytest.FixtureRequest, inputs: Path) -> list[dict[Any, list[dict[str, Any]]]]:
    return run_on_cpu(curves, inputs, processes=2, profile=request.param)


def assert_same(expected: list[dict[str, Any]], actual: list[dict[str, Any]]) -> None:
    for a, b in zip(expected, actual, strict=True):
        assert (b["items"], b["samples"]) == (a["items"], a["samples"])
        assert b["loss"] == pytest.approx(a["loss"], rel=CLOSE)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=10 * CLOSE)
        assert b["term_losses"] == pytest.approx(a["term_losses"], rel=CLOSE)
        assert b["notes"] == pytest.approx(a["notes"], rel=CLOSE, abs=1e-6)  # `moved` is 0 up to rounding


@pytest.mark.parametrize("micro", MICRO_SIZES)
def test_terms_and_notes_are_the_same_on_every_profile_and_micro_size(
    micro: int, single: dict[Any, list[dict[str, Any]]], actual: list[dict[Any, list[dict[str, Any]]]]
) -> None:
    assert_same(single[4], single[micro])
    for rank in actual:
        assert_same(single[4], rank[micro])


def test_terms_without_a_first_pass_are_the_same_on_every_profile(
    single: dict[Any, list[dict[str, Any]]], actual: list[dict[Any, list[dict[str, Any]]]]
) -> None:
    for rank in actual:
        assert_same(single["two terms"], rank["two terms"])


def test_a_derived_column_is_found_by_every_profile_and_computed_alike(
    single: dict[Any, list[dict[str, Any]]], actual: list[dict[Any, list[dict[str, Any]]]]
) -> None:
    (expected,) = single["columns"]
    for rank in actual:
        (columns,) = rank["columns"]
        assert columns["key"] == expected["key"] and columns["found"] == expected["found"]
        for split, values in columns["computed"].items():
            assert values == pytest.approx(expected["found"][split], rel=1e-6)


def test_a_note_that_is_averaged_by_micro_batch_is_another_value(
    single: dict[Any, list[dict[str, Any]]], actual: list[dict[Any, list[dict[str, Any]]]]
) -> None:
    for rank in [single, *actual]:
        expected, averaged = single[4][0]["notes"]["nll"], rank[FAULT][0]["notes"]["nll"]
        assert averaged != pytest.approx(expected, rel=CLOSE)
