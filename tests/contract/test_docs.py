"""The generated reference pages are fresh, and list what a run writes. Update them with: make docs-reference."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import ftcli
from ftcli.runtime import load_monitor
from ftcli.task_contract import check_task

from ..support.cells import write_inputs
from ..support.recipes import recipe_values

ROOT = Path(__file__).resolve().parents[2]
GENERATORS = ROOT / "docs" / "generators"
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")  # to a file, without an anchor
RECIPE = recipe_values(train={"max_steps": 2})
FULL = RECIPE | {
    "precision": "fp16",
    "data": {
        "train": [{"path": "chats.jsonl", "label": "one"}, {"path": "chats.jsonl", "label": "two"}],
        "eval_rows": 12,
        "max_length": 128,
    },
    "evaluate": {"generate": {"prompts": ["one plus one"], "max_new_tokens": 2}},
}
LONG = RECIPE | {"train": {"max_steps": 30}}
STREAM = RECIPE | {"data": {"train": "chats.jsonl", "streaming": True, "max_length": 128}}


@pytest.fixture(scope="module")
def generators() -> Iterator[dict[str, ModuleType]]:
    """Import docs/generators as its script does, which is a folder of scripts and no package."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(GENERATORS))
        import metrics_page
        import run_folder_page
        import write

        yield {"write": write, "metrics": metrics_page, "run_folder": run_folder_page}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Train each recipe for two steps and return its run folder."""
    folder = tmp_path_factory.mktemp("docs")
    write_inputs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(load_monitor, "SAMPLE_SECONDS", 0.01)  # so that the long run has some samples
        for name, recipe in {"plain": RECIPE, "full": FULL, "stream": STREAM, "long": LONG}.items():
            Path(f"{name}.yaml").write_text(yaml.safe_dump(recipe))
            ftcli.train(f"{name}.yaml", cpu=True)
    return {name: folder / "runs" / name for name in ("plain", "full", "stream", "long")}


def test_generated_files_are_fresh(generators: dict[str, ModuleType]) -> None:
    """If this fails, run `make docs-reference` and commit the result."""
    files = generators["write"].FILES
    stale = [name for name, text in files.items() if (ROOT / name).read_text(encoding="utf-8") != text()]
    assert stale == []


def test_public_functions_have_arguments_errors_and_an_example() -> None:
    functions = [getattr(ftcli, name) for name in ftcli.__all__ if inspect.isfunction(getattr(ftcli, name))]
    sections = ("Args:", "Raises:", "Example:")
    missing = {
        function.__name__: [section for section in sections if section not in inspect.getdoc(function)]
        for function in functions
    }
    assert len(functions) > 10 and {name: lacking for name, lacking in missing.items() if lacking} == {}


def test_api_page_has_every_class_of_the_task_protocol() -> None:
    from ftcli.tasks import optional_members, protocol

    page = (ROOT / "docs" / "reference" / "python-api.md").read_text()
    modules = (protocol, optional_members)
    classes = [value for module in modules for value in vars(module).values() if isinstance(value, type)]
    own = {(value.__module__, value.__name__) for value in classes}
    own = {pair for pair in own if pair[0] in {module.__name__ for module in modules}}
    assert {"Task", "Showing", "TaskProperties", "Draws"} <= {name for _, name in own}
    assert [name for place, name in own if f"### {name}." not in page and f"### {place}.{name}\n" not in page] == []


def test_metrics_page_lists_exactly_the_keys_of_training_rows(
    generators: dict[str, ModuleType], runs: dict[str, Path]
) -> None:
    page = generators["metrics"]
    expected = {name.replace("<item>", "token") for name in page.TRAINING}
    sources = {name.replace("<source>", label) for name in page.SEVERAL_SOURCES for label in ("one", "two")}
    assert keys_of(ftcli.RunFolder(runs["plain"]).training_rows()) == expected
    assert keys_of(ftcli.RunFolder(runs["full"]).training_rows()) == expected | sources | page.FP16.keys()
    assert keys_of(ftcli.RunFolder(runs["stream"]).training_rows()) == expected | page.STREAMING.keys()


def test_metrics_page_lists_exactly_the_keys_of_the_load(
    generators: dict[str, ModuleType], runs: dict[str, Path]
) -> None:
    rows = ftcli.RunFolder(runs["long"]).training_rows()
    found = {key.replace("rank-0", "rank-N") for row in rows for key in row if key.startswith(load_monitor.PREFIX)}
    assert found == generators["metrics"].HOST_LOAD.keys()


def test_metrics_page_lists_exactly_the_keys_of_evaluations_and_samples(
    generators: dict[str, ModuleType], runs: dict[str, Path]
) -> None:
    page = generators["metrics"]
    of_task = {f"eval/{name}" for name, tasks in page.task_metrics().items() if "sft" in tasks}
    rows = [row for row in ftcli.RunFolder(runs["full"]).metrics() if "loss" not in row]
    sources = {"eval/one/loss", "eval/two/loss"}
    assert keys_of(rows) == page.EVALUATION.keys() | of_task | sources | page.ANSWERS.keys()
    samples = [json.loads(line) for line in (runs["full"] / "samples.jsonl").read_text().splitlines()]
    assert keys_of(samples) == page.SAMPLES.keys() - {"reference"}


def test_run_folder_page_lists_exactly_the_files_of_a_run(
    generators: dict[str, ModuleType], runs: dict[str, Path]
) -> None:
    page, run = generators["run_folder"], runs["full"]
    files = {re.sub(r"\d", "N", path.relative_to(run).as_posix()) for path in run.rglob("*") if path.is_file()}
    files = {"final/" if name.startswith("final/") else name for name in files}
    assert files == page.ALWAYS.keys() | {"samples.jsonl"}
    assert json.loads((run / "status.json").read_text()).keys() == page.STATUS.keys()
    assert json.loads((run / "environment.json").read_text()).keys() == page.ENVIRONMENT.keys()


def test_readme_takes_five_minutes_to_read() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150 and len(text.split()) <= 1200


def test_readme_lists_every_command_once() -> None:
    """The page of the command line is generated, so it has every command."""
    commands = re.findall(r"^## ftcli (\S+)$", (ROOT / "docs" / "reference" / "cli.md").read_text(), re.MULTILINE)
    table = (ROOT / "README.md").read_text(encoding="utf-8").partition("| Command | Purpose |")[2].partition("\n\n")[0]
    listed = re.findall(r"`([a-z]+)`", " ".join(line.split("|")[1] for line in table.splitlines()[2:]))
    assert len(commands) > 10 and sorted(listed) == sorted(commands)


def test_links_of_pages_outside_docs_point_to_files() -> None:
    """MkDocs checks the links of the pages in docs/ only."""
    pages = [*ROOT.glob("*.md"), *ROOT.glob("[!.]*/README.md")]
    links = [(page, link) for page in pages for link in LINK.findall(page.read_text(encoding="utf-8"))]
    missing = [(str(page.relative_to(ROOT)), link) for page, link in links if not (page.parent / link).exists()]
    assert len(links) > 20 and missing == []


def defined_names(module: Path) -> set[str]:
    """Return the functions and classes of a module, and its methods as Class.method."""
    names = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


def test_architecture_walks_name_functions_that_exist_and_each_module_once() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    walks = page.partition("## Four walks")[2].partition("\n## ")[0].split("\n### ")[1:]
    assert len(walks) == 4
    for walk in walks:
        rows = re.findall(r"^\| `(\S+\.py)` \| (.+?) \|", walk, re.MULTILINE)
        modules = [module for module, _ in rows]
        assert len(modules) >= 10 and len(set(modules)) == len(modules), walk.splitlines()[0]
        for module, functions in rows:
            missing = set(re.findall(r"`([^`]+)`", functions)) - defined_names(ROOT / "ftcli" / module)
            assert not missing, (walk.splitlines()[0], module, missing)


def test_architecture_questions_name_functions_that_exist() -> None:
    page = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
    table = page.partition("| question | module | function |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| .+\? \| `(\S+\.py)` \| `([\w.]+)`", table, re.MULTILINE)
    assert len(rows) >= 7
    assert [row for row in rows if row[1] not in defined_names(ROOT / "ftcli" / row[0])] == []


def test_the_task_of_the_tutorial_passes_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take model, rows, task and recipe from the page, as a reader does."""
    text = (ROOT / "docs" / "tutorials" / "your-own-task.md").read_text(encoding="utf-8")
    inputs, task, recipe = re.findall(r"```(?:python|yaml)\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(inputs, "your-own-task.md", "exec"), {})
    Path("score_task.py").write_text(task)
    Path("score.yaml").write_text(recipe)
    check_task("score.yaml")
    right = 'self._errors(model, batch) ** 2 * batch["counted"]'
    assert task.count(right) == 1
    Path("wrong_task.py").write_text(task.replace(right, f"({right}).mean()"))
    Path("wrong.yaml").write_text(recipe.replace("score_task", "wrong_task"))
    with pytest.raises(AssertionError, match="loss_is_additive"):
        check_task("wrong.yaml")


def keys_of(rows: list[dict[str, Any]]) -> set[str]:
    """Return the keys of all rows together but those of the load; fails without rows."""
    assert rows
    return {key for row in rows for key in row if not key.startswith(load_monitor.PREFIX)}
