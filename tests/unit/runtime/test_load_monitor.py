"""The load of ranks is sampled beside the loop, collected by rank 0, and reported once."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ftcli.runtime import load_findings, load_monitor
from ftcli.runtime.load_monitor import LoadMonitor
from ftcli.runtime.machine.host_memory import HostMemoryReader
from ftcli.runtime.machine.load import LoadSampler
from ftcli.runtime.machine.nvml import NvmlMissingError
from ftcli.runtime.run_folder import RunFolder

from ...support.counting import count_lines

HOST = {"load/cpu_percent/rank-0", "load/process_memory_gb/rank-0", "load/host_memory_available_gb/rank-0"}
GIB = 2**30


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_monitor, "SAMPLE_SECONDS", 0.02)
    monkeypatch.setattr(load_monitor, "RECORD_SECONDS", 0.0)


def wait_for(value: Callable[[], Any]) -> Any:
    """Return a value as soon as it is true."""
    end = time.monotonic() + 120
    while not (found := value()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return found


@pytest.mark.usefixtures("quick")
def test_take_without_a_gpu_has_the_values_of_the_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = LoadMonitor(RunFolder(tmp_path))
    with monitor:
        monitor.begin_training(None)
        row = wait_for(monitor.take)
    assert row.keys() == HOST and 0 < row["load/process_memory_gb/rank-0"] < 64
    assert 0 <= row["load/cpu_percent/rank-0"] < 100_000 and row["load/host_memory_available_gb/rank-0"] > 0
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().err == ""


@pytest.mark.usefixtures("quick")
def test_take_with_nvml_has_the_values_of_the_gpu(tmp_path: Path, nvml: ModuleType) -> None:
    monitor = LoadMonitor(RunFolder(tmp_path))
    monitor.begin_training("aaaa")
    row = wait_for(monitor.take)
    monitor.stop()
    assert {name: value for name, value in row.items() if name not in HOST} == {
        "load/gpu_utilisation_percent/rank-0": 97.0,
        "load/gpu_memory_gb/rank-0": 30.0,
        "load/gpu_power_watts/rank-0": 650.5,
        "load/gpu_temperature_celsius/rank-0": 70.0,
        "load/gpu_throttled_percent/rank-0": 0.0,
        "load/gpu_power_limited_percent/rank-0": 100.0,
    }
    assert nvml.calls == ["init", "shutdown"]


@pytest.mark.usefixtures("quick")
def test_begin_training_without_a_driver_logs_one_line_and_keeps_the_host(
    tmp_path: Path, nvml: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    nvml.driver = False
    monitor = LoadMonitor(RunFolder(tmp_path))
    for _ in range(2):  # a loop of the user's own may be left and entered again
        monitor.begin_training("aaaa")
        assert wait_for(monitor.take).keys() == HOST
        monitor.stop()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ftcli: the load of GPUs is not recorded: none is visible through NVML: Driver Not Loaded;")


def test_sample_without_permission_leaves_out_what_may_not_be_read(nvml: ModuleType) -> None:
    nvml.allowed = False
    sampler = LoadSampler(0)
    sampler.open_gpu("bbbb")
    load = sampler.sample()
    assert load.gpu == 1 and load.values["gpu_temperature_celsius"] == 91.0
    assert load.slowdowns == [] and "gpu_throttled_percent" not in load.values
    sampler.open_gpu("cccc")  # NVML does not know it
    assert not any(name.startswith("gpu_") for name in sampler.sample().values)


def test_open_gpu_without_nvidia_ml_py_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NvmlMissingError, match="nvidia-ml-py is missing"):
        LoadSampler(0).open_gpu("aaaa")


def of_gpus(events: Path) -> list[dict[str, Any]]:
    """Return the events that are not about the load of this machine's own cores, which other processes may cause."""
    recorded = [json.loads(line) for line in events.read_text().splitlines()]
    return [event for event in recorded if event["event"] != "crowded cores"]


@pytest.mark.usefixtures("quick")
def test_monitors_of_two_ranks_record_both_and_report_an_idle_and_hot_gpu_once(
    tmp_path: Path, nvml: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (load_findings, load_monitor):  # long enough for `TREND_SAMPLES` samples on a busy machine
        monkeypatch.setattr(module, "LONG_SECONDS", 2.0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    (tmp_path / "load").mkdir()
    (tmp_path / "load" / "rank-7.json").write_text("{}")  # of an earlier launch
    monitors = []
    for rank in (1, 0):
        monkeypatch.setenv("RANK", str(rank))
        monitors.append(LoadMonitor(RunFolder(tmp_path)))
    other, main = monitors
    main.begin_training("aaaa")
    wait_for(lambda: not (tmp_path / "load" / "rank-7.json").exists())
    other.begin_training("bbbb")
    main.step = 5
    events = tmp_path / "events.jsonl"
    wait_for(lambda: events.exists() and len(of_gpus(events)) == 2)
    used = [f"load/gpu_utilisation_percent/rank-{rank}" for rank in range(2)]
    row = wait_for(lambda: {*used} <= (taken := main.take()).keys() and taken)
    assert [row[name] for name in used] == [97.0, 2.0]
    time.sleep(0.2)  # the findings stay true
    other.stop()
    main.stop()
    lines = [line.removeprefix("ftcli: ") for line in capsys.readouterr().err.splitlines()]
    recorded = of_gpus(events)
    assert [event["text"] for event in recorded] == [line for line in lines if "GPU" in line]
    assert sorted(event["event"] for event in recorded) == ["idle GPU", "throttled GPU"]
    assert all(event["step"] == 5 and "rank 1 on" in event["text"] for event in recorded)
    assert not (tmp_path / "load").exists()


@pytest.mark.usefixtures("quick")
def test_monitor_skips_files_that_are_torn_or_of_another_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = asdict(LoadSampler(3).sample())
    monitor = LoadMonitor(RunFolder(tmp_path))
    with monitor:
        monitor.begin_training(None)
        wait_for(monitor.take)
        (tmp_path / "load").mkdir()
        for name, text in {"rank-1": '{"rank": 1', "rank-2": '{"rank": 2}', "rank-3": json.dumps(other)}.items():
            (tmp_path / "load" / f"{name}.json").write_text(text)
        row = wait_for(lambda: "load/cpu_percent/rank-3" in (taken := monitor.take()) and taken)
        time.sleep(0.2)
        assert "load/cpu_percent/rank-3" not in monitor.take()  # no new sample
        assert wait_for(monitor.take).keys() == HOST
    assert {name.rpartition("/")[2] for name in row} <= {"rank-0", "rank-3"}


@pytest.mark.usefixtures("quick")
def test_begin_training_leaves_out_what_was_sampled_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LoadMonitor(RunFolder(tmp_path)) as monitor:
        wait_for(lambda: monitor._pending)
        monkeypatch.setattr(load_monitor, "SAMPLE_SECONDS", 60.0)
        time.sleep(0.1)
        monitor.begin_training(None)
        time.sleep(0.2)  # the thread takes the sample from which CPU time is counted
        assert monitor.take() == {}


def test_monitor_keeps_the_samples_of_the_last_minute_of_one_process(tmp_path: Path) -> None:
    monitor, first = LoadMonitor(RunFolder(tmp_path)), LoadSampler(0).sample()
    for number, later in enumerate((0.0, 59.0, 61.0)):
        monitor._keep(replace(first, number=number, seconds=first.seconds + later))
    assert [load.number for load in monitor._recent[0]] == [1, 2]
    monitor._keep(replace(first, number=2, process=first.process + 1))  # the rank was started again
    assert [load.process for load in monitor._recent[0]] == [first.process + 1]
    assert len(monitor._pending[0]) == 4


def test_monitor_records_no_sample_that_was_taken_while_training_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_monitor, "SAMPLE_SECONDS", 60.0)
    with LoadMonitor(RunFolder(tmp_path)) as monitor:
        wait_for(lambda: monitor._pending)
        with monitor._lock:
            monitor._begins = True  # and the thread has not seen it yet
            monitor._pending.clear()
        monitor._keep(replace(LoadSampler(0).sample(), number=99))
        assert monitor.take() == {}


def test_take_again_at_once_is_empty_for_many_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_monitor, "SAMPLE_SECONDS", 0.01)
    monkeypatch.setenv("WORLD_SIZE", "1000")
    with LoadMonitor(RunFolder(tmp_path)) as monitor:
        monitor.begin_training(None)
        wait_for(monitor.take)
        time.sleep(0.1)
        assert monitor.take() == {}


def test_start_without_a_folder_samples_nothing() -> None:
    monitor = LoadMonitor()
    monitor.begin_training(None)
    assert monitor._thread is None and monitor.take() == {}


@pytest.mark.usefixtures("quick")
def test_monitor_of_a_deleted_folder_writes_nothing_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    with LoadMonitor(RunFolder(tmp_path / "gone")) as monitor:
        time.sleep(0.2)
        assert monitor._thread is not None and monitor._thread.is_alive()
    assert not (tmp_path / "gone").exists()


def test_sample_takes_the_same_small_number_of_steps_each_time() -> None:
    sampler = LoadSampler(0)
    sampler.sample()
    first, second = count_lines(sampler.sample), count_lines(sampler.sample)
    assert first == second < 1_500  # some 730, of the 200,000 that half a percent of the time between two allows


def write_files(root: Path, **files: object) -> None:
    for name, content in files.items():
        path = root / name.replace("__", "/").replace("DOT", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


MEMINFO = f"MemTotal: {64 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {40 * 2**20} kB"


def test_read_of_a_machine_without_limits_is_memavailable(tmp_path: Path) -> None:
    write_files(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/job")
    write_files(tmp_path / "sys/fs/cgroup/job", memoryDOTmax="max", memoryDOTcurrent=GIB)
    memory = HostMemoryReader(tmp_path).read()
    assert (memory.available, memory.limit) == (40 * GIB, 64 * GIB)


def test_read_of_nested_groups_takes_the_tightest_and_leaves_page_cache_out(tmp_path: Path) -> None:
    write_files(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/job/step")
    group = tmp_path / "sys/fs/cgroup/job"
    write_files(group / "step", memoryDOTmax=32 * GIB, memoryDOTcurrent=8 * GIB)
    write_files(group, memoryDOTmax=16 * GIB, memoryDOTcurrent=14 * GIB)
    write_files(group, memoryDOTstat=f"anon 1\nactive_file {GIB}\ninactive_file {3 * GIB}")
    memory = HostMemoryReader(tmp_path).read()
    assert (memory.available, memory.limit) == (6 * GIB, 16 * GIB)


def test_read_of_version_1_in_a_namespace_reads_the_groups_that_it_sees(tmp_path: Path) -> None:
    write_files(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="5:cpu:/x\n4:memory:/docker/abc\n0::/")
    group = tmp_path / "sys/fs/cgroup/memory"
    write_files(group, memoryDOTlimit_in_bytes=8 * GIB, memoryDOTusage_in_bytes=7 * GIB)
    write_files(group, memoryDOTstat=f"total_inactive_file {GIB}\ninactive_file 5")
    memory = HostMemoryReader(tmp_path).read()
    assert (memory.available, memory.limit) == (2 * GIB, 8 * GIB)
    write_files(group, memoryDOTlimit_in_bytes=2**63 - 4096)  # version 1's number for no limit
    assert HostMemoryReader(tmp_path).read().limit == 64 * GIB


def test_read_of_a_group_outside_of_the_namespace_reads_no_other_folder(tmp_path: Path) -> None:
    write_files(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/../../other")
    write_files(tmp_path / "sys/fs/cgroup", memoryDOTmax=16 * GIB, memoryDOTcurrent=4 * GIB)
    write_files(tmp_path / "sys/other", memoryDOTmax=GIB, memoryDOTcurrent=GIB)
    assert HostMemoryReader(tmp_path).read().available == 12 * GIB


def test_read_of_this_machine_is_within_its_memory() -> None:
    memory = HostMemoryReader().read()
    assert 0 < memory.available <= memory.limit
