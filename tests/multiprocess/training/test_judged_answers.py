"""Preferences, KTO, reward models and weighted losses: one curve on every profile, world and micro-batch size.

One launch of a profile trains all recipes below at all micro sizes, and resumes some of them from a checkpoint that one
process wrote. Two of the launches also train parts of runs that move from profile to profile. Answers have unequal
lengths, and a step of 12 rows leaves rows over.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcli.testing import environment, run_on_cpu

from ...support.cells import LORA, cell, resume_cell, save_cell
from ...support.runner import MakeInputs

MICRO_SIZES = (1, 2, 4)
CLOSE = 1e-5  # relative
RESUMED = ("aot", "kto")
FLAT = ("aot", "reward", "terms")
SAVED_AT = 2
EPS = {"optimizer": {"learning_rate": 5e-3, "eps": 1e-4}}  # a gradient of rounding is no whole step of AdamW

# name -> (cell, file of rows, changes of the recipe)
RECIPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dpo": ("preference", "weighted", {}),
    "orpo": ("preference", "pairs", {"task_options": {"losses": {"orpo": {"beta": 0.5}}}}),
    "aot": ("preference", "close", {"task_options": {"losses": {"aot": {}, "sigmoid": {}, "sigmoid_norm": {}}}}),
    "kto": ("unpaired", "labelled", {}),
    "kto-lora": ("unpaired", "labelled", {"adapter": LORA}),
    "reward": ("reward", "weighted", {"task_options": {"center": 0.01}}),
    "ranked": ("reward", "ranked", {}),
    "rated": ("reward", "rated", {}),
    "terms": ("sft-terms", "weighted_chats", {}),
    "class-weights": ("class-weights", "texts", {}),
    "multi-label": ("multi-label", "tags", {}),
    "regression": ("regression", "grades", {}),
}
AOT = {"task_options": {"losses": {"aot": {}}}}
# Runs that move: full training and adapters, each with a first pass and with columns of the reference.
MOVED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "aot": ("preference", "close", AOT),
    "aot-lora": ("preference", "close", AOT | {"adapter": LORA}),
    "kto": RECIPES["kto"],
    "kto-lora": RECIPES["kto-lora"],
}
# One process and DDP run every micro size. Sharded profiles run the smallest and the largest, and packed rows with 2.
SIZES = {("fsdp", 2): (1, 4), ("zero2", 2): (1, 4), ("zero3", 2): (1, 4)}
SIZES |= {("ddp", 3): (2,), ("zero2", 3): (2,), ("fsdp", 3): (1,), ("zero3", 3): (4,)}
OF_THREE = ["dpo", "orpo", "aot", "kto", "reward", "terms"]  # recipes that three processes train
# (profile, processes) -> (step before, last step, micro size); the run ends at step 4 on one process.
MOVES = {("fsdp", 2): (0, 2, 2), ("zero3", 2): (2, 3, 1), ("single", 1): (3, 4, 4)}
FAST, FAST_SIZES = ["aot", "kto", "reward", "terms"], (1, 4)  # the slow tests have all
Curve = list[dict[str, Any]]


def recipe(folder: Path, name: str, micro: int, recipes: Any = RECIPES, **data: Any) -> Any:
    base, file, changes = recipes[name]
    rows = {"train": str(folder / f"{file}.jsonl"), "eval_rows": 5, "max_length": 128}
    return cell(
        folder, base, **{"data": rows | data, "batch": {"global_size": 12, "micro_size": micro}, **EPS} | changes
    )


def values_of(step: Any) -> dict[str, Any]:
    return {name: getattr(step, name) for name in ("items", "samples", "loss", "grad_norm", "term_losses", "notes")}


def curve(given: Any) -> Curve:
    from ftcli.loop import steps
    from ftcli.training.evaluation import evaluate
    from ftcli.training.setup import prepare

    run = prepare(given, cpu=True)
    curve_of_run = [values_of(step) for step in steps(run)]
    return [*curve_of_run, {"metrics": evaluate(run), "key of derived columns": run.derived}]


def move(folder: Path, place: Path, first: int, last: int, micro: int) -> dict[str, Any]:
    """Train the steps of every moving run after step `first`, stop the run after step `last`, and save it there.

    The runs have a cache of their own in `place`, so that the first of these launches computes the columns.
    """
    from ftcli.loop import steps
    from ftcli.runtime.checkpoint_names import checkpoint_path
    from ftcli.training.checkpointing import save_checkpoint
    from ftcli.training.evaluation import evaluate
    from ftcli.training.setup import prepare

    results = {}
    with environment(FTCLI_CACHE=str(place / "cache")):
        for name in MOVED:
            output = place / name
            resume = checkpoint_path(output, first) if first else None
            run = prepare(recipe(folder, name, micro, MOVED), cpu=True, output=output, resume=resume)
            rows = []
            for step in steps(run):
                rows.append(values_of(step))
                if step.number == last:
                    break
            save_checkpoint(run, last)
            columns = {
                f"{split}/{column}": np.array(v) for split, of in run.rows.derived.items() for column, v in of.items()
            }
            lines = [line for line in run.log_lines if line.startswith("derived columns")]
            end = {"metrics": evaluate(run), "key of derived columns": run.derived}
            results[name] = {"rows": rows, "end": end, "columns": columns, "lines": lines}
    return results


def curves(
    folder: Path, saved: Path, names: list[str], sizes: tuple[int, ...] = MICRO_SIZES, moves: Any = None
) -> dict[Any, Any]:
    """Return the curves of some recipes at every micro size, packed ones, and those that resume in this launch."""
    from ftcli.runtime.checkpoint_names import checkpoint_path

    results: dict[Any, Any] = {(name, micro): curve(recipe(folder, name, micro)) for name in names for micro in sizes}
    for name in FLAT:
        if name in names:
            results[name, "flat"] = curve(recipe(folder, name, 2, padding_free=True))
    for name in RESUMED:
        checkpoint = checkpoint_path(saved / name, SAVED_AT)
        if name in names and checkpoint.exists():
            results[name, "resumed"] = resume_cell(recipe(folder, name, 4), checkpoint)["rows"]
    if moves is not None:
        results["moved"] = move(folder, saved / "moved", *moves)
    return results


def last_move(folder: Path, saved: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the end of the moving runs, and the same runs on one process without an interruption."""
    return move(folder, saved / "moved", *MOVES["single", 1]), move(folder, saved / "not moved", 0, 4, 4)


def saves(folder: Path, saved: Path) -> dict[str, Any]:
    """Write the checkpoints that are resumed, and return the curves that were not interrupted."""
    return {name: save_cell(recipe(folder, name, 2), saved / name, at=(SAVED_AT,))["rows"] for name in RESUMED}


# Notes of the first step that are means over unequal numbers in each micro-batch: recipe -> note.
UNEQUAL = {"kto": "logps/chosen", "two sources": "others/rewards/margins", "ranked": "mean_reward"}


def of_unequal_counts(folder: Path, name: str, micro: int) -> Any:
    if name != "two sources":
        return recipe(folder, name, micro)
    return recipe(folder, "orpo", micro, train=[{"path": str(folder / f"{f}.jsonl")} for f in ("pairs", "others")])


def notes_of_first_step(folder: Path, name: str, micro: int) -> dict[str, float]:
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    return next(iter(steps(prepare(of_unequal_counts(folder, name, micro), cpu=True)))).notes


def faulty_notes(folder: Path) -> dict[tuple[str, int], dict[str, float]]:
    """Return the notes of runs that average the mean of each micro-batch, by (recipe, micro size)."""
    from ftcli.training.terms import Contributions, LossTerms, StepMeans

    read, notes = LossTerms.read, StepMeans.notes

    def means(self: LossTerms, contributions: Any) -> Contributions:
        right = read(self, contributions)
        # As other trainers do: the mean of the desirable rows of a micro-batch, if it has some.
        notes = [values.float().sum() / max(1, int((values != 0).sum())) for values in right.notes]
        return Contributions(right.terms, notes)

    def sums(self: StepMeans) -> dict[str, float]:
        return dict(zip(self.declared.notes, self.sums[-len(self.declared.notes) :].tolist(), strict=True))

    results = {}
    LossTerms.read, StepMeans.notes = means, sums  # type: ignore[method-assign]
    for name in UNEQUAL:
        for micro in (1, 4):
            first = notes_of_first_step(folder, name, micro)
            results[name, micro] = {note: value * micro / 12 for note, value in first.items()}
    LossTerms.read, StepMeans.notes = read, notes  # type: ignore[method-assign]
    return results


def right_and_faulty_notes(folder: Path) -> tuple[dict[str, Any], dict[tuple[str, int], Any]]:
    return {name: notes_of_first_step(folder, name, 4) for name in UNEQUAL}, faulty_notes(folder)


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    folder = make_inputs()
    (folder / "others.jsonl").write_text((folder / "pairs.jsonl").read_text().replace("alpha", "gamma"))
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def uninterrupted(inputs: Path, saved: Path) -> dict[str, Any]:
    results: dict[str, Any] = run_on_cpu(saves, inputs, saved, processes=1, profile="single")[0]
    return results


@pytest.fixture(scope="module")
def single(inputs: Path, saved: Path, uninterrupted: dict[str, Any]) -> dict[Any, Any]:
    arguments = (inputs, saved, FAST, FAST_SIZES)
    results: dict[Any, Any] = run_on_cpu(curves, *arguments, processes=1, profile="single")[0]
    return results


@pytest.fixture(scope="module")
def every_single(inputs: Path, saved: Path, uninterrupted: dict[str, Any]) -> dict[Any, Any]:
    results: dict[Any, Any] = run_on_cpu(curves, inputs, saved, list(RECIPES), processes=1, profile="single")[0]
    return results


def assert_same(expected: Curve, actual: Curve) -> None:
    """Compare every step, the evaluation at the end, and which reference was found."""
    for a, b in zip(expected[:-1], actual[:-1], strict=True):
        assert (b["items"], b["samples"]) == (a["items"], a["samples"])
        assert b["loss"] == pytest.approx(a["loss"], rel=CLOSE)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=20 * CLOSE)
        assert b["term_losses"] == pytest.approx(a["term_losses"], rel=CLOSE, abs=1e-6)  # a term may be near 0
        # Rewards are 0 up to rounding before the first update.
        assert b["notes"] == pytest.approx(a["notes"], rel=CLOSE, abs=2e-5)
    assert actual[-1]["metrics"] == pytest.approx(expected[-1]["metrics"], rel=2 * CLOSE, abs=2e-5)
    assert actual[-1]["key of derived columns"] == expected[-1]["key of derived columns"]


def assert_all(single: dict[Any, Any], actual: dict[Any, Any], uninterrupted: dict[str, Any], names: list[str]) -> None:
    for name in names:
        expected = single[name, 4]
        for micro in (*MICRO_SIZES, "flat"):
            if (name, micro) in actual:
                assert_same(expected, actual[name, micro])
        if (name, "resumed") in actual:
            for a, b in zip(uninterrupted[name][SAVED_AT:], actual[name, "resumed"], strict=True):
                assert b[2] == a[2]
                assert b[:2] == pytest.approx(a[:2], rel=CLOSE)


def test_one_process_gives_one_curve_at_every_micro_size(single: dict[Any, Any], uninterrupted: dict[str, Any]) -> None:
    assert_all(single, single, uninterrupted, FAST)
    assert {key for key in single if key[1] in ("flat", "resumed")} == {
        *((name, "flat") for name in FLAT),
        *((name, "resumed") for name in RESUMED),
    }
    assert single["kto", 1][-2]["notes"]["kl"] > 0, "the baseline is not 0 any more"
    terms = single["aot", 1][-2]["term_losses"]
    assert terms["aot"] != pytest.approx(terms["sigmoid"], rel=1e-3), "pairs are compared with those of other ranks"


def test_two_ddp_processes_give_the_curve_of_one(
    inputs: Path, saved: Path, single: dict[Any, Any], uninterrupted: dict[str, Any]
) -> None:
    for rank in run_on_cpu(curves, inputs, saved, FAST, FAST_SIZES, processes=2, profile="ddp"):
        assert_all(single, rank, uninterrupted, FAST)


Launch = Callable[[str, int], list[dict[Any, Any]]]


@pytest.fixture(scope="module")
def launch(inputs: Path, saved: Path, uninterrupted: dict[str, Any]) -> Launch:
    """Return a function that launches a profile once with all recipes, and gives what each rank returned."""
    done: dict[tuple[str, int], list[dict[Any, Any]]] = {}

    def launch(profile: str, processes: int) -> list[dict[Any, Any]]:
        place = (profile, processes)
        if place == ("zero3", 2):  # it continues runs that this launch stops
            launch("fsdp", 2)
        if place not in done:
            sizes = SIZES.get(place, MICRO_SIZES)
            arguments = (inputs, saved, OF_THREE if processes == 3 else list(RECIPES), sizes, MOVES.get(place))
            done[place] = run_on_cpu(curves, *arguments, processes=processes, profile=profile)
        return done[place]

    return launch


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("profile", "processes"),
    [
        ("single", 1),
        *((profile, processes) for processes in (2, 3) for profile in ("ddp", "fsdp", "zero2", "zero3")),
    ],
)
def test_every_profile_and_world_gives_the_curve_of_one_process(
    profile: str,
    processes: int,
    launch: Launch,
    every_single: dict[Any, Any],
    uninterrupted: dict[str, Any],
) -> None:
    for rank in [every_single] if processes == 1 else launch(profile, processes):
        assert_all(every_single, rank, uninterrupted, OF_THREE if processes == 3 else list(RECIPES))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_that_moves_from_fsdp_to_zero3_to_one_process_gives_the_curve_of_one(
    launch: Launch, inputs: Path, saved: Path
) -> None:
    parts = [launch(*place)[0]["moved"] for place in (("fsdp", 2), ("zero3", 2))]
    end, whole = run_on_cpu(last_move, inputs, saved, processes=1, profile="single")[0]
    for name, expected in whole.items():
        moved = [part[name] for part in (*parts, end)]
        assert [len(part["rows"]) for part in moved] == [2, 1, 1]
        assert_same([*expected["rows"], expected["end"]], [*sum((p["rows"] for p in moved), []), moved[-1]["end"]])
        # FSDP computed the columns, the others read them, and one process alone computes the same.
        assert all("computed in" in line for part in (moved[0], expected) for line in part["lines"])
        for part in moved[1:]:
            (line,) = part["lines"]
            assert "read from the cache" in line and "FSDP, 2 processes" in line
        assert len({part["end"]["key of derived columns"] for part in (*moved, expected)}) == 1
        for column, values in expected["columns"].items():
            assert moved[0]["columns"][column] == pytest.approx(values, rel=CLOSE)
            assert all(np.array_equal(part["columns"][column], moved[0]["columns"][column]) for part in moved)
        assert len(expected["columns"]) == 4, "two columns of each split"


def test_notes_that_are_averaged_by_micro_batch_depend_on_its_size(inputs: Path) -> None:
    right, faulty = run_on_cpu(right_and_faulty_notes, inputs, processes=1, profile="single")[0]
    for name, note in UNEQUAL.items():
        one, four = (faulty[name, micro][note] for micro in (1, 4))
        assert one != pytest.approx(right[name][note], rel=CLOSE), name
        assert one != pytest.approx(four, rel=CLOSE), name
