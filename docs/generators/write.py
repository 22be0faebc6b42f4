"""Write the generated reference pages and the JSON Schema of recipes.

Usage: `python docs/generators/write.py` (or `make docs-reference`). A test in tests/contract fails when a page differs
from what this script would write.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import api_page
import cli_page
import exit_codes_page
import metrics_page
import patches_page
import profiles_page
import run_folder_page

from ftcli.config.reference import recipe_reference, recipe_schema

ROOT = Path(__file__).resolve().parents[2]


def _schema() -> str:
    return json.dumps(recipe_schema(), indent=1) + "\n"


# Path below the repository's root -> the function that returns the file's text.
FILES: dict[str, Callable[[], str]] = {
    "docs/reference/cli.md": cli_page.page,
    "docs/reference/exit-codes.md": exit_codes_page.page,
    "docs/reference/metrics.md": metrics_page.page,
    "docs/reference/patches.md": patches_page.page,
    "docs/reference/profiles.md": profiles_page.page,
    "docs/reference/python-api.md": api_page.page,
    "docs/reference/recipe.md": recipe_reference,
    "docs/reference/run-folder.md": run_folder_page.page,
    "recipes/recipe.schema.json": _schema,
}


def main() -> None:
    """Write every generated file and print the paths of those that changed."""
    for name, text in FILES.items():
        path, new = ROOT / name, text()
        if not path.exists() or path.read_text(encoding="utf-8") != new:
            path.write_text(new, encoding="utf-8")
            print(f"written: {name}")


if __name__ == "__main__":
    main()
