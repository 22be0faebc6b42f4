"""Let the parents of all machines exchange small values, before anything else is started: `ftcli doctor`.

Machine 0 serves a store at the address that all machines were given. Each machine also answers at a port of its own
with its time, so that the others learn whether they reach it, and how far its clock is off. Light: torch is imported
inside functions.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ftcli.launch.machines import Machines
from ftcli.runtime.machine.comparison import clock_fact, comparison_facts
from ftcli.runtime.machine.facts import Fact, ok, wrong

REACH = 3.0  # seconds that a machine waits for another one's answer
OPEN_PORTS = "open all TCP ports between the machines of the run"


class NoMeeting(Exception):
    """The store of machine 0 cannot be served or reached. Holds the fact that says so."""

    def __init__(self, fact: Fact) -> None:
        self.fact = fact
        super().__init__(fact.text)


def _resolve(host: str, port: int, *, until: float) -> None:
    """Wait until the address of machine 0 is known. The name of a pod is known only after the pod has started.

    torch would try again too, but print where in its code. An address of digits is tried once.

    Raises:
        NoMeeting: It is not known at the time `until` of the monotonic clock.
    """
    while True:
        try:
            socket.getaddrinfo(host, port)
            return
        except OSError as error:
            if time.monotonic() < until and not host.replace(".", "").isdigit():
                time.sleep(1)
                continue
            remedy = "give an address of machine 0 that this machine can resolve: --main-process-ip"
            raise NoMeeting(wrong("machine 0", f"the address {host} is not known here: {error}", remedy)) from None


@dataclass
class Meeting:
    """A store that all machines share.

    Attributes:
        machines: Number, rank and address of the machines.
        store: The store of torch.
        host: Address of the store.
        port: Port of the store.
        speeds: Benchmark results of this machine's ranks; None without a benchmark.
    """

    machines: Machines
    store: Any
    host: str
    port: int
    speeds: dict[str, Any] | None = None
    _descriptions: dict[int, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, machines: Machines, seconds: float) -> Meeting:
        """Serve the store on machine 0, or connect to it from another machine.

        Args:
            machines: Number, rank and address of the machines.
            seconds: How long to wait for machine 0, and before that for its address to be known.

        Raises:
            NoMeeting: The address is not known, the port is taken, or machine 0 does not answer.
        """
        from torch.distributed import DistError, TCPStore

        host, port = machines.main_ip or "127.0.0.1", machines.main_port or 0
        serves = machines.rank == 0
        limit = timedelta(seconds=seconds)
        _resolve(host, port, until=time.monotonic() + seconds)
        try:
            store = TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=limit)
        except DistError:
            if serves:
                fact = wrong("machine 0", f"cannot listen at {host}:{port}", "give a free port: --main-process-port")
            else:
                remedy = "start the same command on machine 0 too, and check that its port is open"
                fact = wrong("machine 0", f"did not answer at {host}:{port} within {seconds:.0f} s", remedy)
            raise NoMeeting(fact) from None
        return cls(machines, store, host, store.port)

    def put(self, key: str, value: Any) -> None:
        """Store a value of JSON."""
        self.store.set(key, json.dumps(value))

    def peek(self, key: str) -> Any:
        """Return a value of JSON; None if it is not stored yet."""
        return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def wait(self, key: str, deadline: float) -> Any:
        """Return a value of JSON, or None if it is not stored until the deadline (of the monotonic clock)."""
        while (value := self.peek(key)) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return value

    @property
    def descriptions(self) -> dict[int, dict[str, Any]]:
        """Number of each machine that came -> its description."""
        return self._descriptions

    def gather(self, description: dict[str, Any], seconds: float) -> tuple[list[Fact], bool]:
        """Wait for all machines, compare them, and try each connection. All machines return the same facts.

        Args:
            description: Description of this machine.
            seconds: How long to wait.

        Returns:
            The facts, and whether all machines came and reach each other.
        """
        count, own = self.machines.count, self.machines.rank
        deadline = time.monotonic() + seconds
        with _Clock() as clock:
            self.put(f"machine/{own}", description | {"address": self._own_address(), "port": clock.port})
            answers = {number: self.wait(f"machine/{number}", deadline) for number in range(count)}
            self._descriptions = {number: value for number, value in answers.items() if value is not None}
            others = {number: value for number, value in self._descriptions.items() if number != own}
            self.put(f"reach/{own}", {number: _reach(value) for number, value in others.items()})
            end = time.monotonic() + REACH * count + 1
            if own != 0:
                verdict = self.wait("gathered", deadline + REACH * count + 2)
                if verdict is None:
                    remedy = "look at the output of machine 0"
                    return [wrong("machine 0", "gave no result", remedy)], False
                return [Fact(*item) for item in verdict[0]], verdict[1]
            reached = {number: self.wait(f"reach/{number}", end) or {} for number in self._descriptions}
        facts, is_complete = self._judge(reached, seconds)
        self.put("gathered", [[[f.topic, f.state, f.text, f.remedy] for f in facts], is_complete])
        return facts, is_complete

    def _judge(self, reached: dict[int, dict[str, Any]], seconds: float) -> tuple[list[Fact], bool]:
        """Return the facts of machine 0 about all machines, and whether the ranks may start."""
        facts, is_complete = [], True
        for number in range(self.machines.count):
            if number not in self._descriptions:
                text = f"did not come to {self.host}:{self.port} within {seconds:.0f} s"
                remedy = f"start the same command there with --machine-rank {number}, and check its route to machine 0"
                facts.append(wrong(f"machine {number}", text, remedy))
                is_complete = False
            else:
                facts.append(ok(f"machine {number}", self._descriptions[number]["host"]))
        for number, answers in sorted(reached.items()):
            for other, answer in sorted(answers.items()):
                if isinstance(answer, str):
                    text = f"machine {number} does not reach machine {other}: {answer}"
                    facts.append(wrong(f"machines {number}-{other}", text, OPEN_PORTS))
                    is_complete = False
        facts += comparison_facts(self._descriptions)
        offsets = {int(number): value for number, value in reached.get(0, {}).items() if not isinstance(value, str)}
        if offsets:
            facts.append(clock_fact(offsets))
        return facts, is_complete

    def _own_address(self) -> str:
        """Return the address of this machine on the route to machine 0."""
        if self.machines.rank == 0:
            return self.host
        family = socket.getaddrinfo(self.host, self.port)[0][0]
        with socket.socket(family, socket.SOCK_DGRAM) as route:  # sends nothing
            route.connect((self.host, self.port))
            return str(route.getsockname()[0])


class _Clock:
    """A listener that answers each connection with the time of this machine, in a thread."""

    def __enter__(self) -> _Clock:
        self.listener = socket.create_server(("", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._answer, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.listener.close()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # closed
                return
            with connection:
                connection.sendall(f"{time.time():.6f}".encode())


def _reach(machine: dict[str, Any]) -> float | str:
    """Return by how many seconds another machine's clock is ahead, or why the machine does not answer."""
    best, offset = float("inf"), 0.0
    try:
        for _ in range(3):
            before = time.time()
            with socket.create_connection((machine["address"], machine["port"]), timeout=REACH) as connection:
                remote_time = float(connection.recv(64) or "nan")
            after = time.time()
            if after - before < best:
                best, offset = after - before, remote_time - (before + after) / 2
    except (OSError, ValueError) as error:
        return f"{machine['address']}:{machine['port']}: {error}"
    return offset
