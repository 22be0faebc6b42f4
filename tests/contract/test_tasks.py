"""The checks of ftcli/task_contract.py, for each shipped task and for copies of the shipped tasks."""

from __future__ import annotations

import ast
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from ftcli.config import task_registry
from ftcli.config.recipe import Recipe
from ftcli.runtime.errors import InputError
from ftcli.task_contract import CHECKS, TaskCase, check_task
from ftcli.tasks import build

from ..support.cells import cell
from ..support.runner import MakeInputs

NAMES = {
    "sft": "sft-tied",
    "pretrain": "pretrain",
    "text_classification": "text",
    "image_classification": "vit",
    "preference": "preference",
    "reward": "reward",
    "unpaired_preference": "unpaired",
    "face_swap": "faces",
}


@pytest.fixture(scope="module")
def inputs(make_inputs: MakeInputs) -> Path:
    """Return a folder of this module's own, because its tests write into it."""
    return make_inputs()


def test_contract_covers_every_shipped_task() -> None:
    assert set(NAMES) == set(task_registry.list_tasks())


def test_task_module_imports_torch_only_inside_functions() -> None:
    for name in task_registry.list_tasks():
        tree = ast.parse((Path(build.__file__).parent / f"{name}.py").read_text())
        top = [ast.unparse(node) for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert not any(word in line for line in top for word in ("torch", "transformers", "datasets", "peft"))


def test_task_files_import_by_absolute_names_so_that_a_copy_works() -> None:
    for path in Path(build.__file__).parent.glob("*.py"):
        relative = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        assert path.name == "__init__.py" or not [node.module for node in relative if node.level]


@pytest.fixture(scope="module", params=sorted(NAMES))
def case(request: pytest.FixtureRequest, inputs: Path) -> TaskCase:
    return TaskCase(cell(inputs, NAMES[request.param]))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(case: TaskCase, check: Callable[[TaskCase], None]) -> None:
    check(case)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_copy_of_a_shipped_task_passes_the_contract(name: str, inputs: Path, tmp_path: Path) -> None:
    shutil.copy(Path(build.__file__).parent / f"{name}.py", tmp_path / f"copied_{name}.py")
    recipe = cell(inputs, NAMES[name], task=str(tmp_path / f"copied_{name}.py"))
    assert type(build.build_task(recipe)).__module__ == f"ftcli_user_task_copied_{name}"


def own_task(file: Path, inputs: Path, body: str, *, base: str = "sft", data: str = "chats.jsonl") -> Recipe:
    """Write a task whose class derives from a shipped one with `body`; return a recipe of it."""
    file.write_text(
        f"from ftcli.tasks import {base}\nfrom ftcli.tasks.{base} import Options\n\nclass Task({base}.Task):\n{body}"
    )
    values = cell(inputs, NAMES[base]).model_dump() | {"task": str(file)}
    values["data"] |= {"train": str(inputs / data)}
    return Recipe.model_validate(values)


def test_check_task_names_every_check_that_a_task_fails(inputs: Path, tmp_path: Path) -> None:
    body = "    def loss(self, model, batch):\n        return super().loss(model, batch).mean()\n"
    with pytest.raises(AssertionError) as failed:
        check_task(own_task(tmp_path / "own.py", inputs, body, base="text_classification", data="texts.jsonl"))
    lines = [line.partition(":")[0] for line in str(failed.value).splitlines()]
    assert lines == ["loss_is_additive", "padding_has_no_effect", "evaluation_adds_up_to_the_loss"]


def test_check_task_with_another_shape_of_the_loss_names_the_shape(inputs: Path, tmp_path: Path) -> None:
    body = "    def loss(self, model, batch):\n        return super().loss(model, batch)[:, None]\n"
    with pytest.raises(AssertionError) as failed:
        check_task(own_task(tmp_path / "shape.py", inputs, body, base="text_classification", data="texts.jsonl"))
    assert str(failed.value) == (
        "parts_are_in_row_order: `loss` returned shape [5, 1], not [5]: return one value per row, in the "
        "order of the rows, or their sum"
    )


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    encode_rows = sft.Task.encode_rows\n", "`encode_rows` from ftcli.tasks.sft.Task.encode_rows"),
        (
            "    def encode_rows(self, rows, facts):\n        return super().encode_rows(rows, facts)\n",
            "differing.Task.enc",
        ),
    ],
)
def test_check_task_with_encode_hidden_by_encode_rows_reports_it(
    body: str, message: str, inputs: Path, tmp_path: Path
) -> None:
    body += "\n    def encode(self, row, facts):\n        return [{'input_ids': [1, 2], 'trained': [True, True]}]\n"
    with pytest.raises(InputError, match="return different documents for the first row") as error:
        TaskCase(own_task(tmp_path / "differing.py", inputs, body))
    assert message in str(error.value)
    agreeing = body.replace("return [{'input_ids': [1, 2], 'trained': [True, True]}]", "raise NotImplementedError")
    TaskCase(own_task(tmp_path / "agreeing.py", inputs, agreeing))


def test_check_task_with_too_few_rows_is_refused(inputs: Path, tmp_path: Path) -> None:
    (inputs / "few.jsonl").write_text('{"prompt": "a", "completion": "b"}\n' * 9)  # 5 of them are evaluation rows
    with pytest.raises(InputError, match="the contract needs 5 training rows, and the recipe has 4"):
        TaskCase(own_task(tmp_path / "few.py", inputs, "    pass\n", data="few.jsonl"))


def test_check_task_with_encode_that_returns_one_row_reports_it(inputs: Path, tmp_path: Path) -> None:
    body = "    def encode(self, row, facts):\n        return {'input_ids': [1, 2], 'trained': [True, True]}\n"
    message = r"`encode` of ftcli_user_task_one_row\.Task returned a dict, not a list\n.*return a list of prepared rows"
    with pytest.raises(InputError, match=message):
        TaskCase(own_task(tmp_path / "one_row.py", inputs, body))


def test_check_task_with_inherited_formats_and_own_encode_reports_it(inputs: Path, tmp_path: Path) -> None:
    (inputs / "own.jsonl").write_text('{"question": "a b", "reply": "c"}\n' * 20)
    body = (
        "    def encode(self, row, facts):\n"
        "        return super().encode({'prompt': row['question'], 'completion': row['reply']}, facts)\n"
    )
    message = "overrides `encode`, but inherits `formats` from ftcli.tasks.sft"
    with pytest.raises(InputError, match=message) as error:
        TaskCase(own_task(tmp_path / "inherits.py", inputs, body, data="own.jsonl"))
    assert "set `formats = ()`" in str(error.value)
    body = "    columns = ('question', 'reply')\n    formats = ()\n" + body
    case = TaskCase(own_task(tmp_path / "fixed.py", inputs, body, data="own.jsonl"))
    assert case.loss(0) > 0
