"""Look up the commit of a branch or tag of a repository on the hub. Light: never imports torch."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

COMMIT = re.compile("[0-9a-f]{40}")
COMMITS = "FTCLI_COMMITS"  # environment variable in which ftcli's parent process passes commits to its ranks
ASKED_FILE = {"model": "config.json", "dataset": "README.md"}  # a small file that most repositories have


@cache
def commit_of(name: str, revision: str | None, kind: str) -> str | None:
    """Return the commit of a revision of a repository. The result stays the same as long as this process runs.

    Sends a request to the hub unless HF_HUB_OFFLINE is set. Without an answer, the commit is the last one in the hub's
    cache on this machine.

    Args:
        name: Name of the repository.
        revision: Branch, tag or commit; None is the main branch.
        kind: "model" or "dataset".

    Returns:
        40 hexadecimal digits; None when the revision is not known on this machine.
    """
    if revision is not None and COMMIT.fullmatch(revision):
        return revision
    inherited: dict[str, str] = json.loads(os.environ.get(COMMITS, "{}"))
    if (commit := inherited.get(entry_name(name, revision, kind))) is not None:
        return commit
    _update_reference(name, revision, kind)
    reference = cached_repository(name, kind) / "refs" / (revision or "main")
    cached = reference.read_text().strip() if reference.is_file() else ""
    if COMMIT.fullmatch(cached):
        return cached
    return next(_prepared_commits(name), None) if kind == "dataset" and revision in (None, "main") else None


def cached_repository(name: str, kind: str) -> Path:
    """Return the folder of a repository in the hub's cache on this machine. It need not exist."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / "--".join([f"{kind}s", *name.split("/")])


def _update_reference(name: str, revision: str | None, kind: str) -> None:
    """Download a small file of a repository, because huggingface_hub then stores the commit of the revision."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        hf_hub_download(name, ASKED_FILE[kind], repo_type=kind, revision=revision)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError):
        return  # loading the repository itself reports the error


def _prepared_commits(name: str) -> Iterator[str]:
    """Yield the commits of a data set that `datasets` has prepared on this machine, the newest first.

    Without a network, `datasets` also uses the newest of these commits.
    """
    from huggingface_hub.constants import HF_HOME

    root = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets")
    owner, _, short_name = name.rpartition("/")
    snake = re.sub(r"([a-z\d])([A-Z])", r"\1_\2", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", short_name)).lower()
    folders = [path for path in root.glob(f"{owner}___{snake}/*/*/*" if owner else f"{snake}/*/*/*") if path.is_dir()]
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True):
        if COMMIT.fullmatch(folder.name):
            yield folder.name


def entry_name(name: str, revision: str | None, kind: str) -> str:
    """Return the key of a revision of a repository in the environment variable `COMMITS`."""
    return f"{kind}:{name}@{revision or ''}"
