"""Measure this machine's device and its collectives: `ftcli doctor --bench`.

Each figure is the mean of repeated calls after a first one that is not counted. Bandwidths of collectives are defined
as in NVIDIA's nccl-tests (doc/PERFORMANCE.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
import torch.distributed as dist

SECONDS = 0.3  # of each measurement
MOST_CALLS = 20
SLOW = 1.0  # seconds: after a call this long, larger messages are left out
SIZES = [2**power for power in range(10, 31, 2)]  # bytes: 1 KiB to 1 GiB
MEMORY_PART = 0.25  # of the free memory that all buffers may take
FLOAT = 4  # bytes of an element
HOST_LAYERS, HOST_WIDTH, HOST_ROWS, HOST_CALLS = 16, 64, 8, 50  # kernels that take the GPU less time than the host


def bus_bandwidth(collective: str, size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth in bytes per second, which does not depend on the number of ranks.

    nccl-tests defines algbw = S / t, and busbw = algbw times a factor: 2 (n - 1) / n for all-reduce, (n - 1) / n for
    all-gather, reduce-scatter and all-to-all, 1 for broadcast and point-to-point.

    Args:
        collective: Its name.
        size: S in bytes: the whole buffer. That of all-gather and reduce-scatter is the larger one.
        seconds: t.
        ranks: n.
    """
    factors = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0, "point_to_point": 1.0}
    return size / seconds * factors.get(collective, (ranks - 1) / ranks)


def measure_device(device: torch.device) -> dict[str, Any]:
    """Return the rates of matrix products, memory, copies to the host, and the host, by the keys `ftcli plan` reads.

    Args:
        device: The device.
    """
    on_gpu = device.type == "cuda"
    size = 8192 if on_gpu else 1024
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16} | ({"fp16": torch.float16} if on_gpu else {})
    flops = {}
    for name, dtype in kinds.items():
        one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        flops[name] = 2 * size**3 / _seconds(partial(torch.matmul, one, other), device)
    source = torch.ones((2**30 if on_gpu else 2**26) // FLOAT, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * FLOAT  # read and written
    rates: dict[str, Any] = {"product_flops": flops}
    rates["memory_bytes_per_second"] = moved / _seconds(lambda: target.copy_(source), device)
    if on_gpu:
        rates["gpu"] = torch.cuda.get_device_name(device)
        host = torch.empty(2**28 // FLOAT, pin_memory=True)
        near = torch.empty_like(host, device=device)
        to_device = _seconds(lambda: near.copy_(host, non_blocking=True), device)
        to_host = _seconds(lambda: host.copy_(near, non_blocking=True), device)
        rates["host_to_device_bytes_per_second"] = 2**28 / to_device
        rates["device_to_host_bytes_per_second"] = 2**28 / to_host
        rates["host_bytes_per_second"] = 2**28 / max(to_device, to_host)
        rates["host_layers_per_second"] = measure_host(device)
    return rates


def measure_host(device: torch.device) -> float:
    """Return how many small layers a second the host runs forward and backward, for a GPU that waits for it.

    A layer is a norm, two matrix products and an activation function, under autocast to bfloat16.

    Args:
        device: The device.
    """
    layers = torch.nn.Sequential(
        *(
            layer
            for _ in range(HOST_LAYERS)
            for layer in (
                torch.nn.LayerNorm(HOST_WIDTH),
                torch.nn.Linear(HOST_WIDTH, HOST_WIDTH),
                torch.nn.GELU(),
                torch.nn.Linear(HOST_WIDTH, HOST_WIDTH),
            )
        )
    ).to(device)
    rows = torch.randn(HOST_ROWS, HOST_WIDTH, device=device)

    def call() -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            result = layers(rows)
        result.float().sum().backward()

    _timed(call, MOST_CALLS, device)  # the first ones choose kernels
    return HOST_LAYERS / _timed(call, HOST_CALLS, device)


def measure_collectives(device: torch.device) -> list[dict[str, Any]]:
    """Return time and bandwidths of each collective for each size that memory allows. A collective.

    Args:
        device: Device of the tensors.
    """
    ranks, lines = dist.get_world_size(), []
    most = _agreed(_most_bytes(device), device, dist.ReduceOp.MIN)
    for name in ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "point_to_point"):
        for target in SIZES:
            size = target // (FLOAT * ranks) * FLOAT * ranks  # equal parts for all ranks
            if target > most or not size:
                break
            first, seconds = _time_collective(name, size, device)
            bus = bus_bandwidth(name, size, seconds, ranks)
            algorithm = size / seconds
            lines.append(
                {
                    "collective": name,
                    "bytes": size,
                    "seconds": seconds,
                    "algorithm_bytes_per_second": algorithm,
                    "bus_bytes_per_second": bus,
                }
            )
            if first > SLOW:
                break
    return lines


def _time_collective(name: str, size: int, device: torch.device) -> tuple[float, float]:
    """Return the seconds of the first call and the mean of later calls, of the slowest rank. A collective."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(size // FLOAT, device=device)
    part = torch.zeros(size // FLOAT // ranks, device=device)
    other = torch.zeros_like(whole) if name == "all_to_all" else whole

    def call() -> None:
        if name == "all_reduce":
            dist.all_reduce(whole)
        elif name == "all_gather":
            dist.all_gather_into_tensor(whole, part)
        elif name == "reduce_scatter":
            dist.reduce_scatter_tensor(part, whole)
        elif name == "broadcast":
            dist.broadcast(whole, 0)
        elif name == "all_to_all":
            dist.all_to_all_single(other, whole)
        elif rank < 2:  # from rank 0 to rank 1; the others wait
            operation = dist.isend if rank == 0 else dist.irecv
            for work in dist.batch_isend_irecv([dist.P2POp(operation, whole, 1 - rank)]):
                work.wait()

    first = _agreed(_timed(call, 1, device), device, dist.ReduceOp.MAX)
    count = max(1, min(MOST_CALLS, int(SECONDS / max(first, 1e-6))))
    return first, _agreed(_timed(call, count, device), device, dist.ReduceOp.MAX)


def _timed(call: Callable[[], object], count: int, device: torch.device) -> float:
    """Return the mean seconds of several calls. Waits for the device."""
    _wait(device)
    started = time.perf_counter()
    for _ in range(count):
        call()
    _wait(device)
    return (time.perf_counter() - started) / count


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the mean seconds of a call, after one that is not counted."""
    first = _timed(call, 1, device)
    return _timed(call, max(1, min(MOST_CALLS, int(SECONDS / max(first, 1e-6)))), device)


def _agreed(value: float, device: torch.device, operation: Any) -> float:
    """Return the smallest or largest value of all ranks. A collective."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, operation)
    return float(tensor)


def _most_bytes(device: torch.device) -> float:
    """Return the largest buffer that memory allows: each rank has two, and gloo copies them."""
    if device.type == "cuda":
        return MEMORY_PART * torch.cuda.mem_get_info(device)[0] / 2
    return MEMORY_PART * psutil.virtual_memory().available / (3 * dist.get_world_size())


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
