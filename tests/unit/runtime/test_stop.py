"""The training process's side of trouble: records, stop requests, peers, loader workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from ftcli.runtime.errors import InputError
from ftcli.runtime.failures import failure_records, record_failure, watch_peers
from ftcli.runtime.run_folder import RunFolder
from ftcli.runtime.stop import REPEAT_SECONDS, Stopped, StopRequest, ignore_signals_in_workers

ROOT = Path(__file__).resolve().parents[3]
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def run_script(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
    )


def test_record_failure_of_an_error_writes_a_record_and_raises_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(ValueError, match="boom"), record_failure(tmp_path):
        raise ValueError("boom")
    (record,) = failure_records(tmp_path)
    assert (record["rank"], record["exit_code"], record["message"]) == (3, 1, "ValueError: boom")
    assert record["traceback"].rstrip().endswith("ValueError: boom")
    assert [path.name for path in (tmp_path / "errors").iterdir()] == ["rank-3.json"]


def test_wrong_input_is_recorded_with_exit_code_2(tmp_path: Path) -> None:
    with pytest.raises(InputError), record_failure(tmp_path):
        raise InputError("no rows", hint="write some")
    (record,) = failure_records(tmp_path)
    assert record["exit_code"] == 2
    assert record["message"] == "no rows\n    write some"


def test_record_failure_of_a_clean_exit_writes_no_record(tmp_path: Path) -> None:
    with record_failure(tmp_path):
        pass
    with pytest.raises(SystemExit), record_failure(tmp_path):
        sys.exit(0)
    assert failure_records(tmp_path) == []


def test_record_failure_changes_status_running_to_failed_and_leaves_done(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for state, expected in (("running", "failed"), ("done", "done")):
        folder.write_status(state, 4, 0)
        with pytest.raises(ValueError), record_failure(folder):
            raise ValueError("boom")
        assert (folder.status()["state"], folder.status()["step"]) == (expected, 4)


def test_record_failure_under_torchrun_writes_its_error_file(tmp_path: Path) -> None:
    script = (
        "import sys; from ftcli.runtime.failures import record_failure\n"
        "with record_failure(sys.argv[1]): raise ValueError('boom')"
    )
    file = tmp_path / "elastic.json"
    run_script(script, str(tmp_path), TORCHELASTIC_ERROR_FILE=str(file))
    assert json.loads(file.read_text())["message"]["message"] == "ValueError: boom"


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_stop_request_listening_records_a_signal_and_restores_handlers(tmp_path: Path, number: signal.Signals) -> None:
    before = [signal.getsignal(item) for item in STOP_SIGNALS]
    with StopRequest.listening(tmp_path) as stop:
        assert not stop.requested()
        signal.raise_signal(number)
        assert stop.requested() and stop.reason == number.name
    assert [signal.getsignal(item) for item in STOP_SIGNALS] == before


def test_stop_request_second_signal_calls_the_previous_handler(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), StopRequest.listening(tmp_path):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)


def test_stop_request_with_a_signal_that_a_wrapper_sends_to_us_and_to_our_group_is_one(tmp_path: Path) -> None:
    now = [100.0]
    with StopRequest(tmp_path, clock=lambda: now[0]) as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        assert stop.reason == "SIGINT"
        now[0] += REPEAT_SECONDS
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("seconds", "step", "ends"), [(4.9, "0", False), (5.0, "0", True), (0.6, None, True)])
def test_stop_request_with_the_same_signal_again_counts_once_for_five_seconds_in_a_slurm_step(
    seconds: float, step: str | None, ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if step is not None:
        monkeypatch.setenv("SLURM_STEP_ID", step)
    now = [100.0]
    with StopRequest(tmp_path, clock=lambda: now[0]) as stop:
        signal.raise_signal(signal.SIGINT)
        now[0] += seconds
        with pytest.raises(KeyboardInterrupt) if ends else nullcontext():
            signal.raise_signal(signal.SIGINT)
        assert stop.reason == "SIGINT"


def test_stop_request_in_a_slurm_step_with_a_signal_of_another_kind_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    with pytest.raises(KeyboardInterrupt), StopRequest(tmp_path, clock=lambda: 100.0):
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)


def test_stop_request_with_a_second_signal_ends_a_run_in_the_background_too(tmp_path: Path) -> None:
    script = """
import signal, sys
from ftcli.runtime.stop import StopRequest
signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell does for what it starts with &
with StopRequest.listening(sys.argv[1]):
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGINT)
"""
    assert run_script(script, str(tmp_path)).returncode == -signal.SIGINT


@pytest.mark.parametrize("handler", ["StopRequest.listening(sys.argv[1])", "Signals()"])
def test_command_that_has_stopped_survives_the_same_signal_until_it_ends(handler: str, tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
from ftcli.launch.supervisor import Signals
from ftcli.runtime.stop import StopRequest, ending_with_process
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGTERM):
        kill(pid, number)  # Python has removed its handlers by then
late = Late()
with ending_with_process():
    with {handler}:
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    sys.exit(75)
"""
    assert run_script(script, str(tmp_path), SLURM_STEP_ID="0").returncode == 75


def test_command_that_has_stopped_ends_by_a_later_or_another_signal(tmp_path: Path) -> None:
    script = """
import signal, sys, time
from ftcli.runtime.stop import REPEAT_SECONDS, StopRequest, ending_with_process
with ending_with_process():
    with StopRequest.listening(sys.argv[1]):
        signal.raise_signal(signal.SIGTERM)
    time.sleep(REPEAT_SECONDS if sys.argv[2] == "SIGTERM" else 0)
    signal.raise_signal(signal.Signals[sys.argv[2]])
"""
    for name in ("SIGTERM", "SIGUSR1"):
        assert run_script(script, str(tmp_path), name).returncode == -signal.Signals[name]


def test_stop_request_with_a_time_limit_counts_from_the_start_of_the_launch_and_only_once_the_clock_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FTCLI_STARTED", str(time.monotonic() - 120))
    stop = StopRequest()
    assert not stop.requested()
    stop.start_clock(None)
    assert not stop.requested()
    stop.start_clock(2.5)
    assert not stop.requested()
    stop.start_clock(1.9)
    assert stop.requested() and stop.reason == "train.max_minutes"


def test_stop_request_with_a_first_signal_after_the_time_limit_is_not_the_second(tmp_path: Path) -> None:
    with StopRequest.listening(tmp_path) as stop:
        stop.start_clock(0.0)
        assert stop.requested()
        signal.raise_signal(signal.SIGTERM)  # would end this process
    assert stop.reason == "train.max_minutes"


def test_stop_request_with_a_signal_that_torchrun_passes_on_again_is_not_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with StopRequest.listening(tmp_path) as stop:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)  # would end this process
        assert stop.reason == "SIGTERM"


def test_stop_request_with_nothing_to_save_stops_at_once(tmp_path: Path) -> None:
    with StopRequest.listening(tmp_path) as stop, pytest.raises(Stopped), stop.raise_on_signal():
        signal.raise_signal(signal.SIGUSR1)
    assert stop.reason == "SIGUSR1"


def test_stop_request_with_a_signal_before_the_block_that_may_be_interrupted_stops_there(tmp_path: Path) -> None:
    with StopRequest.listening(tmp_path) as stop:
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(Stopped), stop.raise_on_signal():
            pytest.fail("the block was entered")


@pytest.mark.parametrize("launched", [False, True])
def test_stop_request_with_a_child_forked_meanwhile_dies_of_a_signal_as_any_process(launched: bool) -> None:
    script = (
        f"import os, signal, time; os.environ.update({ ({'FTCLI_LAUNCHED': 'x'} if launched else {}) })\n"
        "from ftcli.runtime.stop import StopRequest\n"
        "ready, tell = os.pipe()\n"
        "with StopRequest():\n"
        "    child = os.fork()\n"
        "    if not child: os.write(tell, b'.'); time.sleep(600); os._exit(0)\n"
        "    os.read(ready, 1)  # Python drops a signal that arrives while it forks\n"
        "    os.kill(child, signal.SIGTERM)\n"
        "    print(os.WTERMSIG(os.waitpid(child, 0)[1]))"
    )
    assert run_script(script).stdout == "15\n"


def test_below_our_parent_only_the_file_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCLI_LAUNCHED", "x")
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    with StopRequest.listening(tmp_path) as stop:
        signal.raise_signal(signal.SIGTERM)  # as it comes to every process of a job
        signal.raise_signal(signal.SIGTERM)
        assert not stop.requested(now=True)
        (tmp_path / "stop").write_text("SIGUSR1\n")
        assert stop.requested(now=True) and stop.reason == "SIGUSR1"
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before


def test_stop_request_file_is_read_by_one_process_per_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTCLI_LAUNCHED", "x")
    monkeypatch.setenv("LOCAL_RANK", "1")
    (tmp_path / "stop").write_text("SIGTERM\n")
    with StopRequest.listening(tmp_path) as stop:
        assert not stop.requested()


def test_stop_request_with_a_stop_file_left_by_an_earlier_run_does_not_stop_this_one(tmp_path: Path) -> None:
    (tmp_path / "stop").write_text("SIGTERM\n")
    with StopRequest.listening(tmp_path) as stop:
        assert not stop.requested()


def test_stop_request_file_is_read_at_most_twice_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with StopRequest.listening(tmp_path) as stop:
        assert not stop.requested()
        (tmp_path / "stop").touch()
        now[0] += 0.45
        assert not stop.requested()
        now[0] += 0.1
        assert stop.requested() and stop.reason == "stop file"


def test_stop_request_without_a_folder_is_never_set() -> None:
    assert not StopRequest().requested()


HANGS = """
import json, sys, time; from pathlib import Path; from ftcli.runtime import failures
looks, now = [], 0.0
time.monotonic = lambda: looks.append(now) or now  # a clock that stands
failures.watch_peers(sys.argv[1])
record = {"rank": 1, "time": time.time() + float(sys.argv[2]), "exit_code": 1, "message": "m", "traceback": ""}
errors = Path(sys.argv[1], "errors"); errors.mkdir(exist_ok=True)
(errors / ".rank-1").write_text(json.dumps(record))
(errors / ".rank-1").replace(errors / "rank-1.json")  # as a rank writes it: whole, or not there
while len(looks) < 4: time.sleep(0.01)  # the record has been seen twice
print("waits", flush=True)
now = failures.PEER_GRACE_SECONDS + 1
time.sleep(600)
"""


@pytest.mark.parametrize("clock", [-7200, 7200])
def test_hanging_rank_ends_after_a_peer_failed_for_any_clocks(clock: int, tmp_path: Path) -> None:
    result = run_script(HANGS, str(tmp_path), str(clock), RANK="0", WORLD_SIZE="2")
    assert result.returncode == 1 and "another rank has failed" in result.stderr
    assert result.stdout == "waits\n"


def test_watch_peers_of_one_process_watches_nothing_after_its_run_has_failed(tmp_path: Path) -> None:
    """A process that outlives its run, as a notebook does, was ended when its variable RANK was set later."""
    watch_peers(tmp_path)
    assert "ftcli-peers" not in {thread.name for thread in threading.enumerate()}


def test_stop_request_with_a_failure_of_an_earlier_run_ends_no_rank_though_its_clock_was_ahead(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    record = {"rank": 1, "time": time.time() + 7200, "exit_code": 1, "message": "m", "traceback": ""}
    (tmp_path / "errors" / "rank-1.json").write_text(json.dumps(record))
    script = (
        "import sys, time; from ftcli.runtime import failures\n"
        "failures.PEER_GRACE_SECONDS = -1.0; failures.watch_peers(sys.argv[1]); time.sleep(1.5)"
    )
    assert run_script(script, str(tmp_path), RANK="0", WORLD_SIZE="2").returncode == 0


def test_failure_records_first_failure_is_the_one_written_first_though_its_clock_was_ahead(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    for rank, clock, written in ((1, 7200, 5), (0, 0, 6), (2, -7200, 7)):
        path = tmp_path / "errors" / f"rank-{rank}.json"
        path.write_text(json.dumps({"rank": rank, "time": time.time() + clock}))
        os.utime(path, (written, written))
    assert [record["rank"] for record in failure_records(tmp_path)] == [1, 0, 2]


def test_parent_watch_with_a_dead_parent_ends_the_process(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    script = "import time; from ftcli.runtime.failures import watch_parent; watch_parent(); time.sleep(600)"
    result = run_script(script, FTCLI_PARENT=str(gone.pid))
    assert result.returncode == 1 and "is gone" in result.stderr


def test_parent_watch_ends_the_process_though_nobody_reads_its_output() -> None:
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    reading, writing = os.pipe()
    os.close(reading)
    script = "import time; from ftcli.runtime.failures import watch_parent; watch_parent(); time.sleep(600)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "FTCLI_PARENT": str(gone.pid)}
    ended = subprocess.run([sys.executable, "-c", script], env=environment, stderr=writing)
    os.close(writing)
    assert ended.returncode == 1


def test_parent_watch_ignores_clock_changes() -> None:
    script = (
        "import time, psutil; from ftcli.runtime.failures import watch_parent\n"
        "watch_parent()\n"
        "booted = psutil._pslinux.boot_time()  # which the system derives from its clock\n"
        "psutil._pslinux.boot_time = lambda: booted + 3600.0\n"
        "time.sleep(1.5)"
    )
    result = run_script(script, FTCLI_PARENT=str(os.getpid()))
    assert result.returncode == 0, result.stderr


def test_loader_workers_ignore_stop_signals() -> None:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    ignore_signals_in_workers(0)
    ignored = [signal.getsignal(number) for number in STOP_SIGNALS]
    for number, handler in before.items():
        signal.signal(number, handler)
    assert ignored == [signal.SIG_IGN] * 3
