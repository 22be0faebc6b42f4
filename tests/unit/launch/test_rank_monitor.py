"""A rank that the system kills writes no record: the parent names it, and not the ranks that lost a connection."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ftcli.launch.rank_monitor import STARTING_SECONDS, RankMonitor
from ftcli.launch.supervisor import LOSS_GRACE_SECONDS, LaunchError, supervise
from ftcli.runtime.run_folder import HEARTBEATS, RunFolder

ROOT = Path(__file__).resolve().parents[3]
ENDS_OTHERS = ", and the other ranks wait for it: ending all processes"
DIED = "rank 1 died without recording an error, as when the system kills a process"

# Two ranks below a launcher that waits for both, as torchrun does for half a minute.
LAUNCHER = """
import os, subprocess, sys
ranks = [
    subprocess.Popen([sys.executable, "-c", os.environ["RANK_SCRIPT"], sys.argv[1]],
                     env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                          "LOCAL_WORLD_SIZE": "2"})
    for rank in range(2)
]
sys.exit(max(abs(rank.wait()) for rank in ranks))
"""
RANK = """
import os, signal, sys, time
{start}
from ftcli.runtime.errors import InputError
from ftcli.runtime.failures import record_failure
from ftcli.runtime.heartbeat import Heartbeat
from ftcli.runtime.run_folder import RunFolder
folder, rank, other = RunFolder(sys.argv[1]), int(os.environ["RANK"]), 1 - int(os.environ["RANK"])
beats = folder.path / "heartbeats"
{middle}
while rank == 1 and not (beats / "rank-0.json").exists(): time.sleep(0.01)  # the main rank clears the folder first
with record_failure(folder), Heartbeat(folder):
    while not (beats / f"rank-{other}.json").exists(): time.sleep(0.01)
    (folder.path / f"saw-{other}").touch()
    while not (folder.path / f"saw-{rank}").exists(): time.sleep(0.01)  # its heartbeat goes when it ends
    if rank == 0: folder.write_status("running", 7, 0)
    while folder.status().get("state") not in ("running", "done"): time.sleep(0.01)
    {body}
if rank == 0: folder.write_status("done", 8, 0)
"""
# The launcher waits for rank 0 first: rank 1 is a zombie then.
KILLED = """import json, psutil
    peer = psutil.Process(json.loads((beats / "rank-1.json").read_text())["process"])
    if rank == 1: os.kill(os.getpid(), signal.SIGKILL)
    while peer.status() != "zombie": time.sleep(0.01)
    """
Launch = Callable[..., None]


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """Return a function that supervises two ranks which do what `body` says, in the run folder tmp_path/run."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr("ftcli.launch.supervisor.FAILURE_GRACE_SECONDS", 15.0)  # not for a rank that was killed
    monkeypatch.setattr("ftcli.launch.supervisor.LOSS_GRACE_SECONDS", 1.0)
    monkeypatch.setattr("ftcli.launch.rank_monitor.STARTING_SECONDS", 0.5)
    monkeypatch.setattr("ftcli.launch.supervisor.TERMINATE_SECONDS", 1.0)

    def run(body: str, start: str = "", middle: str = "") -> None:
        script = RANK.replace("{body}", body).replace("{start}", start).replace("{middle}", middle)
        monkeypatch.setenv("RANK_SCRIPT", script)
        supervise([sys.executable, "-c", LAUNCHER, str(tmp_path / "run")], folder=RunFolder(tmp_path / "run"))

    return run


@pytest.mark.parametrize("peer", ["raise ConnectionError('reset by peer')", "time.sleep(600)"])
def test_monitor_reports_a_killed_rank_for_any_end_of_its_peer(
    peer: str, launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(LaunchError, match=DIED) as caught:
        launch(KILLED + peer)
    assert caught.value.exit_code == 1
    printed = capsys.readouterr().err.splitlines()
    assert printed[-1] == str(caught.value)
    assert any(ENDS_OTHERS in line for line in printed) == ("sleep" in peer)
    status = RunFolder(tmp_path / "run").status()
    assert (status["state"], status["step"]) == ("failed", 7)
    assert status["error"].startswith(DIED)
    assert status["error"].endswith("rank 0: ConnectionError: reset by peer") == ("raise" in peer)


# Not forever: without the monitor the test fails and does not hang.
HANG = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60); os._exit(1)"
WHILE_STARTING = {
    "at once": f"if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n{HANG}",
    "while importing": f"if os.environ['RANK'] == '1': time.sleep(1); os.kill(os.getpid(), signal.SIGKILL)\n{HANG}",
    "before its heartbeat": f"if rank == 1: time.sleep(0.5); os.kill(os.getpid(), signal.SIGKILL)\n{HANG}",
}


@pytest.mark.parametrize("when", WHILE_STARTING)
def test_monitor_with_a_rank_that_is_killed_while_it_starts_ends_the_others(
    when: str, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = "middle" if when == "before its heartbeat" else "start"
    with pytest.raises(LaunchError, match=DIED):
        launch("pass", **{place: WHILE_STARTING[when]})
    assert ENDS_OTHERS in capsys.readouterr().err


def test_monitor_time_until_a_killed_rank_is_named_is_below_ten_seconds() -> None:
    look_seconds = 1.0
    assert look_seconds + LOSS_GRACE_SECONDS + STARTING_SECONDS < 10


def test_monitor_of_a_rank_with_an_error_record_does_not_report_a_kill(launch: Launch) -> None:
    with pytest.raises(LaunchError, match="^rank 0: ValueError: boom$"):
        launch("if rank == 0: raise ValueError('boom')\n    time.sleep(0.5)")


# The parent looks in between.
ENDING_WELL = {
    "after the result": {"body": "time.sleep(rank)"},
    "before the result": {"body": "time.sleep(1.5 if rank == 1 else 4)"},
    "without a heartbeat": {
        "body": "pass",
        "middle": "time.sleep(1.5 + 5 * rank)\nif rank == 0: folder.write_status('done', 8, 0)\nsys.exit()",
    },
}


@pytest.mark.parametrize("when", ENDING_WELL)
def test_monitor_ignores_ranks_that_ended_successfully(
    when: str, launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launch(**ENDING_WELL[when])
    assert "died" not in capsys.readouterr().err
    assert RunFolder(tmp_path / "run").status()["state"] == "done"


RANK_WITH_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print("began", flush=True)
sys.stdin.readline()
child.communicate()
print("ended", flush=True)
sys.stdin.read()
"""


def test_monitor_with_a_process_that_a_rank_has_started_may_end_before_it(tmp_path: Path) -> None:
    """Loader processes have the variables of their rank."""
    ours = os.environ | {"FTCLI_LAUNCHED": "ours", "RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    command = [sys.executable, "-c", RANK_WITH_CHILD]
    monitor = RankMonitor(RunFolder(tmp_path), "ours")
    with subprocess.Popen(command, env=ours, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdin and rank.stdout and rank.stdout.readline() == "began\n"
        monitor.check(os.getpid())
        another = RankMonitor(RunFolder(tmp_path), "another")
        another.check(os.getpid())
        assert monitor.has_seen_all_ranks and not another.has_seen_all_ranks
        print("end", file=rank.stdin, flush=True)
        assert rank.stdout.readline() == "ended\n"
        monitor.check(os.getpid())
        assert monitor.lost == []
        rank.kill()
    monitor.check(os.getpid())
    assert monitor.lost == [0]


def test_monitor_only_ranks_of_this_launch_are_looked_at(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / HEARTBEATS).mkdir()
    for rank, launch in ((0, "another machine's"), (3, "ours"), (1, "ours")):
        text = json.dumps({"process": gone.pid, "launch": launch})
        (tmp_path / HEARTBEATS / f"rank-{rank}.json").write_text(text)
    monitor = RankMonitor(RunFolder(tmp_path), "ours")
    monitor.check()
    assert monitor.lost == [1, 3]
    assert monitor.describe_lost_ranks().startswith("ranks 1, 3 died")


def test_monitor_of_ranks_without_an_error_folder_does_not_report_a_kill(tmp_path: Path) -> None:
    monitor = RankMonitor(RunFolder(tmp_path / "run"), "ours")
    monitor.lost = [1]
    (tmp_path / "run").symlink_to("/dev/full")
    assert monitor.describe_lost_ranks().startswith(
        f"rank 1 failed and could not record the reason, because no file can be written to {tmp_path / 'run'}"
    )
