"""Describe the software and the machine of a run: versions, git commit, command line. Light: never imports torch."""

from __future__ import annotations

import functools
import platform
import subprocess
import sys
from importlib import metadata
from typing import Any

from ftcli.runtime.process import has_ftcli_parent

PACKAGES = ("ftcli", "torch", "accelerate", "transformers", "peft", "datasets", "deepspeed", "safetensors", "numpy")


def describe_environment(device: str, processes: int) -> dict[str, Any]:
    """Return the content of environment.json: command line, versions, git commit and machine.

    Args:
        device: Type of the device, for instance `cuda`.
        processes: Number of processes of the run.
    """
    return {
        "command": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": package_versions(),
        "git_commit": _git_commit(),
        "device": device,
        "processes": processes,
        "launched": "ftcli" if has_ftcli_parent() else "directly",
    }


def package_versions() -> dict[str, str]:
    """Return package -> version of the installed packages that affect a run."""
    return {name: version for name in PACKAGES if (version := _version(name))}


@functools.cache
def _version(name: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    versions = [item.version for item in metadata.distributions(name=name)]
    return versions[0] if versions else None


def _git_commit() -> str | None:
    """Return the commit of the repository that contains the working folder; None outside of a repository.

    The commit ends in -dirty if the repository has changes.
    """
    # The repository may belong to another person, and the monitor in its configuration must not be started.
    command = ["git", "-c", "core.fsmonitor=false", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git on this machine, or a repository on a dead mount
        return None
    return result.stdout.strip() or None if result.returncode == 0 else None
