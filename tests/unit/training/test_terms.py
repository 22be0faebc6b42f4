"""Terms and notes of a loss: means over counts of the whole global batch, by hand-computed values."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ftcli.loop import steps, train
from ftcli.reports.comparison import TOLERANCES, Curve, compare
from ftcli.reports.run_summary import show_run
from ftcli.runtime.errors import InputError
from ftcli.task_contract import TaskCase, check_task
from ftcli.tasks.protocol import Term
from ftcli.training.batches.window import ControlMessage
from ftcli.training.own_loop import prepare
from ftcli.training.terms import Contributions, LossTerms, StepMeans

from ...support.cells import cell, write_inputs
from ...support.two_terms import TWO_TERMS, two_terms
from .test_steady_loop import FIRST, LAST, STEPS, Listening

UNITS = 2**16
NAMES = ("nll", "row_nll", "is_long")  # notes of the task of two_terms.py


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def declared(sources: tuple[str, ...] = (), **attributes: Any) -> LossTerms:
    return LossTerms.of(SimpleNamespace(**attributes), list(sources))  # type: ignore[arg-type]


TERMS = {"nll": Term(2.0), "pairs": Term(0.5, "pairs")}
NOTES = {"margin": "pairs", "seen": "items"}


def message(terms: LossTerms, items: int, further: list[int], source_items: tuple[int, ...] = ()) -> ControlMessage:
    return ControlMessage(items, 0, 4, 0, further, list(source_items), [], [])


def test_a_step_is_the_weighted_sum_of_means_over_different_counts() -> None:
    terms = declared(terms=TERMS, notes=NOTES)
    actual = terms.read(
        {
            "nll": torch.tensor([1.0, 2.0, 3.0]),
            "pairs": torch.tensor([4.0]),
            "notes": {"margin": torch.tensor([6.0]), "seen": torch.tensor([True, False, True])},
        }
    )
    sums = terms.sums(actual, None)
    assert sums.tolist() == [6.0, 4.0, 6.0, 2.0]
    step = message(terms, 12, [3 * UNITS // 2])
    assert terms.factors(step, repeats=6) == [6 / 12 * 2.0, 6 / 1.5 * 0.5]
    assert float(actual.scaled([1.0, 10.0])) == 46.0
    means = terms.means(sums, step)
    assert float(means.loss) == pytest.approx(2.0 * 6 / 12 + 0.5 * 4 / 1.5, rel=1e-6)
    assert means.term_losses() == {"nll": 0.5, "pairs": 4 / 1.5}
    assert means.notes() == {"margin": 4.0, "seen": 2 / 12}


def test_source_losses_divide_only_the_first_term() -> None:
    terms = declared(("a", "b"), terms=TERMS, notes={"margin": "pairs"})
    values = {"nll": torch.tensor([1.0, 2.0, 4.0]), "pairs": torch.tensor([8.0]), "notes": {"margin": torch.ones(1)}}
    sums = terms.sums(terms.read(values), torch.tensor([1, 0, 1]))
    assert sums.tolist() == [7.0, 2.0, 5.0, 8.0, 1.0] and terms.width == 5
    means = terms.means(sums, message(terms, 3, [UNITS], (1, 2)))
    assert means.source_losses() == {"a": 2.0, "b": 2.5}
    assert means.term_losses() == {"nll": 7 / 3, "pairs": 8.0}
    assert means.notes() == {"margin": 1.0}
    assert float(means.loss) == pytest.approx(2.0 * 7 / 3 + 0.5 * 8.0)


def test_sources_are_not_reported_of_a_first_term_that_counts_no_items() -> None:
    terms = declared(("a", "b"), terms={"loss": Term(1.0, "weights")})
    assert terms.sources == [] and terms.width == 1 and terms.further_counts == ["weights"]


def test_terms_with_count_zero_in_a_step_add_nothing() -> None:
    terms = declared(terms=TERMS, notes=NOTES)
    step = message(terms, 2, [0])
    assert terms.factors(step, repeats=4) == [4.0, 0.0]
    means = terms.means(torch.tensor([6.0, 0.0, 0.0, 1.0]), step)
    assert float(means.loss) == 6.0
    assert means.term_losses() == {"nll": 3.0} and means.notes() == {"seen": 0.5}


def test_a_task_without_terms_is_summed_as_before() -> None:
    terms = declared()
    parts = torch.rand(7)
    actual = terms.read(parts)
    assert terms.width == 1 and terms.further_counts == []
    assert torch.equal(terms.sums(actual, None), parts.sum()[None])
    step = message(terms, 7, [])
    assert torch.equal(actual.scaled(terms.factors(step, 3)), parts.sum() * (3 / 7))
    means = terms.means(terms.sums(actual, None), step)
    assert torch.equal(means.loss, parts.sum() / 7) and means.term_losses() == {} and means.notes() == {}


def test_counts_are_summed_as_whole_multiples_of_their_unit() -> None:
    terms = declared(terms=TERMS, notes={"margin": "weights"})
    task: Any = SimpleNamespace(count=lambda batch: batch)
    batches = [{"items": 2, "pairs": 1, "weights": 0.25}, {"items": 3, "pairs": 0, "weights": 2.0**-16}]
    assert terms.count(task, batches) == [5, UNITS, UNITS // 4 + 1]
    for value in (0.1, -1.0, float("nan")):
        with pytest.raises(InputError, match="multiples of 2\\^-16"):
            terms.count(task, [{"items": 1, "pairs": 0, "weights": value}])
    for bad in ({"items": 1, "pairs": 1}, {"pairs": 1, "weights": 1, "items": 1}):
        with pytest.raises(InputError, match="items, pairs, weights are needed"):
            terms.count(task, [bad])


def test_sums_of_weights_do_not_depend_on_the_order_of_ranks() -> None:
    terms = declared(terms={"loss": Term(1.0, "weights")})
    task: Any = SimpleNamespace(count=lambda batch: {"items": 1, "weights": batch})
    weights = [round(value) * 2.0**-16 for value in (torch.rand(999) * 1e9).tolist()]
    assert terms.count(task, weights) == terms.count(task, weights[::-1])


@pytest.mark.parametrize(
    ("attributes", "words"),
    [
        ({"terms": {}}, "no term"),
        ({"terms": {"loss": Term()}, "notes": {"loss": "items"}}, "as terms and as notes"),
        ({"terms": {"notes": Term()}}, "'notes', which is the name of other values"),
        ({"notes": {"chats/loss": "items"}}, "'chats/loss', which is the name"),
        ({"terms": {"loss": Term(float("inf"))}}, "weight of the term loss is inf"),
    ],
)
def test_an_invalid_declaration_is_refused(attributes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        declared(**attributes)


def test_terms_read_refuses_an_undeclared_loss() -> None:
    terms = declared(terms=TERMS, notes={"margin": "pairs"})
    for losses in (torch.ones(2), {"nll": torch.ones(2), "pairs": torch.ones(1)}, {"nll": torch.ones(1)}):
        with pytest.raises(InputError, match="but nll, pairs, note margin are declared"):
            terms.read(losses)


def test_reading_and_summing_read_no_value_of_the_device() -> None:
    terms = declared(terms=TERMS, notes=NOTES)
    empty = torch.empty(3, device="meta")  # a tensor without values, so nothing can wait for them
    actual = terms.read({"nll": empty, "pairs": empty, "notes": {"margin": empty, "seen": empty.bool()}})
    means = terms.means(terms.sums(actual, None), message(terms, 3, [UNITS]))
    assert means.loss.device.type == "meta" and actual.scaled([1.0, 2.0]).shape == ()


def test_notes_are_means_over_the_global_batch_and_not_of_micro_batches(inputs: Path) -> None:
    curves = []
    for micro in (1, 2, 12):
        recipe = two_terms(inputs, batch={"global_size": 12, "micro_size": micro}, train={"max_steps": 2})
        curves.append([(step.loss, step.term_losses, step.notes) for step in steps(prepare(recipe, cpu=True))])
    whole = curves[-1]
    for curve in curves[:-1]:
        for (loss, terms, notes), (loss_2, terms_2, notes_2) in zip(curve, whole, strict=True):
            assert loss == pytest.approx(loss_2, rel=1e-6)
            assert terms == pytest.approx(terms_2, rel=1e-6) and notes == pytest.approx(notes_2, rel=1e-6)
    loss, terms, notes = whole[0]
    assert loss == pytest.approx(0.75 * terms["loss"] + 0.5 * terms["long"], rel=1e-6)
    assert notes["nll"] == pytest.approx(terms["loss"], rel=1e-6) and 0 < notes["is_long"] < 1
    assert abs(notes["row_nll"] - notes["nll"]) > 1e-4  # so that a wrong count would show


def test_notes_averaged_by_micro_batch_differ_from_exact_means(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def notes_of_first_step() -> dict[str, float]:
        recipe = two_terms(inputs, batch={"global_size": 12, "micro_size": 3})
        return next(steps(prepare(recipe, cpu=True))).notes

    expected = notes_of_first_step()
    read = LossTerms.read

    def means_of_notes(self: LossTerms, losses: Any) -> Contributions:
        contributions = read(self, losses)
        return Contributions(contributions.terms, [values.float().mean() for values in contributions.notes])

    monkeypatch.setattr(LossTerms, "read", means_of_notes)
    monkeypatch.setattr(StepMeans, "notes", lambda self: dict(zip(NAMES, (self.sums[-3:] / 4).tolist(), strict=True)))
    notes = notes_of_first_step()
    assert notes["nll"] != pytest.approx(expected["nll"], rel=1e-5)  # micro-batches differ in tokens
    assert notes["is_long"] == pytest.approx(expected["is_long"], rel=1e-5)  # and are equal in rows


def test_no_step_of_a_task_with_terms_and_notes_reads_a_value_or_sends_more_messages(inputs: Path) -> None:
    run = prepare(two_terms(inputs, train={"max_steps": STEPS}), cpu=True)
    sent: list[str] = []

    def listen(name: str) -> None:
        call = getattr(run.hardware.ranks, name)
        setattr(run.hardware.ranks, name, lambda *args, **more: [sent.append(name), call(*args, **more)][1])

    for name in ("sum_later", "sum_on_device", "gather", "collect"):
        listen(name)
    training = steps(run)
    for _ in range(FIRST):
        next(training)
    sent.clear()
    with Listening() as listening:
        for _ in range(FIRST, LAST):
            next(training)
    training.close()  # type: ignore[attr-defined]
    assert listening.places == []
    assert sent == ["sum_on_device", "sum_later"] * (LAST - FIRST)


def test_metrics_show_and_parity_have_terms_and_notes(inputs: Path, tmp_path: Path) -> None:
    run = prepare(two_terms(inputs, log={"every_steps": 1}), cpu=True, output=tmp_path / "run")
    for _ in steps(run):
        pass
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    names = {"train/loss", "train/long", "train/nll", "train/row_nll", "train/is_long"}
    assert all(names <= set(row) for row in rows)
    assert rows[0]["loss"] == pytest.approx(0.75 * rows[0]["train/loss"] + 0.5 * rows[0]["train/long"], rel=1e-6)
    (line,) = [line for line in show_run(tmp_path / "run") if "is_long" in line]
    first, last = rows[0]["train/is_long"], rows[-1]["train/is_long"]
    assert line == f"train    is_long: {first:.4f} at step 1, {last:.4f} at step 4"

    (tmp_path / "final").mkdir()
    expected = Curve("a", rows, {}, tmp_path / "final")
    assert compare(expected, expected, TOLERANCES["fp32"]).further == 0.0
    moved = [row | {"train/row_nll": row["train/row_nll"] * (1 + 1e-4)} for row in rows]
    comparison = compare(Curve("b", moved, {}, tmp_path / "final"), expected, TOLERANCES["fp32"])
    assert comparison.further == pytest.approx(1e-4, rel=0.01)
    assert str(comparison.departure).startswith("b: train/row_nll leaves the tolerance at step 1")
    without = [{name: value for name, value in row.items() if name != "train/nll"} for row in rows]
    comparison = compare(Curve("b", without, {}, tmp_path / "final"), expected, TOLERANCES["fp32"])
    assert str(comparison.departure).startswith("b: train/nll differs at step 1: none against")


def test_a_resumed_run_reports_the_same_terms_and_notes(inputs: Path, tmp_path: Path) -> None:
    from ftcli.training import setup

    recipe = two_terms(inputs, checkpoint={"every_steps": 2}, log={"every_steps": 1})
    train(setup.prepare(recipe, cpu=True, output=tmp_path / "run"))
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    run = setup.prepare(recipe, cpu=True, resume=tmp_path / "run" / "checkpoints" / "step-000002")
    for step, row in zip(steps(run), [row for row in rows if "loss" in row][2:], strict=True):
        assert {f"train/{name}": value for name, value in (step.term_losses | step.notes).items()} == {
            name: value for name, value in row.items() if name.startswith("train/")
        }


def test_a_task_with_terms_passes_the_contract_of_tasks(inputs: Path) -> None:
    check_task(two_terms(inputs))
    assert TaskCase(cell(inputs, "sft-tied")).terms.is_declared is False


def test_a_weight_that_is_no_multiple_of_the_unit_is_refused_before_the_first_step(
    inputs: Path, tmp_path: Path
) -> None:
    wrong = TWO_TERMS.replace("(1 / counts / COUNT_UNIT).round() * COUNT_UNIT", "1 / counts")
    assert wrong != TWO_TERMS
    file = tmp_path / "wrong.py"
    file.write_text(wrong)
    with pytest.raises(InputError, match="for weights; counts are multiples"):
        next(steps(prepare(two_terms(inputs, task=str(file)), cpu=True)))
