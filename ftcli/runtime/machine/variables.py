"""Check the environment variables that change a run, and find misspelt ones. Light."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from ftcli.runtime.errors import nearest
from ftcli.runtime.machine.facts import Fact, look, ok, wrong
from ftcli.runtime.machine.variable_names import KNOWN, PREFIXES
from ftcli.runtime.whole_numbers import whole_number

# Similarity from which a name is a misspelt one. Variables with a known first word may be newer than the list.
CLOSE_WITH_PREFIX, CLOSE = 0.85, 0.9
SHOWN = ("NCCL_", "TORCH_NCCL_", "HF_", "OMP_", "GLOO_", "MKL_")
SHOWN_NAMES = {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"}
SHOWN_NAMES |= {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "TOKENIZERS_PARALLELISM", "TRANSFORMERS_OFFLINE"}
SECRET = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
DEBUG_LEVELS = ("VERSION", "WARN", "INFO", "ABORT", "TRACE", "NONE")  # values of NCCL_DEBUG
# Variables that leave a fast path out, and what to do.
SLOW = {
    "NCCL_P2P_DISABLE": "GPUs of this machine exchange data through host memory",
    "NCCL_IB_DISABLE": "machines exchange data over TCP sockets",
    "NCCL_SHM_DISABLE": "GPUs without peer access exchange data over the network",
    "NCCL_NVLS_ENABLE": "NCCL adds up without the NVLink switch",
    "CUDA_LAUNCH_BLOCKING": "the host waits for each kernel",
    "TORCH_NCCL_BLOCKING_WAIT": "the host waits for each collective",
}
SWITCHES = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE", "NCCL_SHM_DISABLE", "NCCL_NVLS_ENABLE")  # read by C's strtoll
DEVICE_NAMES = ("GPU-", "MIG-")  # of CUDA_VISIBLE_DEVICES, beside numbers
OFF_BY_ZERO = {"NCCL_NVLS_ENABLE"}  # its value 0 leaves the fast path out, 1 does for the others


def variable_facts(environ: Mapping[str, str], cores: int, gpus: int) -> list[Fact]:
    """Return the facts of the variables that change a run: what is set, values that cannot be, and misspelt names.

    Args:
        environ: The environment.
        cores: Number of CPU cores.
        gpus: Number of GPUs of this machine, visible or not.
    """
    facts = [fact for name in sorted(environ) if (fact := _misspelt(name, environ)) is not None]
    for name in sorted(set(environ) & KNOWN):
        if name.startswith(SHOWN) or name in SHOWN_NAMES:
            shown = "set" if name in SECRET else environ[name]
            facts.append(next(_problems(name, environ[name], cores, gpus), ok(name, shown or "empty")))
    return facts


def _misspelt(name: str, environ: Mapping[str, str]) -> Fact | None:
    """Return the fact about a name that is close to a known one, or that has its first word; None for others."""
    if name in KNOWN:
        return None
    prefixed = name.startswith(tuple(PREFIXES))
    hint = nearest(name, KNOWN - set(environ), CLOSE_WITH_PREFIX if prefixed else CLOSE)
    if not prefixed and not hint:
        return None
    if name.startswith("NCCL_") and _is_in_library(name):
        return ok(name, f"{environ[name]} (known to the installed NCCL)")
    if hint:
        return wrong(name, "no program reads a variable of this name", hint)
    return look(
        name, "not in ftcli's list of variables", "check its spelling, unless a plugin or a newer version reads it"
    )


def _is_in_library(name: str) -> bool:
    """Return whether the installed NCCL has this name among its texts."""
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        for item in metadata.distributions(name=package):
            for file in item.files or ():
                if file.name.startswith("libnccl.so") and (path := Path(str(file.locate()))).is_file():
                    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as content:
                        return content.find(name.encode() + b"\0") >= 0
    return False


def _problems(name: str, value: str, cores: int, gpus: int) -> Iterator[Fact]:
    """Yield what a value makes slow, or why it cannot be."""
    if name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        first = whole_number(value.split(",")[0])
        if first is None or first < 1:
            yield wrong(name, f"{value!r} is not a number of threads", f"unset it, or set it to 1 to {cores}")
        elif first > cores:
            yield look(name, f"{value} threads on {cores} cores", f"unset it, or set it to at most {cores}")
    if name == "CUDA_VISIBLE_DEVICES" and gpus:
        items = [item.strip() for item in value.split(",") if item.strip()]
        numbers = [number for item in items if (number := whole_number(item)) is not None]
        if missing := [number for number in numbers if number >= gpus]:
            text = f"{value}: there is no GPU {missing[0]}, and CUDA ignores the numbers after it"
            yield wrong(name, text, f"use numbers from 0 to {gpus - 1}")
        elif len(set(numbers)) < len(numbers):
            yield wrong(name, f"{value} names a GPU twice", "name each GPU once")
        elif not value.strip() or value.strip() == "-1":
            yield look(name, f"hides all {gpus} GPUs", "unset it to train on them")
        elif unknown := [item for item in items if whole_number(item) is None and not item.startswith(DEVICE_NAMES)]:
            text = f"{value}: {unknown[0]} is no GPU, and CUDA ignores it and what follows"
            yield wrong(name, text, f"use numbers from 0 to {gpus - 1}, or names that begin with GPU- or MIG-")
    if name == "NCCL_DEBUG" and value.upper() not in DEBUG_LEVELS:
        yield wrong(name, f"{value} is not a level", nearest(value.upper(), DEBUG_LEVELS) or "use WARN or INFO")
    if name in SWITCHES and not re.match(r"\s*[-+]?\d", value):
        yield wrong(name, f"{value!r} is not a number, and NCCL reads it as 0", "set it to 0 or 1, or unset it")
    if name in SLOW and value.strip() == ("0" if name in OFF_BY_ZERO else "1"):
        yield look(name, f"{value}: {SLOW[name]}", "unset it, unless it works around a fault of this machine")
    if name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") and value.upper() in ("1", "ON", "YES", "TRUE"):
        yield look(name, f"{value}: nothing is downloaded from the hub", "unset it to download models and data")
