"""Replace the revisions of models and data sets on the hub by commits when a run begins.

A branch such as `main` may get new commits. A run therefore trains with a recipe whose revisions are commits.
state.json and environment.json also contain the original revisions. Light: never imports torch.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config.recipe_model import NO_MODEL
from ftcli.data.hub_commits import COMMITS, commit_of, entry_name
from ftcli.data.paths import local_path, similar_names
from ftcli.data.streaming.remote_files import is_address

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe
    from ftcli.config.recipe_data import Source
    from ftcli.config.recipe_model import Model


READER = "ftcli"  # stored with each data set: older versions read its text files through `datasets`


@dataclass(frozen=True)
class Resolved:
    """A recipe whose revisions are commits if they are known, with the original revisions.

    `entries` has {"key", "name", "revision", "commit"} for each repository on the hub: the key of the recipe, the name
    on the hub, the revision in the recipe (None: the main branch), and its commit (None: not known). An entry of a data
    set also has "reader". Versions that read text files through `datasets` did not write it.
    """

    recipe: Recipe
    entries: list[dict[str, Any]]

    def applied_to(self, recipe: Recipe) -> Recipe:
        """Return another recipe with these commits. It must have the same names and revisions."""
        return resolve(recipe, {"resolution": self.entries}).recipe

    def lines(self) -> list[str]:
        """Return one line for each entry, for the log and for `ftcli check`."""
        return [
            f"{entry['key']} {entry['name']}: revision {entry['revision'] or 'main'}, "
            + (f"commit {entry['commit']}" if entry["commit"] else "commit unknown on this machine")
            for entry in self.entries
        ]


def resolve(recipe: Recipe, state: Mapping[str, Any] | None = None) -> Resolved:
    """Look up the commits of a recipe's model and data sets on the hub.

    Args:
        recipe: A recipe as the user wrote it, or with commits.
        state: state.json of the checkpoint that a run resumes from. Its commits are used for equal names and revisions,
            without a request to the hub. Its commit of the model is not used if the recipe trusts the model's code: the
            checkpoint may come from another person, and must not choose the code that runs.

    Returns:
        The recipe with commits as revisions. A revision whose commit is unknown does not change.
    """
    known = {
        (entry["key"], entry["name"], entry["revision"]): entry["commit"]
        for entry in (state or {}).get("resolution") or []
    }
    entries: list[dict[str, Any]] = []

    def pinned(key: str, section: Any, name: str, kind: str) -> Any:
        revision = section.revision
        runs_code = kind == "model" and recipe.model.trust_remote_code
        stored = None if runs_code else known.get((key, name, revision))
        commit = stored or commit_of(name, revision, kind)
        reader = {"reader": READER} if kind == "dataset" else {}
        entries.append({"key": key, "name": name, "revision": revision, "commit": commit, **reader})
        return section if commit is None else section.model_copy(update={"revision": commit})

    model: Model = recipe.model
    if is_on_hub(model.name):
        model = pinned("model", model, model.name, "model")
    changes: dict[str, Any] = {}
    for key in ("train", "eval"):
        value = getattr(recipe.data, key)
        sources = value if isinstance(value, list) else [value]
        resolved = [
            pinned(f"data.{key}", source, source.path, "dataset") if is_data_set(source) else source
            for source in sources
        ]
        changes[key] = resolved if isinstance(value, list) else resolved[0]
    data = recipe.data.model_copy(update=changes)
    return Resolved(recipe.model_copy(update={"model": model, "data": data}), entries)


def is_on_hub(name: str) -> bool:
    """Return whether a name is that of a repository on the hub, and not of a local file or folder.

    The result is False for a task that builds its own model.

    Args:
        name: `model.name`, or the path of a source.
    """
    return name != NO_MODEL and local_path(name) is None and not is_address(name)


def is_data_set(source: Source | None) -> bool:
    """Return whether a source is a data set on the hub."""
    return source is not None and not glob.has_magic(source.path) and is_on_hub(source.path)


def hub_notes(recipe: Recipe) -> list[str]:
    """Return a note for the model and for each data set of a recipe that is a name on the hub.

    A wrong local path may look like such a name, so a similar local name is part of the note.
    """
    names = [("model", recipe.model.name)] if is_on_hub(recipe.model.name) else []
    sources = [*recipe.data.train_sources, *recipe.data.eval_sources]
    names += dict.fromkeys(("data set", source.path) for source in sources if is_data_set(source))
    notes = []
    for kind, name in names:
        similar = f" ({found})" if (found := similar_names(Path(name))) else ""
        notes.append(f"{kind} {name} is a name on the hub: download it with `ftcli fetch`{similar}")
    return notes


def commit_environment(resolved: Resolved) -> dict[str, str]:
    """Return the environment variable that passes commits to launched ranks, so that they send no request to the hub.

    Args:
        resolved: Recipe and commits of the run.
    """
    commits = {
        entry_name(entry["name"], entry["revision"], "model" if entry["key"] == "model" else "dataset"): entry["commit"]
        for entry in resolved.entries
        if entry["commit"]
    }
    return {COMMITS: json.dumps(commits)} if commits else {}
