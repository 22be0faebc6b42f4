"""Machines with another recipe, other rows, another checkpoint or no shared folder are refused before the first step.

Each of two ranks believes to be alone on its machine.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import ftcli
from ftcli.runtime.errors import InputError, RunError
from ftcli.testing import run_on_cpu

from ...support.cells import cell
from ...support.runner import MakeInputs


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    folder = make_inputs()
    rows = (folder / "chats.jsonl").read_text().splitlines()
    (folder / "other").mkdir()
    (folder / "other" / "same.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "other" / "reversed.jsonl").write_text("\n".join(rows[::-1]) + "\n")
    return folder


def train(folder: Path, output: Path | None, of_rank_1: dict[str, Any], **more: Any) -> list[float] | str:
    """Return the losses of two steps, or the message of the error."""
    from ftcli.training import same_run

    is_second = os.environ["RANK"] == "1"
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    same_run.SECONDS_TO_APPEAR = 0.5
    own = of_rank_1 if is_second else {}
    of_both = {"task": more.pop("task")} if "task" in more else {}
    more = {name: value[int(is_second)] if isinstance(value, list) else value for name, value in more.items()}
    if is_second and output is not None:
        output = output.with_name("elsewhere") if "apart" in own else None if "nowhere" in own else output
    values = {name: value for name, value in own.items() if name not in ("apart", "nowhere")}
    recipe = cell(folder, "sft-tied", **({"train": {"max_steps": 2}} | of_both | values))
    try:
        run = ftcli.prepare(recipe, cpu=True, output=output, **more)
    except (InputError, RunError) as error:
        return str(error)
    return [step.loss for step in ftcli.steps(run)]


def both(*arguments: Any, **more: Any) -> Any:
    first, second = run_on_cpu(_train_with, arguments, more)
    assert first == second
    return first


def _train_with(arguments: tuple[Any, ...], more: dict[str, Any]) -> list[float] | str:
    return train(*arguments, **more)


def data(inputs: Path, name: str) -> dict[str, Any]:
    return {"data": {"train": str(inputs / "other" / name), "eval_rows": 5, "max_length": 128}}


def test_machines_with_the_same_rows_at_another_place_train(inputs: Path, tmp_path: Path) -> None:
    assert len(both(inputs, tmp_path / "run", data(inputs, "same.jsonl") | {"log": {"every_steps": 7}})) == 2
    assert not (tmp_path / "run" / ".shared").exists()


def test_machines_with_the_same_model_and_task_at_another_place_train(inputs: Path, tmp_path: Path) -> None:
    shutil.copytree(inputs / "tied", tmp_path / "model", dirs_exist_ok=True)
    shutil.copy(inputs / "two_passes.py", tmp_path / "two_passes.py")
    of_rank_1 = {"model": {"name": str(tmp_path / "model"), "dropout": 0.0}}
    assert len(both(inputs, tmp_path / "run", of_rank_1)) == 2
    first, second = (str(folder / "two_passes.py") for folder in (inputs, tmp_path))
    assert len(both(inputs, None, {"task": second}, task=first)) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": {"max_steps": 3}}, "rank 1 is not in the same run as rank 0: train.max_steps is 3, and 2 on rank 0"),
        ({"nowhere": True}, "rank 1 is not in the same run as rank 0: a run folder is absent, and given on rank 0"),
        ({"seed": 7}, "rank 1 is not in the same run as rank 0: seed is 7, and "),
        ("reversed.jsonl", "rank 1 is not in the same run as rank 0: the digest of the prepared rows is "),
    ],
)
def test_machines_with_another_recipe_or_other_rows_are_refused(
    changes: dict[str, Any] | str, message: str, inputs: Path, tmp_path: Path
) -> None:
    of_rank_1 = data(inputs, changes) if isinstance(changes, str) else changes
    found = both(inputs, tmp_path / "run", of_rank_1)
    assert message in found and "start all machines with the same command" in found


def test_machine_that_does_not_see_the_checkpoint_is_refused(inputs: Path, tmp_path: Path) -> None:
    run = ftcli.prepare(cell(inputs, "sft-tied", train={"max_steps": 2}), cpu=True, output=tmp_path / "first")
    for step in ftcli.steps(run):
        ftcli.save_checkpoint(run, step.number)
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    checkpoint = tmp_path / "copy" / "checkpoints" / "step-000001"
    found = both(inputs, None, {}, resume=[checkpoint, None], resume_anyway=True)
    assert "rank 1 is not in the same run as rank 0: the first step is 0, and 1 on rank 0" in found
    assert "the digest of the checkpoint's state is none" in found


def test_folder_that_cannot_be_written_is_named_on_every_machine(inputs: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / ".shared" / "other").mkdir(parents=True)
    assert "/run/.shared could not be written: Is a directory" in both(inputs, tmp_path / "run", {})


def test_machines_without_a_shared_folder_are_refused_before_the_first_step(inputs: Path, tmp_path: Path) -> None:
    found = both(inputs, tmp_path / "run", {"apart": True})
    assert f"rank 1 does not see {tmp_path / 'run'} of rank 0" in found
    assert not (tmp_path / "run" / ".shared").exists()
