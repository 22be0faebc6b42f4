"""A branch of the model that some steps do not use: the same curve and the same checkpoints on every profile."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftcli.testing import run_on_cpu

from ...support.cells import cell, weights
from ...support.runner import MakeInputs

TASK = """
import torch

from ftcli.tasks.text_classification import Options
from ftcli.tasks.text_classification import Task as Base


class Branched(torch.nn.Module):
    is_used = False

    def __init__(self, inner):
        super().__init__()
        self.inner, self.branch = inner, torch.nn.Linear(3, 1)
        torch.nn.init.ones_(self.branch.weight)
        torch.nn.init.zeros_(self.branch.bias)

    def forward(self, values):
        values = self.inner(values)
        return values * torch.sigmoid(self.branch(values)) if Branched.is_used else values


class Task(Base):
    sparse = ("branch",)

    def finish_model(self, model):
        super().finish_model(model)
        model.classifier = Branched(model.classifier)
"""
PROFILES = {"single": 1, "ddp": 2, "fsdp": 2, "zero2": 2, "zero3": 2}
FIRST, SAVED_AT, LAST = 2, 4, 6  # the branch is used after step 2


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    folder = make_inputs()
    (folder / "branched.py").write_text(TASK)
    return folder


def train(folder: Path, output: Path | None, resume: Path | None) -> dict[str, Any]:
    """Train on, use the branch after step 2, and save after step 4 if there is an output folder."""
    from ftcli.loop import steps
    from ftcli.training.checkpointing import save_checkpoint
    from ftcli.training.setup import prepare

    sections = {
        "task": str(folder / "branched.py"),
        "train": {"max_steps": LAST},
        "batch": {"global_size": 12, "micro_size": 2},
    }
    run = prepare(cell(folder, "text", **sections), cpu=True, output=output, resume=resume)
    branched = type(run.hardware.unwrap(run.model).get_submodule("classifier"))
    branched.is_used = run.first_step >= FIRST
    rows = []
    for step in steps(run):
        branched.is_used = step.number >= FIRST
        rows.append((step.loss, step.grad_norm))
        if output is not None and step.number == SAVED_AT:
            save_checkpoint(run, step.number)
    return {"rows": rows, "after": weights(run), "updates": run.hardware.updates(run.model, run.optimizer)}


def both(folder: Path, output: Path, checkpoint: Path | None) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return an uninterrupted run, and one that resumes from the checkpoint of another profile."""
    whole = train(folder, output, None)
    return whole, None if checkpoint is None else train(folder, None, checkpoint)


@pytest.fixture(scope="module")
def single(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    output = tmp_path_factory.mktemp("single")
    ((whole, _),) = run_on_cpu(both, inputs, output / "run", None, processes=1, profile="single")
    return whole, output / "run" / "checkpoints" / f"step-{SAVED_AT:06d}"


@pytest.mark.parametrize("profile", PROFILES)
def test_branch_that_steps_do_not_use_gives_one_curve_and_resumes_on_any_profile(
    profile: str, inputs: Path, single: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    expected, checkpoint = single
    given = (inputs, tmp_path / "run", checkpoint)
    whole, resumed = run_on_cpu(both, *given, processes=PROFILES[profile], profile=profile)[0]
    assert whole["updates"] == resumed["updates"] == LAST
    assert np.allclose(whole["rows"], expected["rows"], rtol=1e-5, atol=0)
    assert np.allclose(resumed["rows"], expected["rows"][SAVED_AT:], rtol=1e-5, atol=0)
    assert expected["after"]["classifier.branch.weight"].min() < 1
    for name, value in expected["after"].items():
        for found in (whole, resumed):
            assert np.allclose(found["after"][name], value, rtol=1e-4, atol=2e-5), name


def message_of_unused(folder: Path, output: Path) -> str:
    """Train with a branch that is not used and not declared, and return the error."""
    from ftcli import loop
    from ftcli.runtime.errors import RunError
    from ftcli.training.setup import prepare

    (folder / "undeclared.py").write_text(TASK.replace('sparse = ("branch",)', "pass"))
    sections = {"task": str(folder / "undeclared.py"), "batch": {"global_size": 12, "micro_size": 2}}
    run = prepare(cell(folder, "text", **sections), cpu=True, output=output)
    with pytest.raises(RunError) as caught:
        loop.train(run)
    return str(caught.value)


def test_tensors_without_gradient_are_named_under_ddp(inputs: Path, tmp_path: Path) -> None:
    for message in run_on_cpu(message_of_unused, inputs, tmp_path / "run", processes=2, profile="ddp"):
        expected = (
            r"^2 of \d+ trained tensors had no gradient in a step: classifier.branch.weight, classifier.branch.bias\."
        )
        assert re.search(expected, message) and "faults.missing_gradient: warn" in message
