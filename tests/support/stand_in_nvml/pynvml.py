"""Stands in for nvidia-ml-py without a GPU: two GPUs, one of them idle and hot. Tests put it first on the path.

`driver` is whether there is one, `allowed` whether users may read the clocks, `calls` what was started and ended.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

driver, allowed = True, True
calls: list[str] = []
UUIDS = ("GPU-aaaa", "GPU-bbbb")


class NVMLError(Exception):
    """An error of NVML."""


def nvmlInit() -> None:
    if not driver:
        raise NVMLError("Driver Not Loaded")
    calls.append("init")


def nvmlShutdown() -> None:
    calls.append("shutdown")


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    if uuid not in UUIDS:
        raise NVMLError("Not Found")
    return UUIDS.index(uuid)


def nvmlDeviceGetIndex(handle: int) -> int:
    return handle


def nvmlDeviceGetUtilizationRates(handle: int) -> Any:
    return SimpleNamespace(gpu=(97, 2)[handle], memory=10)


def nvmlDeviceGetMemoryInfo(handle: int) -> Any:
    return SimpleNamespace(used=30 * 10**9, total=80 * 10**9, free=50 * 10**9)


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    return 650_500


def nvmlDeviceGetTemperature(handle: int, sensor: int) -> int:
    return (70, 91)[handle]


def nvmlDeviceGetCurrentClocksThrottleReasons(handle: int) -> int:
    if not allowed:
        raise NVMLError("Insufficient Permissions")
    return (0x4, 0x20)[handle]  # its power limit; its temperature


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    return 12080


def nvmlSystemGetDriverVersion() -> str:
    return "570.1"


def nvmlDeviceGetCount() -> int:
    return 2


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetName(handle: int) -> str:
    return "H100"


def nvmlDeviceGetPciInfo(handle: int) -> Any:
    raise NVMLError("Not Supported")


def nvmlDeviceGetTotalEccErrors(handle: int, kind: int, counter: int) -> int:
    return 0


def nvmlDeviceGetRemappedRows(handle: int) -> tuple[int, int, int, int]:
    return 0, 0, 0, 0


def nvmlDeviceGetComputeRunningProcesses(handle: int) -> list[Any]:
    return [SimpleNamespace(pid=4242, usedGpuMemory=30 * 2**30)]


def nvmlDeviceGetP2PStatus(one: int, other: int, kind: int) -> int:
    return 0


def nvmlDeviceGetTopologyCommonAncestor(one: int, other: int) -> int:
    return 10
