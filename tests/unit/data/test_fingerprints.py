"""Cache keys and data fingerprints: when prepared rows are reused, and when a run may resume on them."""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from ftcli import testing
from ftcli.config.recipe import Recipe
from ftcli.config.recipe_data import Source
from ftcli.config.task_registry import FROM_FILE
from ftcli.data import cache_key
from ftcli.data.cache import PreparedRows, prepare_rows
from ftcli.data.cache_key import key_parts, task_code
from ftcli.data.cached_counts import cached_row_counts
from ftcli.data.chat.template_variables import date_formats
from ftcli.data.fingerprints import FORMULA, digest_rows, legacy_fingerprints
from ftcli.data.streaming.corpus import stream_content
from ftcli.runtime.errors import InputError
from ftcli.tasks.build import build_task
from ftcli.training.resume import check_rows

from ...support.recipes import minimal_values
from .chat.test_template_variables import read_table

FIXED_TASK = """
from ftcli.tasks import pretrain

Options = pretrain.Options

class Task(pretrain.Task):
    def fingerprint(self):
        return "constant"
"""
SHOUTING_TASK = """
from ftcli.tasks import sft
import letters

Options = sft.Options

class Task(sft.Task):
    def encode(self, row, facts):
        return super().encode(row | {"completion": letters.change(row["completion"])}, facts)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return testing.save_tiny_causal(tmp_path_factory.mktemp("model"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Work in an empty folder that Python imports from; forget what was imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(tmp_path) in str(getattr(module, "__file__", None)):
            del sys.modules[name]


def recipe_of(model: Path, data: dict[str, Any], **changes: Any) -> Recipe:
    values = minimal_values("pretrain", model={"name": str(model)}, data={"max_length": 64} | data)
    return Recipe.model_validate(values | changes)


def prepared(recipe: Recipe) -> PreparedRows:
    return prepare_rows(recipe, build_task(recipe))


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def texts(count: int = 12) -> list[dict[str, Any]]:
    return [{"text": "a" * (number + 1)} for number in range(count)]


def arrow(path: Path, columns: dict[str, pa.Array], batch: int) -> Path:
    table = pa.table(columns)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def test_digest_rows_ignores_layout_and_widths_and_sees_every_value(tmp_path: Path) -> None:
    ids, marks, names = [[1, 2], [], None, [3]], [[True], [False, True], [], None], ["x", None, "", "yz"]

    def digest(batch: int = 4, width: str = "int32", **columns: Any) -> str:
        values = {"ids": ids, "marks": marks, "names": names, "row": [0, 1, 2, 3]} | columns
        types = {
            "ids": pa.list_(pa.type_for_alias(width)),
            "marks": pa.list_(pa.bool_()),
            "names": pa.string(),
            "row": pa.int64(),
        }
        return digest_rows(
            arrow(tmp_path / "rows.arrow", {name: pa.array(v, type=types[name]) for name, v in values.items()}, batch)
        )

    expected = digest()
    assert digest(batch=1) == digest(batch=3) == digest(width="int64") == digest(row=[5, 6, 7, 8]) == expected
    others = [
        digest(ids=[[1, 2], [], None, [4]]),
        digest(ids=[[1], [2], None, [3]]),  # the same values, cut elsewhere
        digest(ids=[[1, 2], None, [], [3]]),
        digest(ids=ids[::-1]),
        digest(marks=[[True], [False, False], [], None]),
        digest(names=["x", None, "y", "z"]),
        digest(names=["x", "", None, "yz"]),
    ]
    assert len({expected, *others}) == 1 + len(others)


def test_digest_rows_of_nested_values_and_bytes(tmp_path: Path) -> None:
    def digest(value: Any) -> str:
        kind = value.type if isinstance(value, pa.Scalar) else None
        column = pa.array([value.as_py() if kind else value, None], type=kind)
        return digest_rows(arrow(tmp_path / "rows.arrow", {"value": column}, 1))

    values = [b"\xff", "text", {"a": 1, "b": None}, {"a": 1, "b": 2}, [{"a": [1.5]}], [{"a": [1.25]}], True, 7]
    values += [datetime(2020, 1, 1), datetime(2021, 1, 1), pa.scalar(2**63, pa.uint64()), pa.scalar(7, pa.uint64())]
    assert len({digest(value) for value in values}) == len(values)


def test_fingerprint_same_rows_elsewhere_have_the_same_fingerprint_under_another_key(
    model: Path, tmp_path: Path
) -> None:
    first = prepared(recipe_of(model, {"train": write(tmp_path / "a.jsonl", texts())}))
    moved = prepared(recipe_of(model, {"train": write(tmp_path / "b" / "c.jsonl", texts())}))
    again = prepared(recipe_of(model, {"train": write(tmp_path / "a.jsonl", [*texts(), {"text": "b"}])}))
    assert first.folder != moved.folder and first.fingerprint == moved.fingerprint
    assert again.fingerprint != first.fingerprint


def test_another_version_of_a_library_prepares_again_and_changes_no_fingerprint(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(model, {"train": write(tmp_path / "a.jsonl", texts())})
    first = prepared(recipe)
    record = tmp_path / "site" / "tokenizers-99.0.dist-info" / "METADATA"
    record.parent.mkdir(parents=True)
    record.write_text("Metadata-Version: 2.1\nName: tokenizers\nVersion: 99.0\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    cache_key._version.cache_clear()
    assert key_parts(recipe, build_task(recipe))["versions"]["tokenizers"] == "99.0"
    later = prepared(recipe)
    cache_key._version.cache_clear()
    assert later.folder != first.folder and later.fingerprint == first.fingerprint


def test_fingerprint_with_an_edited_task_and_what_it_imports_from_its_folder_are_encoded_again(
    model: Path, folder: Path
) -> None:
    (folder / "shouting.py").write_text(SHOUTING_TASK)
    (folder / "letters.py").write_text("from more.letters import change\n")
    write(folder / "rows.jsonl", [{"prompt": "p", "completion": "abc"}] * 3)
    (folder / "more").mkdir()
    (folder / "more" / "letters.py").write_text("def change(text): return text.upper()\n")
    recipe = recipe_of(model, {"train": "rows.jsonl"}, task="./shouting.py", task_options={"chat": "never"})
    rows = prepared(recipe)
    decode = build_task(recipe).tokenizer.decode
    assert "ABC" in decode(rows.train[0]["input_ids"]) and cached_row_counts(recipe) == {"train": 3}
    for name in ("letters", "more.letters", "more", f"{FROM_FILE}shouting"):
        sys.modules.pop(name, None)
    (folder / "more" / "letters.py").write_text("def change(text): return text[::-1]  # longer than before\n")
    assert cached_row_counts(recipe) is None
    edited = prepared(recipe)
    assert "cba" in decode(edited.train[0]["input_ids"])
    assert edited.folder != rows.folder and edited.fingerprint != rows.fingerprint


LABELLED_TASK = """
import json
from pathlib import Path

from base_of_tasks import Base
from ftcli.tasks import sft
from ftcli.tasks.sft import Options as Options

WORDS = json.loads(Path("words.json").read_text())


class Task(Base, sft.Task):
    def encode(self, row, facts):
        with open("ending.txt") as file:
            ending = file.read()
        row = row | {"completion": self.change(WORDS[row["completion"]]) + ending}
        return super().encode(row, facts)
"""


@pytest.mark.parametrize("rows", [3, pytest.param(5000, marks=pytest.mark.slow)], ids=["one process", "several"])
def test_prepare_rows_of_a_task_notices_changed_files_and_a_base_class_of_another_folder(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    (folder / "elsewhere").mkdir()
    base = folder / "elsewhere" / "base_of_tasks.py"
    base.write_text("class Base:\n    def change(self, text): return text\n")
    monkeypatch.syspath_prepend(str(base.parent))
    (folder / "labelled.py").write_text(LABELLED_TASK)
    (folder / "words.json").write_text('{"a": "one"}')
    (folder / "ending.txt").write_text(".")
    write(folder / "rows.jsonl", [{"prompt": "p", "completion": "a"}] * rows)
    recipe = recipe_of(model, {"train": "rows.jsonl"}, task="./labelled.py", task_options={"chat": "never"})

    def text() -> tuple[str, Path]:
        for name in ("base_of_tasks", f"{FROM_FILE}labelled"):  # as in a new process
            sys.modules.pop(name, None)
        found = prepared(recipe)
        assert cached_row_counts(recipe) == {"train": rows}
        return build_task(recipe).tokenizer.decode(found.train[0]["input_ids"]), found.folder

    first, place = text()
    assert "pone." in first and text() == (first, place)
    for path, content, expected in (
        (folder / "words.json", '{"a": "four"}', "pfour."),
        (folder / "ending.txt", "!", "pfour!"),
        (base, "class Base:\n    def change(self, text): return text.upper()\n", "pFOUR!"),
    ):
        path.write_text(content)
        assert cached_row_counts(recipe) is None
        assert expected in text()[0]
    (folder / "words.json").write_text('{"a": "three"}')
    with pytest.raises(InputError, match=r"words\.json has changed since task \./labelled\.py read it"):
        prepared(recipe)  # the module holds the old words


SHOUTING_BASE_TASK = """
from base_of_tasks import Base
from ftcli.tasks import sft
from ftcli.tasks.sft import Options as Options


class Task(Base, sft.Task):
    def encode(self, row, facts):
        return super().encode(row | {"completion": self.change(row["completion"])}, facts)
"""


def test_prepare_rows_of_a_task_notices_a_base_class_that_was_imported_before_the_task(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = folder / "elsewhere" / "base_of_tasks.py"
    base.parent.mkdir()
    monkeypatch.syspath_prepend(str(base.parent))
    (folder / "based.py").write_text(SHOUTING_BASE_TASK)
    write(folder / "rows.jsonl", [{"prompt": "p", "completion": "a"}] * 3)
    recipe = recipe_of(model, {"train": "rows.jsonl"}, task="./based.py", task_options={"chat": "never"})
    for change, expected in (("text", "pa"), ("text.upper()", "pA")):
        base.write_text(f"class Base:\n    def change(self, text): return {change}\n")
        for name in ("base_of_tasks", f"{FROM_FILE}based"):  # as in a new process
            sys.modules.pop(name, None)
        importlib.import_module("base_of_tasks")  # as a notebook does: the task's import opens no file then
        assert expected in build_task(recipe).tokenizer.decode(prepared(recipe).train[0]["input_ids"])


ENDING_TASK = """
from ftcli.tasks import sft
from ftcli.tasks.sft import Options as Options


class Task(sft.Task):
    def encode(self, row, facts):
        with open("ending.txt") as file:
            return super().encode(row | {"completion": file.read()}, facts)
"""


def test_prepare_rows_in_another_working_directory_reads_the_files_of_a_task_there(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ending.py").write_text(ENDING_TASK)
    rows = write(folder / "rows.jsonl", [{"prompt": "p", "completion": "a"}] * 3)
    recipe = recipe_of(model, {"train": rows}, task=str(folder / "ending.py"), task_options={"chat": "never"})
    found = {}
    for name in ("one", "two", "one"):
        (folder / name).mkdir(exist_ok=True)
        if name not in found:
            (folder / name / "ending.txt").write_text(name)
        monkeypatch.chdir(folder / name)
        sys.modules.pop(f"{FROM_FILE}ending", None)
        some = prepared(recipe)
        assert f"p{name}" in build_task(recipe).tokenizer.decode(some.train[0]["input_ids"])
        assert found.setdefault(name, some.folder) == some.folder


def test_task_code_follows_imports_in_the_tasks_own_folder_only(folder: Path) -> None:
    for name, text in {
        "task.py": "import json, os.path\nfrom lib import part\ndef f():\n    import late\n",
        "lib/__init__.py": "from . import other\n",
        "lib/part.py": "from .deep.leaf import x\n",
        "lib/other.py": "",
        "lib/deep/leaf.py": "import broken\n",
        "late.py": "",
        "broken.py": "def (\n",
        "unused.py": "",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for task, files in {
        "./task.py": {"task.py", "lib/__init__.py", "lib/part.py", "lib/other.py", "lib/deep/leaf.py", "late.py"}
        | {"broken.py"},
        "lib.part": {"lib/__init__.py", "lib/part.py", "lib/other.py", "lib/deep/leaf.py"},
    }.items():
        seen = set()
        for path in sorted(folder.rglob("*.py")):
            before, text = task_code(task), path.read_text()
            path.write_text(text + "# edited\n")
            if task_code(task) != before:
                seen.add(str(path.relative_to(folder)))
            path.write_text(text)
        assert seen == files
    assert task_code("sft") is None and task_code("nowhere.at_all") is None


def test_fingerprint_with_a_template_that_writes_the_date_has_it_in_the_key(model: Path, tmp_path: Path) -> None:
    text = read_table("dated")[0].chat_template
    path = tmp_path / "dated.jinja"
    path.write_text(text)
    given = {"date_string": "26 Jul 2024"}
    assert date_formats((text,), {}) == ["%d %b %Y"] and date_formats((text,), given) == []
    fingerprints = []
    for variables in ({}, given):
        data = {"train": "x.jsonl", "chat_template_kwargs": variables}
        recipe = recipe_of(model, data, task="sft", task_options={"chat_template": str(path)})
        fingerprints.append(key_parts(recipe, build_task(recipe))["dates"])
    assert fingerprints == [[datetime.now().strftime("%d %b %Y")], []]


def with_truncation(model: Path, target: Path) -> Path:
    """Copy a model whose tokenizer.json then sets truncation and padding, as those of sentence encoders do."""
    from tokenizers import Tokenizer

    shutil.copytree(model, target)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    tokenizer.enable_truncation(max_length=5)
    tokenizer.enable_padding(pad_id=1, pad_token="<|im_end|>")
    tokenizer.save(str(target / "tokenizer.json"))
    return target


@pytest.mark.parametrize("streaming", [False, True])
def test_truncation_and_padding_of_a_tokenizers_file_survive_and_change_nothing(
    model: Path, tmp_path: Path, *, streaming: bool
) -> None:
    cut = with_truncation(model, tmp_path / "cut")
    recipe = recipe_of(cut, {"train": write(tmp_path / "a.jsonl", texts()), "streaming": streaming})
    loaded, files = [], []
    for name in ("cold", "warm"):
        task = build_task(recipe)
        before = task.fingerprint()
        loaded.append(prepare_rows(recipe, task))
        assert task.fingerprint() == before  # the first encoding changes the tokenizer no more
        task.save_processor(str(tmp_path / name))
        files.append(json.loads((tmp_path / name / "tokenizer.json").read_text()))
    assert loaded[0].fingerprint == loaded[1].fingerprint and loaded[0].folder == loaded[1].folder
    assert files[0] == files[1] and files[0]["truncation"]["max_length"] == 5 and files[0]["padding"]["pad_id"] == 1
    plain = prepared(recipe_of(model, {"train": str(tmp_path / "a.jsonl"), "streaming": streaming}))
    assert plain.fingerprint == loaded[0].fingerprint  # whose rows are the same
    legacy = legacy_fingerprints(recipe, build_task(recipe))
    assert len(legacy) == 2 and legacy_fingerprints(recipe, task) == legacy


ONE_ROW = {
    "pretrain": {"text": "some words that are longer than five tokens"},
    "sft": {"prompt": "alpha", "completion": "some words that are longer than five tokens"},
    "text_classification": {"text": "some words that are longer than five tokens", "label": "x"},
    "reward": {"prompt": "a", "chosen": "some words", "rejected": "others"},  # both whole in 64 tokens
}


@pytest.mark.parametrize("name", ONE_ROW)
def test_save_processor_writes_truncation_and_padding_of_the_tokenizers_file(
    model: Path, tmp_path: Path, name: str
) -> None:
    for place in (with_truncation(model, tmp_path / "cut"), model):
        task = build_task(recipe_of(place, {"train": "rows.jsonl"}, task=name))
        before = task.fingerprint()
        (row,) = task.encode(ONE_ROW[name], {"labels": ["x", "y"], "attributes": []})
        assert len(row["input_ids"]) > 5
        assert task.fingerprint() == before
        task.save_processor(str(tmp_path / "saved"))
        expected, loaded = (
            json.loads((folder / "tokenizer.json").read_text()) for folder in (place, tmp_path / "saved")
        )
        assert (loaded["truncation"], loaded["padding"]) == (expected["truncation"], expected["padding"])


def test_images_are_identified_by_their_content(tmp_path: Path) -> None:
    model = testing.save_tiny_vit(tmp_path / "vit")
    for label in ("cat", "dog"):
        for number in range(2):
            path = tmp_path / "images" / label / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((4, 4, 3), number, np.uint8)).save(path)
    shutil.copytree(tmp_path / "images", tmp_path / "copy")

    def fingerprint(folder: str) -> str:
        return prepared(recipe_of(model, {"train": str(tmp_path / folder)}, task="image_classification")).fingerprint

    first = fingerprint("images")
    assert fingerprint("copy") == first
    Image.fromarray(np.full((4, 4, 3), 9, np.uint8)).save(tmp_path / "copy" / "dog" / "1.png")
    assert fingerprint("copy") != first


def test_fingerprint_with_a_stream_is_identified_by_names_and_sizes_below_its_folder(folder: Path) -> None:
    for place in ("here", "there/data"):
        for number in range(2):
            write(folder / place / "part" / f"{number}.jsonl", texts(number + 1))
    expected = [["0.jsonl", "1.jsonl"], [14, 29]]
    assert stream_content(Source(path="here")) == stream_content(Source(path=str(folder / "there"))) == expected
    assert stream_content(Source(path="here/part/1.jsonl")) == [["1.jsonl"], [29]]
    write(folder / "here" / "more" / "0.jsonl", texts(1))
    content = stream_content(Source(path="here"))
    assert content == [["more/0.jsonl", "part/0.jsonl", "part/1.jsonl"], [14, 14, 29]]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"eval_rows": 2}, "542a13ae0c4c6e9bfc9c9150032fff86"),
        ({"streaming": True, "max_bad_rows": 3}, "2114317db82179ee65d1d3adc6b9c126"),
        (
            {
                "train": [{"path": "rows.jsonl", "weight": 2.0}, {"path": "rows.jsonl", "label": "again"}],
                "chat_template_kwargs": {"a": 1},
            },
            "bf1fc206bffda9674707c0bc2ea593e3",
        ),
    ],
)
def test_legacy_fingerprints_are_those_that_2f09857_wrote(folder: Path, data: dict[str, Any], expected: str) -> None:
    """The expected values were printed by ftcli at 2f09857, for these very files and recipes."""
    (folder / "fixed.py").write_text(FIXED_TASK)
    write(folder / "rows.jsonl", texts())
    recipe = recipe_of(Path("model"), {"train": "rows.jsonl"} | data, task="./fixed.py")
    testing.save_tiny_causal(folder / "model")
    given = {"chat_template_kwargs": {}} if "chat_template_kwargs" in data else {}
    task = build_task(recipe.model_copy(update={"data": recipe.data.model_copy(update=given)}))
    assert legacy_fingerprints(recipe, task) == [expected]


def test_check_rows_compares_by_the_formula_that_a_checkpoint_names() -> None:
    def state(**data: Any) -> dict[str, Any]:
        return {"data": {"fingerprint": "old"} | data, "versions": {"ftcli": "9.9"}}

    check_rows(state(formula=FORMULA), "old", anyway=False)
    check_rows(state(), "new", anyway=False, legacy=lambda: ["old", "older"])
    check_rows(state(formula=FORMULA), "new", anyway=True)
    with pytest.raises(InputError, match="fingerprint old then, new now"):
        check_rows(state(), "new", anyway=False, legacy=lambda: ["older"])
    with pytest.raises(InputError, match="the prepared rows are not those that .*: in eval rows a source"):
        digests = {"train": "a", "eval": "b"}
        before = digests | {"eval": "c"}
        check_rows(state(formula=FORMULA, digests=before), "new", anyway=False, legacy=lambda: ["old"], digests=digests)
    with pytest.raises(InputError, match=r"(?s)formula rows-7, but this version of ftcli uses .*: 9\.9"):
        check_rows(state(formula="rows-7"), "old", anyway=False)


def test_check_rows_refuses_rows_with_other_labels() -> None:
    def check(before: Any, now: Any, **options: Any) -> None:
        state = {"data": {"fingerprint": "old", "facts": before}, "versions": {}}
        check_rows(state, "new", anyway=False, legacy=lambda: ["old"], facts=now, **options)

    for before in (None, {}, {"labels": ["1.0", "2.0"]}, {"labels": ["1", "2"], "more": 1}):
        check(before, {"labels": ["1", "2"]})
    with pytest.raises(InputError, match=r"labels are \['2', '1'\], but those of the rows are \['1', '2'\]"):
        check({"labels": ["2", "1"]}, {"labels": ["1", "2"]})
    check({"labels": 3}, {"labels": 3})  # a user's task may mean anything by it
    check({"labels": ["a"]}, {})
