"""List recipes, profiles, tasks and versions, and describe a checkpoint: `ftcli show`.

Lists read the first lines and syntax trees of files, without importing them, so that they are fast.
"""

from __future__ import annotations

import ast
import json
import math
import re
import time
from collections.abc import Iterable
from pathlib import Path

from ftcli.checkpoint.folder import find_damage, folder_size, read_state
from ftcli.runtime.checkpoint_names import STATE
from ftcli.runtime.errors import InputError, nearest
from ftcli.runtime.reader_errors import user_path
from ftcli.runtime.resources import PACKAGE


def lines_about(what: str) -> Iterable[str]:
    """Return the lines of `ftcli show WHAT`.

    Raises:
        InputError: `what` is not the name of a list, a run folder or a checkpoint.
    """
    from ftcli.checkpoint.folder import is_checkpoint
    from ftcli.reports.run_summary import show_run

    lists = {"recipes": _recipes, "profiles": _profiles, "tasks": _tasks}
    if what in lists:
        return _columns(lists[what]())
    if not user_path(what).exists():
        raise InputError(
            f"there is no list, run or checkpoint '{what}'",
            hint=nearest(what, lists) or f"give one of {', '.join(lists)}, a run folder or a checkpoint",
        )
    return describe(Path(what)) if is_checkpoint(Path(what)) else show_run(what)


def versions() -> list[str]:
    """Return the versions of ftcli and of the packages that a run depends on, one per line."""
    from ftcli._version import __version__
    from ftcli.runtime.environment import PACKAGES, package_versions

    installed = package_versions() | {"ftcli": __version__}
    return _columns([(name, installed.get(name, "not installed")) for name in PACKAGES])


def _columns(rows: list[tuple[str, str]]) -> list[str]:
    width = max((len(name) for name, _ in rows), default=0)
    return [f"{name:<{width}}  {text}".rstrip() for name, text in rows]


def _recipes() -> list[tuple[str, str]]:
    from ftcli.config.load import list_recipes

    return [(name, _head(path)) for name, path in list_recipes().items()]


def _profiles() -> list[tuple[str, str]]:
    from ftcli.config.profile import list_profiles

    return [(item.name, _head(item.path)) for item in list_profiles() if item.path is not None]


def _tasks() -> list[tuple[str, str]]:
    from ftcli.config.task_registry import list_tasks

    rows = []
    for name in list_tasks():
        tree = ast.parse((PACKAGE / "tasks" / f"{name}.py").read_text(encoding="utf-8"))
        rows.append((name, (ast.get_docstring(tree) or "").split("\n")[0]))
    return rows


def _head(path: Path) -> str:
    """Return the first comment line of a YAML file, except the one for editors."""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.lstrip("# ").strip()
        if line.startswith("#") and text and not text.startswith("yaml-language-server"):
            return text
        if line and not line.startswith("#"):
            break
    return ""


def describe(folder: Path) -> list[str]:
    """Describe a checkpoint in one line per fact, without reading weights."""
    from ftcli.config.yaml_document import dump_document

    if problem := find_damage(folder, hashes=False):
        return [f"checkpoint  {folder}", f"damaged     {problem}"]
    state = read_state(folder)
    recipe, writer = state["recipe"], state["written_by"]
    processes = _count(writer["processes"], "process", "es")
    count = sum(math.prod(shape) for shape in state["parameters"].values())
    saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((folder / STATE).stat().st_mtime))
    facts = {
        "checkpoint": str(folder),
        "trains": f"{recipe['task']} of {recipe['model']['name']}, adapter {recipe['adapter']['type']}",
        "step": f"{state['step']} of {state['steps']}, {state['optimizer_updates']} optimizer updates",
        "saved": f"{saved}, {folder_size(folder) / 1e6:.1f} MB in {_count(len(state['files']), 'file')}",
        "written by": f"{writer['profile']}: {writer['distributed_type']}, {processes}",
        "trained": f"{count:,} elements in {_count(len(state['parameters']), 'tensor')}",
        "buffers": _count(len(state["buffers"]), "tensor"),
        "loss scale": "none" if state["loss_scale"] is None else json.dumps(state["loss_scale"]),
        "data": f"{state['data']['rows']} rows, fingerprint {state['data']['fingerprint']}",
        "versions": ", ".join(f"{name} {version}" for name, version in state["versions"].items()),
    } | {f"eval/{name}": f"{value:.4g}" for name, value in state["metrics"].items()}
    bad = [f"step {entry['step']} ({entry['policy']})" for entry in state["not_finite"]]
    facts |= {"not finite": ", ".join(bad)} if bad else {}
    width = max(map(len, facts))
    lines = [f"{name:<{width}}  {text}" for name, text in facts.items()]
    lines += ["parameters:", *(f"  {line}" for line in _group_layers(state["parameters"]))]
    return [*lines, "recipe:", *(f"  {line}" for line in dump_document(recipe).splitlines())]


def _group_layers(shapes: dict[str, list[int]]) -> list[str]:
    """Return one line with name and shape for each parameter. Equal parameters of several layers are one line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, shape in shapes.items():
        groups.setdefault((re.sub(r"\d+", "*", name), str(shape)), []).append(name)
    return [
        f"{names[0]} {shape}" if len(names) == 1 else f"{pattern} {shape}, {len(names)} times"
        for (pattern, shape), names in groups.items()
    ]


def _count(count: int, noun: str, ending: str = "s") -> str:
    return f"{count} {noun}{'' if count == 1 else ending}"
