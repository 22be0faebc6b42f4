"""Count the GPUs and CPU cores of this machine, and read names and memory of its GPUs. Light: never imports torch."""

from __future__ import annotations

import os
import shutil
import subprocess


def count_gpus() -> int:
    """Return the number of GPUs that training processes will see, without importing torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        listed = [item.strip() for item in visible.split(",")]
        return len(listed[: listed.index("-1")] if "-1" in listed else [item for item in listed if item])
    program = shutil.which("nvidia-smi")
    if program is None:
        return 0
    listing = subprocess.run([program, "-L"], capture_output=True, text=True)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines())


def gpu_memory() -> int | None:
    """Return the memory in bytes of this machine's smallest GPU, without importing torch; None without one."""
    program = shutil.which("nvidia-smi")
    if program is None or not count_gpus():
        return None
    query = [program, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]  # in MiB
    listing = subprocess.run(query, capture_output=True, text=True).stdout.split()
    return min((int(size) * 2**20 for size in listing if size.isdigit()), default=None)


def first_gpu() -> tuple[str, int] | None:
    """Return the name and the memory in bytes of this machine's first GPU; None without one."""
    program = shutil.which("nvidia-smi")
    if program is None or not count_gpus():
        return None
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]  # memory in MiB
    listing = subprocess.run(query, capture_output=True, text=True).stdout.splitlines()
    name, _, size = (listing or [""])[0].rpartition(", ")
    return (name, int(size) * 2**20) if name and size.isdigit() else None


def count_cores() -> int:
    """Return the number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
