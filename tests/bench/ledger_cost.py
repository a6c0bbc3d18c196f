"""`make bench NAME=ledger`: the time ratio of iterations with and without the communication log in a run.

Every other iteration is watched, so a slow minute of the machine affects both kinds equally. They are
compared by the fastest half of each, because whatever else a machine does only adds; the interval is
half as wide under such load as that of the medians which other tables compare. The cost is also computed
from the cost per call times the number of calls.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.experiments.definition import Experiment
from parakit.experiments.engine import Output, Study
from parakit.formatting.terminal import say
from parakit.logs.runs import Run, load_folder
from parakit.reporting.analyse.statistics import TimeComparison
from tests.bench.within_runs import compare_within_runs, fastest_half

LIMIT = 0.02
"""Largest allowed cost of the communication log as a fraction of iteration time."""

_WARM_UP = 10
_FEWEST = 20


@dataclass(frozen=True)
class LedgerCost:
    """Time ratio of watched over unwatched iterations."""

    off_ms: float
    """Mean milliseconds of the fastest half of unwatched iterations."""
    on_ms: float
    count: int
    """Number of iterations of each kind."""
    over: TimeComparison

    def __str__(self) -> str:
        return (
            f"iteration {self.off_ms:.1f} ms off, {self.on_ms:.1f} ms on: "
            f"×{self.over.ratio:.4f}, 95% {self.over.low:.4f} to {self.over.high:.4f} (the fastest half "
            f"of {self.count} iterations each)"
        )

    @property
    def is_above_limit(self) -> bool:
        """True if the whole interval is above the limit."""
        return self.over.low is not None and self.over.low > 1 + LIMIT

    @property
    def verdict(self) -> str:
        """Sentence on whether the cost is below the limit, as far as the interval allows a statement."""
        if self.is_above_limit:
            return f"more than {LIMIT:.0%}: not kept"
        if self.over.high is not None and self.over.high <= 1 + LIMIT:
            return f"at most {LIMIT:.0%}: kept"
        return f"the interval holds {LIMIT:.0%}: too noisy to tell; measure longer (ITERS=)"


def cost_of(runs: Sequence[Mapping[int, float]]) -> LedgerCost:
    """Return the cost from the iteration milliseconds of a run or of its repeats.

    Raises:
        LaunchError: There are too few iterations.
    """
    off, on = zip(*map(kinds, runs), strict=True)
    count = min(sum(map(len, off)), sum(map(len, on)))
    if count < _FEWEST:
        raise LaunchError(f"Only {count} iterations of each kind count; raise ITERS.")
    unwatched, watched = (fastest_half(np.concatenate(kind)) for kind in (off, on))
    counted = sum(map(len, off))
    return LedgerCost(unwatched, watched, counted, compare_within_runs(off, on, fastest_half))


def kinds(iteration_ms: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """Return times of odd (unwatched) and of even (watched) iterations, without warm-up."""
    steady = sorted((i, ms) for i, ms in iteration_ms.items() if i > _WARM_UP)
    off, on = [ms for i, ms in steady if i % 2], [ms for i, ms in steady if not i % 2]
    count = min(len(off), len(on))
    return off[:count], on[:count]


def iteration_times(run: Run) -> dict[int, float]:
    """Return milliseconds of each iteration of a run."""
    lines = run.log.iterations
    return {line.iteration: line.elapsed_ms for line in lines if line.elapsed_ms is not None}


def calls_of(run: Run) -> int:
    """Return calls per iteration of the busiest rank, including groups of a single rank."""
    record = run.measurements.communication
    return (
        max((sum(c.calls for c in rank.calls) for rank in record.ranks), default=0) if record else 0
    )


def by_call(nanoseconds: tuple[float, float], calls: int, iteration_ms: float) -> str:
    """Return a sentence on the cost computed as the additional cost per call times the calls per iteration."""
    plain, watched = nanoseconds
    share = calls * (watched - plain) / (1e6 * iteration_ms)
    return (
        f"one call: {plain / 1000:.1f} µs plain, {watched / 1000:.1f} µs watched; {calls} calls an "
        f"iteration make {calls * (watched - plain) / 1e6:.2f} ms of {iteration_ms:.1f} ms, {share:.1%}"
    )


def call_nanoseconds() -> tuple[float, float]:
    """Return nanoseconds of a small all-reduce without and with the communication log, each the best of three.

    Raises:
        LaunchError: A measurement failed.
    """
    nanoseconds: dict[str, list[float]] = {"plain": [], "watched": []}
    for kind in 3 * tuple(nanoseconds):
        command = (sys.executable, "-m", "tests.bench.ledger_call", kind)
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if ended.returncode:
            last = ended.stderr.strip().splitlines()[-1:]
            raise LaunchError(f"A call alone could not be measured: {' '.join(last)}")
        nanoseconds[kind].append(float(ended.stdout))
    return min(nanoseconds["plain"]), min(nanoseconds["watched"])


def refuse_without_ledger(experiment: Experiment) -> None:
    if not experiment.options.ledger:
        raise LaunchError("LEDGER=0 leaves nothing to measure; leave it out.")


def finish(study: Study) -> int:
    """Print three sentences. Return 1 if the communication log certainly costs more than the limit."""
    study.refuse_failed()
    (result,) = study.results
    runs = [load_folder(folder) for folder in result.runs]
    cost = cost_of([iteration_times(run) for run in runs])
    say(study.console, f"{result.launch.job.target}: {cost}")
    say(study.console, cost.verdict)
    say(study.console, by_call(call_nanoseconds(), calls_of(runs[0]), cost.off_ms))
    return int(cost.is_above_limit)


OUTPUT = Output(finish, refuse_without_ledger)
