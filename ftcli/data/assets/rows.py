"""Build rows from documentation of Python's standard library, scikit-learn's digits and scikit-image's faces.

Sources of the library are parsed as text and not imported. The functions write files into a given folder; catalogue.py
manages the cache.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ftcli.data.assets.models import SCIKIT_IMAGE, download_wheel
from ftcli.runtime.errors import InputError
from ftcli.runtime.installed import is_installed

Report = Callable[[str], None]

HELD_OUT_ROWS = 160
HELD_OUT_SHARE = 0.15
"""Fraction of the rows of python-modules, and of the digits, for evaluation."""
FACES = 100
"""Number of faces in scikit-image's `lfw_subset`."""
CLASSES = 12
"""Number of labels of python-modules: the top-level modules with the most rows."""
FEWEST_ROWS = 1000
SHORTEST, LONGEST = 20, 200
"""Length of a docstring's first paragraph, in characters."""
SKIPPED_FOLDERS = frozenset({"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages"})


class Documented(NamedTuple):
    """One function of the library: `signature` is module.name(arguments), `text` its first paragraph."""

    module: str
    signature: str
    text: str


@cache
def documented_functions(library: Path | None = None) -> tuple[Documented, ...]:
    """Return the public documented functions of a library, in the order of files.

    Private names, nested functions, tests and repeated texts are left out, so no text is in two rows. The result is
    cached, because several assets use it.

    Args:
        library: Folder of the library; default: the standard library of this Python.
    """
    library = library or Path(sysconfig.get_paths()["stdlib"])
    functions: list[Documented] = []
    signatures: set[str] = set()
    texts: set[str] = set()
    for path in _sources(library):
        module = _module_name(path.relative_to(library))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escape sequences in the library
            tree = ast.parse(path.read_bytes(), filename=str(path))
        for signature, text in _public_functions(tree, module):
            if signature not in signatures and text not in texts:
                signatures.add(signature)
                texts.add(text)
                functions.append(Documented(module, signature, text))
    return tuple(functions)


def build_docstrings(folder: Path, work: Path, report: Report) -> None:
    """Write train.jsonl and eval.jsonl (160 rows) with {"prompt": request, "completion": first paragraph}.

    Args:
        folder: Folder for the files.
        work: Folder for temporary files.
        report: Called with lines for the log.
    """
    train, held_out = split(_requests(), HELD_OUT_ROWS)
    _write_rows(folder / "train.jsonl", train)
    _write_rows(folder / "eval.jsonl", held_out)
    report(f"python-docstrings: {len(train)} rows to train on, {len(held_out)} held out")


def build_preferences(folder: Path, work: Path, report: Report) -> None:
    """Write train.jsonl and eval.jsonl (160 rows) with {"prompt": request, "chosen": own text, "rejected": other text}.

    The evaluation rows are those of `build_docstrings`. The rejected texts of a file are its chosen texts in another
    order, so a model cannot distinguish them by length or style. No text of an evaluation row is in a training row.

    Args:
        folder: Folder for the files.
        work: Folder for temporary files.
        report: Called with lines for the log.
    """
    train, held_out = (with_rejected(rows) for rows in split(_requests(), HELD_OUT_ROWS))
    _write_rows(folder / "train.jsonl", train)
    _write_rows(folder / "eval.jsonl", held_out)
    report(f"python-preferences: {len(train)} pairs to train on, {len(held_out)} held out")


def with_rejected(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add a rejected answer to each row: the completion of the row with the next hash.

    Args:
        rows: Two or more rows {"prompt", "completion"} with different completions.

    Returns:
        Rows {"prompt", "chosen", "rejected"} in the same order.
    """
    by_hash = sorted(range(len(rows)), key=lambda index: _digest(rows[index]))
    partner = dict(zip(by_hash, [*by_hash[1:], *by_hash[:1]], strict=True))
    return [
        {"prompt": row["prompt"], "chosen": row["completion"], "rejected": rows[partner[index]]["completion"]}
        for index, row in enumerate(rows)
    ]


def build_modules(folder: Path, work: Path, report: Report) -> None:
    """Write train.jsonl and eval.jsonl with {"text": first paragraph, "label": top-level module}.

    Args:
        folder: Folder for the files.
        work: Folder for temporary files.
        report: Called with lines for the log.
    """
    functions = _enough(documented_functions())
    tops = Counter(row.module.split(".")[0] for row in functions)
    # Equal counts are sorted by name: Counter.most_common would keep the order of the files.
    labels = {name for name, _ in sorted(tops.items(), key=lambda item: (-item[1], item[0]))[:CLASSES]}
    rows = [
        {"text": row.text, "label": row.module.split(".")[0]} for row in functions if row.module.split(".")[0] in labels
    ]
    train, held_out = split(rows, round(len(rows) * HELD_OUT_SHARE))
    _write_rows(folder / "train.jsonl", train)
    _write_rows(folder / "eval.jsonl", held_out)
    label, count = Counter(row["label"] for row in held_out).most_common(1)[0]
    report(
        f"python-modules: {len(train)} rows to train on, {len(held_out)} held out, {len(labels)} labels; "
        f"the most frequent label '{label}' is that of {count / len(held_out):.1%} of the held-out rows"
    )


def build_digits(folder: Path, work: Path, report: Report) -> None:
    """Write train/LABEL/NNNN.png and test/LABEL/NNNN.png: 8 x 8 grey images, one folder for each digit.

    Args:
        folder: Folder for the images.
        work: Folder for temporary files.
        report: Called with lines for the log.

    Raises:
        InputError: scikit-learn or pillow is not installed.
    """
    for module, package in (("sklearn", "scikit-learn"), ("PIL", "pillow")):
        if not is_installed(module):
            raise InputError(
                f"the asset 'digits' needs the package {package}, which is not installed",
                hint="pip install 'ftcli[vision]'",
            )
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    parts: dict[str, list[dict[str, Any]]] = {"train": [], "test": []}
    for digit in range(10):  # each digit separately, so that the held-out images have equal numbers of each
        rows = [{"index": index, "label": digit} for index in map(int, (digits.target == digit).nonzero()[0])]
        train, test = split(rows, round(len(rows) * HELD_OUT_SHARE))
        parts["train"] += train
        parts["test"] += test
    for name, part in parts.items():
        for row in part:
            path = folder / name / str(row["label"]) / f"{row['index']:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            ink = digits.images[row["index"]] / 16  # values of the source are 0 to 16
            grey = (ink * 255).round().astype("uint8")
            Image.fromarray(grey).save(path)
    report(f"digits: {len(parts['train'])} images to train on, {len(parts['test'])} held out")


def build_faces(folder: Path, work: Path, report: Report) -> None:
    """Write train/PERSON/face.png and test/PERSON/face.png: 25 x 25 grey faces of Labeled Faces in the Wild.

    The source has no names, so every face counts as a person of its own.

    Args:
        folder: Folder for the images.
        work: Folder for temporary files.
        report: Called with lines for the log.

    Raises:
        InputError: Pillow is not installed, or pip failed.
    """
    if not is_installed("PIL"):
        message = "the asset 'faces' needs the package pillow, which is not installed"
        raise InputError(message, hint="pip install 'ftcli[vision]'")
    import numpy as np
    from PIL import Image

    unzipped = download_wheel(SCIKIT_IMAGE, work, report)
    images = np.load(unzipped / "skimage" / "data" / "lfw_subset.npy", allow_pickle=False)
    rows = [{"index": index} for index in range(FACES)]  # the images after them show no faces
    parts = dict(zip(("train", "test"), split(rows, round(FACES * HELD_OUT_SHARE)), strict=True))
    for name, part in parts.items():
        for row in part:
            path = folder / name / f"person-{row['index']:03d}" / "face.png"
            path.parent.mkdir(parents=True)
            grey = (images[row["index"]] * 255).round().astype("uint8")  # values of the source are 0 to 1
            Image.fromarray(grey).save(path)
    report(f"faces: {len(parts['train'])} images to train on, {len(parts['test'])} held out")


def split(rows: Sequence[dict[str, Any]], held_out: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split rows by their hashes.

    Args:
        rows: The rows.
        held_out: Number of held-out rows.

    Returns:
        (training rows, held-out rows), both in the given order.
    """
    by_hash = sorted(range(len(rows)), key=lambda index: _digest(rows[index]))
    selected = set(by_hash[:held_out])
    return (
        [row for index, row in enumerate(rows) if index not in selected],
        [row for index, row in enumerate(rows) if index in selected],
    )


def _requests() -> list[dict[str, Any]]:
    """Return {"prompt", "completion"} of every documented function."""
    return [
        {"prompt": f"Document this Python function: {row.signature}", "completion": row.text}
        for row in _enough(documented_functions())
    ]


def _digest(row: dict[str, Any]) -> str:
    """Return a hash of a row."""
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()


def _enough(rows: tuple[Documented, ...]) -> tuple[Documented, ...]:
    """Return the rows; raise `InputError` if there are too few."""
    if len(rows) < FEWEST_ROWS:
        raise InputError(
            f"this Python has the source of only {len(rows)} documented functions; {FEWEST_ROWS} are needed",
            where=sysconfig.get_paths()["stdlib"],
            hint="use a Python that has its standard library as .py files",
        )
    return rows


def _sources(library: Path) -> Iterator[Path]:
    """Yield the public modules of a library."""
    for path in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).parts):
        parts = path.relative_to(library).parts
        names = [*parts[:-1], path.stem]
        private = any(name.startswith("_") and name != "__init__" for name in names)
        # A folder whose name is not an identifier (config-3.11-..., turtledemo's data) is not a package.
        if not private and not SKIPPED_FOLDERS & set(names) and all(name.isidentifier() for name in names):
            yield path


def _module_name(relative: Path) -> str:
    """Return the name of a module from its path in the library."""
    parts = [*relative.parts[:-1], relative.stem]
    return ".".join(part for part in parts if part != "__init__")


def _public_functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (signature, first paragraph of the docstring) of the public functions and methods of a module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield from _public_functions(node, f"{prefix}.{node.name}")
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not node.name.startswith("_"):
            text = _first_paragraph(ast.get_docstring(node) or "")
            if SHORTEST <= len(text) <= LONGEST:
                yield f"{prefix}.{node.name}({ast.unparse(node.args)})", text
        elif isinstance(node, (ast.If, ast.Try, ast.ExceptHandler)):  # defined for some platforms only
            yield from _public_functions(node, prefix)


def _first_paragraph(docstring: str) -> str:
    """Return the first paragraph of a docstring on one line."""
    return " ".join(docstring.strip().split("\n\n")[0].split())


def _write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows into a .jsonl file."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
