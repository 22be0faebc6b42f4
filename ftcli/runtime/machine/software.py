"""Check the versions of Python and of the installed packages, without importing them. Light."""

from __future__ import annotations

import ast
import importlib.util
import platform
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from ftcli.runtime.environment import package_versions
from ftcli.runtime.machine.facts import Fact, look, ok, wrong

CHECKED = ("torch", "accelerate", "transformers", "deepspeed", "peft", "datasets")


@dataclass(frozen=True)
class TorchBuild:
    """What torch was built for.

    Attributes:
        version: Version of torch; None if it is not installed.
        cuda: Version of the CUDA runtime; None for a build without CUDA.
        hip: Version of ROCm; None for a build without it.
    """

    version: str | None
    cuda: str | None = None
    hip: str | None = None


def torch_build() -> TorchBuild:
    """Return the build of the installed torch, from its file version.py."""
    spec = importlib.util.find_spec("torch")
    file = None if spec is None or spec.origin is None else Path(spec.origin).with_name("version.py")
    version = package_versions().get("torch")
    if file is None or not file.is_file():
        return TorchBuild(version)
    values: dict[str, str | None] = {}
    for node in ast.parse(file.read_text()).body:
        target: ast.expr | None = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(target, ast.Name) and isinstance(value, ast.Constant):
            values[target.id] = None if value.value is None else str(value.value)
    return TorchBuild(version or values.get("__version__"), values.get("cuda"), values.get("hip"))


def software_facts(build: TorchBuild) -> list[Fact]:
    """Return the facts of Python and of the packages that ftcli needs, compared with the bounds of ftcli's metadata.

    Args:
        build: The installed torch.
    """
    bounds = _bounds()
    facts = [ok("Python", f"{platform.python_version()} ({sys.executable})")]
    versions = package_versions()
    for name in CHECKED:
        version, bound = versions.get(name), bounds.get(name)
        remedy = f"pip install '{name}{bound.specifier if bound else ''}'"
        kind = _kind(build) if name == "torch" else ""
        if version is None and (bound is not None or name == "torch"):
            facts.append(wrong(name, "not installed", remedy))
        elif version is None:
            facts.append(look(name, "not installed", f"{remedy}, if a profile needs it"))
        elif bound is not None and not bound.specifier.contains(version, prereleases=True):
            facts.append(wrong(name, f"{version}, but ftcli needs {bound.specifier}", remedy))
        else:
            facts.append(ok(name, f"{version}{kind}"))
    return facts


def _kind(build: TorchBuild) -> str:
    """Return for which devices torch was built."""
    if build.cuda:
        return f", CUDA runtime {build.cuda}"
    return f", ROCm {build.hip}" if build.hip else ", built for the CPU only"


def _bounds() -> dict[str, Requirement]:
    """Return package -> requirement of the installed ftcli; empty if ftcli runs without being installed."""
    requirements: dict[str, Requirement] = {}
    for distribution in metadata.distributions(name="ftcli"):
        for line in distribution.requires or ():
            try:
                requirement = Requirement(line)
            except InvalidRequirement:
                continue
            marker = requirement.marker
            if marker is None or marker.evaluate({"extra": ""}):
                requirements.setdefault(requirement.name, requirement)
        break
    return requirements


def driver_facts(build: TorchBuild, driver: str | None, driver_cuda: tuple[int, int] | None) -> list[Fact]:
    """Return the facts of NVIDIA's driver and of the CUDA runtime that it supports.

    A driver runs every runtime of its own major version and of older ones (CUDA Compatibility, minor version
    compatibility).

    Args:
        build: The installed torch.
        driver: Version of the driver; None without one.
        driver_cuda: (major, minor) of the newest CUDA that the driver supports; None if not known.
    """
    if driver is None:
        return []
    newest = "" if driver_cuda is None else f", supports CUDA {driver_cuda[0]}.{driver_cuda[1]}"
    facts = [ok("NVIDIA driver", f"{driver}{newest}")]
    if build.version is not None and build.cuda is None:
        remedy = "install the CUDA build of torch for this driver"
        facts.append(wrong("CUDA runtime", f"torch {build.version} is built without CUDA: GPUs are not used", remedy))
    elif build.cuda is not None and driver_cuda is not None:
        major, minor = (int(part) for part in build.cuda.split(".")[:2])
        text = f"{build.cuda} of torch"
        if major > driver_cuda[0]:
            remedy = f"update the driver, or install a build of torch for CUDA {driver_cuda[0]}"
            facts.append(wrong("CUDA runtime", f"{text} is newer than the driver's CUDA {driver_cuda[0]}", remedy))
        elif (major, minor) > driver_cuda:
            remedy = "update the driver: kernels that are compiled during a run may fail"
            facts.append(look("CUDA runtime", f"{text} is newer than the driver's {newest.split()[-1]}", remedy))
        else:
            facts.append(ok("CUDA runtime", text))
    return facts
