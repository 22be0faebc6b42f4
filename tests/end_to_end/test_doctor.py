"""`ftcli doctor` with real processes. Each fault is provoked by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ftcli
from ftcli.launch.collective_check import LocalRanks, check_collectives, diagnose, read_progress
from ftcli.launch.machines import Machines
from ftcli.launch.meeting import Meeting, NoMeeting
from ftcli.runtime.errors import InputError
from ftcli.runtime.machine.facts import Fact

from ..support.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
SMALL_SHM = "mount -t tmpfs -o size=64m none /dev/shm && exec"
CAN_UNSHARE = subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide GPUs, import this checkout in child processes, and write nothing outside of the test's folder."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "ftcli", "doctor", "--json", *map(str, arguments)]


def facts_of(report: dict[str, Any], state: str) -> dict[str, dict[str, str]]:
    return {fact["topic"]: fact for fact in report["facts"] if fact["state"] == state}


def test_doctor_of_two_processes_exercises_each_collective_over_gloo() -> None:
    report = ftcli.doctor(num_processes=2, timeout=120)
    facts = {fact.topic: fact for fact in report.facts}
    assert facts["collectives"].state == "ok" and "2 ranks, gloo" in facts["collectives"].text
    assert report.as_dict()["processes"] == 2 and report.lines()[-1].startswith("0 wrong")


def test_doctor_without_processes_starts_no_rank_and_names_a_misspelt_variable() -> None:
    script = (
        "import sys\nfrom ftcli.__main__ import main\n"
        "note = lambda name, given: name == 'subprocess.Popen' and print(*given[1][1:], file=sys.stderr)\n"
        "sys.addaudithook(note)\n"
        "try: main(['doctor', '--json'])\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NCCL_SOCKET_IFNAM": "eth0", "OMP_NUM_THREADS": "1"}
    environment.pop("OMP_WAIT_POLICY", None)  # ftcli sets it then, and must not show it as the user's
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines() == ["-m ftcli.launch.torch_probe", "False"]  # torch is imported once, apart
    wrong = facts_of(json.loads(done.stdout), "wrong")
    assert wrong["NCCL_SOCKET_IFNAM"]["remedy"] == "did you mean 'NCCL_SOCKET_IFNAME'?"
    shown = facts_of(json.loads(done.stdout), "ok")
    assert "OMP_NUM_THREADS" in shown and "OMP_WAIT_POLICY" not in shown


@pytest.mark.skipif(not CAN_UNSHARE, reason="this user may not create a mount namespace")
def test_doctor_with_64_mb_of_shared_memory_is_wrong() -> None:
    line = ["unshare", "-m", "sh", "-c", f'{SMALL_SHM} "$@"', "sh", *command()]
    done = subprocess.run(line, capture_output=True, text=True)
    fact = facts_of(json.loads(done.stdout), "wrong")["/dev/shm"]
    assert done.returncode == 2 and fact["text"].startswith("64 MiB free of 64 MiB") and "--shm-size" in fact["remedy"]


def test_doctor_of_a_machine_that_never_comes_names_it() -> None:
    report = ftcli.doctor(
        num_processes=2, num_machines=2, main_process_ip="127.0.0.1", main_process_port=free_port(), timeout=2
    )
    facts = {fact.topic: fact for fact in report.facts}
    assert report.exit_code == 2
    assert facts["machine 1"].state == "wrong" and "did not come" in facts["machine 1"].text
    assert "--machine-rank 1" in facts["machine 1"].remedy and facts["machine 0"].state == "ok"
    assert facts["collectives"].state == "look" and facts["InfiniBand"].state in ("ok", "look")


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    yield Meeting.open(Machines(), 60)


def test_doctor_of_a_machine_number_without_other_machines_is_refused() -> None:
    with pytest.raises(InputError, match="--machine-rank 4 of --num-machines 1"):
        ftcli.doctor(machine_rank=4)


def test_meeting_at_an_address_that_cannot_be_resolved_names_it() -> None:
    begin = time.monotonic()
    with pytest.raises(NoMeeting, match="the address no-such-host.invalid is not known here"):
        Meeting.open(Machines(2, 0, "no-such-host.invalid", 29500), 2)
    assert time.monotonic() - begin > 2  # the name of a pod is known only after it has started


@pytest.mark.slow
def test_diagnose_of_a_stopped_rank_and_of_one_that_never_comes_names_both(meeting: Meeting) -> None:
    with LocalRanks(range(2), 3, "cpu") as ranks:
        ranks.begin(meeting, 300)
        for rank in range(2):
            assert meeting.wait(f"beat/{rank}", time.monotonic() + 250) is not None
            assert meeting.wait(f"phase/{rank}", time.monotonic() + 250) is not None
        os.kill(ranks.children[1].pid, signal.SIGSTOP)
        ranks.watch(meeting, time.monotonic() + 1)
        facts = diagnose(read_progress(meeting, 3), {0: 0, 1: 0, 2: 0}, 1)
    assert [(fact.topic, fact.state) for fact in facts] == [("rank 2", "wrong"), ("rank 1", "wrong")]
    assert "never came" in facts[0].text and "the process hangs" in facts[1].text


@pytest.mark.slow
def test_check_collectives_of_a_rank_that_dies_names_it(meeting: Meeting) -> None:
    with LocalRanks(range(2), 2, "cpu") as ranks:
        os.kill(ranks.children[1].pid, signal.SIGKILL)
        (fact,) = check_collectives(ranks, meeting, 60)
    assert fact == Fact("rank 1", "wrong", "failed: killed by SIGKILL", fact.remedy)


@pytest.mark.slow
def test_doctor_of_two_machines_with_two_versions_names_both(tmp_path: Path) -> None:
    """Both machines are this one; the second finds other metadata of transformers first."""
    other = tmp_path / "other" / "transformers-5.18.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.18.0\n")
    shared = ("--num-processes", 2, "--num-machines", 2, "--main-process-ip", "127.0.0.1", "--timeout", 200)
    line = command(*shared, "--main-process-port", free_port())
    paths = [str(ROOT), f"{other.parent}{os.pathsep}{ROOT}"]
    machines = [
        subprocess.Popen(
            [*line, "--machine-rank", str(rank)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        for rank, path in enumerate(paths)
    ]
    reports = [json.loads(process.communicate()[0]) for process in machines]
    for report in reports:
        fact = facts_of(report, "wrong")["transformers differs"]
        assert "on machine 0" in fact["text"] and "5.18.0 on machine 1" in fact["text"]
        assert facts_of(report, "ok").keys() >= {"machine 0", "machine 1", "clocks", "collectives"}
    assert [process.returncode for process in machines] == [2, 2]


@pytest.mark.slow
def test_doctor_bench_measures_each_collective_and_keeps_the_rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTCLI_CACHE", str(tmp_path / "cache"))
    report = ftcli.doctor(num_processes=2, bench=True)
    assert report.speeds is not None and report.speeds["product_flops"]["fp32"] > 0
    sizes: dict[str, list[int]] = {}
    for line in report.speeds["collectives"]:
        sizes.setdefault(line["collective"], []).append(line["bytes"])
    names = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "point_to_point"}
    assert sizes.keys() == names and all(one[:3] == [2**10, 2**12, 2**14] for one in sizes.values())
    assert json.loads(report.files[0].read_text())["processes"] == 2
    assert any("bus" in line for line in report.lines())
