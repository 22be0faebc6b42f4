"""A custom task that was edited after its import: its own file is imported again, other files need a new process."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

import pytest

import ftcli
from ftcli.config.task_registry import find_task, refresh_task
from ftcli.reports.survey import prepare_data
from ftcli.runtime.errors import InputError

from ...support.cells import cell

TASK = """
from ftcli.tasks.sft import Options
from ftcli.tasks.sft import Task as Sft
{imports}

class Task(Sft):
    def encode(self, row, facts):
        return super().encode({{"prompt": "{prompt}", "completion": row["completion"]}}, facts)
"""


def write(folder: Path, prompt: str, imports: str = "") -> str:
    file = folder / f"edited_{folder.name.replace('-', '_')}.py"  # a name of its own, because modules stay in a process
    file.write_text(TASK.format(prompt=prompt, imports=imports))
    return str(file)


def first_row(inputs: Path, task: str) -> list[int]:
    recipe = cell(inputs, "sft-tied").model_copy(update={"task": task})
    return [int(token) for token in prepare_data(recipe).rows.train[0]["input_ids"]]


def test_edited_task_file_is_used_in_the_same_process(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTCLI_CACHE", str(tmp_path / "cache"))
    before = first_row(inputs, write(tmp_path, "alpha"))
    old = find_task(write(tmp_path, "alpha")).Task
    task = write(tmp_path, "beta beta beta")
    assert find_task(task).Task is old  # a run that trains is not disturbed
    after = first_row(inputs, task)
    assert len(after) > len(before) and find_task(task).Task is not old
    run = ftcli.prepare(cell(inputs, "sft-tied").model_copy(update={"task": write(tmp_path, "gamma")}), cpu=True)
    assert type(run.task) is find_task(task).Task
    assert len(run.rows.train[0]["input_ids"]) < len(after)


def test_edit_within_a_second_that_keeps_the_size_of_the_file_is_used(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setenv("FTCLI_CACHE", str(tmp_path / "cache"))
    rows = []
    for prompt in ("alpha", "gamma", "delta"):
        task = write(tmp_path, prompt)
        os.utime(task, (1e9, 1e9))
        rows.append(first_row(inputs, task))
    assert len({tuple(row) for row in rows}) == 3


def test_edited_task_file_that_does_not_compile_is_an_error_once(tmp_path: Path) -> None:
    task = write(tmp_path, "alpha")
    find_task(task)
    Path(task).write_text("def (\n")
    refresh_task(task)
    with pytest.raises(InputError, match="cannot be imported: SyntaxError"):
        find_task(task)
    assert find_task(write(tmp_path, "beta")).Task


def test_edited_module_of_a_task_needs_a_new_process(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = f"helper_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text("SHIFT = 0\n")
    task = write(tmp_path, "alpha", f"from {name} import SHIFT")
    first_row(inputs, task)
    (tmp_path / f"{name}.py").write_text("SHIFT = 100\n")
    find_task(task)
    with pytest.raises(InputError, match=rf"(?s)older contents of .*{name}.py.*restart the process"):
        first_row(inputs, task)
    with pytest.raises(InputError, match="older contents"):
        first_row(inputs, write(tmp_path, "beta", f"from {name} import SHIFT"))
    (tmp_path / f"{name}.py").write_text("SHIFT = 0\n")
    first_row(inputs, write(tmp_path, "alpha", f"from {name} import SHIFT"))

    # A helper that the user reloads, one that is not imported yet, and one that another task has imported.
    (tmp_path / f"{name}.py").write_text("SHIFT = 200\n")
    importlib.reload(sys.modules[name])
    first_row(inputs, task)
    assert find_task(task).SHIFT == 200
    (tmp_path / f"late_{name}.py").write_text("")
    task = write(tmp_path, "alpha", f"def late():\n    import late_{name}\n")
    first_row(inputs, task)
    (tmp_path / f"late_{name}.py").write_text("# edited\n")
    first_row(inputs, task)
    (tmp_path / f"{name}.py").write_text("SHIFT = 300\n")
    (tmp_path / f"second_{name}.py").write_text(TASK.format(prompt="alpha", imports=f"from {name} import SHIFT"))
    second = str(tmp_path / f"second_{name}.py")
    find_task(second)
    with pytest.raises(InputError, match="older contents"):
        first_row(inputs, second)
    importlib.reload(sys.modules[name])
    first_row(inputs, second)
    task = write(tmp_path, "alpha")

    package = tmp_path / f"package_{name}"
    package.mkdir()
    (package / "task.py").write_text(Path(task).read_text())
    dotted = f"{package.name}.task"
    first_row(inputs, dotted)
    (package / "task.py").write_text(Path(task).read_text() + "\n")
    with pytest.raises(InputError, match="older contents"):
        first_row(inputs, dotted)
    importlib.reload(sys.modules[dotted])
    first_row(inputs, dotted)
