"""Run folders that ftcli 0.1.0 wrote: evaluated, answered from, resumed and exported with the numbers they gave then.

The folders lie in tests/fixtures/runs; fixtures/make_run_folders.py made them and their numbers.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ftcli
from ftcli.testing import run_on_cpu

from ..fixtures.make_run_folders import ENVIRONMENT, PLACE, RUNS, describe_machine, expect, move, resume

EXPECTED: dict[str, Any] = json.loads((RUNS / "expected.json").read_text())
NAMES = sorted(path.stem for path in (RUNS / "recipes").glob("*.yaml"))
# On another CPU or torch sums are rounded differently; products of 16-bit numbers have 8 or 11 significant bits.
TOLERANCES = {"sft_bf16_pure": 2e-2, "sft_fp16": 4e-3}
EXPORTS = [
    ("sft", "checkpoints/step-000003", {}),
    ("sft_lora", "", {"merge": True}),
    pytest.param("text_classification", "", {}, marks=pytest.mark.slow),
    pytest.param("sft_lora_new_tokens", "", {}, marks=pytest.mark.slow),
    pytest.param("sft_zero3", "checkpoints/step-000003", {}, marks=pytest.mark.slow),
    pytest.param("image_classification", "", {}, marks=pytest.mark.slow),
    pytest.param("own_model", "", {"trust_remote_code": True}, marks=pytest.mark.slow),
]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a copy of the fixtures, which is the working folder meanwhile."""
    copy = Path(shutil.copytree(RUNS, tmp_path / "runs"))
    move(copy, PLACE, str(copy))
    for final in copy.glob("folders/*/final"):
        os.utime(final)  # a checkout gives all files new times; these runs wrote their final weights last
    monkeypatch.chdir(copy)
    monkeypatch.setattr(sys, "argv", sys.argv)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield copy
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NAMES)
def test_resume_of_an_earlier_run_folder_gives_the_recorded_steps(name: str, runs: Path) -> None:
    actual, expected = expect(name), EXPECTED["folders"][name]
    if describe_machine() == EXPECTED["machine"]:
        assert actual == expected
        return
    within = TOLERANCES.get(name, 1e-5)
    assert actual["rows"] == [pytest.approx(row, rel=10 * within) for row in expected["rows"]]
    losses = [[row.get("loss", row.get("eval/loss")) for row in given["rows"]] for given in (actual, expected)]
    assert losses[0] == pytest.approx(losses[1], rel=within)
    assert actual.get("answer") == expected.get("answer")
    evaluation = expected.get("evaluation")  # None: the run was stopped before its end
    assert actual.get("evaluation") == (evaluation and pytest.approx(evaluation, rel=10 * within))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "source", "options"), EXPORTS)
def test_export_of_an_earlier_run_folder_is_verified(
    name: str, source: str, options: dict[str, Any], runs: Path
) -> None:
    folder = ftcli.export(Path("folders", name, source), runs / "exported", **options)
    assert list(folder.glob("*.safetensors"))


def recorded_losses(name: str) -> dict[int, float]:
    """Return step -> loss of the steps after the checkpoint of a folder."""
    return {row["step"]: row["loss"] for row in EXPECTED["folders"][name]["rows"] if "loss" in row}


def test_user_loop_with_the_earlier_import_of_save_resumes_and_saves(runs: Path) -> None:
    spec = importlib.util.spec_from_file_location("own_loop_of_a_user", runs / "own_task.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    output = Path("folders", "own_task")
    losses = module.train(
        "recipes/own_task.yaml", output, output / "checkpoints" / "step-000003", ["train.max_steps=5"]
    )
    assert losses == pytest.approx(list(recorded_losses("own_task").values()), rel=1e-5)
    assert {"step-000004", "step-000005"} <= {path.name for path in (output / "checkpoints").iterdir()}


def resume_on_this_rank(runs: Path, names: list[str]) -> dict[str, dict[int, float]]:
    """Return step -> loss of each folder, resumed on this rank of several."""
    os.chdir(runs)
    results = {}
    for name in names:
        _, recipe, *_, change = resume(name)
        checkpoint = Path("folders", name, "checkpoints", "step-000003")
        run = ftcli.prepare(recipe, overrides=[change], resume=checkpoint, cpu=True)
        results[name] = {step.number: step.loss for step in ftcli.steps(run)}
    return results


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["fsdp", "zero3"])
def test_resume_on_two_processes_of_a_checkpoint_of_any_profile_gives_the_recorded_losses(
    profile: str, runs: Path
) -> None:
    names = ["sft", "sft_ddp", "sft_fsdp", "sft_zero3", "sft_lora", "sft_lora_zero3"]
    for rank in run_on_cpu(resume_on_this_rank, runs, names, profile=profile):
        for name in names:
            assert rank[name] == pytest.approx(recorded_losses(name), rel=1e-5)


def test_fixtures_contain_no_absolute_path() -> None:
    for path in RUNS.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".yaml", ".md", ".jinja"):
            assert not re.search(r"[\s\"'=]/\w+/", path.read_text()), path
