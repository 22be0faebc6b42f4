"""Write pairs of whole docstrings of Python's standard library, whose lengths are those of real texts, into a file.

    python benchmarks/docstring_pairs.py PAIRS FILE

The chosen answer is the docstring of the function that the prompt names, the rejected one that of another function.
Unlike the asset python-preferences, docstrings are neither cut to their first paragraph nor limited in length.
"""

from __future__ import annotations

import ast
import json
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path

from ftcli.data.assets.rows import split, with_rejected

SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"}


def write_pairs(count: int, file: Path) -> Path:
    """Write `count` pairs {"prompt", "chosen", "rejected"}, and return the file."""
    texts: dict[str, str] = {}
    for name, text in documented():
        texts.setdefault(text, name)
    rows = [
        {"prompt": f"Document this Python function: {name}", "completion": text} for text, name in texts.items() if text
    ]
    _, chosen = split(rows, count)
    file.write_text("".join(json.dumps(row) + "\n" for row in with_rejected(chosen)), encoding="utf-8")
    return file


def documented() -> Iterator[tuple[str, str]]:
    """Yield the name with arguments, and the whole docstring, of the public functions of the standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if SKIPPED & set(inside.parts) or any(part.startswith("_") for part in inside.parts):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in the library
            try:
                tree = ast.parse(path.read_bytes(), filename=str(path))
            except SyntaxError:
                continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and ast.get_docstring(node):
                yield f"{inside.stem}.{node.name}({ast.unparse(node.args)})", ast.get_docstring(node) or ""


if __name__ == "__main__":
    write_pairs(int(sys.argv[1]), Path(sys.argv[2]))
