"""Draw docstrings, messages and pages at random, for a review against the writing rules of CONTRIBUTING.md.

Call it from the root of the checkout: `python docs/generators/draw_for_review.py SEED`. The same seed and tree give the
same draw.
"""

from __future__ import annotations

import argparse
import ast
import random
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MESSAGE_CALLS = {"InputError", "RunError", "RowError", "log_line"}


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, docstring) of a module, its classes and its functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, source) of every call that builds an error or a line of the log, if its words are in the call."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if name in MESSAGE_CALLS and any(_is_text(part) for part in ast.walk(node)):
                yield node.lineno, ast.get_source_segment(source, node) or ""


def main(seed: int) -> None:
    """Print 20 docstrings, 20 messages and the names of five pages."""
    draw = random.Random(seed)
    modules = sorted((ROOT / "ftcli").rglob("*.py"))
    for title, texts_of in (("docstring", docstrings), ("message", messages)):
        texts = [(path, line, text) for path in modules for line, text in texts_of(path)]
        for path, line, text in draw.sample(texts, 20):
            print(f"## {title}: {path.relative_to(ROOT)}:{line}\n{text}\n")
    for page in draw.sample(sorted((ROOT / "docs").rglob("*.md")), 5):
        print(f"## page: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int, help="number that selects the draw")
    main(parser.parse_args().seed)
