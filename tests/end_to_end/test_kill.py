"""Runs are killed (SIGKILL, every rank) at random, seeded moments; whatever is left, `--resume auto` ends them as if
nothing had happened. A run saves every step, and takes seconds."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from ftcli.checkpoint_folder import checkpoints_of, damage, newest_intact, step_of
from ftcli.recipe_file import load_recipe
from ftcli.run_folder import RunFolder

from ..multiprocess.cells import write_inputs
from ..multiprocess.killing import HIDDEN, Moment, train

STEPS = 6
KILLED = -signal.SIGKILL
SLOW = 1.0  # seconds that a disk takes, which is many steps
TIMED = ("seconds", "tokens_per_second", "rows_per_second", "data_wait_share", "peak_memory_gb")
Reference = tuple[Path, Counter[str]]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    values: dict[str, Any] = {
        "task": "sft",
        "model": {"name": str(folder / "tied"), "dropout": 0.0},
        "data": {"train": str(folder / "chats.jsonl"), "max_length": 128},
        "batch": {"global_size": 4, "micro_size": 2},
        "train": {"max_steps": STEPS},
        "optimizer": {"learning_rate": 5e-3},
        "checkpoint": {"every_steps": 1, "keep": 2},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    values["checkpoint"]["background"] = False
    (folder / "waiting.yaml").write_text(yaml.safe_dump(values))
    return folder / "recipe.yaml"


@pytest.fixture(scope="module")
def waiting(recipe: Path) -> Path:
    """Return the same recipe, of a run that waits for the disk at each save."""
    return recipe.with_name("waiting.yaml")


@pytest.fixture(scope="module")
def references(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """Return a function that gives a profile's uninterrupted run and its operations on files."""
    found: dict[str, Reference] = {}

    def reference(profile: str) -> Reference:
        if profile not in found:
            run = tmp_path_factory.mktemp(profile) / "run"
            codes, operations = train(recipe, run, profile, None)
            assert not any(codes), (run.parent / "rank-0.log").read_text()[-3000:]
            found[profile] = run, operations
        return found[profile]

    return reference


def curve(run: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMED} for row in RunFolder(run).metrics()]


def assert_same_run(found: Path, wanted: Path) -> None:
    assert curve(found) == curve(wanted)
    for file in ("final/model.safetensors", "probe.safetensors"):
        assert (found / file).read_bytes() == (wanted / file).read_bytes()
    assert RunFolder(found).status()["state"] == "done"
    assert [step_of(folder) for folder in checkpoints_of(found)] == [STEPS - 1, STEPS]
    assert not list(found.rglob("*.tmp")) and not list((found / "checkpoints").glob("abandoned-*"))


def rows_and_saved(run: Path) -> tuple[int, int]:
    """Return (how many steps have their row in the metrics, the step of the newest checkpoint: 0 without any)."""
    found, problems = newest_intact(run)
    assert problems == []
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return len([line for line in lines if line.endswith("}")]), step_of(found) if found else 0


def assert_nothing_is_lost(run: Path, recipe: Path) -> None:
    """Hold what a killed run leaves: no damaged checkpoint, and no more steps without one than the recipe allows.

    The row of a step is written before its checkpoint, so one step may lack it. A run that saves in the background
    (the default) writes row k + 1 while checkpoint k is on its way to the disk, and waits for it only where it saves
    step k + 1: then the newest two may. A run that waits for the disk has checkpoint k before it begins step k + 1.
    """
    background = load_recipe(recipe).checkpoint.background
    rows, saved = rows_and_saved(run)
    assert saved >= rows - (2 if background else 1)


def moments(operations: Counter[str], seed: int) -> list[Moment]:
    """Return each kind of operation once, at a drawn occurrence, in drawn order: rare ones come as often."""
    draw = random.Random(seed)
    return draw.sample([(kind, draw.randint(1, min(count, 3))) for kind, count in operations.items()], len(operations))


def kill_and_resume(recipe: Path, run: Path, profile: str, reference: Reference, kills: int, seed: int) -> list[Moment]:
    """Kill one run after the other, each several times, until it happened `kills` times; return the moments hit."""
    wanted, operations = reference
    hit: list[Moment] = []
    number, pending = 0, moments(operations, seed)
    while len(hit) < kills:
        codes: list[int] = [KILLED]
        while any(codes):
            moment = pending.pop() if pending and len(hit) < kills else None
            codes, _ = train(recipe, run / str(number) / "run", profile, moment)
            log = (run / str(number) / "rank-0.log").read_text()[-3000:]
            assert set(codes) in ({0}, {KILLED}), log
            if any(codes):
                assert moment is not None
                hit.append(moment)
                assert_nothing_is_lost(run / str(number) / "run", recipe)
        assert_same_run(run / str(number) / "run", wanted)
        number, seed = number + 1, seed + 1
        pending = pending or moments(operations, seed)
    return hit


@pytest.mark.parametrize(("profile", "kills"), [("single", 4), ("ddp", 2), ("fsdp", 2), ("zero2", 2), ("zero3", 2)])
def test_a_run_that_is_killed_again_and_again_ends_as_if_it_never_was(
    profile: str, kills: int, recipe: Path, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    assert len(kill_and_resume(recipe, tmp_path, profile, references(profile), kills, seed=kills)) == kills


def test_a_run_that_waits_for_the_disk_is_killed_and_ends_as_if_it_never_was(
    waiting: Path, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    assert len(kill_and_resume(waiting, tmp_path, "single", references("single"), 2, seed=4)) == 2


@pytest.mark.parametrize(("background", "rows"), [(True, 3), (False, 2)])
def test_a_disk_that_is_slow_with_a_checkpoint_costs_two_steps_in_the_background_and_one_where_training_waits(
    background: bool, rows: int, recipe: Path, waiting: Path, tmp_path: Path
) -> None:
    run, second = tmp_path / "run", ("os.rename checkpoints/step-N.tmp", 2)
    codes, _ = train(recipe if background else waiting, run, "single", second, after=SLOW)
    assert codes == [KILLED], (tmp_path / "rank-0.log").read_text()[-3000:]
    assert rows_and_saved(run) == (rows, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("profile", "kills"), [("single", 32), ("ddp", 8), ("fsdp", 12), ("zero2", 6), ("zero3", 6)])
def test_runs_are_killed_at_every_kind_of_operation_on_their_files(
    profile: str, kills: int, recipe: Path, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    hit = kill_and_resume(recipe, tmp_path, profile, references(profile), kills, seed=100)
    assert len(hit) == kills
    assert len(set(hit)) > kills // 2


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "kills"), [("single", 8), ("ddp", 4)])
def test_runs_that_wait_for_the_disk_are_killed_at_every_kind_of_operation(
    profile: str, kills: int, waiting: Path, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    assert len(set(kill_and_resume(waiting, tmp_path, profile, references(profile), kills, seed=200))) > kills // 2


def kill_all(command: psutil.Process) -> None:
    """Kill a launched run: the parent, the launcher and every rank, none of which can clean up."""
    for process in [command, *command.children(recursive=True)]:
        if process.is_running():
            process.kill()


def wait_until(is_so: Callable[[], bool], child: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while not is_so() and child.poll() is None and time.monotonic() < end:
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("profile", "step"),
    [("ddp", 2), *(pytest.param(p, s, marks=pytest.mark.slow) for p, s in (("fsdp", 4), ("zero2", 3), ("zero3", 5)))],
)
def test_a_launched_run_is_killed_while_it_saves_and_goes_on(
    profile: str, step: int, recipe: Path, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "ftcli", "train", str(recipe), "--profile", profile, "--cpu"]
    command += ["--num-processes", "2", "--output", str(run), "--resume", "auto"]
    with (tmp_path / "log").open("wb") as log:
        child = subprocess.Popen(command, stdout=log, stderr=log, env=dict(psutil.Process().environ()) | HIDDEN)
        wait_until((run / "checkpoints" / f"step-{step:06d}.tmp").exists, child)
        kill_all(psutil.Process(child.pid))
        assert child.wait() == KILLED
        assert_nothing_is_lost(run, recipe)
        left = [step_of(folder) for folder in checkpoints_of(run)]
        assert all(not damage(folder) for folder in checkpoints_of(run))
        assert left and left[-1] in range(step - 1, STEPS)
        done = subprocess.run(command, stdout=log, stderr=log, env=dict(psutil.Process().environ()) | HIDDEN)
    assert done.returncode == 0, (tmp_path / "log").read_text()[-3000:]
    assert_same_run(run, references(profile)[0])
