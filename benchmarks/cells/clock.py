"""Record the time, loss and gradient norm of each step without synchronising with the device.

On a GPU, a CUDA event is recorded after each step and losses stay on the device. All values are read after the last
step.
"""

from __future__ import annotations

import resource
import time
from typing import Any

import torch

from .cell import Cell, Measured


class Clock:
    """Counts the optimizer steps of one rank. `started` is the time.time() at which the measurement began."""

    def __init__(self, cell: Cell, started: float) -> None:
        self.cell, self.started = cell, started
        self.is_on_gpu = torch.cuda.is_available() and not cell.cpu
        self.marks: list[Any] = []
        self.losses: list[Any] = []
        self.grad_norms: list[Any] = []
        self.first_step_seconds = 0.0
        self.trace = ""
        self._profiler: Any = None

    def mark(self, loss: Any, grad_norm: Any) -> None:
        """Record an optimizer step: its loss per item of the global batch, and the gradient norm before clipping."""
        if self.is_on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())
        self.losses.append(loss.detach() if torch.is_tensor(loss) else loss)
        self.grad_norms.append(grad_norm)
        if len(self.marks) == 1:
            if self.is_on_gpu:
                torch.cuda.synchronize()
            self.first_step_seconds = time.time() - self.started
        if self.cell.traced:
            self._trace(len(self.marks))

    def _trace(self, step: int) -> None:
        """Profile the last steps."""
        from . import trace

        if step == self.cell.steps - self.cell.traced - 1:
            self._profiler = trace.start(self.cell.traced, on_gpu=self.is_on_gpu)
        elif self._profiler is not None:
            trace.end_step(self._profiler, on_gpu=self.is_on_gpu)
            if step == self.cell.steps:
                self.trace = trace.describe(self._profiler, self.cell.traced, on_gpu=self.is_on_gpu)

    def read(self, **details: Any) -> Measured:
        """Wait for the device and return the results. A collective if gradient norms are sharded tensors."""
        if self.is_on_gpu:
            torch.cuda.synchronize()
            pairs = zip(self.marks, self.marks[1:], strict=False)
            seconds = [before.elapsed_time(after) / 1000 for before, after in pairs]
        else:
            seconds = [after - before for before, after in zip(self.marks, self.marks[1:], strict=False)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return Measured(
            step_seconds=seconds,
            losses=[float(value) for value in self.losses],
            grad_norms=[_whole(value) for value in self.grad_norms],
            first_step_seconds=self.first_step_seconds,
            peak_allocated=torch.cuda.max_memory_allocated() if self.is_on_gpu else peak,
            peak_reserved=torch.cuda.max_memory_reserved() if self.is_on_gpu else peak,
            device=torch.cuda.get_device_name() if self.is_on_gpu else "cpu",
            details=details,
            trace=self.trace,
        )


def _whole(value: Any) -> float:
    """Return a norm as a number. A sharded tensor is gathered."""
    return float(value.full_tensor() if hasattr(value, "full_tensor") else value)
