"""What is drawn from the declarations of recipe.py: the JSON Schema for editors, and the reference of every
key.

Both are committed (recipes/recipe.schema.json, recipes/README.md); `python -m ftcli.recipe_docs` writes them
anew, and a test fails when they are stale. Light: the shipped tasks' options are read, torch is not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from .recipe import Recipe
from .shipped import shipped_folder
from .tasks import find_task, list_tasks
from .validation import branches, words

SCHEMA_FILE, REFERENCE_FILE = "recipe.schema.json", "README.md"
_HEAD = """\
# Every key of a recipe

Generated from `ftcli/recipe.py` and its sections by `python -m ftcli.recipe_docs`; do not edit it by hand.

One file tells a whole experiment: what is trained. Where it is trained is the profile's
(`accelerate_configs/`). A key marked *required* has no default. Unknown and duplicate keys are errors.
`--set a.b=c` overrides any key. `1e-4` is a number; `true` and `false` are the only booleans.
`data.train: rows.jsonl` is short for `data.train.path`. Editors complete and check a recipe whose
first line is `# yaml-language-server: $schema=recipe.schema.json` (the path from the recipe to that file).
"""


def recipe_schema() -> dict[str, Any]:
    """Return the JSON Schema of a recipe file; task_options are those of the task that the recipe names."""
    schema = Recipe.model_json_schema()
    rules = []
    for task in list_tasks():
        options = find_task(task).Options.model_json_schema()
        schema["$defs"].update(options.pop("$defs", {}))
        schema["$defs"][f"options_of_{task}"] = options
        rules.append(
            {
                "if": {"properties": {"task": {"const": task}}, "required": ["task"]},
                "then": {"properties": {"task_options": {"$ref": f"#/$defs/options_of_{task}"}}},
            }
        )
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "ftcli recipe"}
    return {**schema, **head, "allOf": rules}


def recipe_reference() -> str:
    """Return the text of recipes/README.md: every key with what it must be, its default and its meaning."""
    schema = Recipe.model_json_schema()
    lines = [*_HEAD.splitlines(), "", "## Top level", "", *_table(schema, schema)]
    for key, node, section in _sections(schema, schema, ""):
        told = node.get("description") or section.get("description", "")
        lines += ["", f"## {key}", "", told, "", *_table(section, schema, f"{key}.")]
    for task in list_tasks():
        options = find_task(task).Options.model_json_schema()
        lines += ["", f"## task_options of {task}", ""]
        lines += _table(options, options, "task_options.") if options.get("properties") else ["None."]
    return "\n".join(lines) + "\n"


def write_docs() -> list[str]:
    """Write both files into recipes/ and return their paths."""
    folder = shipped_folder("recipes")
    texts = {SCHEMA_FILE: json.dumps(recipe_schema(), indent=1) + "\n", REFERENCE_FILE: recipe_reference()}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [str(folder / name) for name in texts]


def _sections(
    node: dict[str, Any], schema: dict[str, Any], prefix: str
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield (dotted key, its node, the section it holds) of every section below a node, outer ones first."""
    for key, value in node.get("properties", {}).items():
        for branch in branches(value, schema):
            if "properties" in branch:
                yield prefix + key, value, branch
                yield from _sections(branch, schema, f"{prefix}{key}.")


def _table(section: dict[str, Any], schema: dict[str, Any], prefix: str = "") -> list[str]:
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, node in section["properties"].items():
        inner = next((branch for branch in branches(node, schema) if "properties" in branch), None)
        name, meaning = f"{prefix}{key}", node.get("description", (inner or {}).get("description", ""))
        must = words(node, schema) if inner is None else f"section, see [{name}](#{name.replace('.', '')})"
        if key in section.get("required", []):
            default = "*required*"
        elif "default" in node:
            default = f"`{json.dumps(node['default'])}`"
        else:
            default = "empty" if inner is None else "all defaults"
        cells = (f"`{name}`", must, default, meaning)
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


if __name__ == "__main__":
    print(*write_docs(), sep="\n")
