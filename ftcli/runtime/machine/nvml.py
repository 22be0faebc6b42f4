"""Read the state of NVIDIA GPUs through NVML: memory, other processes, faults, throttling and links. Light."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from ftcli.runtime.machine.facts import GIB, Fact, look, ok, wrong

BUSY = GIB  # bytes that other processes may hold
# NVML's reasons for a lower clock that are no fault of the moment: idle, a clock that the user set, sync boost.
POWER_LIMIT = "its power limit"
SLOWDOWNS = {
    0x4: POWER_LIMIT,
    0x8: "a hardware slowdown",
    0x20: "its temperature",
    0x40: "its temperature (hardware)",
    0x80: "an external power brake",
}
# Values of NVML's topology levels, from near to far.
LEVELS = {
    0: "the same board",
    10: "one PCIe switch",
    20: "several PCIe switches",
    30: "one PCIe host bridge",
    40: "one NUMA node",
    50: "the link between CPUs",
}


Ask = Callable[..., Any]  # `Nvml.ask`


@dataclass
class Devices:
    """The GPUs of this machine.

    Attributes:
        names: Name of each GPU.
        driver: Version of the driver; None without one.
        cuda: (major, minor) of the newest CUDA that the driver supports.
        facts: One fact for each GPU, and for their links; or the one that says why there is none.
    """

    names: list[str] = field(default_factory=list)
    driver: str | None = None
    cuda: tuple[int, int] | None = None
    facts: list[Fact] = field(default_factory=list)


class NvmlMissingError(Exception):
    """NVML cannot be used on this machine.

    Args:
        reason: What is missing.
        remedy: What to do about it.
    """

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.remedy = remedy


class Nvml:
    """NVML, initialised until `close`.

    Raises:
        NvmlMissingError: nvidia-ml-py is not installed, or there is no driver, or no permission.
    """

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise NvmlMissingError("nvidia-ml-py is missing", "pip install nvidia-ml-py") from error
        self._library: Any = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            remedy = "on a machine with NVIDIA GPUs, install the driver, or start the container with GPUs (--gpus all)"
            raise NvmlMissingError(f"none is visible through NVML: {error}", remedy) from error

    def ask(self, function: str, *arguments: Any) -> Any:
        """Return the answer of a function of NVML; None if the GPU has none, or the user may not read it."""
        try:
            return getattr(self._library, function)(*arguments)
        except self._library.NVMLError:
            return None

    def close(self) -> None:
        """Shut NVML down."""
        self.ask("nvmlShutdown")


def read_devices(root: Path = Path("/")) -> Devices:
    """Return the GPUs of this machine and their facts. Without NVML there is one fact, which says what is missing.

    Args:
        root: Folder that holds sys.
    """
    try:
        nvml = Nvml()
    except NvmlMissingError as missing:
        return Devices(facts=[look("GPUs", str(missing), missing.remedy)])
    try:
        return _read(nvml.ask, root)
    finally:
        nvml.close()


def _read(ask: Ask, root: Path) -> Devices:
    """Return what an initialised NVML knows."""
    cuda = ask("nvmlSystemGetCudaDriverVersion_v2")
    devices = Devices(driver=ask("nvmlSystemGetDriverVersion"))
    devices.cuda = None if cuda is None else (cuda // 1000, cuda % 1000 // 10)
    handles = [ask("nvmlDeviceGetHandleByIndex", index) for index in range(ask("nvmlDeviceGetCount") or 0)]
    for index, handle in enumerate(handles):
        if handle is None:
            remedy = "look for its Xid error in the kernel's log: dmesg"
            devices.facts.append(wrong(f"GPU {index}", "does not answer NVML", remedy))
            continue
        name = str(ask("nvmlDeviceGetName", handle) or "unknown GPU")
        devices.names.append(name)
        devices.facts.append(_device_fact(index, name, handle, ask, root))
    if not handles:
        remedy = "start the container with GPUs, or check the driver with nvidia-smi"
        devices.facts.append(look("GPUs", "NVML sees no GPU", remedy))
    working = [(index, handle) for index, handle in enumerate(handles) if handle is not None]
    if len(working) > 1:
        devices.facts.append(_link_fact(working, ask))
    return devices


def _device_fact(index: int, name: str, handle: Any, ask: Ask, root: Path) -> Fact:
    """Return the fact of one GPU: the worst of its states."""
    topic, memory = f"GPU {index}", ask("nvmlDeviceGetMemoryInfo", handle)
    text = [name]
    if memory is not None:
        text.append(f"{memory.used / GIB:.1f} of {memory.total / GIB:.1f} GiB in use")
    if node := _numa_node(handle, ask, root):
        text.append(f"NUMA node {node}")
    errors = ask("nvmlDeviceGetTotalEccErrors", handle, 1, 0)  # uncorrected, since the driver was loaded
    if errors:
        remedy = "reset or drain the GPU: nvidia-smi -q -d ECC,ROW_REMAPPER"
        return wrong(topic, ", ".join([*text, f"{errors} uncorrected memory errors"]), remedy)
    remapped = ask("nvmlDeviceGetRemappedRows", handle)  # corrected, uncorrected, pending, failed
    if remapped is not None and (remapped[2] or remapped[3]):
        state = "failed" if remapped[3] else "waits for a reset"
        return wrong(topic, ", ".join([*text, f"remapping of faulty memory rows {state}"]), "reset or replace the GPU")
    if reasons := read_slowdowns(handle, ask):
        temperature = ask("nvmlDeviceGetTemperature", handle, 0)
        degrees = "" if temperature is None else f" at {temperature} C"
        remedy = "check cooling and power: nvidia-smi -q -d PERFORMANCE"
        return look(topic, ", ".join([*text, f"slowed down by {' and '.join(reasons)}{degrees}"]), remedy)
    if memory is not None and memory.used > BUSY:
        holders = ask("nvmlDeviceGetComputeRunningProcesses", handle) or []
        named = ", ".join(f"{item.pid} ({(item.usedGpuMemory or 0) / GIB:.1f} GiB)" for item in holders)
        remedy = "wait for them, or leave this GPU out with CUDA_VISIBLE_DEVICES"
        return look(topic, ", ".join([*text, f"held by process {named or 'of another user or container'}"]), remedy)
    return ok(topic, ", ".join(text))


def read_slowdowns(handle: Any, ask: Ask) -> list[str] | None:
    """Return what lowers the clock of a GPU now, from `SLOWDOWNS`; None if it is not known.

    Args:
        handle: NVML's handle of the GPU.
        ask: `Nvml.ask`.
    """
    bits = ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
    return None if bits is None else [reason for bit, reason in SLOWDOWNS.items() if bits & bit]


def _numa_node(handle: Any, ask: Ask, root: Path) -> str:
    """Return the NUMA node of a GPU as Linux tells it; empty if it is not known."""
    bus = ask("nvmlDeviceGetPciInfo", handle)
    if bus is None:
        return ""
    text = bus.busId.decode() if isinstance(bus.busId, bytes) else str(bus.busId)
    domain, _, rest = text.lower().partition(":")
    file = root / "sys" / "bus" / "pci" / "devices" / f"{domain[-4:]}:{rest}" / "numa_node"
    node = file.read_text().strip() if file.is_file() else ""
    return "" if node == "-1" else node


def _link_fact(handles: list[tuple[int, Any]], ask: Ask) -> Fact:
    """Return the fact about the links between the GPUs: NVLink, or how far apart they are on PCIe."""
    kinds: dict[str, list[str]] = {}
    for (first, one), (second, other) in combinations(handles, 2):
        by_nvlink = ask("nvmlDeviceGetP2PStatus", one, other, 2) == 0  # NVML_P2P_CAPS_INDEX_NVLINK is OK
        level = ask("nvmlDeviceGetTopologyCommonAncestor", one, other)
        kind = "NVLink" if by_nvlink else f"PCIe over {LEVELS.get(level, 'an unknown path')}"
        kinds.setdefault(kind, []).append(f"{first}-{second}")
    text = "; ".join(f"{kind}: {'all pairs' if len(kinds) == 1 else ', '.join(kinds[kind])}" for kind in kinds)
    if len(kinds) > 1 and "NVLink" in kinds:
        remedy = (
            "choose GPUs that are joined by NVLink with CUDA_VISIBLE_DEVICES; if all should be: nvidia-smi nvlink -s"
        )
        return look("links of GPUs", text, remedy)
    return ok("links of GPUs", text)
