import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from parakit.config.files import ROOT
from parakit.launch.supervise import hang
from parakit.launch.supervise.hang import HangWatch, collect_stacks
from tests.patience import PATIENCE, until

RANK = """
import time
from megatron_patches.stacks import dump_stacks_on_request
dump_stacks_on_request()
def stuck_here():
    print("ready", flush=True)
    time.sleep(600)
stuck_here()
"""

COMPILES = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

@triton.jit
def kernel(x, n: tl.constexpr):
    tl.store(x + tl.arange(0, n), 1.0)

source = ASTSource(kernel, {"x": "*fp32", "n": "constexpr"}, {"n": 128})
"""
"""Needs no GPU."""


def test_a_log_that_grows_is_no_hang_and_one_that_stalls_is(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("a")
    watch = HangWatch(0.3)
    for _ in range(4):
        assert not watch.is_hanging(log)
        time.sleep(0.1)
        log.write_text(log.read_text() + "a")
    assert not watch.is_hanging(log)
    time.sleep(0.35)
    assert watch.is_hanging(log)


@contextmanager
def started(code: str, folder: Path) -> Iterator[psutil.Popen]:
    """A rank, from a file: Triton reads the source of what it compiles."""
    own_variables = {
        "KIT_STACKS": str(folder),
        "RANK": "3",
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }
    program = folder / "program.py"
    program.write_text(code)
    process = psutil.Popen(
        (sys.executable, str(program)),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **own_variables},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            process.communicate()


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[psutil.Popen]:
    with started(RANK, tmp_path) as process:
        yield process


@pytest.mark.parametrize("was_stopped", [False, True])
def test_ranks_say_where_they_are_also_when_they_were_stopped(
    rank: psutil.Popen, tmp_path: Path, was_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang, "STACK_SECONDS", PATIENCE)
    if was_stopped:
        rank.send_signal(signal.SIGSTOP)
        until(lambda: rank.status() == psutil.STATUS_STOPPED, "the rank was not stopped")
    log = tmp_path / "log.txt"
    log.touch()
    error = HangWatch(5).error(collect_stacks({3: rank}, tmp_path), tmp_path)
    assert "stuck_here" in (tmp_path / "rank3.txt").read_text()
    assert error.rank == (3 if was_stopped else None)
    assert "nothing was logged for 5 s" in str(error)
    assert ("Rank 3 was stopped" in str(error)) == was_stopped


def test_a_rank_answers_also_after_triton_has_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(hang, "STACK_SECONDS", PATIENCE)
    begun, waits = RANK.split("def stuck_here")
    compiled = "triton.compile(source, GPUTarget('cuda', 90, 32))\n"
    with started(f"{COMPILES}{begun}{compiled}def stuck_here{waits}", tmp_path) as process:
        collect_stacks({3: process}, tmp_path)
    assert "stuck_here" in (tmp_path / "rank3.txt").read_text()


def test_a_process_that_would_die_of_the_question_is_not_asked(tmp_path: Path) -> None:
    process = psutil.Popen(("sleep", "600"))
    try:
        collect_stacks({0: process}, tmp_path)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_process_that_has_just_died_is_not_asked(tmp_path: Path) -> None:
    process = psutil.Popen(("true",))
    process.wait()
    collect_stacks({0: process}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_is_ended_says_where_it_was_and_ends_by_that_signal(
    rank: psutil.Popen, tmp_path: Path
) -> None:
    rank.send_signal(signal.SIGTERM)
    rank.communicate(timeout=PATIENCE)
    assert rank.returncode == -signal.SIGTERM
    assert "stuck_here" in (tmp_path / "rank3.txt").read_text()
    assert (tmp_path / "rank3.pkl").exists()
