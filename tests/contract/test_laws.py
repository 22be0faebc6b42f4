"""The laws of the house, each as a test that fails when the law is broken."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from inspect import signature
from pathlib import Path

import pytest
import yaml
from annotated_types import Ge, Gt, Interval, Le, Lt
from pydantic import BaseModel

from ftcli.profiles import check_pair, list_profiles
from ftcli.recipe import Recipe
from ftcli.recipe_file import key_paths, list_recipes, load_recipe
from ftcli.tasks import list_tasks

PACKAGE = Path(__file__).parents[2] / "ftcli"
BACKENDS = re.compile(r"deepspeed|fsdp|zero3|DistributedType|\bddp\b|MULTI_GPU", re.IGNORECASE)


def names_in(tree: ast.AST) -> set[str]:
    """Return every identifier, attribute, import and text constant of a syntax tree, docstrings apart."""
    docs = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            found.add(node.value)
    return found


def test_law_1_the_loop_names_no_backend_no_task_and_no_model() -> None:
    names = names_in(ast.parse((PACKAGE / "loop.py").read_text()))
    forbidden = [name for name in names if BACKENDS.search(name) or name in list_tasks() or "transformers" in name]
    assert forbidden == []
    assert "accelerate" not in names


def test_law_1_the_loop_fits_one_screen() -> None:
    source = (PACKAGE / "loop.py").read_text()
    assert source.count("\n") < 200
    loops = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef) and n.name == "steps"]
    assert len(loops) == 1
    assert (loops[0].end_lineno or 0) - loops[0].lineno < 80


def test_law_1_only_hardware_and_profiles_name_backends() -> None:
    allowed = {
        "profiles.py",
        "profile_keys.py",
        "profile_rules.py",
        "launcher.py",
        "launch_command.py",
        "devices.py",
        "testing.py",
        "cli_options.py",
        "cli_recipes.py",
    }
    guilty = {
        path.name
        for path in PACKAGE.rglob("*.py")
        if path.parent.name != "hardware"
        and path.name not in allowed
        and any(re.search(r"deepspeed|fsdp", name, re.IGNORECASE) for name in names_in(ast.parse(path.read_text())))
    }
    assert guilty <= {
        "run_folder.py",
        "supervision.py",
        "foreign_names.py",
        "models.py",
    }  # words only: see there


def test_law_1_every_backend_offers_the_whole_interface() -> None:
    from ftcli.hardware import BACKENDS

    tree = ast.parse((PACKAGE / "hardware" / "__init__.py").read_text())
    told = re.findall(r"`(\w+)`", (ast.get_docstring(tree) or "").partition("; `build`")[0])
    backend = {"self.backend", "chosen", "asked", "_asked()"}
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert sorted(told) == sorted({node.attr for node in attributes if ast.unparse(node.value) in backend})
    for name in told:
        offered = [getattr(BACKENDS[kind], name) for kind in ("NO", "FSDP", "DEEPSPEED")]
        taken = [list(signature(one).parameters) if callable(one) else type(one) for one in offered]
        assert taken == [taken[0]] * 3, name


def test_law_1_hardware_never_asks_which_backend_it_has() -> None:
    tree = ast.parse((PACKAGE / "hardware" / "__init__.py").read_text())
    naming = [
        ast.unparse(node).partition("\n")[0].partition(":")[0]
        for node in tree.body
        if {"ddp", "fsdp", "deepspeed"} & names_in(node)
    ]
    assert naming == [
        "from . import ddp, deepspeed, fsdp, loading, precision, rehearsal",
        "BACKENDS",
        "def _asked() -> ModuleType",
    ]


def test_law_1_prepare_is_called_once_in_the_whole_package() -> None:
    calls = [
        path.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("accelerator.prepare")
    ]
    assert calls == ["run.py"]


def test_law_2_no_recipe_and_no_profile_can_write_accumulation() -> None:
    assert [path for path in key_paths() if "accumulation" in path] == []
    for profile in list_profiles():
        assert "gradient_accumulation_steps" not in str(profile.values)
        assert "mixed_precision" not in profile.values
        assert profile.num_processes is None


def test_law_2_every_shipped_recipe_pairs_with_every_shipped_profile() -> None:
    recipes = list_recipes()
    assert {"quickstart", *(f"smoke/{task}" for task in list_tasks())} <= set(recipes)
    for name, path in recipes.items():
        for profile in list_profiles():
            assert check_pair(load_recipe(path), profile) == [], (name, profile.name)


def test_law_2_each_recipe_points_its_editor_at_the_schema() -> None:
    for path in list_recipes().values():
        first = path.read_text().splitlines()[0]
        match = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
        assert match, path
        assert (path.parent / match[1]).resolve().is_file()
        assert "TO BE MEASURED" not in path.read_text()


def test_law_2_every_line_of_a_profile_says_why() -> None:
    for profile in list_profiles():
        assert profile.path is not None
        for line in profile.path.read_text().splitlines():
            assert "#" in line or yaml.safe_load(line) is None or line.endswith(":"), (profile.name, line)


def test_law_6_there_are_no_callbacks_and_no_trainer() -> None:
    for path in PACKAGE.rglob("*.py"):
        classes = [n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)]
        assert [name for name in classes if re.search(r"callback|trainer", name, re.IGNORECASE)] == []


def fields(model: type[BaseModel], prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, field in model.model_fields.items():
        found.append((prefix + name, field))
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            found += fields(inner, f"{prefix}{name}.")
    return found


@pytest.mark.parametrize("path,field", fields(Recipe))
def test_law_7_every_key_says_what_it_means_and_every_number_is_bounded(path: str, field: object) -> None:
    assert len(field.description or "") > 10, path  # type: ignore[attr-defined]
    if field.annotation in (int, float):  # type: ignore[attr-defined]
        assert any(isinstance(m, Ge | Gt | Le | Lt | Interval) for m in field.metadata), path  # type: ignore[attr-defined]


def test_law_8_shell_and_notebook_call_the_same_functions() -> None:
    source = "".join(path.read_text() for path in PACKAGE.glob("cli_*.py"))
    for verb in ("launcher.train", "checks.check", "exports.export", "generation.generate", "module.preview_data"):
        assert f"{verb}(" in source


def test_law_9_a_wrong_recipe_ends_with_code_2_before_torch_is_imported(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("task: sft\nbatch: {global_sise: 8}\n")
    program = (
        "import sys; from ftcli.__main__ import main\n"
        "code = main(['train', sys.argv[1], '--profile', 'ddp', '--cpu'])\n"
        "assert 'torch' not in sys.modules, 'torch'\nsys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", program, str(wrong)], capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "did you mean 'global_size'" in result.stderr
    assert f"{wrong}:2" in result.stderr
    assert "model is missing" in result.stderr or "'model' is missing" in result.stderr
