"""`ftcli parity` as a user meets it: curves that stay, and two planted faults that it names by step and quantity."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ..support.recipes import recipe_values
from ..support.runner import MakeInputs

pytestmark = pytest.mark.slow  # several launches of two profiles

ROOT = Path(__file__).resolve().parents[2]
RECIPE = recipe_values(
    "text_classification",
    model={"name": "encoder", "dropout": 0.0},
    data={"train": "texts.jsonl", "eval_rows": 5},
    batch={"global_size": 12, "micro_size": 3},
    train={"max_steps": 30},
)
FAULTY = '''
"""Text classification with a planted fault."""
import os
from ftcli.models.losses import cross_entropy_rows
from ftcli.tasks.text_classification import Options, Task as Whole

class Task(Whole):
    def loss(self, model, batch):
        inputs = {name: value for name, value in batch.items() if name != "targets"}
        rows = cross_entropy_rows(model(**inputs).logits, batch["targets"])
        return FAULT
'''
DROPS_A_ROW = 'rows[1:].sum() if os.environ.get("RANK") == "1" else rows.sum()'
MEAN = "rows.mean()"


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    folder = make_inputs()
    for name, fault in (("drops_a_row", DROPS_A_ROW), ("mean", MEAN)):
        (folder / f"{name}.py").write_text(FAULTY.replace("FAULT", fault))
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(RECIPE | {"task": f"./{name}.py"}))
    (folder / "right.yaml").write_text(yaml.safe_dump(RECIPE))
    return folder


def parity(inputs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ftcli", "parity", *arguments, "--cpu", "--steps", "3"],
        cwd=inputs,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_parity_of_two_profiles_and_two_micro_sizes_holds(inputs: Path) -> None:
    result = parity(inputs, "right.yaml", "--profiles", "single,ddp", "--num-processes", "2", "--json")
    assert result.returncode == 0, result.stderr[-3000:]
    report = json.loads(result.stdout)
    assert (report["holds"], report["reference"], report["steps"]) == (True, "single x1, micro 3", 3)
    assert [run["label"] for run in report["comparisons"]] == ["ddp x2, micro 3", "single x1, micro 2"]
    for run in report["comparisons"]:
        assert run["loss"] < 1e-5 and abs(run["drift"]) <= run["loss"] and run["grad_norm"] < 1e-4
        assert run["learning_rates"] and run["samples"] and run["items"] and run["start"]
        assert run["evaluation"] < 1e-5 and run["weights"] < 0.05 and run["departure"] is None
    output = inputs / "runs" / "right-parity"
    assert json.loads((output / "parity.json").read_text()) == report
    assert "the curve stays" in (output / "parity.txt").read_text()
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    weights = json.loads((output / "ddp-x2-micro-3" / "start.json").read_text())["weights"]
    assert "classifier.weight" in weights
    again = parity(inputs, "right.yaml", "--profiles", "single,ddp")
    assert again.returncode == 2 and "right-parity exists and is not an empty folder" in again.stderr
    home = Path("~") / os.path.relpath(output, Path.home())
    again = parity(inputs, "right.yaml", "--profiles", "single,ddp", "--output", str(home))
    assert again.returncode == 2 and "right-parity exists and is not an empty folder" in again.stderr


def test_parity_with_a_dropped_row_names_step_and_quantity(inputs: Path) -> None:
    arguments = ("--profiles", "single,ddp", "--num-processes", "2", "--micro-sizes", "3")
    result = parity(inputs, "drops_a_row.yaml", *arguments)
    assert result.returncode == 1, result.stderr[-3000:]
    assert "ddp x2, micro 3: loss leaves the tolerance at step 1: " in result.stdout
    assert "> 1e-05)" in result.stdout and "1 of 1 leave the curve" in result.stdout


def test_parity_with_a_mean_instead_of_a_sum_names_step_and_quantity(inputs: Path) -> None:
    result = parity(inputs, "mean.yaml", "--profiles", "single", "--micro-sizes", "3,1")
    assert result.returncode == 1, result.stderr[-3000:]
    assert "single x1, micro 1: loss leaves the tolerance at step 1: " in result.stdout
