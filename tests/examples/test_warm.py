"""Ranks that are forked from a process which has imported Megatron: a run like any other."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from tests.examples.runs import ITERATIONS, Run, run_of
from tools.launch.compose import Launch
from tools.launch.execute import execute
from tools.launch.options import Options
from tools.launch.start import ensure_start_checkpoint
from tools.launch.supervise.warm import WarmMegatron
from tools.launch.target import parse_target
from tools.launch.train import compose_target, flags_of_grammar
from tools.records.measurements import read_communication
from tools.records.run import Status


@pytest.fixture(scope="module")
def options(
    tmp_path_factory: pytest.TempPathFactory, sample_prefix: Path, starting_weights: Path
) -> Options:
    runs = tmp_path_factory.mktemp("warm")
    (runs / ".start").symlink_to(starting_weights)
    data = str(sample_prefix)
    return Options(
        iterations=ITERATIONS, micro_batch_size=2, global_batch_size=8, data=data, runs=runs
    )


@pytest.fixture(scope="module")
def launch(options: Options) -> Iterator[Launch]:
    target = parse_target("train-tp2-gpt2-tiny-2cpu")
    plain = compose_target(target, flags_of_grammar(target), options)
    assert plain.can_be_forked
    with closing(WarmMegatron(plain.entry.path, plain.environment)) as warm:
        launch = replace(plain, warm=warm)
        ensure_start_checkpoint(launch, options, Console(quiet=True))
        yield launch


def test_a_forked_run_is_what_torchrun_makes(
    launch: Launch, options: Options, six: dict[str, Run]
) -> None:
    folder, _ = execute(launch, options.runs, Console(quiet=True), "tp2")
    forked, started = run_of(folder), six["tp2"]
    assert forked.status.status is Status.OK
    assert forked.losses == started.losses
    assert forked.parameters == started.parameters
    assert _sent(forked) == _sent(started)
    assert "torch.distributed.run" in (folder / "command.sh").read_text()
    assert {path.name for path in folder.iterdir()} == {
        path.name for path in started.folder.iterdir()
    }


@pytest.mark.slow
def test_a_forked_rank_that_is_killed_is_named_and_takes_the_others_with_it(
    launch: Launch, options: Options
) -> None:
    assert launch.warm is not None
    endless = replace(launch, iterations=500, flags=(*launch.flags, "--exit-interval", "500"))
    killer = threading.Thread(target=_kill_second_rank, args=(launch.warm.pid,))
    killer.start()
    folder, status = execute(endless, options.runs, Console(quiet=True), "tp2")
    killer.join()
    assert (status.status, status.rank) == (Status.CRASHED, 1)
    assert "SIGKILL" in status.reason
    assert _ranks(launch.warm.pid) == {}
    assert (folder / "status.json").is_file()


def _sent(run: Run) -> list[set[tuple[object, ...]]]:
    """By rank, which has its calls in the order of time that they took."""
    return [
        {
            (calls.group, calls.operation, calls.phase, calls.calls, calls.payload_bytes)
            for calls in rank.calls
        }
        for rank in read_communication(run.folder).ranks
    ]


def _ranks(pid: int) -> dict[str, psutil.Process]:
    return {
        process.name(): process
        for process in psutil.Process(pid).children(recursive=True)
        if process.status() != psutil.STATUS_ZOMBIE and process.name().startswith("rank")
    }


def _kill_second_rank(pid: int) -> None:
    while "rank1" not in _ranks(pid):
        time.sleep(0.1)
    _ranks(pid)["rank1"].send_signal(signal.SIGKILL)
