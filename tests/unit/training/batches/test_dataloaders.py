"""What loader processes are handed: also in a process that was started anew, as Python does by default from 3.14 on."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from ftcli.config.plan import derive_plan
from ftcli.config.recipe import Recipe
from ftcli.config.task_registry import find_task
from ftcli.reports.survey import prepare_data
from ftcli.runtime.stop import STOP_SIGNALS
from ftcli.testing import save_tiny_causal
from ftcli.training.batches.dataloaders import LOADER_NICENESS, Collate, Rows, start_worker
from ftcli.training.batches.loaders import build_loaders
from ftcli.training.prepared_data import PreparedData

from ....support.recipes import minimal_values

CPU = SimpleNamespace(device=torch.device("cpu"))

TASK = """
from pydantic import BaseModel, ConfigDict

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)
    word: str = "none"

class Task:
    def __init__(self, options):
        self.options = options
"""
ELSEWHERE = """
import pickle, sys
rows, collate = pickle.load(sys.stdin.buffer)
print(type(rows.task).__module__, rows.task.options.word, collate.task.options.word, rows.training, rows.excluded)
"""


def test_dataloader_with_a_task_of_a_users_file_arrives_in_a_process_that_never_imported_it(tmp_path: Path) -> None:
    (tmp_path / "carried.py").write_text(TASK)
    module = find_task(str(tmp_path / "carried.py"))
    task = module.Task(module.Options(word="here"))
    handed = pickle.dumps((Rows([], task, training=True, excluded={3}), Collate(task)))
    there = subprocess.run([sys.executable, "-c", ELSEWHERE], input=handed, capture_output=True)
    assert there.stdout.decode() == "ftcli_user_task_carried here here True {3}\n", there.stderr.decode()


def niceness(recipe: Recipe) -> int:
    """Return the niceness of the loader process of a recipe, beyond that of this process."""
    data = prepare_data(recipe)
    hardware: Any = SimpleNamespace(ranks=SimpleNamespace(rank=0, collect=lambda mine: [mine]), accelerator=CPU)
    prepared = PreparedData(data.task, data.rows, [], derive_plan(data.recipe, 1, 2))
    batches = iter(build_loaders(data.recipe, prepared, hardware=hardware).train)
    next(batches)
    (worker,) = multiprocessing.active_children()
    return int(psutil.Process(worker.pid).nice() - psutil.Process().nice())


@pytest.mark.parametrize("is_stream", [False, True])
def test_loader_process_has_a_lower_priority_than_training(is_stream: bool, tmp_path: Path) -> None:
    save_tiny_causal(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "alpha {n}"}}\n' for n in range(8)))
    data = {"train": str(rows), "workers": 1, "streaming": is_stream, "max_length": 16}
    sections = {"model": {"name": str(tmp_path / "model")}, "batch": {"global_size": 2}, "train": {"max_steps": 2}}
    assert niceness(Recipe.model_validate(minimal_values("pretrain", data=data, **sections))) == LOADER_NICENESS


@pytest.mark.parametrize(("micro_size", "workers", "each"), [(1, 1, 9), (2, 2, 3), (8, 2, 2)])
def test_loader_processes_of_a_gpu_prepare_the_batches_of_a_whole_step_ahead(
    micro_size: int, workers: int, each: int, tmp_path: Path
) -> None:
    save_tiny_causal(tmp_path / "model")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"text": "alpha {n}"}}\n' for n in range(16)))
    sections: dict[str, Any] = {
        "data": {"train": str(rows), "workers": workers, "max_length": 16},
        "model": {"name": str(tmp_path / "model")},
        "batch": {"global_size": 8, "micro_size": micro_size},
        "train": {"max_steps": 2},
    }
    data = prepare_data(Recipe.model_validate(minimal_values("pretrain", **sections)))
    prepared = PreparedData(data.task, data.rows, [], derive_plan(data.recipe, 1, 16))
    gpu: Any = SimpleNamespace(accelerator=SimpleNamespace(device=torch.device("cuda")))
    loader: Any = build_loaders(data.recipe, prepared, hardware=gpu).train
    assert loader.prefetch_factor == each and loader.pin_memory
    assert build_loaders(data.recipe, prepared).train.prefetch_factor == 2  # torch's own; nothing is pinned


def test_start_worker_where_priorities_cannot_be_changed_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(increment: int) -> int:
        raise PermissionError(increment)

    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for change in (lambda: monkeypatch.setattr(os, "nice", refuse), lambda: monkeypatch.delattr(os, "nice")):
        change()
        start_worker(0)
    assert all(signal.signal(number, handler) == signal.SIG_IGN for number, handler in before.items())
