"""Every private name of another library that ftcli uses exists in the installed version, and is declared as a patch."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from ftcli.runtime import patches
from ftcli.runtime.patches import Patch, has_api, private_names

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ftcli"
# Documented names of the standard library that begin with an underscore.
PUBLIC = {"_replace", "_asdict", "_fields", "_exit"}
FIGURE = re.compile(r"(\d[\d,.]*) (?:ms|s|GiB)\b")
READERS = {"getattr", "setattr", "hasattr", "delattr"}


def modules_with_patches() -> list[str]:
    """Return the modules of ftcli whose text calls `declare`."""
    files = [path for path in PACKAGE.rglob("*.py") if " = declare(\n" in path.read_text(encoding="utf-8")]
    return sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files)


MODULES: dict[str, ModuleType] = {name: importlib.import_module(name) for name in modules_with_patches()}
PATCHES = sorted(patches.REGISTRY.values(), key=lambda patch: patch.name)
ROWS = [(patch, api) for patch in PATCHES for api in patch.apis]


def skip_if_not_installed(patch: Patch) -> None:
    if patch.installed is None:
        pytest.skip(f"{patch.library} is not installed")


def test_names_of_patches_are_listed() -> None:
    assert [patch.name for patch in PATCHES] == list(patches.NAMES)


@pytest.mark.parametrize(("patch", "api"), ROWS, ids=[f"{patch.name}-{api}" for patch, api in ROWS])
def test_patch_apis_exist_in_the_installed_library(patch: Patch, api: str) -> None:
    skip_if_not_installed(patch)
    assert has_api(api), f"{patch.library} {patch.installed} has no {api}, which {patch.module} uses: {patch.purpose}"


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_patch_supports_the_installed_version(patch: Patch) -> None:
    skip_if_not_installed(patch)
    assert patch.problem() is None


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.name)
def test_patch_version_range_has_both_ends_and_covers_the_tested_sets(patch: Patch) -> None:
    expected = SpecifierSet(patch.versions)
    assert sorted(part.operator for part in expected) == ["<", ">="]
    for version in versions_of_tested_sets(patch.library):
        assert expected.contains(version), f"{patch.name} leaves out {patch.library} {version}"


def versions_of_tested_sets(library: str) -> set[str]:
    """Return the versions of a library in constraints.txt, in tests/oldest.txt and on the GPUs that were tested."""
    lines = [
        line for name in ("constraints.txt", "tests/oldest.txt") for line in (ROOT / name).read_text().splitlines()
    ]
    pinned = {line.split("==")[1] for line in lines if line.lower().startswith(f"{library}==")}
    return pinned | {"torch": {"2.11.0", "2.13.0"}, "transformers": {"5.17.0"}}.get(library, set())


def test_dependencies_with_patches_have_the_upper_bound_of_their_patches() -> None:
    text = (ROOT / "pyproject.toml").read_text().partition("\ndependencies = [")[2].partition("\n]")[0]
    lines = [line.strip().strip(",").strip('"') for line in text.splitlines() if line.strip()]
    bounds = {requirement.name: requirement.specifier for requirement in map(Requirement, lines)}
    bounded = [patch for patch in PATCHES if patch.library in ("accelerate", "deepspeed", "transformers")]
    assert [patch.name for patch in bounded if SpecifierSet(patch.versions) != bounds[patch.library]] == []


@pytest.mark.parametrize("patch", [patch for patch in PATCHES if not patch.required], ids=lambda patch: patch.name)
def test_optional_patch_has_a_figure_or_the_reason_why_it_has_none(patch: Patch) -> None:
    assert bool(FIGURE.search(patch.measurement)) != bool(patch.unmeasured)
    assert not (patch.measurement and patch.unmeasured)


def recorded_figures(patch: Patch) -> set[str]:
    """Return the numbers of the lines of performance.md with the name of a patch, and of pages that it links to."""
    record = (ROOT / "docs" / "explanation" / "performance.md").read_text(encoding="utf-8")
    texts = [line for line in record.splitlines() if f"| `{patch.name}`" in line or f", `{patch.name}`" in line]
    links = re.findall(r"\]\((\.\.[^)#]+)", patch.measurement)
    texts += [(ROOT / "docs" / "reference" / link).read_text(encoding="utf-8") for link in links]
    return set(re.findall(r"\d[\d,]*(?:\.\d+)?", " ".join(texts)))


@pytest.mark.parametrize("patch", [patch for patch in PATCHES if patch.measurement], ids=lambda patch: patch.name)
def test_figures_of_a_patch_are_recorded(patch: Patch) -> None:
    assert set(FIGURE.findall(patch.measurement)) - recorded_figures(patch) == set()


def declared_names(module: ModuleType) -> set[str]:
    """Return the private names of the patches that a module declares or imports."""
    results = [value for value in vars(module).values() if isinstance(value, Patch)]
    return {name for patch in results for name in private_names(patch)}


def own_private_names(package: Path) -> set[str]:
    """Return the private names that ftcli itself defines: functions, classes, variables, attributes of `self`."""
    own_names = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own_names.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own_names.add(node.id)
    return own_names


def foreign_private_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every private name that a file takes from an object other than `self` and `cls`.

    These are attributes, imports, and the second argument of getattr and its relatives, also by a constant's name.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        names: list[object] = []
        if isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        ):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] not in ("ftcli", "__future__"):
            names = [*str(node.module).split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in READERS:
            given = node.args[1] if len(node.args) > 1 else None
            names = [given.value] if isinstance(given, ast.Constant) else []
            names = [constants.get(given.id)] if isinstance(given, ast.Name) else names
        for name in names:
            if isinstance(name, str) and name.startswith("_") and not name.startswith("__") and name not in PUBLIC:
                yield node.lineno, name


def undeclared(package: Path) -> list[str]:
    """Return every use of a private name of another library that no patch of its module declares."""
    own = own_private_names(package)
    results = []
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package.parent)
        module = MODULES.get(".".join(where.with_suffix("").parts))
        if module is None and (uses := [name for _, name in foreign_private_names(path) if name not in own]):
            module = (
                importlib.import_module(".".join(where.with_suffix("").parts)) if uses and package == PACKAGE else None
            )
        allowed = own | (set() if module is None else declared_names(module))
        results += [f"{where}:{line} uses {name}" for line, name in foreign_private_names(path) if name not in allowed]
    return results


def test_every_private_name_of_another_library_is_declared() -> None:
    assert undeclared(PACKAGE) == []


def test_private_names_of_a_planted_use_finds_it(tmp_path: Path) -> None:
    planted = tmp_path / "ftcli"
    planted.mkdir()
    lines = [
        "import torch._dynamo",
        "from torch.utils import _pytree",
        "HOOK = '_hook'",
        "def f(model):",
        "    self._own = model._private",
        "    getattr(model, HOOK), hasattr(model, '_text'), model.public, model.__dict__, cursor._replace",
    ]
    (planted / "module.py").write_text("\n".join(lines) + "\n")
    reported = [line.rpartition(" ")[2] for line in undeclared(planted)]
    assert sorted(reported) == ["_dynamo", "_hook", "_private", "_pytree", "_text"]


def test_patch_names_of_a_removed_attribute_are_missing() -> None:
    for api in ("torch:Tensor._gone", "torch._gone:name", "torch:gone.name", "accelerate.state:PartialState.gone"):
        assert not has_api(api)
