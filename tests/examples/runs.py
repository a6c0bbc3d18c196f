"""Real runs of gpt2-tiny and moe-tiny on CPU ranks, which the tests of this folder share."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock

from rich.console import Console

from tools.launch.execute import execute
from tools.launch.options import Options
from tools.launch.start import ensure_start_checkpoint
from tools.launch.target import parse_target
from tools.launch.train import compose_target, flags_of_grammar
from tools.records import run as records
from tools.report.read.scrape import scrape_log
from tools.report.read.scraped import ScrapedLog
from tools.spec.files import ROOT
from tools.spec.run import Backend

ITERATIONS = 6


@dataclass(frozen=True)
class Run:
    """A finished run and what its log says."""

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
    """A run that was made."""
    log = scrape_log(folder / records.LOG_FILE)
    return Run(folder, records.read_status(folder), records.read_run(folder), log)


Wanted = tuple[str, dict[str, object]]
"""A target, and what differs from the options of all."""


class Trainer:
    """Trains targets into one runs folder, from one shared start."""

    def __init__(self, runs: Path, data: Path) -> None:
        self.options = Options(
            iterations=ITERATIONS,
            micro_batch_size=2,
            global_batch_size=8,
            data=str(data),
            runs=runs,
        )
        self._starts: defaultdict[Path | None, Lock] = defaultdict(Lock)

    def __call__(self, name: str, **changes: object) -> Run:
        options = replace(self.options, **changes)  # type: ignore[arg-type]
        target = parse_target(name)
        launch = compose_target(target, flags_of_grammar(target), options)
        console = Console(quiet=True)
        with self._starts[launch.start_checkpoint]:
            ensure_start_checkpoint(launch, options, console)
        folder, _ = execute(launch, options.runs, console, target.strategy)
        return run_of(folder)

    def together(self, wanted: Mapping[str, Wanted], at_a_time: int) -> dict[str, Run]:
        """Runs by name; one leaves cores idle while it starts and ends, so two may train at a time."""
        with ThreadPoolExecutor(at_a_time) as pool:
            runs = pool.map(lambda one: self(one[0], **one[1]), wanted.values())
            return dict(zip(wanted, runs, strict=True))


EVALUATED = {"extra": ("--eval-interval", str(ITERATIONS), "--eval-iters", "2")}
NATIVE = {"backend": Backend.NATIVE}
SIX = ("baseline", "dp2", "tp2", "sp2", "cp2", "pp2")


def dense(strategy: str, **changes: object) -> Wanted:
    return f"train-{strategy}-gpt2-tiny-{1 if strategy == 'baseline' else 2}cpu", changes


def of_experts(strategy: str, **changes: object) -> Wanted:
    return f"train-{strategy}-moe-tiny-{1 if strategy == 'baseline' else 2}cpu", changes


FIXTURES: dict[str, dict[str, Wanted]] = {
    "six": {name: dense(name) for name in SIX},
    "eight": {name: dense(name) for name in (*SIX, "vpp2", "zero1")},
    "zero3": {"zero3": dense("zero3")},
    "refused": {"refused": dense("baseline", extra=("--check-for-spiky-loss",))},
    "native": {
        "native baseline": dense("baseline", **NATIVE),
        "native tp2": dense("tp2", **NATIVE),
    },
    "experts": {"experts": of_experts("baseline", **EVALUATED)},
    "ep2": {"ep2": of_experts("ep2")},
    "native_experts": {"native experts": of_experts("baseline", **EVALUATED, **NATIVE)},
    "spread_experts": {"spread experts": of_experts("ep2", **EVALUATED, **NATIVE)},
}
"""The runs that several tests look at, by the fixture that gives them."""

ALONE = "pp2"
"""What it waits for is looked at, so it trains without another run beside it."""


class SharedRuns:
    """The runs of `FIXTURES` that were asked for: a process of their own trains them.

    Other tests run meanwhile, and some of them change the environment of their process.
    """

    def __init__(self, asked: Collection[str], runs: Path, data: Path, others_run: bool) -> None:
        self.trainer = Trainer(runs, data)
        wanted = {
            name: run
            for fixture in FIXTURES
            if fixture in asked
            for name, run in FIXTURES[fixture].items()
        }
        # Those on one rank first: two of them start at a time, and write the two starts.
        self._names = sorted(wanted, key=lambda name: "1cpu" not in wanted[name][0])
        self._answer = runs / "shared.json"
        at_a_time = "1" if others_run else "2"
        together = [name for name in self._names if name != ALONE]
        words = (str(runs), str(data), at_a_time, str(self._answer), *together)
        command = (sys.executable, "-m", "tests.examples.runs", *words)
        self._process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)

    def result(self) -> dict[str, Run]:
        """All of them; the one that must train alone is trained now."""
        assert self._process.wait() == 0, "the shared runs could not be trained; see above"
        folders = json.loads(self._answer.read_text())
        runs = {name: run_of(Path(folder)) for name, folder in folders.items()}
        if ALONE in self._names:
            runs[ALONE] = self.trainer(dense(ALONE)[0])
        return runs

    def stop(self) -> None:
        """End what still trains."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait()


def main(runs: str, data: str, at_a_time: str, answer: str, *names: str) -> None:
    """Train runs by name; their folders become the answer."""
    wanted = {name: run for each in FIXTURES.values() for name, run in each.items()}
    made = Trainer(Path(runs), Path(data)).together(
        {name: wanted[name] for name in names}, int(at_a_time)
    )
    Path(answer).write_text(json.dumps({name: str(run.folder) for name, run in made.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
