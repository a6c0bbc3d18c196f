"""Real runs of gpt2-tiny and moe-tiny on CPU ranks, which the tests of this folder share."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock, Semaphore, Thread
from typing import Any

from rich.console import Console

from parakit.artifacts import run as records
from parakit.config.files import ROOT
from parakit.config.run import Backend
from parakit.experiments.verify.verifier import ForkedRanks
from parakit.launch.compose import Launch
from parakit.launch.execute import execute_launch
from parakit.launch.initial_checkpoint import ensure_initial_checkpoint
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.supervise.warm import WarmMegatron
from parakit.launch.train import compose_job
from parakit.logs.scrape import scrape_log
from parakit.logs.scraped import ScrapedLog
from tests.examples.stopped import stopped
from tests.examples.warm_native import WarmNative
from tests.faults.killed import killed
from tests.native.pipelined import pipelines
from tests.patches.fused.updated import fused_updates
from tests.small import SMALL
from tests.verify.benched import quick_injected

ITERATIONS = 6


@dataclass(frozen=True)
class Run:
    """A finished run and its parsed log."""

    folder: Path
    status: records.StatusRecord
    record: records.RunRecord
    log: ScrapedLog

    @property
    def losses(self) -> list[float]:
        return [line.lm_loss for line in self.log.iterations if line.lm_loss is not None]

    @property
    def parameters(self) -> dict[tuple[int, int], int]:
        return {
            (count.tensor_rank, count.pipeline_rank): count.parameters
            for count in self.log.parameters
        }


def run_of(folder: Path) -> Run:
    """Return the run of a folder."""
    log = scrape_log(folder / records.LOG_FILE)
    return Run(folder, records.read_status(folder), records.read_run(folder), log)


Wanted = tuple[str, dict[str, object]]
"""Target, and its differences from the common options."""


class Trainer:
    """Trainer of targets in a single runs folder, from shared initial weights."""

    def __init__(self, runs: Path, data: Path) -> None:
        self.options = Options(
            iterations=ITERATIONS,
            micro_batch_size=2,
            global_batch_size=8,
            data=str(data),
            runs=runs,
        )
        self._starts: defaultdict[Path | None, Lock] = defaultdict(Lock)

    def __call__(
        self,
        name: str,
        ranks: ForkedRanks | None = None,
        warm: WarmMegatron | None = None,
        **changes: object,
    ) -> Run:
        """Train to the end. Ranks are forked by `ranks`, or for another backend by `warm`."""
        launch = replace(self.compose(name, **changes), warm=ranks.warm if ranks else warm)
        console = Console(quiet=True)
        # The initial checkpoint of the dense model is written in the same way as for a user.
        forked = ranks if launch.model.shape.experts else None
        with self._starts[launch.initial_checkpoint]:
            ensure_initial_checkpoint(launch, console, forked and forked.exit_code)
        folder, _ = execute_launch(launch, launch.job.options.runs, console, name)
        return run_of(folder)

    def compose(self, name: str, **changes: object) -> Launch:
        target = parse_target(name)
        return compose_job(target.with_options(self._options(changes)))

    def _options(self, changes: Mapping[str, Any]) -> Options:
        extra = (*SMALL, *changes.get("extra", ()))
        return replace(self.options, **{**changes, "extra": extra})


EVALUATED = {"extra": ("--eval-interval", str(ITERATIONS), "--eval-iters", "2")}
NATIVE = {"backend": Backend.NATIVE}
SIX = ("baseline", "dp2", "tp2", "sp2", "cp2", "pp2")


def dense(strategy: str, **changes: object) -> Wanted:
    return f"train-{strategy}-gpt2-tiny-{1 if strategy == 'baseline' else 2}cpu", changes


def of_experts(strategy: str, **changes: object) -> Wanted:
    return f"train-{strategy}-moe-tiny-{1 if strategy == 'baseline' else 2}cpu", changes


SINGLE = ("baseline", "dp2", "tp2", "zero1")
"""Runs that tests request by name, without the other runs of `six` or `eight`."""

FIXTURES: dict[str, dict[str, Wanted]] = {
    **{name: {name: dense(name)} for name in SINGLE},
    "six": {name: dense(name) for name in SIX},
    "eight": {name: dense(name) for name in (*SIX, "vpp2", "zero1")},
    "zero3": {"zero3": dense("zero3")},
    "refused": {"refused": dense("baseline", extra=("--check-for-spiky-loss",))},
    "native": {"native tp2": dense("tp2", **NATIVE)},
    "experts": {"experts": of_experts("baseline", **EVALUATED)},
    "ep2": {"ep2": of_experts("ep2")},
    "native_experts": {"native experts": of_experts("baseline", **EVALUATED, **NATIVE)},
    "spread_experts": {"spread experts": of_experts("ep2", **EVALUATED, **NATIVE)},
    "by_torchrun": {"tp2 by torchrun": dense("tp2")},
    "undisturbed": {
        "undisturbed": dense("dp2", iterations=12, global_batch_size=4, dropout=0.1, ledger=False)
    },
}
"""Runs that several tests need, by their fixture."""

FORKED = (
    *("baseline", "experts", "dp2", "sp2", "cp2", "vpp2", "zero1", "ep2"),
    *("tp2", "zero3", "refused", "undisturbed", "quick_injected", "pp2"),
    *("stopped", "killed"),
)
"""Runs whose start-up is not tested. Their ranks are forked from a single process that imported Megatron."""

FORKED_NATIVE = ("native experts", "native tp2", "spread experts")
"""Runs whose ranks are forked from a single process that imported torch."""

SCENARIOS: dict[str, Callable[[Path, Path, ForkedRanks | None], Any]] = {
    "killed": killed,
    "stopped": stopped,
    "quick_injected": quick_injected,
    "pipelines": pipelines,
    "fused_updates": fused_updates,
}
"""What happens to runs, by the fixture that gives what was found: called with a folder, the data and
ranks that can be forked."""

LANES = 2
"""Forked runs in turn, and beside them the others: a run leaves cores idle while it starts and ends."""

ALL_CORES = b"+"
"""Byte that is written to the process that trains runs once the other tests have ended."""


def runs_for(fixtures: Collection[str]) -> list[str]:
    """Return the unique names of the runs that tests with these fixtures need."""
    asked = [FIXTURES[fixture] for fixture in FIXTURES if fixture in fixtures]
    return list(dict.fromkeys(name for runs in asked for name in runs))


class SharedRuns:
    """The runs and scenarios that were asked for, made by a process of its own.

    Other tests run meanwhile, and some of them change the environment of their process. No process is started
    if nothing was asked for: `train` alone trains what a test tells it to.
    """

    def __init__(self, asked: Collection[str], runs: Path, data: Path, others_run: bool) -> None:
        self.trainer = Trainer(runs, data)
        self._names = runs_for(asked)
        names = (*(name for name in SCENARIOS if name in asked), *self._names)
        self._process: subprocess.Popen[bytes] | None = None
        if not names:
            return
        self._answer = runs / "shared.json"
        command = (sys.executable, "-m", "tests.examples.runs")
        self._process = subprocess.Popen(
            (*command, str(runs), str(data), str(self._answer), *names),
            cwd=ROOT,
            start_new_session=True,
            stdin=subprocess.PIPE,
            bufsize=0,
        )
        if not others_run:
            self._use_all_cores()

    @functools.cached_property
    def runs(self) -> dict[str, Run]:
        """Return all runs by name."""
        return {name: run_of(Path(self._made(name))) for name in self._names}

    def scenario(self, name: str) -> Any:
        """Return the result of a scenario."""
        return self._made(name)

    def stop(self) -> None:
        """Stop runs that still train."""
        if self._process is None:
            return
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.communicate()

    def _use_all_cores(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(ALL_CORES)

    def _made(self, name: str) -> Any:
        result = self._results[name]
        assert "failed" not in result, result["failed"]
        return result["made"]

    @functools.cached_property
    def _results(self) -> dict[str, dict[str, Any]]:
        self._use_all_cores()
        assert self._process is not None
        assert self._process.wait() == 0, "the shared runs could not be made; see above"
        results: dict[str, dict[str, Any]] = json.loads(self._answer.read_text())
        return results


def main(runs: str, data: str, answer: str, *names: str) -> None:
    """Train runs and scenarios by name, one at a time until all cores are free, and write their results."""
    trainer = Trainer(Path(runs), Path(data))
    wanted = {
        name: run for runs_of_fixture in FIXTURES.values() for name, run in runs_of_fixture.items()
    }
    permits = Semaphore(1)

    def permit_all() -> None:
        while os.read(0, 1):
            permits.release(LANES - 1)
        os.killpg(
            0, signal.SIGTERM
        )  # If the tests were killed, the runs that they wait for would otherwise continue training.

    def make(
        name: str, ranks: ForkedRanks | None, warm: WarmMegatron | None = None
    ) -> dict[str, Any]:
        with permits:
            try:
                if name in SCENARIOS:
                    return {"made": SCENARIOS[name](Path(runs), Path(data), ranks)}
                target, changes = wanted[name]
                return {"made": str(trainer(target, ranks, warm, **changes).folder)}
            except Exception:  # Only tests that need this run should fail.
                return {"failed": traceback.format_exc()}

    def make_all(names: Sequence[str], ranks: ForkedRanks | None) -> dict[str, dict[str, Any]]:
        return {name: make(name, ranks) for name in names}

    def make_native(names: Sequence[str]) -> dict[str, dict[str, Any]]:
        if not names:
            return {}
        with closing(WarmNative()) as warm:
            return {name: make(name, None, warm) for name in names}

    Thread(target=permit_all, daemon=True).start()
    forked = [name for name in FORKED if name in names]
    native = [name for name in names if name in FORKED_NATIVE]
    started = [name for name in names if name not in (*forked, *native)]
    with ExitStack() as around, ThreadPoolExecutor(LANES) as pool:
        ranks = around.enter_context(closing(ForkedRanks())) if forked else None
        results = make_all(
            forked[:2], ranks
        )  # These runs write the initial checkpoints of both models.
        further = pool.submit(make_all, forked[2:], ranks)
        results |= make_all(started, None) | make_native(native) | further.result()
    Path(answer).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
