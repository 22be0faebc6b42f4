"""Find out whether an optional Python package is installed, without importing it."""

from __future__ import annotations

import importlib.util


def is_installed(package: str) -> bool:
    """Return whether a top-level package or module can be imported and has code of its own.

    Python takes any folder of that name on its search path for a namespace package, for instance the folder `wandb`
    that Weights & Biases leaves in the working directory. Such a folder holds no code and does not count.

    Args:
        package: Name as in an import statement, without dots.
    """
    spec = importlib.util.find_spec(package)
    if spec is None:
        return False
    is_namespace = spec.origin is None and spec.submodule_search_locations is not None
    return not is_namespace
