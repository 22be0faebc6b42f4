"""Checkpoint folders: complete, damaged and pruned ones. Files only, no torch."""

from __future__ import annotations

import json
import math
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest

from ftcli.checkpoint import folder as checkpoint_folder
from ftcli.checkpoint.folder import (
    FORMAT,
    abandon,
    describe_best,
    find_best,
    find_damage,
    folder_size,
    newest_intact,
    prune,
    publish,
    read_state,
    update_state,
)
from ftcli.config.recipe_training import Best
from ftcli.runtime.checkpoint_names import COMPLETE, STATE, checkpoint_path, checkpoints_of
from ftcli.runtime.durable_files import write_durably

DATA = "rank-00000-0000.safetensors"


def write(run: Path, step: int, **more: Any) -> Path:
    """Publish a checkpoint with one file of arbitrary content, which this module does not read."""
    folder = checkpoint_path(run, step)
    temporary = folder.with_name(f"{folder.name}.tmp")
    temporary.mkdir(parents=True)
    files = {DATA: write_durably(temporary / DATA, b"weights" * step)}
    publish(temporary, folder, {"format": FORMAT, "step": step, "metrics": {}, "files": files} | more)
    return folder


def steps(run: Path) -> list[int]:
    return [int(folder.name.removeprefix("step-")) for folder in checkpoints_of(run)]


def test_find_damage_of_a_published_checkpoint_is_empty(tmp_path: Path) -> None:
    folder = write(tmp_path, 5)
    assert find_damage(folder) == ""
    assert {file.name for file in folder.iterdir()} == {DATA, STATE, COMPLETE}
    assert [item.name for item in (tmp_path / "checkpoints").iterdir()] == ["step-000005"]


def test_checkpoints_of_ignores_a_folder_without_complete(tmp_path: Path) -> None:
    (write(tmp_path, 5) / COMPLETE).unlink()
    write(tmp_path, 1000000)
    assert steps(tmp_path) == [1000000]


@pytest.mark.parametrize("name", [DATA, STATE, COMPLETE])
@pytest.mark.parametrize("fault", ["one bit", "cut off", "removed", "longer"])
def test_damage_every_damaged_file_is_named(name: str, fault: str, tmp_path: Path) -> None:
    path = write(tmp_path, 5) / name
    content = path.read_bytes()
    if fault == "removed":
        path.unlink()
    else:
        flipped = bytes([content[0] ^ 1]) + content[1:]
        path.write_bytes({"one bit": flipped, "cut off": content[:-7], "longer": content + b"x"}[fault])
    problem = find_damage(path.parent)
    assert str(path) in problem or (name == COMPLETE and COMPLETE in problem)
    assert ("missing" if fault == "removed" else "damaged") in problem


def test_damage_without_hashes_sizes_are_compared_only(tmp_path: Path) -> None:
    path = write(tmp_path, 5) / DATA
    path.write_bytes(b"WEIGHTS" * 5)
    assert find_damage(path.parent, hashes=False) == ""
    assert "sha256" in find_damage(path.parent)


def test_find_damage_of_a_file_name_outside_the_folder_does_not_read_it(tmp_path: Path) -> None:
    record = write_durably(tmp_path / "elsewhere", b"secret")
    folder = write(tmp_path, 5, files={"../../elsewhere": record})
    assert "missing" in find_damage(folder)


def test_damage_with_a_format_of_the_future_is_refused(tmp_path: Path) -> None:
    assert f"format {FORMAT + 1}" in find_damage(write(tmp_path, 5, format=FORMAT + 1))


def test_read_state_of_the_first_format_version_fills_in_defaults(tmp_path: Path) -> None:
    state = read_state(write(tmp_path, 5, data={"rows": 3}))
    assert state["data"] == {"rows": 3, "facts": None} and state["not_finite"] == []


@pytest.mark.parametrize("operations", range(8))
def test_restate_killed_halfway_leaves_the_old_or_the_new_state(
    operations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path, 5)
    left, replace, durably = iter(range(operations)), Path.replace, checkpoint_folder.write_durably

    def killed(real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any) -> Any:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return real(*arguments)

        return operation

    monkeypatch.setattr(Path, "replace", killed(replace))
    monkeypatch.setattr(checkpoint_folder, "write_durably", killed(durably))
    with pytest.raises(KeyboardInterrupt) if operations < 6 else nullcontext():
        update_state(folder, metrics={"loss": 1.0})
    assert find_damage(folder) == ""
    assert read_state(folder)["metrics"] == ({"loss": 1.0} if operations >= 4 else {})
    assert len((folder / COMPLETE).read_text().split()) == (1 if operations in (0, 1, 6, 7) else 2)


def test_newest_intact_skips_damaged_checkpoints(tmp_path: Path) -> None:
    good, bad, worse = (write(tmp_path, step) for step in (5, 10, 15))
    (bad / DATA).write_bytes(b"")
    (worse / DATA).unlink()
    checkpoint, problems = newest_intact(tmp_path)
    assert checkpoint == good
    assert [str(worse / DATA) in problems[0], str(bad / DATA) in problems[1]] == [True, True]
    (good / STATE).write_text(json.dumps({}))
    assert newest_intact(tmp_path)[0] is None


def test_prune_leaves_the_newest_and_the_best(tmp_path: Path) -> None:
    for step, loss in ((1, 3.0), (2, 1.0), (3, float("nan")), (4, 2.0), (5, 2.5)):
        write(tmp_path, step, metrics={"loss": loss})
    best = Best(metric="loss", direction="min")
    prune(tmp_path, None, best)
    assert steps(tmp_path) == [1, 2, 3, 4, 5]
    prune(tmp_path, 2, best)
    assert steps(tmp_path) == [2, 4, 5]
    assert find_best(checkpoints_of(tmp_path), Best(metric="loss", direction="max")) == checkpoint_path(tmp_path, 5)
    prune(tmp_path, 1, None)
    assert steps(tmp_path) == [5]


@pytest.mark.parametrize("direction", ["min", "max"])
def test_prune_of_equal_metrics_leaves_the_oldest_and_ignores_nonfinite_ones(
    direction: Literal["min", "max"], tmp_path: Path
) -> None:
    best = Best(metric="score", direction=direction)
    for step, score in ((1, math.nan), (2, 1.0), (3, 1.0), (4, math.inf), (5, -math.inf), (6, 1.0)):
        write(tmp_path, step, metrics={"score": score})
        prune(tmp_path, 1, best)  # as a run does
    assert steps(tmp_path) == [2, 6]


def test_find_best_without_evaluations_returns_none(tmp_path: Path) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    assert find_best(checkpoints_of(tmp_path), Best(metric="loss", direction="min")) is None


def test_describe_best_of_a_checkpoint_without_a_readable_recipe_is_empty(tmp_path: Path) -> None:
    assert describe_best(tmp_path) == ""
    write(tmp_path, 1, recipe={"checkpoint": {"keep_best": {"metric": "loss"}}}, versions={}, metrics={"loss": 1.0})
    assert describe_best(tmp_path) == ""


def test_abandon_leaves_newer_checkpoints_until_the_next_one(tmp_path: Path) -> None:
    for step in (5, 10):
        write(tmp_path, step)
    half = checkpoint_path(tmp_path, 15).with_name("step-000015.tmp")
    half.mkdir()
    abandon(tmp_path, 5)
    assert steps(tmp_path) == [5] and not half.exists()
    assert (tmp_path / "checkpoints" / "abandoned-step-000010" / DATA).exists()
    write(tmp_path, 10)
    prune(tmp_path, 2, None)
    assert sorted(item.name for item in (tmp_path / "checkpoints").iterdir()) == ["step-000005", "step-000010"]


def test_removed_checkpoints_leave_files_that_ftcli_did_not_write(tmp_path: Path) -> None:
    place = tmp_path / "checkpoints"

    def add_notes(*names: str) -> None:
        for name in names:
            (place / name / "plots").mkdir(parents=True)
            (place / name / "plots" / "loss.png").write_text(name)

    for step in (5, 10, 15):
        write(tmp_path, step)
    (place / "step-000020.tmp").mkdir()
    (place / "step-000020.tmp" / DATA).write_text("half")
    add_notes("step-000005", "step-000010", "step-000015", "step-000020.tmp")
    for _ in range(2):  # of two resumes, the second moves an abandoned folder over an older one
        abandon(tmp_path, 10)
        write(tmp_path, 15)
        add_notes("step-000015")
    write(tmp_path, 15)  # replaces an earlier checkpoint of the step
    prune(tmp_path, 1, None)
    assert steps(tmp_path) == [15] and not list(place.glob("step-*.tmp")) and not list(place.glob("abandoned-*"))
    left = [file.read_text() for file in sorted(place.rglob("loss.png"))]
    assert sorted(left) == ["step-000005", "step-000010", *["step-000015"] * 3, "step-000020.tmp"]
    assert all(file.parts[-3].startswith("not-by-ftcli-") for file in place.rglob("loss.png"))
    assert not list(place.glob(f"not-by-ftcli-*/{DATA}"))


def test_size_of_a_folder_with_vanishing_files_succeeds(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"12345")
    over = threading.Event()

    def write_and_remove() -> None:
        while not over.is_set():
            (tmp_path / "step.tmp").mkdir()
            for number in range(50):
                (tmp_path / "step.tmp" / str(number)).write_bytes(b"1")
            shutil.rmtree(tmp_path / "step.tmp")

    other = threading.Thread(target=write_and_remove)
    other.start()
    try:
        sizes = [folder_size(tmp_path) for _ in range(500)]  # without care, one of 25 fails
    finally:
        over.set()
        other.join()
    assert all(5 <= size <= 55 for size in sizes) and folder_size(tmp_path) == 5
