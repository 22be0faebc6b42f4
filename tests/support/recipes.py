"""Small recipes as dictionaries, for tests that write them to YAML files or validate them."""

from __future__ import annotations

from typing import Any


def recipe_values(task: str = "sft", **sections: Any) -> dict[str, Any]:
    """Return the sections of a recipe that trains a model of `cells.write_inputs` for four steps of six rows.

    Each of `sections` replaces a whole section or adds one.
    """
    values: dict[str, Any] = {
        "task": task,
        "model": {"name": "tied", "dropout": 0.0},
        "data": {"train": "chats.jsonl", "eval_rows": 5, "max_length": 128},
        "batch": {"global_size": 6, "micro_size": 3},
        "train": {"max_steps": 4},
        "optimizer": {"learning_rate": 5e-3},
    }
    return values | sections


def minimal_values(task: str = "sft", **sections: Any) -> dict[str, Any]:
    """Return the sections of a recipe of one row and one step; `sections` give at least the model and the data."""
    values: dict[str, Any] = {
        "task": task,
        "batch": {"global_size": 1},
        "train": {"max_steps": 1},
        "optimizer": {"learning_rate": 1e-3},
    }
    return values | sections
