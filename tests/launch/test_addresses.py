"""How ranks find each other on machines whose name or loopback interface is of no use."""

import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from parakit.cluster.checks import host
from parakit.cluster.checks.result import FAIL, PASS, WARN, CheckResult
from parakit.cluster.nodes import Nodes, Rendezvous
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.launch import preflight
from parakit.launch.compose import torchrun_command
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.preflight import check_launch
from parakit.launch.train import compose_job
from tests.small import write_documents

NO_NAME = "nosuchhost.invalid"

RANK = r"""
import datetime, os, socket
import torch.distributed as dist

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
dist.barrier()
# One write per line: print() may write a line and its end apart, and two ranks share the pipe.
os.write(1, f"rank {dist.get_rank()} of {socket.gethostname()}\n".encode())
"""

CHECKS = """
from parakit.cluster.checks import host

for result in (host.check_loopback(), host.check_host_name()):
    print(result.status, result.finding, result.fix, sep="|")
"""


def unshared(*arguments: str) -> tuple[str, ...]:
    """The command line before a command that runs in namespaces of its own, as their root."""
    prefix_words = ("unshare", "--user", "--map-root-user", *arguments)
    if (
        shutil.which("unshare") is None
        or subprocess.run((*prefix_words, "true"), check=False).returncode
    ):
        pytest.skip("this machine does not allow user namespaces (unshare --user)")
    return prefix_words


def without_a_name(*command: str) -> subprocess.CompletedProcess[str]:
    script = f"hostname {NO_NAME} && exec {shlex.join(command)}"
    prefix_words = (*unshared("--uts"), "bash", "-c", script)
    return subprocess.run(prefix_words, cwd=ROOT, capture_output=True, text=True, check=False)


def test_ranks_of_a_machine_whose_name_has_no_address_find_each_other(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    done = without_a_name(*torchrun_command(2, sys.executable), str(program))
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of {NO_NAME}" for rank in (0, 1)]


def test_the_doctor_names_a_host_without_an_address_and_what_follows() -> None:
    loopback, name = without_a_name(sys.executable, "-c", CHECKS).stdout.splitlines()
    assert loopback.startswith(f"{PASS}|")
    assert name.startswith(f"{WARN}|it has no address (")
    assert f"runs on this machine do without; for runs over several, give {NO_NAME} one" in name


def test_the_doctor_names_a_loopback_interface_that_is_down() -> None:
    command = (*unshared("--net"), sys.executable, "-c", CHECKS)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    loopback, _ = done.stdout.splitlines()
    assert loopback.startswith(
        f"{FAIL}|nothing can be connected to at 127.0.0.1 (Network is unreach"
    )
    assert "'ip link set lo up' as root" in loopback


def test_a_name_that_is_another_machines_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("192.0.2.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: elsewhere)
    result = host.check_host_name()
    assert (result.status, result.finding) == (WARN, "its address is not one of this machine's")
    assert "192.0.2.1" in result.fix


def test_a_run_without_a_loopback_interface_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_documents(tmp_path / "mine", [36] * 60)
    options = Options(data=prefix, runs=tmp_path)
    launch = compose_job(parse_target("train-dp2-gpt2-tiny-2cpu").with_options(options))
    monkeypatch.setattr(preflight, "check_loopback", lambda: CheckResult(FAIL, "", "it is", "do"))
    with pytest.raises(LaunchError, match="it is; do"):
        check_launch(launch)


def test_node_0_is_refused_under_an_address_that_does_not_resolve(tmp_path: Path) -> None:
    prefix = write_documents(tmp_path / "mine", [36] * 60)
    nodes = Nodes(2, 0, NO_NAME)
    options = Options(data=prefix, runs=tmp_path, nodes=nodes)
    launch = compose_job(parse_target("train-dp2-gpt2-tiny-2cpu").with_options(options))
    with pytest.raises(LaunchError, match=rf"MASTER_ADDR={NO_NAME} has no address on this machine"):
        check_launch(launch)
    # A cluster may give the name an address after other nodes have begun to wait for it.
    check_launch(replace(launch, nodes=replace(nodes, rank=1)))


def test_nodes_of_a_c10d_rendezvous_are_known_by_their_real_address() -> None:
    address = "127.0.0.1"
    nodes = Nodes(2, 1, "10.0.0.1", rendezvous=Rendezvous.C10D, local_address=address)
    flags = nodes.torchrun_flags(1)
    assert flags[flags.index("--local-addr") + 1] == address
    assert "--local-addr" not in replace(nodes, local_address=None).torchrun_flags(1)
