"""Run mypy with a cache that outlives this clone: `make lint` calls it. The check itself is always a whole one.

mypy takes a minute without a cache, and a few seconds with the cache of another clone: it compares the contents of
files when their times differ. The cache is $MYPY_CACHE_DIR, or a folder of the user's cache, or .mypy_cache where
neither can be written. One process at a time uses a shared folder: a second one that runs meanwhile takes .mypy_cache.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

OWN = ".mypy_cache"


def shared_folder() -> Path:
    """Return the cache folder that clones share."""
    if given := os.environ.get("MYPY_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ftcli" / "mypy"


def main() -> int:
    """Run mypy with the arguments of this command."""
    folder: Path | str = OWN
    with suppress(OSError, RuntimeError):  # no home, a read-only one, or another process that holds the lock
        shared = shared_folder()
        shared.mkdir(parents=True, exist_ok=True)
        lock = (shared / "lock").open("w")  # held until this process ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder = shared
    return subprocess.run([sys.executable, "-m", "mypy", "--cache-dir", folder, *sys.argv[1:]]).returncode


if __name__ == "__main__":
    sys.exit(main())
