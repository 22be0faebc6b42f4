"""Worlds and micro-batches of every shape against one process: 20 steps, tails of epochs, sets of 1 to 17 rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli.testing import run_on_cpu

from ..support.cells import cell
from ..support.patching import patching
from ..support.runner import MakeInputs

STEPS = 20
MICRO_SIZES = (1, 2, 4, "auto")
IMAGE_MICRO_SIZES = (1, 4)
WORLDS = [("ddp", 2), ("ddp", 3), ("fsdp", 2), ("fsdp", 3), ("zero2", 2), ("zero2", 3), ("zero3", 2), ("zero3", 3)]
ROWS = range(1, 18)
ACCUMULATIONS = (1, 2, 8, "auto")
SHARED_OUT = 48  # rows of a step: over 1, 2 and 3 processes, in 1, 2 or 8 micro-batches


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    folder = make_inputs()
    chats = (folder / "chats.jsonl").read_text().splitlines()
    for rows in ROWS:
        (folder / f"chats-{rows}.jsonl").write_text("\n".join(chats[:rows]) + "\n")
    return folder


def curve(recipe: Any) -> list[dict[str, Any]]:
    from ftcli.loop import steps
    from ftcli.training.setup import prepare

    fields = ("loss", "grad_norm", "learning_rate", "items", "samples", "rows", "source_items", "source_losses")
    fields += ("term_losses",)
    return [{name: getattr(step, name) for name in fields} for step in steps(prepare(recipe, cpu=True))]


def long_curves(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return 20 steps at every micro size; 37 rows in steps of 12 leave one row for the end of each epoch.

    The cell `faces` has four terms with two counts, and pairs of rows.
    """
    faces = {
        f"faces, micro {micro}": curve(
            cell(folder, "faces", batch={"global_size": 12, "micro_size": micro}, train={"max_steps": STEPS})
        )
        for micro in MICRO_SIZES
    }
    return (
        faces
        | image_curves(folder)
        | {
            f"micro {micro}, drop_last {drop_last}": curve(
                cell(
                    folder,
                    "sft-tied",
                    batch={"global_size": 12, "micro_size": micro},
                    train={"max_steps": STEPS},
                    data={
                        "train": {"path": str(folder / "chats.jsonl")},
                        "eval_rows": 5,
                        "max_length": 128,
                        "drop_last": drop_last,
                    },
                )
            )
            for micro in MICRO_SIZES
            for drop_last in (True, False)
        }
    )


def image_curves(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return some steps of image models. Trained batch norm has equal statistics for equal rows in a forward pass.

    A forward pass is that of all processes under `sync`, and that of one process under `train`. They train for four
    steps: in the sixth, rounding grows a hundredfold, also where only the order of a sum of gradients differs.
    """
    import os

    world = int(os.environ.get("WORLD_SIZE", "1"))
    sizes = [(name, micro, micro, 8) for name in ("resnet", "vit-mixed") for micro in IMAGE_MICRO_SIZES]
    sizes += [("resnet-sync", rows, rows // world, 4) for rows in (6, 12)] + [("resnet-train", 2, 2, 4)]
    return {
        f"{name}, {rows} rows": curve(
            cell(folder, name, batch={"global_size": 12, "micro_size": micro}, train={"max_steps": steps})
        )
        for name, rows, micro, steps in sizes
    }


def short_curves(folder: Path, sizes: list[int]) -> dict[str, list[dict[str, Any]]]:
    """Return two epochs of one step each on sets far smaller than a step, at every accumulation."""
    import os

    world = int(os.environ.get("WORLD_SIZE", "1"))
    return {
        f"{rows} rows, accumulation {accumulation}": curve(
            cell(
                folder,
                "sft-tied",
                batch={
                    "global_size": SHARED_OUT,
                    "micro_size": "auto" if accumulation == "auto" else SHARED_OUT // world // accumulation,
                },
                train={"max_steps": 2},
                data={"train": {"path": str(folder / f"chats-{rows}.jsonl")}, "max_length": 128, "drop_last": False},
                schedule={"name": "constant"},
            )
        )
        for rows in sizes
        for accumulation in ACCUMULATIONS
    }


def assert_same(expected: list[dict[str, Any]], actual: list[dict[str, Any]]) -> None:
    assert len(expected) == len(actual)
    for a, b in zip(expected, actual, strict=True):
        for name in ("learning_rate", "items", "samples", "rows", "source_items"):
            assert b[name] == a[name]
        assert b["source_losses"] == pytest.approx(a["source_losses"], rel=1e-5)
        assert b["term_losses"] == pytest.approx(a["term_losses"], rel=1e-5)
        assert b["loss"] == pytest.approx(a["loss"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-4)


@pytest.fixture(scope="module")
def long_single(inputs: Path) -> dict[str, list[dict[str, Any]]]:
    return run_on_cpu(long_curves, inputs, processes=1, profile="single")[0]


@pytest.mark.slow
def test_one_process_at_every_micro_size_gives_one_curve(long_single: dict[str, list[dict[str, Any]]]) -> None:
    for drop_last in (True, False):
        expected = long_single[f"micro 1, drop_last {drop_last}"]
        for micro in MICRO_SIZES:
            assert_same(expected, long_single[f"micro {micro}, drop_last {drop_last}"])
    for micro in MICRO_SIZES:
        assert_same(long_single["faces, micro 1"], long_single[f"faces, micro {micro}"])
    for name in ("resnet", "vit-mixed"):
        assert_same(*(long_single[f"{name}, {rows} rows"] for rows in IMAGE_MICRO_SIZES))
    with pytest.raises(AssertionError):  # other statistics
        assert_same(long_single["resnet-sync, 6 rows"], long_single["resnet-sync, 12 rows"])


@pytest.mark.slow
def test_drop_last_false_trains_the_remaining_rows_in_a_last_step(long_single: dict[str, list[dict[str, Any]]]) -> None:
    assert [step["rows"] for step in long_single["micro 4, drop_last True"]] == [12] * STEPS
    assert [step["rows"] for step in long_single["micro 4, drop_last False"]] == [12, 12, 12, 1] * (STEPS // 4)


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "processes"), WORLDS)
def test_twenty_steps_on_every_profile_and_world_give_one_curve(
    profile: str, processes: int, inputs: Path, long_single: dict[str, list[dict[str, Any]]]
) -> None:
    actual = run_on_cpu(long_curves, inputs, processes=processes, profile=profile)
    for name, expected in long_single.items():
        for rank in actual:
            assert_same(expected, rank[name])


@pytest.fixture(scope="module")
def short_single(inputs: Path) -> dict[str, list[dict[str, Any]]]:
    return run_on_cpu(short_curves, inputs, list(ROWS), processes=1, profile="single")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "processes", "sizes"),
    [("ddp", 2, [*ROWS]), ("ddp", 3, [*ROWS]), ("fsdp", 3, [1, 5, 16, 17]), ("zero3", 3, [1, 5, 16, 17])],
)
def test_partial_step_on_every_world_has_the_exact_mean(
    profile: str, processes: int, sizes: list[int], inputs: Path, short_single: dict[str, list[dict[str, Any]]]
) -> None:
    ranks = run_on_cpu(short_curves, inputs, sizes, processes=processes, profile=profile)
    for rank in ranks:
        for name, steps in rank.items():
            assert steps[0]["rows"] == int(name.split()[0])
            assert_same(short_single[name], steps)


@patching
def faulty_curves(patch: pytest.MonkeyPatch, folder: Path, faults: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Return the curves of a run with one guard of the mathematics removed at a time, the last with none."""
    import ftcli.training.run
    from ftcli.hardware.collectives import Ranks

    rate = ftcli.training.run.learning_rate
    results = {}
    for fault in faults:
        if fault == "the loss is divided by a rank's own items":
            patch.setattr(Ranks, "sum_later", lambda self, values: lambda: [v * self.world for v in values])
        if fault == "the schedule is stepped once per process":
            twice = lambda number, **rest: rate(min(2 * number, rest["steps"] - 1), **rest)  # noqa: E731
            patch.setattr(ftcli.training.run, "learning_rate", twice)
        if fault == "the logged loss is the main rank's":
            patch.setattr(Ranks, "sum_on_device", lambda self, value: value * self.world)
        results[fault] = curve(cell(folder, "sft-tied", batch={"global_size": 12, "micro_size": 2}))
        patch.undo()
    return results


FAULTS = [
    "the loss is divided by a rank's own items",
    "the schedule is stepped once per process",
    "the logged loss is the main rank's",
    "none",
]


@pytest.fixture(scope="module")
def faulty(inputs: Path) -> list[dict[str, list[dict[str, Any]]]]:
    return [
        run_on_cpu(faulty_curves, inputs, ["none"], processes=1, profile="single")[0],
        run_on_cpu(faulty_curves, inputs, FAULTS, processes=2, profile="ddp")[0],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_curve_with_a_planted_fault_differs(fault: str, faulty: list[dict[str, Any]]) -> None:
    expected, actual = faulty[0]["none"], faulty[1][fault]
    if fault == "none":
        assert_same(expected, actual)
    else:
        with pytest.raises(AssertionError):
            assert_same(expected, actual)
