"""Every evaluation row is counted exactly once: 1 to 17 rows on one to three processes, at any micro size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli.testing import run_on_cpu

from .cells import cell, write_inputs

SIZES = range(1, 18)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    rows = (folder / "texts.jsonl").read_text().splitlines()
    chats = (folder / "chats.jsonl").read_text().splitlines()
    for size in SIZES:
        (folder / f"texts-{size}.jsonl").write_text("\n".join(rows[:size]) + "\n")
        (folder / f"chats-{size}.jsonl").write_text("\n".join(chats[:size]) + "\n")
    return folder


def evaluate_all(folder: Path, micro_size: int) -> dict[str, dict[str, float]]:
    """Return the metrics of untrained models on evaluation sets of every size."""
    from ftcli.evaluation import evaluate
    from ftcli.run import prepare

    found = {}
    for size in SIZES:
        for name, rows in (("text", "texts"), ("sft-tied", "chats")):
            data = {
                "train": {"path": str(folder / f"{rows}.jsonl")},
                "eval": {"path": str(folder / f"{rows}-{size}.jsonl")},
                "max_length": 128,
            }
            recipe = cell(folder, name, data=data, batch={"global_size": 12, "micro_size": micro_size})
            found[f"{name}-{size}"] = evaluate(prepare(recipe, cpu=True))
    return found


@pytest.fixture(scope="module")
def alone(inputs: Path) -> dict[str, dict[str, float]]:
    return run_on_cpu(evaluate_all, inputs, 1, processes=1, profile="single")[0]


@pytest.mark.parametrize(("processes", "micro_size"), [(1, 4), (2, 3), pytest.param(3, 2, marks=pytest.mark.slow)])
def test_metrics_do_not_depend_on_processes_or_micro_size(
    processes: int, micro_size: int, inputs: Path, alone: dict[str, dict[str, float]]
) -> None:
    profile = "single" if processes == 1 else "ddp"
    for rank in run_on_cpu(evaluate_all, inputs, micro_size, processes=processes, profile=profile):
        assert rank.keys() == alone.keys()
        for name, metrics in rank.items():
            assert metrics == pytest.approx(alone[name], rel=1e-6), name


def evaluate_with_a_row_lost(folder: Path) -> str:
    """Return what `evaluate` says when a process delivers a row twice and another never."""
    import ftcli.loaders
    from ftcli.evaluation import evaluate
    from ftcli.run import prepare

    run = prepare(cell(folder, "text"), cpu=True)
    original = ftcli.loaders.Rows.__getitem__
    ftcli.loaders.Rows.__getitem__ = lambda rows, key: original(rows, (key[0], 0 if key[1] == 1 else key[1]))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError) as caught:
        evaluate(run)
    return str(caught.value)


def test_a_row_that_is_lost_is_noticed(inputs: Any) -> None:
    told = run_on_cpu(evaluate_with_a_row_lost, inputs, processes=1, profile="single")[0]
    assert "a row is missing or double" in told
