"""Recomputation, offloading and exact bfloat16 weights do not change the curve on any profile."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from ftcli.testing import run_on_cpu

from ...support.cells import LORA, cell, train_recipe
from ...support.patching import patching

pytestmark = pytest.mark.slow
MODES: dict[str, dict[str, Any]] = {
    "none": {"gradient_checkpointing": "none"},
    "selective": {"gradient_checkpointing": "selective"},
    "full": {"gradient_checkpointing": "full", "activation_offloading": True},
}
KINDS: dict[str, dict[str, Any]] = {
    "tied": {},
    "packed, lora": {"adapter": LORA, "data": {"packing": True}},
}


@patching
def train_in_every_mode(patch: pytest.MonkeyPatch, folder: Path) -> dict[str, dict[str, Any]]:
    """Return kind -> mode -> (losses and norms of each step, the line that says what is recomputed)."""
    from ftcli.loop import steps
    from ftcli.models.kernels import activation_offloading
    from ftcli.training.setup import prepare

    patch.setattr(activation_offloading, "MIN_OFFLOAD_BYTES", 0)
    results: dict[str, dict[str, Any]] = {}
    for kind, changes in KINDS.items():
        for mode, keys in MODES.items():
            data = {"train": {"path": str(folder / "chats.jsonl")}, "eval_rows": 5, "max_length": 128}
            changed: dict[str, Any] = {
                "model": {"name": str(folder / "tied"), "dropout": 0.0} | keys,
                "batch": {"global_size": 4, "micro_size": 1},
                "train": {"max_steps": 2},
                "precision": "bf16" if kind == "tied" else "fp32",
            }
            data |= changes.get("data", {})
            run = prepare(cell(folder, "sft-tied", **changed | changes | {"data": data}), cpu=True)
            rows = [(step.loss, step.grad_norm, step.samples) for step in steps(run)]
            results.setdefault(kind, {})[mode] = rows, run.log_lines[-1]
    return results


class Line:
    """A meter for which each row takes 10 bytes beside 20, when 1 and then 2 rows are tried."""

    limit = 45

    def __init__(self) -> None:
        self.rows = -1  # 0 rows are measured first

    def start(self) -> None:
        self.rows += 1

    def held(self) -> int:
        return 20

    def peak(self) -> int:
        return 20 + 10 * self.rows


def bytes_of_tensors() -> int:
    """Return the bytes of all storages that Python knows of in this process."""
    gc.collect()
    seen = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor) and item.device.type == "cpu" and item.layout == torch.strided:
            local = item.to_local() if hasattr(item, "to_local") else item
            storage = local.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
    return sum(seen.values())


def try_and_train(folder: Path) -> dict[str, Any]:
    """Return the size that a trial found, the memory it left, and the curves of the next two runs."""
    from functools import partial

    from ftcli.training.memory import find_micro_batch_size
    from ftcli.training.setup import prepare

    before = bytes_of_tensors()
    auto = cell(folder, "sft-tied", batch={"global_size": 12, "micro_size": "auto"})
    size, saving, message = find_micro_batch_size(auto, Line, partial(prepare, cpu=True))
    assert saving.mode == "none"
    left = bytes_of_tensors() - before
    curves = [train_recipe(cell(folder, "sft-tied"))["rows"] for _ in range(2)]
    return {"size": size, "message": message, "left": left, "curves": curves}


def everything(folder: Path) -> dict[str, Any]:
    return {"trial": try_and_train(folder), "modes": train_in_every_mode(folder)}


@pytest.fixture(
    scope="module",
    params=["ddp", "fsdp", "zero2", "zero3"],
)
def ranks(request: pytest.FixtureRequest, inputs: Path) -> list[dict[str, Any]]:
    return run_on_cpu(everything, inputs, processes=2, profile=request.param)


def test_recomputation_and_offloading_are_bit_exact(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for kind, modes in rank["modes"].items():
            for mode, (rows, message) in modes.items():
                assert rows == modes["none"][0], (kind, mode)
                on_host = ", inputs of layers on the host" if mode == "full" else ""
                assert f"gradient_checkpointing {mode}{on_host} (as set)" in message


def test_try_out_leaves_no_gradients_and_the_same_curve(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        trial = rank["trial"]
        assert trial["size"] == 2 and trial["message"].startswith("batch.micro_size auto: 2 rows fit into")
        assert trial["left"] < 50_000, "weights and moments of the model are 320 kB"
        assert trial["curves"][0] == trial["curves"][1]
