"""Start the ranks of `ftcli doctor` on this machine, watch them, and name the rank or the pair that does not answer.

Light: torch is imported by the ranks.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ftcli.launch.meeting import Meeting
from ftcli.runtime.machine.facts import Fact, look, ok, wrong
from ftcli.runtime.machine.nccl_log import Transports, read_transports, transport_facts
from ftcli.runtime.resources import PACKAGE

POLL = 0.1  # seconds
GRACE = 2.0  # seconds that other ranks get to report after one failed
FROZEN = 1.5  # seconds in which a rank that runs gives a sign of life
NETWORK = "check the interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) and that all TCP ports are open"


@dataclass
class Progress:
    """How far the ranks came.

    Attributes:
        steps: Rank -> (number of its step, name of the step). Ranks that never came are missing.
        errors: Rank -> what failed.
        frozen: Ranks that gave no sign of life.
    """

    steps: dict[int, tuple[int, str]] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    frozen: set[int] = field(default_factory=set)


class LocalRanks:
    """The ranks of this machine as child processes; a context manager that ends them.

    Args:
        ranks: Their ranks.
        world: Number of ranks on all machines.
        device: cuda or cpu.
    """

    def __init__(self, ranks: range, world: int, device: str) -> None:
        self.ranks, self.world, self.device = ranks, world, device
        self.children: dict[int, subprocess.Popen[str]] = {}

    def __enter__(self) -> LocalRanks:
        self.folder = tempfile.TemporaryDirectory(prefix="ftcli-doctor-")
        for local, rank in enumerate(self.ranks):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(local),
                "WORLD_SIZE": str(self.world),
                "LOCAL_WORLD_SIZE": str(len(self.ranks)),
                "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(PACKAGE.parent)]),
            }
            environment.setdefault("OMP_NUM_THREADS", "1")
            if self.device == "cuda":
                environment |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,SHM"}
            else:
                environment["CUDA_VISIBLE_DEVICES"] = ""
            with self._output(rank).open("w") as output:
                self.children[rank] = subprocess.Popen(
                    [sys.executable, "-m", "ftcli.launch.doctor_rank"],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    text=True,
                )
        return self

    def __exit__(self, *error: object) -> None:
        for child in self.children.values():
            child.kill()
            child.wait()
            if child.stdin is not None:
                child.stdin.close()
        self.folder.cleanup()

    def _output(self, rank: int) -> Path:
        return Path(self.folder.name) / f"rank-{rank}.txt"

    def begin(self, meeting: Meeting, seconds: float, **settings: Any) -> None:
        """Send the ranks the address of the store, so that they begin."""
        values = {"host": meeting.host, "port": meeting.port, "device": self.device, "seconds": seconds}
        line = json.dumps(values | {"group_seconds": seconds + 60} | settings) + "\n"  # the parent ends them before
        for child in self.children.values():
            assert child.stdin is not None
            try:
                child.stdin.write(line)
                child.stdin.flush()
            except BrokenPipeError:  # it has died, which `watch` reports
                continue

    def watch(self, meeting: Meeting, deadline: float) -> None:
        """Wait until all ranks of this machine have ended, one of any machine has failed, or the deadline."""
        while time.monotonic() < deadline:
            codes = {rank: child.poll() for rank, child in self.children.items()}
            for rank, code in codes.items():
                if code and meeting.store.check([f"error/{rank}"]) is False:
                    meeting.store.set(f"error/{rank}", self._death(rank, code))
                    meeting.store.set("failed", str(rank))
            if all(code is not None for code in codes.values()):
                return
            if meeting.store.check(["failed"]):
                deadline = min(deadline, time.monotonic() + GRACE)
            time.sleep(POLL)

    def _death(self, rank: int, code: int) -> str:
        """Return how a rank died, with the last line that it wrote."""
        lines = self._output(rank).read_text(errors="replace").strip().splitlines()
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return f"{how}: {lines[-1]}" if lines else how

    def transports(self) -> Transports:
        """Return what NCCL's lines of the ranks of this machine tell."""
        texts = [self._output(rank).read_text(errors="replace").splitlines() for rank in self.ranks]
        return read_transports(line for lines in texts for line in lines)


def read_progress(meeting: Meeting, world: int) -> Progress:
    """Return how far all ranks came; looks twice for signs of life if some have not ended.

    Args:
        meeting: The store.
        world: Number of ranks.
    """
    progress = Progress()
    for rank in range(world):
        if (step := meeting.peek(f"phase/{rank}")) is not None:
            progress.steps[rank] = (step[0], step[1])
        if meeting.store.check([f"error/{rank}"]):
            progress.errors[rank] = meeting.store.get(f"error/{rank}").decode(errors="replace")
    running = [rank for rank, (_, name) in progress.steps.items() if name != "done"]
    if running and not progress.errors:
        first = {rank: meeting.peek(f"beat/{rank}") for rank in running}
        time.sleep(FROZEN)
        progress.frozen = {rank for rank in running if meeting.peek(f"beat/{rank}") == first[rank]}
    return progress


def diagnose(progress: Progress, machine_of: Mapping[int, int], seconds: float) -> list[Fact]:
    """Return the facts of the ranks that failed or do not answer; empty if all ended well.

    Args:
        progress: How far the ranks came.
        machine_of: Rank -> number of its machine.
        seconds: How long they had.
    """
    if progress.errors:
        return [
            wrong(_named(rank, machine_of), f"failed: {text}", "repair this first; other ranks waited for it")
            for rank, text in sorted(progress.errors.items())
        ]
    within = f"within {seconds:.0f} s"
    remedy = "look at its machine: is Python or the file system slow (--timeout), and can it reach machine 0?"
    missing = [rank for rank in machine_of if rank not in progress.steps]
    facts = [wrong(_named(rank, machine_of), f"never came {within}", remedy) for rank in missing]
    remedy = "look at the process: stopped, out of memory, or waiting for a dead file system or GPU (dmesg)"
    for rank in sorted(progress.frozen):
        text = f"does not answer in {progress.steps[rank][1]}: the process hangs"
        facts.append(wrong(_named(rank, machine_of), text, remedy))
    if facts:
        return facts
    waiting = {rank: step for rank, step in progress.steps.items() if step[1] != "done"}
    if not waiting:
        return []
    first = min(number for number, _ in waiting.values())
    late = {rank: name for rank, (number, name) in sorted(waiting.items()) if number == first}
    if pairs := sorted({name.removeprefix("pair ") for name in late.values() if name.startswith("pair ")}):
        return [wrong(f"ranks {pair}", f"do not answer each other {within}", NETWORK) for pair in pairs]
    name = next(iter(late.values()))
    if len(late) == len(progress.steps):
        return [wrong("collectives", f"all ranks hang in {name} {within}", NETWORK)]
    return [wrong(_named(rank, machine_of), f"does not answer in {name} {within}", NETWORK) for rank in late]


def _named(rank: int, machine_of: Mapping[int, int]) -> str:
    """Return the name of a rank, with its machine if there are several."""
    several = len(set(machine_of.values())) > 1
    return f"rank {rank}" + (f" (machine {machine_of[rank]})" if several else "")


def check_collectives(ranks: LocalRanks, meeting: Meeting, seconds: float, **settings: Any) -> list[Fact]:
    """Let the ranks of all machines join, exchange and run each collective once. All machines return the same facts.

    Args:
        ranks: The ranks of this machine.
        meeting: The store.
        seconds: How long the ranks may take.
        settings: Further settings of the ranks.
    """
    count, started = meeting.machines.count, time.monotonic()
    deadline = started + seconds
    machine_of = {rank: rank // (ranks.world // count) for rank in range(ranks.world)}
    ranks.begin(meeting, seconds, machine=meeting.machines.rank, **settings)
    ranks.watch(meeting, deadline)
    took = time.monotonic() - started
    meeting.speeds = meeting.peek(f"speeds/{meeting.machines.rank}")
    transports = ranks.transports()
    meeting.put(
        f"transports/{meeting.machines.rank}", [[*pair, sorted(kinds)] for pair, kinds in transports.pairs.items()]
    )
    end = max(deadline, time.monotonic()) + GRACE
    if meeting.machines.rank:
        verdict = meeting.wait("verdict", end + FROZEN + GRACE)
        meeting.put(f"bye/{meeting.machines.rank}", True)
        remedy = "look at the output of machine 0"
        facts = [wrong("machine 0", "gave no result", remedy)] if verdict is None else [Fact(*one) for one in verdict]
        return facts
    for number in range(count):
        for first, second, kinds in meeting.wait(f"transports/{number}", end) or []:
            transports.pairs.setdefault((first, second), set()).update(kinds)
    facts = diagnose(read_progress(meeting, ranks.world), machine_of, seconds)
    if not facts and ranks.world > 1:
        backend = "NCCL" if ranks.device == "cuda" else "gloo"
        facts = [
            ok("collectives", f"each pair and each collective answers: {ranks.world} ranks, {backend}, {took:.1f} s")
        ]
    if ranks.device == "cuda" and ranks.world > 1:
        rdma = any(machine.get("rdma") for machine in meeting.descriptions.values())
        facts += transport_facts(transports, machine_of, rdma) or [_no_lines()]
    meeting.put("verdict", [[fact.topic, fact.state, fact.text, fact.remedy] for fact in facts])
    for number in range(1, count):
        meeting.wait(f"bye/{number}", time.monotonic() + GRACE)
    return facts


def _no_lines() -> Fact:
    return look("NCCL", "wrote no line about its transports", "unset NCCL_DEBUG_FILE to let ftcli read them")
