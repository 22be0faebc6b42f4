"""Check shared memory, limits of a process, and the file systems of run folder and caches. Light."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from ftcli.runtime.machine.facts import GIB, Fact, look, ok, wrong
from ftcli.runtime.resources import cache_root

LITTLE_SHM, ENOUGH_SHM = GIB // 4, GIB  # bytes; containers get 64 MiB unless they ask for more
ENOUGH_FILES = 4096  # open files: each tensor that a loader process sends holds one
LITTLE_SPACE, ENOUGH_SPACE = GIB, 20 * GIB
NETWORK = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "glusterfs",
    "fuse.sshfs",
    "9p",
    "virtiofs",
)
TEMPORARY = ("tmpfs", "ramfs")


def storage_facts(run_folder: Path, root: Path = Path("/")) -> list[Fact]:
    """Return the facts of shared memory, limits, and the folders that a run writes to.

    Args:
        run_folder: Where runs are written. It need not exist.
        root: Folder that holds dev/shm and proc.
    """
    folders = {"run folder": run_folder, "cache of ftcli": cache_root(), "cache of the hub": hub_cache()}
    files, memory = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    facts = [shm_fact(root / "dev" / "shm"), open_files_fact(files), locked_memory_fact(memory, has_rdma(root))]
    return facts + [folder_fact(topic, folder, root) for topic, folder in folders.items()]


def shm_fact(folder: Path) -> Fact:
    """Return the fact about shared memory, through which NCCL and loader processes pass data.

    Args:
        folder: /dev/shm.
    """
    remedy = "docker run --shm-size=8g or --ipc=host, in Kubernetes an emptyDir with medium: Memory"
    if not folder.is_dir():
        return wrong("/dev/shm", "does not exist", f"mount a tmpfs there; {remedy}")
    sizes = os.statvfs(folder)
    free, total = sizes.f_bavail * sizes.f_frsize, sizes.f_blocks * sizes.f_frsize
    text = f"{_size(free)} free of {_size(total)}"
    if free < LITTLE_SHM:
        return wrong("/dev/shm", f"{text}: NCCL and loader processes fail with less than {_size(LITTLE_SHM)}", remedy)
    if free < ENOUGH_SHM:
        return look("/dev/shm", f"{text}, which large batches or many processes may fill", remedy)
    return ok("/dev/shm", text)


def open_files_fact(limit: int) -> Fact:
    """Return the fact about the limit of open files (`ulimit -n`).

    Args:
        limit: The soft limit.
    """
    if 0 <= limit < ENOUGH_FILES:
        text = f"{limit:,} open files; many loader processes need more"
        return look("ulimit -n", text, "ulimit -n 65536, at most the hard limit (ulimit -Hn)")
    return ok("ulimit -n", "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} open files")


def locked_memory_fact(limit: int, rdma: bool) -> Fact:
    """Return the fact about the limit of locked memory (`ulimit -l`), which InfiniBand and RoCE need.

    Args:
        limit: The soft limit in bytes.
        rdma: Whether this machine has InfiniBand or RoCE devices.
    """
    if limit == resource.RLIM_INFINITY:
        return ok("ulimit -l", "unlimited")
    text = f"{_size(limit)} of locked memory"
    if rdma:
        remedy = "ulimit -l unlimited (docker run --ulimit memlock=-1; in Slurm PropagateResourceLimits)"
        return wrong("ulimit -l", f"{text}: InfiniBand and RoCE cannot register their buffers", remedy)
    return ok("ulimit -l", text)


def has_rdma(root: Path = Path("/")) -> bool:
    """Return whether this machine has InfiniBand or RoCE devices.

    Args:
        root: Folder that holds sys.
    """
    folder = root / "sys" / "class" / "infiniband"
    return folder.is_dir() and any(folder.iterdir())


def folder_fact(topic: str, folder: Path, root: Path = Path("/")) -> Fact:
    """Return the fact about the space and the file system of a folder.

    Args:
        topic: Name of the folder.
        folder: The folder. If it does not exist, its nearest parent is judged.
        root: Folder that holds proc.
    """
    place = folder.absolute()
    while not place.is_dir():
        place = place.parent
    kind = file_system(place, root)
    free = shutil.disk_usage(place).free
    text = f"{folder}: {_size(free)} free, {kind or 'unknown file system'}"
    if not os.access(place, os.W_OK):
        return wrong(topic, f"{text}, not writable", "change its owner, or choose another folder")
    if free < LITTLE_SPACE:
        return wrong(topic, text, "free space: one checkpoint of a 1B model takes about 12 GB")
    if free < ENOUGH_SPACE:
        return look(topic, text, "free space: one checkpoint of a 1B model takes about 12 GB")
    if kind in TEMPORARY:
        return look(topic, f"{text}: lost when the machine restarts, and it takes host memory", "use a disk")
    if kind == "overlay":
        return look(topic, f"{text}: deleted with its container", "mount a volume there")
    if kind in NETWORK and topic != "run folder":
        return look(topic, f"{text}: every machine reads it over the network", "use a local disk if reading is slow")
    return ok(topic, text)


def file_system(folder: Path, root: Path = Path("/")) -> str | None:
    """Return the kind of file system that holds a folder, such as ext4 or nfs4; None if it is not known.

    Args:
        folder: An existing folder.
        root: Folder that holds proc/self/mountinfo, whose format proc_pid_mountinfo(5) describes.
    """
    table = root / "proc" / "self" / "mountinfo"
    if not table.is_file():
        return None
    best, kind, path = -1, None, folder.resolve()
    for line in table.read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split()
        if len(fields) < 5 or not after:
            continue
        point = Path(fields[4].encode().decode("unicode_escape"))
        if (path == point or point in path.parents) and len(point.parts) >= best:
            best, kind = len(point.parts), after.split()[0]
    return kind


def hub_cache() -> Path:
    """Return the cache folder of the hub: HF_HUB_CACHE, else hub/ under HF_HOME or ~/.cache/huggingface."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder).expanduser()
    home = os.environ.get("HF_HOME")
    return (Path(home).expanduser() if home else Path.home() / ".cache" / "huggingface") / "hub"


def _size(size: int) -> str:
    """Return a number of bytes as text."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / 2**20:,.0f} MiB"
