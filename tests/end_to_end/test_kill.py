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

from ftcli.checkpoint.folder import find_damage, newest_intact
from ftcli.config.load import load_recipe
from ftcli.runtime.checkpoint_names import checkpoints_of, step_of
from ftcli.runtime.run_folder import RunFolder

from ..support.killing import HIDDEN, Moment, train
from ..support.run_folders import stable_metrics
from ..support.runner import MakeInputs

STEPS = 6
KILLED = -signal.SIGKILL
SLOW = 1.0  # seconds that a disk takes, which is many steps
Reference = tuple[Path, Counter[str]]


@pytest.fixture(scope="module")
def recipe(make_inputs: MakeInputs) -> Path:
    folder = make_inputs()
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
    references_by_profile: dict[str, Reference] = {}

    def reference(profile: str) -> Reference:
        if profile not in references_by_profile:
            run = tmp_path_factory.mktemp(profile) / "run"
            codes, operations = train(recipe, run, profile, None)
            assert not any(codes), (run.parent / "rank-0.log").read_text()[-3000:]
            references_by_profile[profile] = run, operations
        return references_by_profile[profile]

    return reference


def assert_same_run(actual: Path, expected: Path) -> None:
    assert stable_metrics(actual) == stable_metrics(expected)
    for file in ("final/model.safetensors", "probe.safetensors"):
        assert (actual / file).read_bytes() == (expected / file).read_bytes()
    assert RunFolder(actual).status()["state"] == "done"
    assert [step_of(folder) for folder in checkpoints_of(actual)] == [STEPS - 1, STEPS]
    assert not list(actual.rglob("*.tmp")) and not list((actual / "checkpoints").glob("abandoned-*"))


def assert_ended_together(codes: list[int], run: Path, log: str) -> None:
    """Hold that every rank finished, or that every rank was killed.

    The main rank alone writes the status and removes files once the weights are in final/: the others have ended by
    themselves by then, if the kill hits one of these last operations.
    """
    others = {0, KILLED} if (run / "final").is_dir() else {KILLED}
    assert set(codes) == {0} or (codes[0] == KILLED and set(codes[1:]) <= others), log


def rows_and_saved(run: Path) -> tuple[int, int]:
    """Return (how many steps have their row in the metrics, the step of the newest checkpoint: 0 without any)."""
    checkpoint, problems = newest_intact(run)
    assert problems == []
    lines = (run / "metrics.jsonl").read_text().splitlines() if (run / "metrics.jsonl").exists() else []
    return len([line for line in lines if line.endswith("}")]), step_of(checkpoint) if checkpoint else 0


def assert_nothing_is_lost(run: Path, recipe: Path) -> None:
    """Check what a killed run leaves: no damaged checkpoint, and no more unsaved steps than the recipe allows.

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
    expected, operations = reference
    hit: list[Moment] = []
    number, pending = 0, moments(operations, seed)
    while len(hit) < kills:
        codes: list[int] = [KILLED]
        while any(codes):
            moment = pending.pop() if pending and len(hit) < kills else None
            codes, _ = train(recipe, run / str(number) / "run", profile, moment)
            log = (run / str(number) / "rank-0.log").read_text()[-3000:]
            assert_ended_together(codes, run / str(number) / "run", log)
            if any(codes):
                assert moment is not None
                hit.append(moment)
                assert_nothing_is_lost(run / str(number) / "run", recipe)
        assert_same_run(run / str(number) / "run", expected)
        number, seed = number + 1, seed + 1
        pending = pending or moments(operations, seed)
    return hit


@pytest.mark.slow
def test_resume_after_a_kill_of_the_main_rank_alone_gives_the_same_run(
    recipe: Path, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Kill the main rank at its last operation, when the other rank has ended by itself."""
    run = tmp_path / "run"
    codes, _ = train(recipe, run, "fsdp", ("os.remove .lock", 1), after=3 * SLOW)
    log = (tmp_path / "rank-0.log").read_text()[-3000:]
    assert codes == [KILLED, 0], log
    assert_ended_together(codes, run, log)
    assert train(recipe, run, "fsdp", None)[0] == [0, 0]
    assert_same_run(run, references("fsdp")[0])


@pytest.mark.parametrize(("profile", "kills"), [("single", 4), ("ddp", 2), ("fsdp", 2)])
def test_resume_after_several_kills_gives_the_same_run(
    profile: str, kills: int, recipe: Path, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    assert len(kill_and_resume(recipe, tmp_path, profile, references(profile), kills, seed=kills)) == kills


def test_resume_after_kills_without_background_saves_gives_the_same_run(
    waiting: Path, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    assert len(kill_and_resume(waiting, tmp_path, "single", references("single"), 2, seed=4)) == 2


@pytest.mark.parametrize(("background", "rows"), [(True, 3), (False, 2)])
def test_kill_during_a_slow_save_loses_two_steps_in_the_background_and_one_otherwise(
    background: bool, rows: int, recipe: Path, waiting: Path, tmp_path: Path
) -> None:
    run, second = tmp_path / "run", ("os.rename checkpoints/step-N.tmp", 2)
    codes, _ = train(recipe if background else waiting, run, "single", second, after=SLOW)
    assert codes == [KILLED], (tmp_path / "rank-0.log").read_text()[-3000:]
    assert rows_and_saved(run) == (rows, 1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("profile", "kills"), [("single", 32), ("ddp", 8), ("fsdp", 12), ("zero2", 6), ("zero3", 6)])
def test_resume_after_kills_at_every_kind_of_file_operation_gives_the_same_run(
    profile: str, kills: int, recipe: Path, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    hit = kill_and_resume(recipe, tmp_path, profile, references(profile), kills, seed=100)
    assert len(hit) == kills
    assert len(set(hit)) > kills // 2


@pytest.mark.slow
@pytest.mark.parametrize(("profile", "kills"), [("single", 8), ("ddp", 4)])
def test_resume_without_background_saves_after_kills_at_every_operation_gives_the_same_run(
    profile: str, kills: int, waiting: Path, references: Callable[[str], Reference], tmp_path: Path
) -> None:
    assert len(set(kill_and_resume(waiting, tmp_path, profile, references(profile), kills, seed=200))) > kills // 2


def kill_all(command: psutil.Process) -> None:
    """Kill a launched run: the parent, the launcher and every rank, none of which can clean up."""
    for process in [command, *command.children(recursive=True)]:
        if process.is_running():
            process.kill()


def wait_until(is_so: Callable[[], bool], child: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 300
    while not is_so() and child.poll() is None and time.monotonic() < end:
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("profile", "step"),
    [pytest.param(p, s, marks=pytest.mark.slow) for p, s in (("ddp", 2), ("fsdp", 4), ("zero2", 3), ("zero3", 5))],
)
def test_resume_after_a_launched_run_is_killed_during_a_save_gives_the_same_run(
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
        assert all(not find_damage(folder) for folder in checkpoints_of(run))
        assert left and left[-1] in range(step - 1, STEPS)
    codes, _ = train(recipe, run, profile, None)
    assert codes == [0, 0], (tmp_path / "rank-0.log").read_text()[-3000:]
    assert_same_run(run, references(profile)[0])
