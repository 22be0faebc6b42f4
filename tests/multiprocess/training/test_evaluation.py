"""Every evaluation row is counted exactly once: 1 to 17 rows on one to three processes, at any micro size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ftcli.testing import run_on_cpu

from ...support.cells import cell
from ...support.runner import MakeInputs

SIZES = range(1, 18)
SOME_SIZES = (1, 2, 5, 17)  # of the fast tests


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    folder = make_inputs()
    rows = (folder / "texts.jsonl").read_text().splitlines()
    chats = (folder / "chats.jsonl").read_text().splitlines()
    for size in SIZES:
        (folder / f"texts-{size}.jsonl").write_text("\n".join(rows[:size]) + "\n")
        (folder / f"chats-{size}.jsonl").write_text("\n".join(chats[:size]) + "\n")
    return folder


def evaluate_all(folder: Path, micro_size: int, sizes: Sequence[int]) -> dict[str, dict[str, float]]:
    """Return the metrics of untrained models on evaluation sets of some sizes."""
    from ftcli.training.evaluation import evaluate
    from ftcli.training.setup import prepare

    results = {}
    for size in sizes:
        for name, rows in (("text", "texts"), ("sft-tied", "chats")):
            data = {
                "train": {"path": str(folder / f"{rows}.jsonl")},
                "eval": {"path": str(folder / f"{rows}-{size}.jsonl")},
                "max_length": 128,
            }
            recipe = cell(folder, name, data=data, batch={"global_size": 12, "micro_size": micro_size})
            results[f"{name}-{size}"] = evaluate(prepare(recipe, cpu=True))
    return results


@pytest.fixture(scope="module")
def alone(inputs: Path) -> Callable[[Sequence[int]], dict[str, dict[str, float]]]:
    """Return a function that evaluates sets of some sizes on one process, row by row, once."""
    return cache(lambda sizes: run_on_cpu(evaluate_all, inputs, 1, sizes, processes=1, profile="single")[0])


@pytest.mark.parametrize(
    ("processes", "micro_size", "sizes"),
    [(1, 4, SOME_SIZES), (2, 3, SOME_SIZES), pytest.param(3, 2, SIZES, marks=pytest.mark.slow)],
)
def test_evaluate_gives_the_same_metrics_on_any_processes_and_micro_size(
    processes: int,
    micro_size: int,
    sizes: Sequence[int],
    inputs: Path,
    alone: Callable[[Sequence[int]], dict[str, dict[str, float]]],
) -> None:
    profile, expected = "single" if processes == 1 else "ddp", alone(sizes)
    for rank in run_on_cpu(evaluate_all, inputs, micro_size, sizes, processes=processes, profile=profile):
        assert rank.keys() == expected.keys()
        for name, metrics in rank.items():
            assert metrics == pytest.approx(expected[name], rel=1e-6), name


def evaluate_with_a_row_lost(folder: Path) -> str:
    """Return the error of `evaluate` if one row is evaluated twice and another is missing."""
    import ftcli.training.batches.dataloaders
    from ftcli.training.evaluation import evaluate
    from ftcli.training.setup import prepare

    run = prepare(cell(folder, "text"), cpu=True)
    original = ftcli.training.batches.dataloaders.Rows.__getitem__
    ftcli.training.batches.dataloaders.Rows.__getitem__ = lambda rows, key: original(
        rows, (key[0], 0 if key[1] == 1 else key[1])
    )  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        evaluate(run)
    return str(caught.value)


def test_evaluate_with_a_lost_row_raises(inputs: Any) -> None:
    message = run_on_cpu(evaluate_with_a_row_lost, inputs, processes=1, profile="single")[0]
    assert "a row is missing or double" in message
