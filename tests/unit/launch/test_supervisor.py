"""The parent's side of a launch, with real processes: small scripts stand in for torchrun and its ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ftcli.launch.supervisor import LaunchError, Signals, supervise
from ftcli.runtime.failures import record_failure
from ftcli.runtime.run_folder import RunFolder
from ftcli.runtime.stop import REPEAT_SECONDS

ROOT = Path(__file__).resolve().parents[3]

# Like torchrun: every rank in a session of its own, the first that fails ends the wait, and a stack tells of its end.
AGENT = """
import os, signal, subprocess, sys, time
def fail(*_): raise ConnectionError("ended")
signal.signal(signal.SIGHUP, fail)
ranks = [
    subprocess.Popen([sys.executable, sys.argv[1], sys.argv[2]], start_new_session=True,
                     env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"})
    for rank in range(2)
]
while any(rank.poll() is None for rank in ranks):
    time.sleep(0.05)
sys.exit(max(abs(rank.returncode) for rank in ranks))
"""

RANK_HEAD = """
import os, signal, sys, time
from pathlib import Path
from ftcli.runtime.errors import InputError
from ftcli.runtime.stop import StopRequest; from ftcli.runtime.failures import record_failure, watch_parent
from ftcli.runtime.run_folder import FLIGHT_RECORDER, RunFolder
folder, rank = RunFolder(sys.argv[1]), int(os.environ["RANK"])
def ready():  # once the rank does what its name says, so that a test can begin
    (folder.path / f".pid-{rank}").write_text(str(os.getpid()))
    (folder.path / f".pid-{rank}").replace(folder.path / f"pid-{rank}")
def wait_until(condition):
    while not condition(): time.sleep(0.02)
"""

RANK_BODIES = {
    "finishes": """
ready()
sys.stdout.write(f"a line of rank {rank}\\n")  # one write, so that two ranks do not mix
if rank == 0: folder.write_status("done", 3, 0)
""",
    "fails_late": """
if rank == 0: folder.write_status("done", 3, 0)
wait_until(lambda: folder.status().get("state") == "done")
os._exit(134)
""",
    "one_raises": """
if rank == 0: folder.write_status("running", 7, 0)
wait_until(lambda: folder.status().get("state") == "running" or rank == 0)
with record_failure(folder):
    if rank == 1: raise ValueError("boom on one rank")
    wait_until((folder.errors / "rank-1.json").exists)
    raise RuntimeError("connection closed by peer")
""",
    "one_raises_other_hangs": """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
ready()
with record_failure(folder):
    wait_until((folder.path / "pid-0").exists)
    if rank == 1: raise ValueError("boom on one rank")
    time.sleep(600)
""",
    "input_is_wrong": """
with record_failure(folder):
    raise InputError("no rows in rows.jsonl", hint="write some")
""",
    "times_out": """
(folder.path / f"{FLIGHT_RECORDER}{rank}").touch()
os.kill(os.getpid(), signal.SIGKILL)
""",
    "is_killed": """
folder.write_status("running", 0, 0)
os.kill(os.getpid(), signal.SIGKILL)
""",
    "stops_when_asked": """
watch_parent()
with StopRequest.listening(folder) as stop:
    if rank == 0: folder.write_status("running", 4, 0)
    ready()
    while not stop.requested() and folder.status().get("state", "running") == "running": time.sleep(0.05)
    if rank == 0:  # the one that reads the file; real ranks agree by a collective
        (folder.path / "reason").write_text(stop.reason)
        folder.write_status("stopped", 5, 0)
""",
    "loads_for_long": """
watch_parent()
ready()
time.sleep(600)
""",
    "fails_when_ended": """
watch_parent()
if rank == 0: folder.write_status("running", 3, 0)
def fail(*_): raise ConnectionError("closed by peer")
signal.signal(signal.SIGHUP, fail)
with record_failure(folder): ready(); time.sleep(600)
""",
    "ignores_everything": """
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP): signal.signal(number, signal.SIG_IGN)
watch_parent()
if rank == 0: folder.write_status("running", 0, 0)
ready()
time.sleep(600)
""",
}

PARENT = """
import sys
from pathlib import Path
from ftcli.runtime.run_folder import RunFolder
from ftcli.launch.supervisor import LaunchError, supervise
agent, worker, folder = sys.argv[1:]
try:
    supervise([sys.executable, agent, worker, folder], folder=RunFolder(folder))
except LaunchError as error:
    sys.exit(error.exit_code)
"""


@pytest.fixture
def launch_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """Return the command that starts two ranks which behave as named, in the run folder tmp_path/run."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def command(behaviour: str) -> list[str]:
        agent, worker = tmp_path / "agent.py", tmp_path / f"{behaviour}.py"
        agent.write_text(AGENT)
        worker.write_text(RANK_HEAD + RANK_BODIES[behaviour])
        return [sys.executable, str(agent), str(worker), str(tmp_path / "run")]

    return command


@pytest.fixture
def parent(
    tmp_path: Path, launch_command: Callable[[str], list[str]]
) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Return a function that starts a launching parent and waits until both of its ranks run."""
    started: list[subprocess.Popen[str]] = []

    def start(behaviour: str) -> subprocess.Popen[str]:
        command = launch_command(behaviour)
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT, *command[1:]], stderr=subprocess.PIPE, text=True, cwd=tmp_path
        )
        started.append(process)
        wait_until(lambda: len(rank_pids(tmp_path)) == 2)
        return process

    yield start
    for process in started:
        process.kill()  # ends the ranks too, through their parent watch
        process.wait()
        process.stderr.close()  # type: ignore[union-attr]


def wait_until(condition: Callable[[], bool], seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def rank_pids(tmp_path: Path) -> list[int]:
    return [int(text) for path in (tmp_path / "run").glob("pid-*") if (text := path.read_text())]


def is_alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def assert_no_rank_lives(tmp_path: Path) -> None:
    pids = rank_pids(tmp_path)
    assert len(pids) == 2 and not any(is_alive(pid) for pid in pids)


def test_supervise_with_a_finished_run_returns_and_its_output_is_passed_on(
    tmp_path: Path, launch_command: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    supervise(launch_command("finishes"), folder=RunFolder(tmp_path / "run"))
    assert sorted(capsys.readouterr().out.splitlines()) == ["a line of rank 0", "a line of rank 1"]
    assert_no_rank_lives(tmp_path)


def test_supervise_takes_the_exit_code_from_status_json(
    tmp_path: Path, launch_command: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    supervise(launch_command("fails_late"), folder=RunFolder(tmp_path / "run"))
    assert "the result of the run was already written" in capsys.readouterr().err


def test_supervise_ignores_the_status_of_an_earlier_launch(
    tmp_path: Path, launch_command: Callable[[str], list[str]]
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.write_status("done", 3, 0)
    with pytest.raises(LaunchError, match="without a result"):
        supervise([sys.executable, "-c", "pass"], folder=folder)


def test_supervise_last_lines_are_the_first_failing_ranks_error(
    tmp_path: Path, launch_command: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LaunchError) as caught:
        supervise(launch_command("one_raises"), folder=RunFolder(tmp_path / "run"))
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "rank 1: ValueError: boom on one rank"
    assert lines[-2] == "ValueError: boom on one rank" and any("Traceback" in line for line in lines)
    assert caught.value.exit_code == 1
    status = RunFolder(tmp_path / "run").status()
    assert (status["state"], status["step"]) == ("failed", 7)
    assert status["error"] == "ValueError: boom on one rank"


def test_supervise_one_ranks_failure_ends_a_rank_that_hangs_and_ignores_signals(
    tmp_path: Path, launch_command: Callable[[str], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftcli.launch.supervisor.FAILURE_GRACE_SECONDS", 1.0)
    monkeypatch.setattr("ftcli.launch.supervisor.TERMINATE_SECONDS", 1.0)
    with pytest.raises(LaunchError, match="rank 1: ValueError"):
        supervise(launch_command("one_raises_other_hangs"), folder=RunFolder(tmp_path / "run"))
    assert_no_rank_lives(tmp_path)


def test_supervise_with_invalid_input_on_a_rank_exits_with_2(
    tmp_path: Path, launch_command: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LaunchError) as caught:
        supervise(launch_command("input_is_wrong"), folder=RunFolder(tmp_path / "run"))
    assert caught.value.exit_code == 2
    error = capsys.readouterr().err
    assert error.rstrip().endswith("no rows in rows.jsonl\n    write some")
    assert "ftcli: the launcher" not in error


def test_supervise_with_a_rank_that_the_system_kills_is_a_failure(
    tmp_path: Path, launch_command: Callable[[str], list[str]]
) -> None:
    with pytest.raises(LaunchError, match="lack of host memory"):
        supervise(launch_command("is_killed"), folder=RunFolder(tmp_path / "run"))
    assert RunFolder(tmp_path / "run").status()["state"] == "failed"


def test_supervise_with_a_deleted_run_folder_ends_all_ranks_and_does_not_recreate_it(
    tmp_path: Path, parent: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = parent("ignores_everything")
    pids = rank_pids(tmp_path)
    (tmp_path / "run").rename(tmp_path / "renamed")
    _, error = process.communicate()
    assert process.returncode == 1 and "Traceback" not in error
    assert error.splitlines()[-1].startswith(f"the run folder {tmp_path / 'run'} is gone: it was deleted or renamed")
    assert not (tmp_path / "run").exists() and not any(map(is_alive, pids))


def test_supervise_with_a_collective_that_timed_out_comes_with_the_flight_recorder_s_files(
    tmp_path: Path, launch_command: Callable[[str], list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LaunchError, match="ended because a collective timed out: another rank did not take part"):
        supervise(launch_command("times_out"), folder=RunFolder(tmp_path / "run"))
    assert (
        f"2 ranks wrote their last collectives to {tmp_path}/run/flight-recorder-rank-*; compare them"
        in capsys.readouterr().err
    )
    with pytest.raises(LaunchError):
        supervise(launch_command("is_killed"), folder=RunFolder(tmp_path / "run"))
    assert "a collective timed out" not in capsys.readouterr().err  # those were an earlier run's


def test_supervise_first_signal_asks_for_a_stop_and_the_run_ends_well(
    tmp_path: Path, parent: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = parent("stops_when_asked")
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate()
    assert process.returncode == 0, error
    assert (tmp_path / "run" / "reason").read_text() == "SIGTERM"
    assert not (tmp_path / "run" / "stop").exists()  # it must not stop the next run
    assert_no_rank_lives(tmp_path)


def test_supervise_with_a_second_signal_ends_ranks_that_ignore_signals(
    tmp_path: Path, parent: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = parent("ignores_everything")
    process.send_signal(signal.SIGINT)
    wait_until((tmp_path / "run" / "stop").exists)
    assert (tmp_path / "run" / "stop").read_text() == "SIGINT\n"
    time.sleep(REPEAT_SECONDS)
    assert all(is_alive(pid) for pid in rank_pids(tmp_path)) and process.poll() is None
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 128 + signal.SIGINT and "Traceback" not in error
    assert error.splitlines()[-1] == "ended by a second signal (SIGINT)"
    status = RunFolder(tmp_path / "run").status()
    assert (status["state"], status["exit_code"]) == ("failed", 130)
    assert_no_rank_lives(tmp_path)


def test_signals_count_a_forwarded_signal_once_and_a_later_one_as_second() -> None:
    now = [100.0]
    with Signals(clock=lambda: now[0]) as signals:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        assert signals.names == ["SIGINT"]
        signal.raise_signal(signal.SIGTERM)
        now[0] += REPEAT_SECONDS
        signal.raise_signal(signal.SIGTERM)
    assert signals.names == ["SIGINT", "SIGTERM", "SIGTERM"]


@pytest.mark.parametrize(("step", "counted"), [("0", 2), (None, 4)])
def test_signals_in_a_slurm_step_count_the_same_signal_once_for_five_seconds(
    step: str | None, counted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if step is not None:
        monkeypatch.setenv("SLURM_STEP_ID", step)
    now = [100.0]
    with Signals(clock=lambda: now[0]) as signals:
        for seconds in (0.0, 2.0, 2.5, 0.5):  # the last one comes five seconds after the first
            now[0] += seconds
            signal.raise_signal(signal.SIGTERM)
        assert signals.names == ["SIGTERM"] * counted
        signal.raise_signal(signal.SIGINT)
        assert signals.names[-1] == "SIGINT"


def test_supervise_first_signal_ends_ranks_that_have_not_begun_a_step(
    tmp_path: Path, parent: Callable[[str], subprocess.Popen[str]]
) -> None:
    RunFolder(tmp_path / "run").write_status("running", 7, 0)  # of an earlier launch that was killed
    process = parent("loads_for_long")
    process.send_signal(signal.SIGUSR1)
    _, error = process.communicate()
    assert process.returncode == 0 and "stopped on request before the first step" in error
    status = RunFolder(tmp_path / "run").status()
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert_no_rank_lives(tmp_path)


def test_supervise_with_a_command_that_has_nothing_to_save_ends_at_the_first_signal(
    tmp_path: Path, launch_command: Callable[[str], list[str]]
) -> None:
    script = "import os, signal, time; os.kill(int(os.environ['FTCLI_PARENT']), signal.SIGTERM); time.sleep(600)"
    with pytest.raises(LaunchError, match=r"ended by a signal \(SIGTERM\)") as caught:
        supervise([sys.executable, "-c", script], folder=RunFolder(tmp_path), result="evaluation.json")
    assert caught.value.exit_code == 143


def test_supervise_with_a_rank_that_fails_while_it_is_ended_reports_the_signal(
    tmp_path: Path, parent: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = parent("fails_when_ended")
    process.send_signal(signal.SIGUSR1)
    wait_until((tmp_path / "run" / "stop").exists)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate()
    assert process.returncode == 143 and error.splitlines()[-1] == "ended by a second signal (SIGTERM)"


def test_supervise_with_a_signal_sent_to_the_ranks_keeps_them_alive(
    tmp_path: Path, parent: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = parent("stops_when_asked")
    for child in psutil.Process(process.pid).children(recursive=True):
        child.send_signal(signal.SIGUSR1)
    time.sleep(0.3)
    assert all(is_alive(pid) for pid in rank_pids(tmp_path))
    process.send_signal(signal.SIGUSR1)
    _, error = process.communicate()
    assert process.returncode == 0, error
    assert (tmp_path / "run" / "reason").read_text() == "SIGUSR1"


def test_supervise_death_of_the_parent_ends_the_ranks(
    tmp_path: Path, parent: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = parent("ignores_everything")
    process.kill()
    process.communicate()
    wait_until(lambda: not any(is_alive(pid) for pid in rank_pids(tmp_path)))


def test_ranks_do_not_inherit_an_accelerator_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_USE_FSDP", "FSDP_VERSION"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "info")
    script = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"
    result = tmp_path / "environment.json"
    supervise(
        [sys.executable, "-c", script, str(result)],
        folder=RunFolder(tmp_path),
        environment={"FTCLI_PROFILE": "p.yaml"},
        result="environment.json",
    )
    seen = json.loads(result.read_text())
    assert not seen.keys() & {"RANK", "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_USE_FSDP", "FSDP_VERSION"}
    assert seen["ACCELERATE_LOG_LEVEL"] == "info" and seen["FTCLI_PROFILE"] == "p.yaml"
    assert seen["FTCLI_PARENT"] == str(os.getpid()) and len(seen["FTCLI_LAUNCHED"]) == 32


def test_signal_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    supervise([sys.executable, "-c", "pass"], folder=RunFolder(tmp_path), result=None)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)] == before


def test_supervise_ignores_files_of_an_earlier_launch(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_text("stop", "SIGTERM\n")
    folder.errors.mkdir()
    (folder.errors / "rank-1.json").write_text("{}")
    script = f"import os, sys; sys.exit(os.path.exists({str(tmp_path / 'stop')!r}))"
    supervise([sys.executable, "-c", script], folder=folder, result=None)


def test_another_machine_than_the_first_neither_clears_the_shared_folder_nor_writes_its_status(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.write_status("running", 3, 0)
    with pytest.raises(ValueError), record_failure(folder):
        raise ValueError("of an earlier run")
    folder.write_status("running", 3, 0)
    supervise([sys.executable, "-c", "pass"], folder=folder, result=None, owns_folder=False)
    assert (folder.errors / "rank-0.json").exists()
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    with pytest.raises(LaunchError, match="code 3"):
        supervise(command, folder=folder, result=None, owns_folder=False)
    assert folder.status()["state"] == "running"
    with pytest.raises(LaunchError, match="code 3"):
        supervise(command, folder=folder, result=None)
    assert folder.status()["state"] == "failed" and not list(folder.errors.iterdir())


CELL = """
import sys
from ftcli.runtime.run_folder import RunFolder
from ftcli.launch.supervisor import supervise
supervise([sys.executable, {script!r}, {folder!r}], folder=RunFolder({folder!r}), result=None)
print("the cell continues")
"""

PATIENT = """
import sys, time
from pathlib import Path
print("a line for the cell")
while not Path(sys.argv[1], "stop").exists(): time.sleep(0.05)
print("stopped on request")
"""


def test_supervise_with_an_interrupted_notebook_cell_stops_the_run_and_shows_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager_module = pytest.importorskip("jupyter_client.manager")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = tmp_path / "patient.py"
    script.write_text(PATIENT)
    manager, client = manager_module.start_new_kernel(kernel_name="python3")
    shown = ""

    def collect(message: dict[str, Any]) -> None:
        nonlocal shown
        if message["msg_type"] == "stream":
            shown += message["content"]["text"]
            if message["content"]["text"].startswith("a line for the cell"):
                manager.interrupt_kernel()

    reply = client.execute_interactive(
        CELL.format(script=str(script), folder=str(tmp_path / "run")), output_hook=collect, timeout=240
    )
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    assert reply["content"]["status"] == "ok"
    for line in ("SIGINT: stopping after the current step", "stopped on request", "the cell continues"):
        assert line in shown
