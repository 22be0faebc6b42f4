"""What saves memory moves no number: recomputation, the host and bfloat16 that is kept exactly, on every profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ftcli.testing import run_on_cpu

from .cells import LORA, cell, write_inputs

MODES: dict[str, dict[str, Any]] = {
    "none": {"gradient_checkpointing": "none"},
    "selective": {"gradient_checkpointing": "selective"},
    "full": {"gradient_checkpointing": "full", "activation_offloading": True},
}
KINDS: dict[str, dict[str, Any]] = {
    "tied": {},
    "packed, lora": {"adapter": LORA, "data": {"packing": True}},
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    return folder


def train_in_every_mode(folder: Path) -> dict[str, dict[str, Any]]:
    """Return kind -> mode -> (losses and norms of each step, the line that says what is recomputed)."""
    from ftcli import activations
    from ftcli.loop import steps
    from ftcli.run import prepare

    activations.LEAST_MOVED = 0
    found: dict[str, dict[str, Any]] = {}
    for kind, changes in KINDS.items():
        for mode, keys in MODES.items():
            data = {"train": {"path": str(folder / "chats.jsonl")}, "eval_rows": 5, "max_length": 128}
            changed: dict[str, Any] = {
                "model": {"name": str(folder / "tied"), "dropout": 0.0} | keys,
                "batch": {"global_size": 4, "micro_size": 1},
                "train": {"max_steps": 2},
            }
            run = prepare(
                cell(folder, "sft-tied", **changed | changes | {"data": data | changes.get("data", {})}), cpu=True
            )
            rows = [(step.loss, step.grad_norm, step.samples) for step in steps(run)]
            found.setdefault(kind, {})[mode] = rows, run.facts[-1]
    return found


@pytest.mark.parametrize(
    "profile",
    ["single", *(pytest.param(name, marks=pytest.mark.slow) for name in ("ddp", "fsdp", "zero3"))],
)
def test_recomputation_and_the_host_leave_every_bit(profile: str, inputs: Path) -> None:
    ranks = run_on_cpu(train_in_every_mode, inputs, processes=1 if profile == "single" else 2, profile=profile)
    for found in ranks:
        for kind, modes in found.items():
            for mode, (rows, told) in modes.items():
                assert rows == modes["none"][0], (kind, mode)
                assert f"gradient_checkpointing {mode} (as the recipe says)" in told
