"""What samples of the load show: an idle GPU, a throttled GPU, a machine that runs out of memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ftcli.runtime.load_findings import crowded_cores, find_all, hosts_running_out, idle_gpus, throttled_gpus
from ftcli.runtime.machine.load import (
    GPU_TEMPERATURE,
    GPU_UTILISATION,
    HOST_MEMORY,
    PROCESS_MEMORY,
    Load,
    LoadSampler,
    read_scheduled,
)

STEPS = 12  # samples of a minute


def loads(
    rank: int,
    used: float | None = 95.0,
    *,
    slow: int = 0,
    left: tuple[float, ...] = (),
    samples: int = STEPS,
    machine: str = "node-a",
    memory: float = 2.0,
) -> list[Load]:
    """Return samples of one rank, every 5 s; the first `slow` of them while the GPU is hot."""
    gpu = {} if used is None else {GPU_UTILISATION: used, GPU_TEMPERATURE: 88.0}
    free = left or (50.0,) * samples
    return [
        Load(
            rank=rank,
            machine=machine,
            process=100 + rank,
            number=number,
            seconds=1000.0 * rank + 5.0 * number,  # each process has its own clock
            values=gpu | {HOST_MEMORY: free[number], PROCESS_MEMORY: memory},
            host_limit_gb=100.0,
            gpu=rank,
            slowdowns=["its temperature"] if number < slow else [],
        )
        for number in range(len(free))
    ]


def test_idle_gpus_of_one_idle_rank_names_rank_machine_and_the_busiest() -> None:
    (found,) = idle_gpus({0: loads(0), 1: loads(1, 3.0, machine="node-b"), 2: loads(2, 99.0)})
    assert (found.kind, found.subject) == ("idle GPU", "rank 1")
    assert found.text.startswith(
        "GPU 1 of rank 1 on node-b was idle for 60 s (3 % busy) while the GPU of rank 2 was 99 % busy"
    )


@pytest.mark.parametrize(
    "others",
    [
        {0: loads(0, 4.0), 1: loads(1, 3.0)},  # all wait
        {0: loads(0, 95.0), 1: loads(1, 40.0)},  # slower, but not idle
        {0: loads(0, 95.0), 1: loads(1, 3.0, samples=STEPS - 1)},  # not for long
        {0: loads(0, 95.0), 1: loads(1, None)},  # without NVML
        {0: loads(0, 95.0)},
        {},
    ],
)
def test_idle_gpus_of_ranks_that_work_or_wait_together_finds_none(others: dict[int, list[Load]]) -> None:
    assert list(idle_gpus(others)) == []


def test_throttled_gpus_of_a_hot_gpu_names_reason_and_temperature() -> None:
    (found,) = throttled_gpus({0: loads(0), 1: loads(1, slow=7)})
    assert (found.kind, found.subject) == ("throttled GPU", "rank 1")
    assert found.text.startswith("GPU 1 of rank 1 on node-a is slowed down by its temperature at up to 88 C")


@pytest.mark.parametrize("recent", [{0: loads(0, slow=6)}, {0: loads(0, slow=11, samples=11)}])
def test_throttled_gpus_of_a_short_slowdown_finds_none(recent: dict[int, list[Load]]) -> None:
    assert list(throttled_gpus(recent)) == []


def waiting(rank: int, percent: float, samples: int = STEPS, machine: str = "node-a") -> list[Load]:
    """Return samples of a rank on a CPU that waited for a core for a part of the time."""
    plain = loads(rank, None, samples=samples, machine=machine)
    return [replace(load, waited_percent=percent, gpu=None) for load in plain]


def test_crowded_cores_of_processes_with_less_than_half_of_their_time_names_each_machine_once() -> None:
    recent = {0: waiting(0, 51), 1: waiting(1, 64), 2: waiting(2, 90, machine="node-b")}
    found = list(crowded_cores(recent))
    assert found == [each for each in find_all(recent) if each.kind == "crowded cores"]
    assert [(each.kind, each.subject) for each in found] == [
        ("crowded cores", "machine node-a"),
        ("crowded cores", "machine node-b"),
    ]
    assert found[0].text.startswith("on machine node-a, rank 1 had a core for 36 % of the time")
    with_gpu = [replace(load, gpu=3) for load in waiting(3, 90)]
    fine = {0: waiting(0, 49), 1: waiting(1, 90, samples=STEPS - 1), 2: loads(2, None), 3: with_gpu}
    assert list(crowded_cores(fine)) == []


def test_hosts_running_out_with_little_memory_left_names_machine_and_largest_process() -> None:
    recent = {
        0: loads(0, left=(4.9,)),
        1: loads(1, left=(4.8,), memory=40.0),
        2: loads(2, left=(50.0,), machine="node-b", memory=60.0),
    }
    (found,) = hosts_running_out(recent)
    assert (found.kind, found.subject) == ("host memory", "machine node-a")
    assert found.text.startswith("machine node-a runs out of memory: 4.8 of 100.0 GB are left. The system")
    assert "rank 1 with 40.0 GB" in found.text


def test_hosts_running_out_of_a_fast_fall_gives_the_seconds_left() -> None:
    (found,) = hosts_running_out({0: loads(0, left=(44.0, 34.0, 24.0))})
    assert "24.0 of 100.0 GB are left, enough for 12 s at this rate" in found.text


@pytest.mark.parametrize(
    "left",
    [
        (50.0,),
        (5.1, 5.1, 5.1),  # little, but constant
        (80.0, 60.0, 40.0),  # a fast fall of much
        (24.9, 24.5, 24.1),  # a slow fall
        (34.0, 24.0),  # two samples are no trend
    ],
)
def test_hosts_running_out_with_enough_memory_finds_none(left: tuple[float, ...]) -> None:
    assert list(hosts_running_out({0: loads(0, left=left)})) == []


def test_sample_of_threads_without_a_core_has_the_part_of_time_that_they_waited(tmp_path: Path) -> None:
    tasks = tmp_path / "proc" / "self" / "task"
    for thread, times in {"1": "1000 1000 5", "2": "0 0 0"}.items():
        (tasks / thread).mkdir(parents=True)
        (tasks / thread / "schedstat").write_text(f"{times}\n")
    sampler = LoadSampler(0, tmp_path)
    assert sampler.sample().waited_percent is None  # no thread has run
    (tasks / "1" / "schedstat").write_text("1300 1400 9\n")
    (tasks / "2" / "schedstat").write_text("100 200 1\n")
    assert sampler.sample().waited_percent == pytest.approx(60)
    assert read_scheduled(tmp_path / "nothing") == {} and read_scheduled(Path("/proc/self/task"))
