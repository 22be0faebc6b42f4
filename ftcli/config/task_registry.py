"""Find tasks by name: a file of ftcli/tasks, or a custom task in a file or module of the user."""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from ftcli.config.task_files import changed_code, note_modules, remember_code
from ftcli.runtime.errors import InputError, Problem, nearest
from ftcli.runtime.opened_files import files_of_task, recording, recording_import
from ftcli.runtime.reader_errors import user_path
from ftcli.runtime.resources import PACKAGE
from ftcli.tasks.protocol import TaskProperties, properties_of

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.config.yaml_document import Keys

FROM_FILE = "ftcli_user_task_"  # prefix of the module name of a user's file


def list_tasks() -> list[str]:
    """Return the names of the shipped tasks, sorted. Reads their files without importing them."""
    return list(_task_names())


@cache
def _task_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in (PACKAGE / "tasks").glob("*.py") if _defines_task(path)))


METHODS = ("encode", "blank", "collate", "count", "loss", "eval_step", "metrics")  # that each task needs


def is_custom_task(name: str) -> bool:
    """Return whether a task's name is a file or module of the user, and not a shipped task."""
    return "/" in name or "." in name


def recording_task(name: str) -> AbstractContextManager[None]:
    """Return a context that records the files which a custom task opens: prepared rows depend on them.

    Args:
        name: Name of a task. Files of a shipped task are not recorded.
    """
    return recording(files_of_task(name)) if is_custom_task(name) else nullcontext()


def find_task(name: str) -> ModuleType:
    """Import and return the module of a task.

    Args:
        name: Name of a shipped task, `./my_task.py`, or `package.module`.

    Raises:
        InputError: There is no such task, it cannot be imported, or it does not define Options and Task.
    """
    if not is_custom_task(name):
        names = list_tasks()
        if name not in names:
            known = f"one of {', '.join(names)}, ./my_task.py, or package.module"
            raise InputError(f"no task '{name}'", hint=nearest(name, names) or known)
        return importlib.import_module(f"ftcli.tasks.{name}")
    module = _from_file(name) if name.endswith(".py") or "/" in name else _from_module(name)
    if missing := [part for part in ("Options", "Task") if not hasattr(module, part)]:
        raise InputError(
            f"task '{name}' defines no {' and no '.join(missing)}",
            hint="a task's file has a pydantic model Options and a class Task; see ftcli/tasks/protocol.py",
        )
    if module.Options.model_config.get("extra") != "forbid":
        raise InputError(
            f"Options of task '{name}' would silently ignore a misspelt key",
            hint='give it model_config = ConfigDict(extra="forbid", strict=True, frozen=True)',
        )
    return module


def refresh_task(name: str) -> None:
    """Make this process use the present code of a custom task: call this before a new run, and not during one.

    A notebook may go on after an edit. The task's own file is then imported again, which Python would not do. A run
    that was prepared before keeps the old classes.

    Args:
        name: Name of a task.

    Raises:
        InputError: A module that the task imports has changed. Only a new process imports that again.
    """
    if not is_custom_task(name):
        return
    is_file = name.endswith(".py") or "/" in name
    own = user_path(name, "task").resolve() if is_file else None
    module = name if own is None else f"{FROM_FILE}{own.stem}"
    if module not in sys.modules:
        return
    older, reloaded = changed_code(module)
    if others := [file for file in older if file != own]:
        raise InputError(
            f"task '{name}': this process has imported older contents of {', '.join(map(str, others))}",
            hint="restart the process (in a notebook: the kernel), which imports the present code",
        )
    if own is not None and (older or reloaded):
        del sys.modules[module]


def task_class(name: str) -> Any:
    """Return the class of a task without importing a custom task.

    Args:
        name: Name of a task.

    Returns:
        The class; None for a custom task that is not imported yet, and for an unknown name.
    """
    if not is_custom_task(name):
        return find_task(name).Task if name in list_tasks() else None
    if not (name.endswith(".py") or "/" in name):
        return getattr(sys.modules.get(name), "Task", None)
    path = user_path(name, "task").resolve()
    module = sys.modules.get(f"{FROM_FILE}{path.stem}")
    return getattr(module, "Task", None) if getattr(module, "__file__", None) == str(path) else None


def recipe_problems(recipe: Recipe, task: Any, where: Callable[[Keys], str] = lambda keys: "") -> list[Problem]:
    """Return what a task finds wrong in a recipe as a whole: options that do not fit its other keys.

    Args:
        recipe: A valid recipe.
        task: Class of its task; None if it may not be imported.
        where: Function that returns the place (`file:line`) of a key path.
    """
    find = getattr(task, "recipe_problems", None)
    return [] if find is None else list(find(recipe, where))


def check_methods(name: str, task: Any) -> None:
    """Raise `InputError` if a custom task lacks a method that every task needs.

    Args:
        name: Name of the task.
        task: The task. Its methods need not be in its class.
    """
    for method in METHODS:
        if not hasattr(task, method) and not hasattr(task, f"{method}_rows"):  # `encode_rows` may stand for `encode`
            names = [other for other in dir(task) if not other.startswith("_")]
            hint = nearest(method, names) or "ftcli/tasks/protocol.py says what it takes and returns"
            raise InputError(f"the class Task of task '{name}' has no method {method}", hint=hint)


def lacks_method(name: str, method: str) -> bool:
    """Return whether a task certainly has no method of a name. A custom task is parsed and not imported.

    Args:
        name: Name of a task.
        method: Name of the method.

    Returns:
        Whether the method is missing. False if only an import could show it: the class `Task` of the file is derived
        from another class or decorated, or there is no such file.
    """
    if not is_custom_task(name):
        return name in list_tasks() and not hasattr(find_task(name).Task, method)
    path = user_path(name, "task")
    if not path.is_file():
        return False
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):  # importing the task reports it
        return False
    task = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Task"), None)
    if task is None or task.bases or task.keywords or task.decorator_list:
        return False
    return not any(getattr(node, "name", None) == method or _assigns(node, method) for node in ast.walk(task))


def _assigns(node: ast.AST, name: str) -> bool:
    """Return whether a node of a syntax tree is a variable or an attribute of a name, for instance `self.name`."""
    return name in (getattr(node, "id", None), getattr(node, "attr", None))


def tasks_where(condition: Callable[[TaskProperties], bool]) -> list[str]:
    """Return the names of the shipped tasks whose properties meet a condition, sorted; imports their modules."""
    return [name for name in list_tasks() if condition(properties_of(find_task(name).Task))]


def _defines_task(path: Path) -> bool:
    """Return whether a file defines the classes Options and Task."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {"Options", "Task"} <= {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


class _SourceLoader(SourceFileLoader):
    """Compiles a file each time. Python would use cached code after an edit within a second that keeps its size."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the present contents of the file."""
        code: CodeType = self.source_to_code(self.get_data(self.path), self.path)
        return code


def _from_file(name: str) -> ModuleType:
    """Import and return the module of a custom task in a file."""
    path = user_path(name, "task").resolve()
    if not path.is_file():
        raise InputError(f"no task '{name}': no such file", hint="the path starts at the current folder")
    module_name = f"{FROM_FILE}{path.stem}"
    if module_name in sys.modules and sys.modules[module_name].__file__ == str(path):
        return sys.modules[module_name]
    if path.suffix != ".py":
        raise InputError(f"task '{name}' is not a Python file", hint="give a file whose name ends in .py")
    loader = _SourceLoader(module_name, str(path))
    spec = importlib.util.spec_from_file_location(module_name, path, loader=loader)
    assert spec is not None
    module, execute = importlib.util.module_from_spec(spec), loader.exec_module
    if os.getcwd() not in sys.path:  # for modules beside the file; last, so that they hide no installed package
        sys.path.append(os.getcwd())
    remember_code(module_name, name)
    sys.modules[module_name] = module  # loader workers and dataclasses find the module by name
    _import(name, module_name, lambda: execute(module))
    note_modules(module_name)
    return module


def _from_module(name: str) -> ModuleType:
    """Import and return the module of a custom task by its dotted name."""
    if os.getcwd() not in sys.path:  # `python -m ftcli` adds the current folder, the command `ftcli` does not
        sys.path.insert(0, os.getcwd())
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise InputError(f"no task '{name}'", hint="a module's name has the form package.module")
    for end in range(1, len(parts) + 1):  # find_spec raises when a package above is missing
        parent = ".".join(parts[:end])
        if importlib.util.find_spec(parent) is None:
            raise InputError(
                f"no task '{name}': no module '{parent}'",
                hint="install its package, or start in the folder that holds it",
            )
        if end < len(parts):
            _import(name, parent, lambda parent=parent: importlib.import_module(parent))  # type: ignore[misc]
    is_new = name not in sys.modules
    if is_new:
        remember_code(name, name)
    _import(name, name, lambda: importlib.import_module(name))
    if is_new:
        note_modules(name)
    return sys.modules[name]


def _import(task: str, module: str, load: Callable[[], object]) -> None:
    """Run an import of the user's code, and convert its exceptions into `InputError`."""
    try:
        with recording_import(task):
            load()
    except Exception as error:
        sys.modules.pop(module, None)
        raise InputError(f"task '{task}' cannot be imported: {type(error).__name__}: {error}") from error
