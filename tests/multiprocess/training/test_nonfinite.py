"""A row makes the loss not a number: the run leaves its step out, or goes back, alike on every rank and profile."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ftcli
from ftcli.checkpoint.folder import publish, read_state
from ftcli.runtime.checkpoint_names import checkpoint_path
from ftcli.runtime.errors import RunError
from ftcli.runtime.run_folder import RunFolder
from ftcli.testing import run_on_cpu

from ...support.cells import LORA, cell, resume_cell, save_cell, weights
from ...support.runner import MakeInputs

BAD_STEP = 4
ROLL_BACK = {"faults": {"non_finite": "rollback"}, "checkpoint": {"every_steps": 1}}
POISONED_TASK = """
import os, torch
from ftcli.tasks import sft

Options = sft.Options

class Task(sft.Task):
    def collate(self, rows):
        bad = {int(i) for i in os.environ.get("BAD_IDS", "").split()}
        poison = float("nan") if any(row["id"] in bad for row in rows) else 1.0
        return super().collate(rows) | {"poison": torch.tensor(poison)}

    def loss(self, model, batch):
        rest = {name: value for name, value in batch.items() if name != "poison"}
        if os.environ.get("FINITE_GRADIENT"):
            return super().loss(model, rest) + (batch["poison"] - 1)
        return super().loss(model, rest) * batch["poison"]

    def eval_step(self, model, batch):
        return super().eval_step(model, {name: value for name, value in batch.items() if name != "poison"})
"""


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    return make_inputs({"poisoned.py": POISONED_TASK})


def poisoned(folder: Path, **changes: Any) -> Any:
    """Return a recipe of six steps an epoch whose task looks at BAD_IDS."""
    batch = {"global_size": 6, "micro_size": 3}
    return cell(folder, "sft-tied", **{"task": str(folder / "poisoned.py"), "batch": batch} | changes)


def rows_of(recipe: Any, step: int) -> list[int]:
    """Return the sample ids of a step, in global order."""
    from ftcli.training.setup import prepare

    run = prepare(recipe, cpu=True)
    size = run.plan.global_size
    keys = [key for batch in run.order for key in batch][(step - 1) * size : step * size]
    return [run.rows.train[index]["id"] for _, index in keys]


def curve(run: Any, save_at: tuple[int, ...] = ()) -> dict[str, Any]:
    from ftcli.loop import steps
    from ftcli.training.checkpointing import save_checkpoint

    rows, saved = [], []
    for step in steps(run):
        rows.append((step.number, step.loss, step.grad_norm, step.samples, step.rows))
        if step.number in save_at:
            saved.append(save_checkpoint(run, step.number))
    return {"rows": rows, "after": weights(run), "record": run.guard.record, "saved": saved}


def leave_a_step_out(folder: Path, output: Path, names: list[str]) -> dict[str, Any]:
    """Return case -> (curve of a run that skips a bad step, curve of one that never made it)."""
    from ftcli.training.setup import prepare

    results = {}
    for name in names:
        changes = {"adapter": LORA} if name == "lora" else {}
        changes |= {"train": {"max_steps": 6}, "precision": name if name in ("fp16", "bf16_pure") else "fp32"}
        recipe = poisoned(folder, **changes)
        ids = rows_of(recipe, BAD_STEP)
        os.environ.pop("BAD_IDS", None)
        if name == "finite gradient":
            os.environ["FINITE_GRADIENT"] = "1"
        save_cell(recipe, output / name, at=(BAD_STEP - 1,))
        if os.environ.get("RANK", "0") == "0":
            as_if_made(output / name)
        expected = save_cell_barrier(recipe, checkpoint_path(output / name, BAD_STEP))
        os.environ["BAD_IDS"] = str(ids[-1])
        skipping = prepare(poisoned(folder, faults={"non_finite": "skip"}, **changes), cpu=True)
        results[name] = {"ids": ids, "skipping": curve(skipping), "expected": expected}
        os.environ.pop("FINITE_GRADIENT", None)
    return results


def save_cell_barrier(recipe: Any, checkpoint: Path) -> dict[str, Any]:
    """Go on from a checkpoint that rank 0 has just made."""
    import torch.distributed as dist

    if dist.is_initialized():
        dist.barrier()
    return resume_cell(recipe, checkpoint)


def as_if_made(run: Path) -> None:
    """Write a checkpoint that says that the step after the last one was made, and changed nothing."""
    import shutil

    before, target = checkpoint_path(run, BAD_STEP - 1), checkpoint_path(run, BAD_STEP)
    shutil.copytree(before, target.with_suffix(".tmp"))
    publish(target.with_suffix(".tmp"), target, read_state(before) | {"step": BAD_STEP})


def assert_left_out(actual: dict[str, Any]) -> None:
    for name, case in actual.items():
        rows = case["skipping"]["rows"]
        assert [row[0] for row in rows] == [1, 2, 3, 4, 5, 6], name
        assert np.isnan(rows[BAD_STEP - 1][1]), name
        assert [row[1:4] for row in rows[BAD_STEP:]] == case["expected"]["rows"], name
        for key, value in case["expected"]["after"].items():
            assert np.array_equal(case["skipping"]["after"][key], value), (name, key)
        assert case["skipping"]["record"] == [{"step": 4, "policy": "skip", "samples": sorted(case["ids"])}], name


CASES = ["full", "lora", "finite gradient"]


def test_skipped_step_on_one_process_leaves_no_trace(inputs: Path, tmp_path: Path) -> None:
    assert_left_out(run_on_cpu(leave_a_step_out, inputs, tmp_path, CASES, processes=1, profile="single")[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "profile",
    ["ddp", "fsdp", "zero2", "zero3", "fsdp_offload", "zero3_offload"],
)
def test_skipped_step_on_any_profile_leaves_no_trace(profile: str, inputs: Path, tmp_path: Path) -> None:
    cases = CASES if profile.endswith("offload") else [*CASES, "bf16_pure"]
    results = run_on_cpu(leave_a_step_out, inputs, tmp_path, cases, profile=profile)[0]
    assert list(results) == cases
    assert_left_out(results)


def go_back(folder: Path, output: Path, workers: int) -> dict[str, Any]:
    """Return the curves of a run that goes back from a bad step, and of one that skips it."""
    import multiprocessing

    from ftcli.training.setup import prepare

    multiprocessing.set_start_method("fork", force=True)  # as in any run: loader processes start at once

    data = {"train": str(folder / "chats.jsonl"), "eval_rows": 5, "max_length": 128, "workers": workers}
    changes: dict[str, Any] = {"train": {"max_steps": 12}, "checkpoint": {"every_steps": 2}, "data": data}
    recipe = poisoned(folder, faults={"non_finite": "rollback"}, **changes)
    ids = rows_of(recipe, BAD_STEP)
    os.environ["BAD_IDS"] = str(ids[0])
    undone = curve(prepare(recipe, cpu=True, output=output / "run"), save_at=(2, 4, 6))
    resumed = curve(prepare(recipe, cpu=True, resume=checkpoint_path(output / "run", 6)))
    short = changes | {"train": {"max_steps": 6}, "schedule": {"name": "constant"}}
    back = prepare(poisoned(folder, faults={"non_finite": "rollback"}, **short), cpu=True, output=output / "short")
    went_back = curve(back, save_at=(3,))
    left = prepare(poisoned(folder, faults={"non_finite": "skip"}, **short), cpu=True)
    return {"ids": ids, "undone": undone, "resumed": resumed, "short": went_back, "skipping": curve(left)}


@pytest.mark.parametrize(
    ("profile", "workers"),
    [
        ("single", 0),
        # loader processes hold rows that were requested before the rollback
        pytest.param("single", 2, marks=pytest.mark.slow),
        *(pytest.param(p, 0, marks=pytest.mark.slow) for p in ("ddp", "fsdp", "zero2", "zero3")),
    ],
)
def test_rollback_on_every_profile_resumes_without_the_rows_of_the_bad_step(
    profile: str, workers: int, inputs: Path, tmp_path: Path
) -> None:
    ranks = run_on_cpu(go_back, inputs, tmp_path, workers, processes=1 if profile == "single" else 2, profile=profile)
    actual = ranks[0]
    rows = actual["undone"]["rows"]
    assert [row[0] for row in rows] == [1, 2, 3, 4, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]
    assert rows[2] == rows[4]
    assert np.isnan(rows[3][1]) and rows[5][1:] == (0.0, 0.0, 0, 0)
    assert sum(row[4] for row in rows[8:]) == 36 - 6  # a second epoch without those six, wherever they fall
    assert np.isfinite([row[1:3] for row in rows[4:]]).all()
    assert actual["undone"]["record"] == [{"step": 4, "policy": "rollback", "samples": sorted(actual["ids"])}]
    folders = [checkpoint_path(tmp_path / "run", step) for step in (2, 4, 6)]
    assert actual["undone"]["saved"] == [folders[0], None, *folders[1:]]  # nothing while step 4 is bad
    assert read_state(checkpoint_path(tmp_path / "run", 6))["not_finite"] == actual["undone"]["record"]
    assert actual["resumed"]["rows"] == rows[8:]
    for key, value in actual["short"]["after"].items():
        assert np.array_equal(actual["skipping"]["after"][key], value), key
    for other in ranks[1:]:
        assert [row[:3] for row in other["undone"]["rows"] if row[0] != 4] == [row[:3] for row in rows if row[0] != 4]


def test_rollback_of_a_packed_run_resumes_without_the_documents_of_the_bad_step(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ftcli.training.setup import prepare

    data = {"train": str(inputs / "chats.jsonl"), "max_length": 256, "packing": True, "drop_last": False}
    batch = {"global_size": 2, "micro_size": 1}
    changes = {"data": data, "batch": batch, "checkpoint": {"every_steps": 2}}
    recipe = poisoned(inputs, faults={"non_finite": "rollback"}, train={"epochs": 2}, **changes)
    first = prepare(recipe, cpu=True, output=tmp_path / "run")
    per_epoch, bins = first.plan.steps_per_epoch, first.rows.bins
    assert per_epoch is not None and bins is not None and per_epoch >= BAD_STEP
    keys = [key for micro in first.order for key in micro]
    ids = [number for _, index in keys[2 * BAD_STEP - 2 : 2 * BAD_STEP] for number in bins[index]]
    assert len(ids) > 2  # documents, more than rows
    monkeypatch.setenv("BAD_IDS", str(ids[-1]))
    undone = curve(first, save_at=(2, 4, 6))
    rows = undone["rows"]
    assert [row[0] for row in rows] == [1, 2, 3, 4, *range(3, 2 * per_epoch + 1)]
    assert rows[2] == rows[4] and np.isnan(rows[3][1]) and rows[5][1:] == (0.0, 0.0, 0, 0)
    assert np.isfinite([row[1:3] for row in rows[4:]]).all()
    assert undone["record"] == [{"step": BAD_STEP, "policy": "rollback", "samples": sorted(ids)}]
    assert sum(row[4] for row in rows[:4]) + sum(row[4] for row in rows[6 : 2 + per_epoch]) == 42
    assert sum(row[4] for row in rows[2 + per_epoch :]) == 42 - len(ids)
    resumed = curve(prepare(recipe, cpu=True, resume=checkpoint_path(tmp_path / "run", 6)))
    assert resumed["rows"] == rows[8:]


def evaluations(folder: Path) -> list[tuple[int, float]]:
    """Return the step and the loss of each recorded evaluation."""
    return [(row["step"], row["eval/loss"]) for row in RunFolder(folder).metrics() if "eval/loss" in row]


def stopped_loop(inputs: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """Return a run for a user's loop, whose step `BAD_STEP` is bad."""
    recipe = poisoned(inputs, train={"max_steps": 6}, **changes)
    monkeypatch.setenv("BAD_IDS", str(rows_of(recipe, BAD_STEP)[-1]))
    return ftcli.prepare(recipe, cpu=True, output=folder)


@pytest.mark.parametrize("where", ["left by break", "inside the loop", "raised by the loop"])
def test_run_stopped_by_a_bad_step_cannot_be_saved_evaluated_or_continued(
    where: str, inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, folder = stopped_loop(inputs, tmp_path / "run", monkeypatch), RunFolder(tmp_path / "run")

    def loop() -> None:
        for step in ftcli.steps(run):
            if step.number == 2:
                ftcli.save_checkpoint(run, 2)
            if step.number == BAD_STEP and where == "left by break":
                break
            if step.number == BAD_STEP and where == "inside the loop":
                ftcli.evaluate(run)

    bad = rf"step {BAD_STEP}: loss nan.*The step was not saved"
    with nullcontext() if where == "left by break" else pytest.raises(RunError, match=bad):
        loop()
    assert folder.status()["state"] == ("stopped" if where == "left by break" else "failed")
    save = lambda: ftcli.save_checkpoint(run, run.position)  # noqa: E731
    for use in (save, save, lambda: ftcli.evaluate(run)):
        with pytest.raises(RunError, match=bad):
            use()
    with pytest.raises(RunError, match="step 5 was interrupted" if where == "raised by the loop" else bad):
        next(iter(ftcli.steps(run)))
    assert [path.name for path in (folder.path / "checkpoints").iterdir()] == ["step-000002"]
    status = folder.status()
    assert (status["state"], status["exit_code"]) == ("failed", 1) and "loss nan" in status["error"]
    assert evaluations(folder.path) == []


def test_evaluation_of_a_step_that_will_be_undone_is_not_recorded(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = stopped_loop(inputs, tmp_path / "run", monkeypatch, **ROLL_BACK)
    found = []
    for step in ftcli.steps(run):
        found.append((step.number, bool(np.isfinite(ftcli.evaluate(run)["loss"]))))
        ftcli.save_checkpoint(run, step.number)
    assert found == [(1, True), (2, True), (3, True), (4, False), (4, True), (5, True), (6, True)]
    steps, losses = zip(*evaluations(tmp_path / "run"), strict=True)
    assert steps == (1, 2, 3, 4, 5, 6) and np.isfinite(losses).all()
