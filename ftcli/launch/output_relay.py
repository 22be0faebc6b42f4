"""Write the output of a child process to the streams of this process. Light: never imports torch."""

from __future__ import annotations

import io
import queue
import subprocess
import sys
import threading
from typing import IO


class OutputRelay:
    """Writes the child's output line by line in the calling thread, so that a notebook shows it in the right cell."""

    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._lines: queue.Queue[tuple[str, str]] = queue.Queue()
        self._threads = [
            threading.Thread(target=self._read, args=(pipe, name), daemon=True)
            for pipe, name in ((child.stdout, "stdout"), (child.stderr, "stderr"))
            if pipe is not None
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, pipe: IO[bytes], name: str) -> None:
        # newline="": a carriage return of a progress bar ends a line too, and is not translated
        with io.TextIOWrapper(pipe, encoding="utf-8", errors="replace", newline="") as lines:
            for line in lines:
                self._lines.put((name, line))

    @property
    def has_pipes(self) -> bool:
        """Whether the child writes into pipes of this process."""
        return bool(self._threads)

    def pass_on(self, timeout: float) -> None:
        """Write the lines that have arrived, after waiting up to `timeout` seconds for the first one."""
        if not self._threads:
            return
        try:
            name, line = self._lines.get(timeout=timeout)
            while True:
                getattr(sys, name).write(line)
                name, line = self._lines.get_nowait()
        except queue.Empty:
            sys.stdout.flush()
            sys.stderr.flush()

    def finish(self) -> None:
        """Write the remaining lines, after the child and all its descendants have ended."""
        for thread in self._threads:
            thread.join(timeout=2.0)
        self.pass_on(timeout=0.01)
