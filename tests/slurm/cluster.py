"""Start and end a Slurm cluster of two nodes on this machine: munged, slurmctld and two slurmd, in a folder of its own.

Needs root and Debian's packages slurm-wlm and munge. Both nodes are this machine. Usage by hand:

    python tests/slurm/cluster.py FOLDER COMMAND ...    # runs a command inside the cluster, then ends it
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Two partitions over the same nodes: a job of `urgent` preempts the jobs of `normal`, which are requeued.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdSpoolDir={folder}/spool-%n
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
KillWait=30
ReturnToService=2
MpiDefault=none
NodeName={nodes[0]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=1000
NodeName={nodes[1]} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=1000
PartitionName=normal Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL Default=NO MaxTime=INFINITE State=UP PriorityTier=10
"""


def free_ports(count: int) -> list[int]:
    """Return ports that nothing listens on, below those that the system gives to connections of other programs."""
    sockets: list[socket.socket] = []
    for port in random.sample(range(10_000, 20_000), 200):
        with suppress(OSError):
            sockets.append(socket.create_server(("127.0.0.1", port)))
        if len(sockets) == count:
            break
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def wait_until(command: list[str], expected: str, environment: dict[str, str], seconds: float) -> None:
    """Repeat a command until its output has a text; raise `RuntimeError` with its last output after some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        if expected in ended.stdout:
            return
        time.sleep(0.3)
    raise RuntimeError(f"{command}: no {expected!r} in {ended.stdout}{ended.stderr}")


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Run a cluster below a folder and yield the environment variables by which its commands find it."""
    nodes = ["node-a", "node-b"]
    for name in ("state", *(f"spool-{node}" for node in nodes)):
        (folder / name).mkdir(parents=True)
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(host=socket.gethostname(), folder=folder, nodes=nodes, ports=free_ports(3))
    )
    environment = {**os.environ, "SLURM_CONF": str(configuration)}
    munge = ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}"]
    munge += [f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munged.seed"]
    commands = [munge, ["slurmctld", "-D"], *(["slurmd", "-D", "-N", node] for node in nodes)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("ab") as out:
                program = ["/usr/sbin/" + command[0], *command[1:]]
                started.append(subprocess.Popen(program, env=environment, stdout=out, stderr=out))
            time.sleep(1)
        wait_until(["sinfo", "--noheader", "--partition=normal", "--format=%D %t"], "2 idle", environment, 60)
        yield environment
    finally:
        subprocess.run(["scancel", "--user=root"], env=environment, capture_output=True, timeout=30)
        for process in reversed(started):
            process.send_signal(signal.SIGTERM)
        for process in reversed(started):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


if __name__ == "__main__":
    with slurm_cluster(Path(sys.argv[1]).absolute()) as variables:
        sys.exit(subprocess.run(sys.argv[2:], env=variables).returncode)
