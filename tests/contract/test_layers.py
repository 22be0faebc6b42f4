"""The layers of the package: a module imports from its own layer or a lower one, inside functions and for types too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "ftcli"
LAYERS = [
    "runtime",
    "config",
    "data",
    "models",
    "hardware",
    "tasks",
    "checkpoint",
    "inference",
    "training",
    "launch",
    "reports",
    "cli",
]
# Modules that stand beside the packages, and the layer each belongs to.
BESIDE = {
    "__init__": "cli",
    "__main__": "cli",
    "_version": "runtime",
    "loop": "training",
    "task_contract": "cli",
    "testing": "cli",
    "tiny_models": "cli",
}
INTERFACE = "ftcli.tasks.protocol"  # imports config only, and may be imported from config upward
PUBLIC_ALIASES = {"ftcli/tasks/tokens.py", "ftcli/checkpoint/__init__.py"}  # old names, kept for one release
HEAVY = {"torch", "transformers", "datasets", "accelerate", "peft", "deepspeed"}


def module_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int:
    """Return the position of a module's layer; the package itself belongs to the highest."""
    first = (module.split(".") + ["__init__"])[1]
    return LAYERS.index(BESIDE.get(first, first))


def imported_modules(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, module of ftcli) of every import in a file."""
    modules = {module_of(other, package) for other in package.rglob("*.py")}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.partition(".")[0] == "ftcli")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports of ftcli are absolute"
            if str(node.module).partition(".")[0] == "ftcli":
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    yield node.lineno, inner if inner in modules else str(node.module)


def upward_imports(package: Path) -> list[str]:
    """Return every import of a module that belongs to a higher layer than the importing one."""
    imports = []
    for path in sorted(package.rglob("*.py")):
        where = path.relative_to(package.parent).as_posix()
        own = layer_of(module_of(path, package))
        for line, module in imported_modules(path, package):
            is_interface = module == INTERFACE and own >= LAYERS.index("config")
            if layer_of(module) > own and not is_interface and where not in PUBLIC_ALIASES:
                imports.append(f"{where}:{line} imports {module}")
    return imports


def test_no_module_imports_from_a_higher_layer() -> None:
    assert upward_imports(PACKAGE) == []


def test_upward_imports_of_a_planted_import_finds_it(tmp_path: Path) -> None:
    planted = tmp_path / "ftcli"
    for folder in ("runtime", "training"):
        (planted / folder).mkdir(parents=True)
    (planted / "training" / "run.py").write_text("")
    (planted / "runtime" / "errors.py").write_text("def f():\n    from ftcli.training import run\n")
    assert upward_imports(planted) == ["ftcli/runtime/errors.py:2 imports ftcli.training.run"]


def test_every_module_belongs_to_a_layer() -> None:
    packages = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE}
    assert packages == set(LAYERS)
    assert {path.stem for path in PACKAGE.glob("*.py")} == set(BESIDE)


def test_packages_have_empty_init_files() -> None:
    inits = [path for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]
    filled = {path.relative_to(ROOT).as_posix() for path in inits if path.read_text().strip()}
    assert filled <= PUBLIC_ALIASES


def test_the_task_interface_imports_config_only() -> None:
    path = PACKAGE / "tasks" / "protocol.py"
    lower = ("ftcli.runtime.", "ftcli.config.")
    assert [module for _, module in imported_modules(path, PACKAGE) if not module.startswith(lower)] == []


MOST_MODULE_LINES = 350  # a module has fewer
MOST_FUNCTION_LINES = 60  # a function has fewer, without its signature, docstring and blank lines


def long_functions(source: str) -> list[str]:
    """Return the functions of a module that are too long, with their lines."""
    lines, long = source.splitlines(), []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[ast.get_docstring(node) is not None :]
            code = lines[body[0].lineno - 1 : body[-1].end_lineno] if body else []
            if (count := sum(bool(line.strip()) for line in code)) >= MOST_FUNCTION_LINES:
                long.append(f"{node.name}: {count} lines")
    return long


def test_long_functions_of_a_planted_function_counts_code_only() -> None:
    source = 'def f():\n    """Doc.\n\n    More.\n    """\n\n' + "    x = 1\n\n" * 60
    assert long_functions(source) == ["f: 60 lines"]
    assert long_functions(source.replace("    x = 1\n", "", 1)) == []


def test_module_size_is_within_the_limits() -> None:
    long = []
    for path in PACKAGE.rglob("*.py"):
        text, name = path.read_text(), path.relative_to(ROOT)
        if text.count("\n") >= MOST_MODULE_LINES:
            long.append(f"{name}: {text.count(chr(10))} lines")
        long += [f"{name}: {function}" for function in long_functions(text)]
    assert long == []
