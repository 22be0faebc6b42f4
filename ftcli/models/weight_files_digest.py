"""Compute a digest of all bytes of a model's weight files, when they are the weights that training starts from.

Derived columns are stored under it. Reading the files takes less time than gathering every weight from all ranks. The
digests of files that did not change since are remembered in the cache folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.config.task_registry import is_custom_task
from ftcli.data.fingerprints import file_digest
from ftcli.models.files import weight_files
from ftcli.models.frozen_weights import model_files_folder, model_settings
from ftcli.runtime.resources import cache_root

if TYPE_CHECKING:
    from ftcli.config.recipe import Recipe

ADAPTER_CONFIG = "adapter_config.json"  # transformers adds the adapter of such a folder to the model
UNCHANGED_SECONDS = 2.0  # a file that is younger may change again without another time of change


def settings_of_model(recipe: Recipe) -> dict[str, Any]:
    """Return config.json of a recipe's model without keys that may change; empty if it is not on this machine."""
    folder = model_files_folder(recipe)
    return {} if folder is None else model_settings(folder)


def weight_files_digest(recipe: Recipe) -> str | None:
    """Return a digest of the weights that the model has at the start of training.

    A task that ships with ftcli loads a causal language model from its files without changing a value, unless there are
    new tokens, code of the model's own, an adapter in the folder, or one in `adapter.path`. A new adapter changes
    nothing yet.

    Args:
        recipe: The recipe, with resolved commits.

    Returns:
        32 hexadecimal digits. None if the files do not determine the weights, or are not on this machine.
    """
    section, folder = recipe.model, model_files_folder(recipe)
    if is_custom_task(recipe.task) or section.new_tokens or section.trust_remote_code or recipe.adapter.path:
        return None
    if folder is None:
        return None
    files = weight_files(folder)
    if not files or not all(path.is_file() for path in files) or (folder / ADAPTER_CONFIG).exists():
        return None
    with ThreadPoolExecutor() as pool:  # hashing releases Python's lock
        digests = sorted(pool.map(_remembered_digest, files))
    quantization = None if section.quantization is None else section.quantization.model_dump()
    content = [digests, section.dtype, quantization]
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _remembered_digest(path: Path) -> str:
    """Return the digest of a file, from the cache folder if path, size, time of change and inode are the same."""
    before = path.stat()
    known = [str(path.resolve()), before.st_size, before.st_mtime_ns, before.st_ctime_ns, before.st_ino]
    name = hashlib.blake2b(json.dumps(known).encode(), digest_size=16).hexdigest()
    entry = cache_root() / "digests" / name
    with contextlib.suppress(OSError):
        return entry.read_text()
    digest = file_digest(path)
    if time.time() - max(before.st_mtime, before.st_ctime) > UNCHANGED_SECONDS:
        with contextlib.suppress(OSError):  # a cache folder without room or permission
            entry.parent.mkdir(parents=True, exist_ok=True)
            temporary = entry.with_name(f"{name}.tmp-{os.getpid()}")
            temporary.write_text(digest)
            temporary.rename(entry)
    return digest
