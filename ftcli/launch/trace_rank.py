"""Record some steps of one rank with PyTorch's profiler, for `ftcli trace`.

The rank trains as in a run, but saves and evaluates nothing. It writes a Chrome trace, and a small file with facts. The
phases of the loop are ranges in the trace. If the rank fails, it writes what was recorded until then.
"""

from __future__ import annotations

import gzip
import platform
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftcli.launch.trace_files import PHASE, SLOW_STEPS, STEP, WARM_UP, facts_name, trace_name
from ftcli.launch.worker import check_world
from ftcli.runtime.failures import record_failure, watch_parent, watch_peers
from ftcli.runtime.heartbeat import Heartbeat
from ftcli.runtime.run_folder import RunFolder
from ftcli.runtime.stop import StopRequest
from ftcli.training.setup import prepare

if TYPE_CHECKING:
    from ftcli.config.profile import Profile
    from ftcli.config.recipe import Recipe
    from ftcli.training.run import Run


class MarkedHeartbeat(Heartbeat):
    """A heartbeat that also makes each phase of the loop a range in the trace, while the profiler records."""

    def __init__(self, folder: RunFolder) -> None:
        super().__init__(folder)
        self._is_recording = False
        self._step_range: Any = None
        self._phase_range: Any = None

    def beat(self, phase: str, step: int) -> None:
        """Record that this process enters a phase; see `Heartbeat.beat`."""
        super().beat(phase, step)
        if self._is_recording:
            self._close_range(self._phase_range)
            self._phase_range = self._open_range(PHASE + phase)

    def begin_step(self) -> None:
        """Begin the range of a step."""
        self._is_recording, self._step_range = True, self._open_range(STEP)

    def end_step(self) -> None:
        """End the range of a step and that of its last phase."""
        self._close_range(self._phase_range)
        self._close_range(self._step_range)
        self._is_recording, self._step_range, self._phase_range = False, None, None

    @staticmethod
    def _open_range(name: str) -> Any:
        from torch.profiler import record_function

        mark = record_function(name)
        mark.__enter__()
        return mark

    @staticmethod
    def _close_range(mark: Any) -> None:
        if mark is not None:
            mark.__exit__(None, None, None)


def trace_rank(recipe: Recipe, profile: Profile | None, *, output: Path, steps: int, cpu: bool) -> None:
    """Train some steps and write the trace of this rank. A collective.

    Args:
        recipe: The recipe, with the length of the trace.
        profile: The profile of the launch; None without one.
        output: The folder for traces.
        steps: Number of recorded steps.
        cpu: Train on the CPU, also on a machine with GPUs.

    Raises:
        InputError: Recipe, data or model are wrong.
        RuntimeError: Accelerate started another backend than the profile's.
    """
    folder = RunFolder(output)
    heart = MarkedHeartbeat(folder)
    with record_failure(folder), heart, StopRequest.listening(folder) as stop:
        watch_parent()
        watch_peers(folder)
        run = prepare(recipe, cpu=cpu)
        run.heartbeat, run.stop = heart, stop
        check_world(run, profile)
        _record(run, heart, folder, steps)
        run.hardware.close()


def _record(run: Run, heart: MarkedHeartbeat, folder: RunFolder, steps: int) -> None:
    """Train all steps, and record the last ones. A collective."""
    import torch
    from torch.profiler import ProfilerActivity, profile, schedule

    from ftcli.loop import steps as train_steps

    device = run.hardware.accelerator.device
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    # The profiler's own warm-up step loads its library for GPUs and is dropped.
    profiler = profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=steps, repeat=1))
    plain: list[float] = []  # seconds of steps without a profiler
    recorded: list[float] = []
    last = WARM_UP + steps
    before = time.perf_counter()
    try:
        for step in train_steps(run):
            number = step.number
            if on_gpu:
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - before
            if WARM_UP < number <= last:
                heart.end_step()
                recorded.append(seconds)
            elif number != WARM_UP:
                plain.append(seconds)
            if number == WARM_UP - 1:
                profiler.start()
            elif WARM_UP <= number <= last:
                profiler.step()
            before = time.perf_counter()
            if WARM_UP <= number < last:
                heart.begin_step()
    finally:
        heart.end_step()
        if recorded:
            _write(run, profiler, folder, plain, recorded)


def _write(run: Run, profiler: Any, folder: RunFolder, plain: list[float], recorded: list[float]) -> None:
    """Write the trace and the facts of this rank."""
    import torch
    from torch.profiler import ProfilerAction

    rank, device = run.hardware.ranks.rank, run.hardware.accelerator.device
    if profiler.current_action is not ProfilerAction.NONE:  # the run ended early
        profiler.stop()
    plain_file = folder.path / f".rank-{rank}.trace.json"
    profiler.export_chrome_trace(str(plain_file))
    with plain_file.open("rb") as source, gzip.open(folder.path / trace_name(rank), "wb", compresslevel=3) as target:
        shutil.copyfileobj(source, target)
    plain_file.unlink()
    on_gpu = device.type == "cuda"
    facts = {
        "rank": rank,
        "processes": run.plan.processes,
        "machine": platform.node(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
        "backend": run.hardware.distributed_type,
        "replaces_shards": run.hardware.backend.replaces_shards,
        "micro_size": run.plan.typical_rows,
        "accumulation": run.plan.typical_passes,
        "steps": len(recorded),
        "step_seconds": recorded,
        "plain_step_seconds": plain[SLOW_STEPS:],
        "peak_memory_gb": torch.cuda.max_memory_allocated(device) / 1e9 if on_gpu else None,
        "compiled": run.compiled,
        "recomputed": run.memory_saving.mode,
    }
    folder.write_json(facts_name(rank), facts)
