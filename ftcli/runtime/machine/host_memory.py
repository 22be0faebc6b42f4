"""Read how much memory this machine or its container has left: MemAvailable or the cgroup limit. Light."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

# Files of a cgroup with memory: limit, use, and the names of page cache in memory.stat. The kernel frees page cache
# before it ends a process. Sources: the kernel's cgroup-v2.rst and cgroup-v1/memory.rst.
VERSION_2 = ("memory.max", "memory.current", ("active_file", "inactive_file"))
VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))


@dataclass(frozen=True)
class HostMemory:
    """Memory of a machine or of its container.

    Attributes:
        available: Bytes that processes can still take.
        limit: Bytes that all processes together may use.
    """

    available: int
    limit: int


class HostMemoryReader:
    """Reads the memory of this machine, or of the tightest cgroup that this process is in.

    Args:
        root: Folder that holds proc and sys.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._groups = list(_memory_groups(root))

    def read(self) -> HostMemory:
        """Return the memory that is left now, by the tighter of MemAvailable and the limits of all cgroups."""
        memory = self._read_machine()
        for folder, (limit_name, used_name, cache_names) in self._groups:
            limit = _read_number(folder / limit_name)
            used = _read_number(folder / used_name)
            if limit is None or used is None or limit >= memory.limit:  # "max", or version 1's number without a limit
                continue
            counts = _read_counts(folder / "memory.stat")
            left = max(limit - used + sum(counts.get(name, 0) for name in cache_names), 0)
            memory = HostMemory(min(left, memory.available), limit)
        return memory

    def _read_machine(self) -> HostMemory:
        """Return the memory of the machine without regard to cgroups."""
        counts = _read_counts(self._root / "proc" / "meminfo")
        if "MemAvailable:" in counts:
            return HostMemory(counts["MemAvailable:"] * 1024, counts["MemTotal:"] * 1024)
        import psutil

        memory = psutil.virtual_memory()
        return HostMemory(memory.available, memory.total)


def _memory_groups(root: Path) -> list[tuple[Path, tuple[str, str, tuple[str, str]]]]:
    """Return the cgroups of this process that count memory, the innermost first, each with the names of its files."""
    groups: list[tuple[Path, tuple[str, str, tuple[str, str]]]] = []
    table = root / "proc" / "self" / "cgroup"
    for line in table.read_text().splitlines() if table.is_file() else ():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base, files = root / "sys" / "fs" / "cgroup", VERSION_2
        if controllers:
            base, files = base / "memory", VERSION_1
        parts = PurePosixPath(name.lstrip("/")).parts
        inner = base.joinpath(*parts) if ".." not in parts else base  # outside of this process's cgroup namespace
        for folder in (inner, *inner.parents):
            if (folder / files[0]).is_file():  # the outermost group of version 2 has none
                groups.append((folder, files))
            if folder == base:
                break
    return groups


def _read_number(file: Path) -> int | None:
    """Return the number in a file; None if it has another word or cannot be read."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read_counts(file: Path) -> dict[str, int]:
    """Return name -> number of the lines of a file such as memory.stat; empty if it cannot be read."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    fields = [line.split() for line in lines]
    return {field[0]: int(field[1]) for field in fields if len(field) > 1 and field[1].isdigit()}
