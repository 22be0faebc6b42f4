"""The rules of the design, each as a test that fails when the rule is broken."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from annotated_types import Ge, Gt, Interval, Le, Lt
from pydantic import BaseModel

from ftcli.config.compatibility import check_pair
from ftcli.config.load import key_paths, list_recipes, load_recipe
from ftcli.config.profile import list_profiles
from ftcli.config.recipe import Recipe
from ftcli.config.task_registry import find_task, list_tasks
from ftcli.config.validation import validate
from ftcli.tasks.shared.preference_options import PREFERENCE_LOSSES

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
    identifiers: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            identifiers.add(node.id)
        elif isinstance(node, ast.Attribute):
            identifiers.add(node.attr)
        elif isinstance(node, ast.alias):
            identifiers.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            identifiers.add(node.module or "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            identifiers.add(node.value)
    return identifiers


def test_law_1_the_loop_names_no_backend_no_task_and_no_model() -> None:
    names = names_in(ast.parse((PACKAGE / "loop.py").read_text()))
    forbidden = [name for name in names if BACKENDS.search(name) or name in list_tasks() or "transformers" in name]
    assert forbidden == []
    assert "accelerate" not in names


def test_law_1_there_is_one_loop_over_steps_and_it_is_short() -> None:
    """The module that steps the optimizer has one function that does, which other limits keep below 60 lines."""
    source = (PACKAGE / "loop.py").read_text()
    assert source.count("\n") < 200
    stepping = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "hardware" and optimizer_steps(path)]
    assert {path.relative_to(PACKAGE).as_posix() for path in stepping} == {"loop.py", *STEP_OUTSIDE_OF_THE_LOOP}
    assert optimizer_steps(PACKAGE / "loop.py") == ["_train_until_undone"]


# Modules outside of loop.py that step an optimizer, and why.
STEP_OUTSIDE_OF_THE_LOOP = {"training/memory.py"}  # measures micro-batch sizes with a run that is then discarded


def optimizer_steps(path: Path) -> list[str]:
    """Return the functions of a module that call `step` of the hardware."""
    return [
        function.name
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("hardware.step")
    ]


def test_law_1_a_named_task_or_model_class_is_found_in_code() -> None:
    planted = """
if recipe.task == "sft" or auto_class == "AutoModelForCausalLM":
    hint = "set task: text_classification"
"""
    assert task_words(planted) == {"sft", "text_classification", "AutoModelForCausalLM"}
    assert task_words('"""About sft."""\nhint = "pretraining"') == set()


def task_words(source: str) -> set[str]:
    """Return the names of tasks, and of transformers' classes for one of them, in code; not in docstrings."""
    pattern = re.compile(rf"\b({'|'.join(list_tasks())}|AutoModelFor\w+)\b")
    return {word for name in names_in(ast.parse(source)) for word in pattern.findall(name)}


# Modules outside of tasks/ that name one of transformers' classes for a task, and why.
NAME_MODEL_CLASSES = {"data/assets/models.py"}  # converts the file of a language model, without a task


def test_law_4_no_module_outside_of_tasks_names_a_task() -> None:
    named = {
        path.relative_to(PACKAGE).as_posix(): words
        for path in PACKAGE.rglob("*.py")
        if "tasks" not in path.relative_to(PACKAGE).parts and (words := task_words(path.read_text()))
    }
    assert named == {path: {"AutoModelForCausalLM"} for path in NAME_MODEL_CLASSES}


# Layers that read profiles, start launchers, and explain both: they name the backends that users name.
READ_PROFILES = {"runtime", "config", "launch", "cli"}


def test_law_1_only_hardware_and_layers_that_read_profiles_name_backends() -> None:
    """testing.py, which starts ranks as the launcher does, is the only module beside the packages that may."""
    guilty = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if path.relative_to(PACKAGE).parts[0] not in {"hardware", *READ_PROFILES}
        and any(re.search(r"deepspeed|fsdp", name, re.IGNORECASE) for name in names_in(ast.parse(path.read_text())))
    ]
    assert guilty == ["testing.py"]


def public_names(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_law_1_every_backend_is_a_subclass_of_backend_and_adds_no_public_method() -> None:
    from ftcli.hardware.backend import Backend
    from ftcli.hardware.requested_backend import BACKENDS

    for backend in BACKENDS.values():
        assert isinstance(backend, Backend) and type(backend) is not Backend
        assert public_names(type(backend)) == public_names(Backend), type(backend).__name__


def test_law_1_hardware_never_asks_which_backend_it_has() -> None:
    backends = {"ddp", "fsdp", "deepspeed", "DDP", "FSDP2", "DeepSpeed"}
    names = names_in(ast.parse((PACKAGE / "hardware" / "interface.py").read_text()))
    assert not backends & {part for name in names for part in name.split(".")}


def test_law_1_one_module_imports_the_backends() -> None:
    backends = {f"ftcli.hardware.{name}" for name in ("ddp", "fsdp", "deepspeed")}
    importing = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and backends & {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    }
    assert importing == {"hardware/requested_backend.py"}


def test_law_1_prepare_is_called_once_in_the_whole_package() -> None:
    calls = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("accelerator.prepare")
    ]
    assert calls == ["hardware/interface.py"]


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


def test_every_loss_of_judged_answers_has_a_recipe_with_valid_options() -> None:
    tested: dict[str, set[str]] = {"preference": set(), "unpaired_preference": set(), "reward": set()}
    for name in list_recipes():
        recipe = load_recipe(name)
        if recipe.task in tested and not name.startswith("smoke/"):
            assert validate(find_task(recipe.task).Options, recipe.task_options)[1] == [], name
            loss = "regression" if "score" in recipe.data.columns else "bradley_terry"
            tested[recipe.task] |= set(recipe.task_options.get("losses", [recipe.task_options.get("loss", loss)]))
    assert tested == {
        "preference": set(PREFERENCE_LOSSES),
        "unpaired_preference": {"kto", "apo_zero_unpaired"},
        "reward": {"bradley_terry", "regression"},
    }


def test_law_2_each_recipe_points_its_editor_at_the_schema() -> None:
    for path in list_recipes().values():
        first = path.read_text().splitlines()[0]
        match = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
        assert match, path
        assert (path.parent / match[1]).resolve().is_file()
        assert "TO BE MEASURED" not in path.read_text()


def test_law_2_profile_file_every_line_has_a_comment() -> None:
    for profile in list_profiles():
        assert profile.path is not None
        for line in profile.path.read_text().splitlines():
            assert "#" in line or yaml.safe_load(line) is None or line.endswith(":"), (profile.name, line)


def test_law_6_there_are_no_callbacks_and_no_trainer() -> None:
    for path in PACKAGE.rglob("*.py"):
        classes = [n.name for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ClassDef)]
        assert [name for name in classes if re.search(r"callback|trainer", name, re.IGNORECASE)] == []


def repeated_constants(sources: dict[str, str]) -> set[str]:
    """Return constants that two modules define with the same value."""
    first: dict[tuple[str, str], str] = {}
    repeated = set()
    for module, source in sources.items():
        for node in ast.parse(source).body:
            named = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in named:
                if isinstance(target, ast.Name) and target.id.isupper() and len(target.id) > 1:
                    key = (target.id, ast.unparse(node.value))  # type: ignore[attr-defined]
                    if first.setdefault(key, module) != module:
                        repeated.add(target.id)
    return repeated


def test_law_7_no_constant_is_defined_in_two_modules() -> None:
    assert repeated_constants({"a": "SPLITS = ('train', 'eval')", "b": 'SPLITS: tuple = ("train", "eval")'}) == {
        "SPLITS"
    }
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text() for path in PACKAGE.rglob("*.py")}
    assert repeated_constants(sources) == set()


def fields(model: type[BaseModel], prefix: str = "") -> list[tuple[str, object]]:
    values: list[tuple[str, object]] = []
    for name, field in model.model_fields.items():
        values.append((prefix + name, field))
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            values += fields(inner, f"{prefix}{name}.")
    return values


@pytest.mark.parametrize("path,field", fields(Recipe))
def test_law_7_recipe_key_has_a_description_and_bounds(path: str, field: object) -> None:
    assert len(field.description or "") > 10, path  # type: ignore[attr-defined]
    if field.annotation in (int, float):  # type: ignore[attr-defined]
        assert any(isinstance(m, Ge | Gt | Le | Lt | Interval) for m in field.metadata), path  # type: ignore[attr-defined]


def test_law_8_shell_and_notebook_call_the_same_functions() -> None:
    source = "".join(path.read_text() for path in (PACKAGE / "cli").glob("*_commands.py"))
    for verb in ("launcher.train", "check.check", "export.export", "generate.generate", "module.preview_data"):
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


# Their output is read by another process of ftcli, or only in tests.
NOT_FOR_USERS = ("config/load.py", "launch/torch_probe.py", "testing.py", "runtime/terminal.py")


def test_output_goes_through_the_one_function_that_escapes_what_a_stream_lacks() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
        if str(path.relative_to(PACKAGE)) not in NOT_FOR_USERS
    ]
    assert found == [], "use ftcli.runtime.terminal.print_text"
