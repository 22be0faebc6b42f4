"""Read from NCCL's own INFO lines which transport it chose between each two ranks. Light."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ftcli.runtime.machine.facts import Fact, look, ok, wrong

# Such as: host:919:1150 [0] NCCL INFO Channel 01/0 : 8[0] -> 15[7] [send] via NET/IB/0/GDRDMA
_CHANNEL = re.compile(
    r"NCCL INFO (?:Channel|Ring) \d+(?:/\d+)? : "
    r"(\d+)(?:\[\w+\])? -> (\d+)(?:\[\w+\])?(?: \[(?:send|receive)\])? via (\S+)"
)
_IB = re.compile(r"NCCL INFO NET/IB : (?:Using (.*?)(?:;|$)|(No device found))")
_PLUGIN = re.compile(r"NCCL INFO (?:Using network|NET/\S+ : Using network) (\S+)")
_WARNING = re.compile(r"NCCL WARN (.+)")


@dataclass
class Transports:
    """What NCCL's lines tell.

    Attributes:
        pairs: (sending rank, receiving rank) -> transports, such as {"P2P/CUMEM"} or {"NET/IB/0/GDRDMA"}.
        network: Name of the network that NCCL chose, such as IB or Socket.
        has_ib: Whether NCCL found InfiniBand or RoCE devices; None if it did not look.
        warnings: Its warnings, each once.
    """

    pairs: dict[tuple[int, int], set[str]] = field(default_factory=dict)
    network: str | None = None
    has_ib: bool | None = None
    warnings: list[str] = field(default_factory=list)


def read_transports(lines: Iterable[str]) -> Transports:
    """Return what NCCL's lines with NCCL_DEBUG=INFO tell about its transports.

    Args:
        lines: Lines of all ranks, in any order. Other lines may be among them.
    """
    transports = Transports()
    for line in lines:
        if match := _CHANNEL.search(line):
            transports.pairs.setdefault((int(match[1]), int(match[2])), set()).add(match[3])
        elif match := _IB.search(line):
            transports.has_ib = bool(match[1]) or bool(transports.has_ib)
        elif match := _PLUGIN.search(line):
            transports.network = match[1]
        elif (match := _WARNING.search(line)) and match[1] not in transports.warnings:
            transports.warnings.append(match[1])
    return transports


def transport_facts(transports: Transports, machine_of: Mapping[int, int], rdma: bool) -> list[Fact]:
    """Return the facts of the transports that NCCL used inside of machines and between them.

    Args:
        transports: What NCCL's log lines show.
        machine_of: Rank -> number of its machine.
        rdma: Whether a machine has an InfiniBand or RoCE device that is active.
    """
    facts = [look("NCCL", f"warns: {text}", "look it up in NCCL's documentation") for text in transports.warnings[:3]]
    inside: dict[str, list[str]] = {}
    between: dict[str, list[str]] = {}
    for (first, second), kinds in sorted(transports.pairs.items()):
        groups = inside if machine_of.get(first) == machine_of.get(second) else between
        for kind in sorted(kinds):
            groups.setdefault(_short(kind), []).append(f"{first}-{second}")
    if inside:
        facts.append(_inside_fact(inside))
    if between:
        facts.append(_between_fact(between, rdma or bool(transports.has_ib)))
    return facts


def _short(transport: str) -> str:
    """Return a transport without the numbers of devices: NET/IB/0/GDRDMA is NET/IB/GDRDMA."""
    return "/".join(part for part in transport.split("/") if not part.isdigit())


def _described(groups: Mapping[str, list[str]]) -> str:
    """Return transports with their pairs of ranks, or without if there is one transport."""
    if len(groups) == 1:
        return next(iter(groups))
    return "; ".join(f"{kind}: ranks {', '.join(sorted(set(pairs)))}" for kind, pairs in groups.items())


def _inside_fact(groups: Mapping[str, list[str]]) -> Fact:
    """Return the fact about the transports between GPUs of the same machine."""
    topic, text = "NCCL inside a machine", _described(groups)
    if any(kind.startswith("NET/") for kind in groups):
        remedy = "check NCCL_P2P_DISABLE, NCCL_SHM_DISABLE and the size of /dev/shm; NCCL_DEBUG=INFO tells the reason"
        return wrong(topic, f"{text}: data leaves the machine's memory", remedy)
    if any(kind.startswith("SHM") for kind in groups):
        remedy = "on GPUs with NVLink or peer access, check NCCL_P2P_DISABLE, NCCL_P2P_LEVEL and IOMMU settings"
        return look(topic, f"{text}: data goes through host memory", remedy)
    return ok(topic, text)


def _between_fact(groups: Mapping[str, list[str]], rdma: bool) -> Fact:
    """Return the fact about the transports between machines."""
    topic, text = "NCCL between machines", _described(groups)
    if any(kind.startswith("NET/Socket") for kind in groups):
        if rdma:
            remedy = "check NCCL_IB_DISABLE, NCCL_IB_HCA, ulimit -l, and that containers see /dev/infiniband"
            return wrong(topic, f"{text}, although there is InfiniBand or RoCE", remedy)
        return look(topic, f"{text}: TCP sockets", "expect a tenth of the speed of InfiniBand; profile hsdp needs less")
    if any(kind.startswith("NET/IB") and "GDRDMA" not in kind for kind in groups):
        remedy = "load nvidia-peermem, or use a kernel with DMA-BUF; NCCL_NET_GDR_LEVEL may forbid it"
        return look(topic, f"{text}: without GPUDirect, data goes through host memory", remedy)
    return ok(topic, text)
