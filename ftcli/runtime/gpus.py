"""Known GPUs: memory, peak rates and links from NVIDIA's data sheets, and the rates that a machine measured itself.

`ftcli plan` uses the measured rates of this machine if there is a file with them, else the table. Light: never imports
torch.
"""

from __future__ import annotations

import platform
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from ftcli.runtime.errors import InputError, nearest
from ftcli.runtime.resources import cache_root
from ftcli.runtime.torn_files import read_object

TERA, GIGA = 10**12, 10**9
# What kernels of a training step reach of the peaks. Sources: kernel profiles of H200s in benchmarks/where.
PRODUCT_SHARE = 0.71  # matrix products: 0.67 to 0.76 in seven profiles
MEMORY_SHARE = 0.8  # kernels that are limited by memory: AdamW 0.71 to 0.87, activation functions 0.9
LINK_SHARE = 0.4  # NCCL beside computation, in bytes of one direction: 0.2 to 0.5 in four profiles
# NCCL alone, for comparison: nccl-tests report about 360 of 450 GB/s in one direction for eight H100s without NVLink
# SHARP. So a link that was measured alone serves a training step at half of its rate.
ALONE_SHARE = 0.8
RING_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")  # those of a training step
LEAST_BYTES = 2**24  # smaller messages measure the latency
# Layers a second (`measure_host`) of a host for which the constants of step_time.py hold: 1.225 times what was measured
# on a host on which two cells took 1.22 and 1.23 times as long as on the host of the constants.
HOST_RATE = 1375
MEASURED_FILE = "machine-speeds-{host}.json"  # in the cache folder of ftcli, which several machines may share


@dataclass(frozen=True)
class GPU:
    """The rates of one GPU in a training step.

    Attributes:
        name: Name in the table, or the driver's name.
        memory: Bytes.
        products: Precision -> FLOP/s of matrix products. A precision without an entry has no hardware.
        bandwidth: Bytes per second of its memory.
        link: Bytes per second to the other GPUs of a machine, in one direction.
        host_link: Bytes per second between GPU and host, in one direction.
        source: The document with the figures, or the file with the measured ones.
        host: Speed at which the host launches kernels, relative to that of the hosts behind the estimates.
    """

    name: str
    memory: int
    products: dict[str, float]
    bandwidth: float
    link: float
    host_link: float
    source: str
    host: float = 1.0


def _gpu(
    name: str,
    memory: int,
    half: float,
    single: float,
    bandwidth: float,
    link: float,
    pcie: float,
    source: str,
    *,
    fp8: float | None = None,
    has_bfloat16: bool = True,
) -> GPU:
    """Return a GPU from the figures of a data sheet: GB (of 2^30 bytes), dense TFLOP/s, GB/s in one direction."""
    peaks = {"fp32": single, "fp16": half, **({"bf16": half, "bf16_pure": half} if has_bfloat16 else {})}
    if fp8 is not None:
        peaks["fp8"] = fp8
    products = {precision: PRODUCT_SHARE * peak * TERA for precision, peak in peaks.items()}
    rates = (MEMORY_SHARE * bandwidth * GIGA, LINK_SHARE * link * GIGA, MEMORY_SHARE * pcie * GIGA)
    return GPU(name, memory * 2**30, products, *rates, source)


ADA, TURING = "NVIDIA Ada GPU Architecture whitepaper", "NVIDIA T4 data sheet"
# Rates with sparsity, as data sheets have them for tensor cores, are halved. A link of NVLink has half the stated
# bandwidth in each direction. GPUs without NVLink between all GPUs of a machine use PCIe.
TABLE = [
    _gpu("B200", 180, 2250, 80, 8000, 900, 64, "NVIDIA Blackwell data sheet, HGX B200", fp8=4500),
    _gpu("H200", 141, 989, 67, 4800, 450, 64, "NVIDIA H200 data sheet, SXM", fp8=1979),
    _gpu("H200 NVL", 141, 835, 60, 4800, 450, 64, "NVIDIA H200 data sheet, NVL", fp8=1671),
    _gpu("H100", 80, 989, 67, 3350, 450, 64, "NVIDIA H100 data sheet, SXM", fp8=1979),
    _gpu("H100 NVL", 94, 835, 60, 3900, 300, 64, "NVIDIA H100 data sheet, NVL", fp8=1671),
    _gpu("H100 PCIe", 80, 756, 51, 2000, 64, 64, "NVIDIA H100 data sheet, PCIe", fp8=1513),
    _gpu("A100 80GB", 80, 312, 19.5, 2039, 300, 32, "NVIDIA A100 data sheet, SXM"),
    _gpu("A100 40GB", 40, 312, 19.5, 1555, 300, 32, "NVIDIA A100 data sheet, SXM"),
    _gpu("A100 PCIe 80GB", 80, 312, 19.5, 1935, 32, 32, "NVIDIA A100 data sheet, PCIe"),
    _gpu("A100 PCIe 40GB", 40, 312, 19.5, 1555, 32, 32, "NVIDIA A100 data sheet, PCIe"),
    _gpu("A30", 24, 165, 10.3, 933, 32, 32, "NVIDIA A30 data sheet"),
    _gpu("A40", 48, 149.7, 37.4, 696, 32, 32, "NVIDIA A40 data sheet"),
    _gpu("A10", 24, 125, 31.2, 600, 32, 32, "NVIDIA A10 data sheet"),
    _gpu("L4", 24, 121, 30.3, 300, 32, 32, "NVIDIA L4 data sheet", fp8=242),
    _gpu("L40S", 48, 362, 91.6, 864, 32, 32, "NVIDIA L40S data sheet", fp8=733),
    _gpu("L40", 48, 181, 90.5, 864, 32, 32, "NVIDIA L40 data sheet", fp8=362),
    _gpu("RTX 6000 Ada", 48, 364, 91.1, 960, 32, 32, "NVIDIA RTX 6000 Ada Generation data sheet", fp8=728),
    _gpu("RTX A6000", 48, 154.8, 38.7, 768, 32, 32, "NVIDIA RTX A6000 data sheet"),
    _gpu("RTX 5090", 32, 209.5, 104.8, 1792, 64, 64, "NVIDIA RTX Blackwell GPU Architecture whitepaper", fp8=419),
    _gpu("RTX 4090", 24, 165.2, 82.6, 1008, 32, 32, ADA, fp8=330.3),
    _gpu("RTX 3090", 24, 71, 35.6, 936, 32, 32, "NVIDIA Ampere GA102 GPU Architecture whitepaper"),
    _gpu("V100 32GB", 32, 125, 15.7, 900, 150, 16, "NVIDIA V100 data sheet, SXM2", has_bfloat16=False),
    _gpu("V100 16GB", 16, 125, 15.7, 900, 150, 16, "NVIDIA V100 data sheet, SXM2", has_bfloat16=False),
    _gpu("T4", 16, 65, 8.1, 320, 16, 16, TURING, has_bfloat16=False),
]
# Words of names of other, slower GPUs: laptops, cut-down variants, and parts of a GPU (MIG).
VARIANTS = {"laptop", "mobile", "d", "mig"}


def find_gpu(name: str) -> GPU | None:
    """Return the GPU of the table that a name means, including a driver's name such as `NVIDIA A100-SXM4-80GB`.

    Args:
        name: A name. Case does not count, nor do words that name no model.

    Returns:
        The GPU with the most words of the name, the larger one of equals; None if no GPU has its model.
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower())) - {""}
    if words & VARIANTS:
        return None
    candidates = []
    for gpu in TABLE:
        model, *rest = gpu.name.lower().split()
        required = {model, *rest} - {word for word in rest if word.endswith("gb")}
        if required <= words:
            candidates.append((len(set(gpu.name.lower().split()) & words), gpu.memory, gpu))
    return max(candidates, key=lambda item: item[:2])[2] if candidates else None


def require_gpu(name: str) -> GPU:
    """Return the GPU of the table that a user names.

    Args:
        name: Value of `--gpu`.

    Raises:
        InputError: The table has no such GPU. The hint has a similar name.
    """
    gpu = find_gpu(name)
    if gpu is None:
        known = [gpu.name for gpu in TABLE]
        hint = nearest(name.upper(), known) or f"known: {', '.join(known)}"
        raise InputError(f"--gpu: {name} is not in the table of GPUs", hint=f"{hint}; or give --memory GB too")
    return gpu


def with_measured_speeds(gpu: GPU, path: Path) -> GPU:
    """Return a GPU with the rates that this machine measured, where the file has them for a GPU of this name.

    `ftcli doctor --bench` writes the file, a JSON object. All keys but the first are optional:

    - `gpu`: name of the GPU, as the driver gives it.
    - `product_flops`: object from precision (fp32, fp16, bf16, fp8) to FLOP/s of matrix products.
    - `memory_bytes_per_second`: rate of a copy inside the GPU's memory, read and written bytes.
    - `collectives`: bus bandwidths by collective and size. They were measured alone, so `LINK_SHARE / ALONE_SHARE` of
      the slowest collective of a step at its largest size counts, from 16 MiB. Ignored if `machines` is not 1.
    - `link_bytes_per_second`: rate to the other GPUs beside computation, for hand-written files. It goes before
      `collectives`.
    - `host_bytes_per_second`: rate of a copy between GPU and pinned host memory.
    - `host_layers_per_second`: small layers that the host launches forward and backward.

    Args:
        gpu: The GPU.
        path: The file. If it is missing, torn or about another GPU, the GPU is returned as it is.
    """
    values = read_object(path) or {}
    measured = find_gpu(str(values.get("gpu", "")))
    if measured is None or measured.name != gpu.name:
        return gpu
    flops = values.get("product_flops")
    rates = {key: float(rate) for key, rate in flops.items() if _is_rate(rate)} if isinstance(flops, dict) else {}
    if "bf16" in rates:
        rates["bf16_pure"] = rates["bf16"]
    names = {"bandwidth": "memory_bytes_per_second", "link": "link_bytes_per_second"}
    names["host_link"] = "host_bytes_per_second"
    others: dict[str, Any] = {field: float(values[key]) for field, key in names.items() if _is_rate(values.get(key))}
    if _is_rate(layers := values.get("host_layers_per_second")):
        others["host"] = layers / HOST_RATE
    if "link" not in others and (link := _measured_link(values)):
        others["link"] = link
    if not rates and not others:
        return gpu
    return replace(gpu, products=gpu.products | rates, source=f"measured on this machine ({path})", **others)


def _measured_link(values: dict[str, Any]) -> float | None:
    """Return the rate of a link beside computation from collectives that ran alone; None if there are none."""
    lines = values.get("collectives")
    if not isinstance(lines, list) or values.get("machines", 1) != 1:
        return None
    largest: dict[str, tuple[float, float]] = {}  # collective -> (bytes, bus bandwidth)
    for line in lines:
        if isinstance(line, dict) and line.get("collective") in RING_COLLECTIVES:
            size, rate = line.get("bytes"), line.get("bus_bytes_per_second")
            if _is_rate(size) and _is_rate(rate) and size >= LEAST_BYTES:
                largest[line["collective"]] = max(largest.get(line["collective"], (0.0, 0.0)), (size, rate))
    return LINK_SHARE / ALONE_SHARE * min(rate for _, rate in largest.values()) if largest else None


def _is_rate(value: Any) -> TypeGuard[float]:
    """Return whether a value of the file is a usable rate."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def measured_speeds_path() -> Path:
    """Return the path of this machine's file of measured rates."""
    return cache_root() / MEASURED_FILE.format(host=platform.node() or "unknown")
