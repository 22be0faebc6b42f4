"""One module reads rank, world size and launch facts of its own process; log lines go through one function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import ftcli

PACKAGE = Path(ftcli.__file__).parent
VARIABLES = {
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "FTCLI_LAUNCHED",
    "FTCLI_PARENT",
    "FTCLI_PROFILE",
}
PRINTS = {
    "runtime/log.py": "writes the lines",
    "__main__.py": "errors that end a command, and what comes before imports",
    "cli/chat.py": "the conversation on the terminal",
    "testing.py": "a tool of tests",
}


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in PACKAGE.rglob("*.py"):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def reads_own_environment(node: ast.AST) -> bool:
    """Return whether a node is `os.environ[NAME]`, `os.environ.get(NAME)` or `NAME in os.environ`."""
    if isinstance(node, ast.Subscript):
        owner, names = node.value, [node.slice]
        if not isinstance(node.ctx, ast.Load):
            return False
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
        owner, names = node.func.value, node.args[:1]
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        owner, names = node.comparators[0], [node.left]
    else:
        return False
    is_environment = ast.unparse(owner) in ("os.environ", "environ")
    return is_environment and any(isinstance(name, ast.Constant) and name.value in VARIABLES for name in names)


def test_rank_and_launch_variables_are_read_in_one_module() -> None:
    places = {
        f"{name}:{node.lineno}"  # type: ignore[attr-defined]
        for name, tree in sources()
        for node in ast.walk(tree)
        if name != "runtime/process.py" and reads_own_environment(node)
    }
    # Functions that are given an environment, which may be another process's.
    places = {place for place in places if not place.startswith(("config/profile.py", "launch/bare_launch.py"))}
    assert places == set()


def test_lines_on_standard_error_are_log_lines() -> None:
    places = {
        name
        for name, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("print", "print_text")
        and any(keyword.arg == "file" and ast.unparse(keyword.value) == "sys.stderr" for keyword in node.keywords)
    }
    assert places == set(PRINTS)
