"""Check the versions of Python and of the installed packages, without importing them. Light."""

from __future__ import annotations

import ast
import importlib.util
import os
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


def torch_module() -> Path | None:
    """Return the file `__init__.py` of the installed torch; None without torch."""
    spec = importlib.util.find_spec("torch")
    return None if spec is None or spec.origin is None else Path(spec.origin)


def torch_build() -> TorchBuild:
    """Return the build of the installed torch, from its file version.py."""
    module = torch_module()
    file = None if module is None else module.with_name("version.py")
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


def bytecode_facts(package: Path | None, prefix: str | None, *, may_write: bool) -> list[Fact]:
    """Return a fact if Python compiles the modules of a package again in each process, because it cannot store them.

    Args:
        package: The file `__init__.py` of the package; None if it is not installed.
        prefix: `sys.pycache_prefix`, the folder of all bytecode; None for folders beside the modules.
        may_write: Whether Python stores bytecode; PYTHONDONTWRITEBYTECODE forbids it.
    """
    if package is None or Path(importlib.util.cache_from_source(package)).is_file():
        return []
    if not may_write:
        reason, remedy = "PYTHONDONTWRITEBYTECODE is set", "unset PYTHONDONTWRITEBYTECODE"
    elif prefix is None and not os.access(package.parent, os.W_OK):
        reason, remedy = f"{package.parent} is read-only", "set PYTHONPYCACHEPREFIX to a folder that keeps it"
    else:
        return []  # the next import stores it
    text = f"{reason} and {package.parent.name} has no bytecode, so each process compiles its modules when it starts"
    return [look("bytecode", text, f"{remedy}, or install packages with their bytecode (uv: --compile-bytecode)")]


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
