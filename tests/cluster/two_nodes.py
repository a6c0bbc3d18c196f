"""A real Slurm of two nodes with one CPU each on this machine, with its own munge; root is needed.

Slurm and munge of the machine are neither read nor changed: configuration, key, sockets, state and ports belong to
the fixture, and its daemons end with it.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.patience import OF_A_RUN, PATIENCE

PROGRAMS = (
    "slurmctld",
    "slurmd",
    "munged",
    "sbatch",
    "srun",
    "squeue",
    "scancel",
    "scontrol",
    "setpriv",
)
NODES = ("n1", "n2")
CONFIGURATION = """\
ClusterName=kit
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
CommunicationParameters=NoAddrCache
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,defer_batch
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
MinJobAge=600
KillWait=120
SlurmdTimeout=300
RebootProgram=/bin/false
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=1 RealMemory=2000 State=UNKNOWN
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=1 RealMemory=2000 State=UNKNOWN
PartitionName=two Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
"""


def obstacle() -> str | None:
    """Return why Slurm cannot be started here, or None if it can."""
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"Slurm is not installed: no {', '.join(missing)} (Debian: slurm-wlm and munge)"
    return None if os.geteuid() == 0 else "slurmd and its own munged need root"


@dataclass(frozen=True)
class Cluster:
    """A running Slurm."""

    folder: Path

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables that make Slurm's commands use this instance."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def ask(self, *command: str) -> str:
        """Return the output of a Slurm command."""
        answer = subprocess.run(
            command,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=OF_A_RUN,
            check=False,
        )
        assert answer.returncode == 0, f"{command}: {answer.stderr}"
        return answer.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job as named by Slurm."""
        return self.ask("squeue", "--states=all", "--noheader", "--format=%T", "--jobs", job)

    def wait(self, job: str, *states: str) -> str:
        """Wait until a job is in one of the states. Return the state."""
        deadline = time.monotonic() + 4 * OF_A_RUN
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}: {self.logs()}"
            time.sleep(0.2)
        return state

    def logs(self) -> str:
        """Return the last lines of the daemons' logs."""
        texts = (path.read_text()[-1500:] for path in sorted(self.folder.glob("slurm*.log")))
        return "\n".join(texts)


@contextmanager
def two_nodes(folder: Path) -> Iterator[Cluster]:
    """Start both nodes and the controller. All processes are ended and files removed afterwards.

    A requeued job waits until its old credential has expired: 10 s here, and two minutes elsewhere.
    """
    folder.chmod(0o755)
    (folder / "state").mkdir()
    ports = dict(zip(("controller", "first", "second"), _free_ports(3), strict=True))
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(folder=folder, host=host, **ports)
    (folder / "slurm.conf").write_text(text)
    cluster = Cluster(folder)
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        daemons.append(_munged(folder))
        daemons.append(_start(cluster, "slurmctld", "-D"))
        daemons += [_start(cluster, "slurmd", "-D", "-N", node) for node in NODES]
        _wait_until_idle(cluster)
        yield cluster
    finally:
        _end(daemons)
        _end_steps(folder)


def _munged(folder: Path) -> subprocess.Popen[bytes]:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    socket_path = folder / "munge.socket"
    socket_options = [
        f"--{name}={folder}/munge.{name}"
        for name in ("socket", "pid-file", "log-file", "seed-file")
    ]
    daemon = subprocess.Popen(
        ("munged", "--foreground", "--force", f"--key-file={key}", *socket_options),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + PATIENCE
    while not socket_path.exists():
        assert daemon.poll() is None, "munged ended"
        assert time.monotonic() < deadline, "munged does not listen"
        time.sleep(0.05)
    return daemon


def _start(cluster: Cluster, *command: str) -> subprocess.Popen[bytes]:
    log = (cluster.folder / f"slurm-{command[0]}-{command[-1]}.out.log").open("wb")
    with log:
        return subprocess.Popen(
            # A killed test must not leave the daemons behind.
            ("setpriv", "--pdeathsig", "TERM", *command),
            env=cluster.environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _wait_until_idle(cluster: Cluster) -> None:
    deadline = (
        time.monotonic() + OF_A_RUN
    )  # The time is for two nodes, a controller and their handshakes.
    states: list[str] = []
    while states != ["idle", "idle"]:
        assert time.monotonic() < deadline, f"the nodes are {states}: {cluster.logs()}"
        time.sleep(0.2)
        with suppress(AssertionError, subprocess.TimeoutExpired):
            states = cluster.ask("sinfo", "--noheader", "--Node", "--format=%t").split()


def _end(daemons: list[subprocess.Popen[bytes]]) -> None:
    """End the daemons from the last to the first, and their remaining steps."""
    family: list[psutil.Process] = []
    for daemon in reversed(daemons):
        with suppress(psutil.NoSuchProcess):
            family += [psutil.Process(daemon.pid), *psutil.Process(daemon.pid).children(True)]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)
        family = psutil.wait_procs(family, 5)[1]
    for daemon in daemons:
        daemon.wait()


def _end_steps(folder: Path) -> None:
    """End remaining steps of running jobs and their srun, which outlive Slurm's daemons."""
    remaining = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            ours = process.environ().get("SLURM_CONF") == str(folder / "slurm.conf")
            # slurmstepd overwrites its environment, but the name of its log remains.
            is_step = process.name() == "slurmstepd"
            if ours or (is_step and str(folder) in str(process.open_files())):
                process.kill()
                remaining.append(process)
    psutil.wait_procs(remaining, PATIENCE)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [server.getsockname()[1] for server in sockets]
    for server in sockets:
        server.close()
    return ports
