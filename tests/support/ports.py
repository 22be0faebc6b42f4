"""A port for processes that start a moment later."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Return an unused port below the range from which the system assigns ports, so that it stays unused."""
    while True:
        port = random.randrange(15_000, 30_000)
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
