"""What loader processes are handed: also in a process that was started anew, as Python does by default from 3.14 on."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

from ftcli.config.task_registry import find_task
from ftcli.training.batches.dataloaders import Collate, Rows

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
