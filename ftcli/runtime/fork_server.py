"""Start processes by forking from a server process that has imported their modules, so that each starts quickly."""

from __future__ import annotations

import multiprocessing
import sys
from typing import Any

from ftcli.runtime.patches import declare

FORK_SERVER = declare(
    __name__,
    "fork-server",
    library="python",
    versions=">=3.10,<3.14",
    purpose="Ends a server of forked test processes that has imported other modules",
    without="Each test process then imports all that it needs.",
    alternative="None: `multiprocessing.forkserver` has no public function that ends its server.",
    apis=(
        "multiprocessing.forkserver:_forkserver",
        "multiprocessing.forkserver:ForkServer._preload_modules",
        "multiprocessing.forkserver:ForkServer._stop",
    ),
    unmeasured="Tests use it, and no run does.",
)

FREEZER = "ftcli.runtime.frozen_imports"


def imports_are_frozen() -> bool:
    """Return whether this process forked from a server whose imports are excluded from garbage collection."""
    return FREEZER in sys.modules


def fork_context(preloaded: list[str]) -> Any:
    """Return a multiprocessing context whose processes fork from a server that has imported these modules.

    The server keeps the environment of its first start. A process has one server at a time: a server that has imported
    other modules is ended. Garbage collections of the processes do not search what the server has imported.

    Args:
        preloaded: Names of the modules that the server imports.

    Returns:
        A context of `multiprocessing`: forkserver, or spawn where the system or the Python version does not allow it.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods() or not FORK_SERVER.is_usable():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    server: Any = forkserver._forkserver
    preloaded = [*preloaded, FREEZER]
    if server._preload_modules != preloaded:
        server._stop()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloaded)
    return context
