"""`make bench-ledger`: what the ledger costs, measured on against off in one run.

Every other iteration is watched, so a slow minute of the machine falls on both kinds alike. They are
compared by the fastest half of each, because whatever else a machine does only adds; the interval is a
bootstrap's, and half as wide under such load as that of the medians which tables compare. The same
cost is counted from the other end too: what a call costs, times the calls.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from tools.launch.experiment.data import ensure_sample
from tools.report.read.runs import find_run_folders, load_folder
from tools.spec.files import ROOT

TARGET, ITERATIONS = "train-tp2-gpt2-tiny-2cpu", 300
LIMIT = 0.02
"""Of iteration time: what the ledger may cost."""

_WARM_UP = 10
_DRAWS, _SEED = 2000, 1
_FEWEST = 20


class BenchError(RuntimeError):
    """A run did not end well; the message has its last lines."""


@dataclass(frozen=True)
class LedgerCost:
    """Watched iterations over the others."""

    off_ms: float
    """Mean of the fastest half."""
    on_ms: float
    low: float
    high: float
    """95% interval of the ratio."""
    count: int
    """Iterations of each kind."""

    @property
    def ratio(self) -> float:
        """On over off."""
        return self.on_ms / self.off_ms

    def __str__(self) -> str:
        return (
            f"iteration {self.off_ms:.1f} ms off, {self.on_ms:.1f} ms on: ×{self.ratio:.4f}, 95% "
            f"{self.low:.4f} to {self.high:.4f} (the fastest half of {self.count} iterations each)"
        )

    @property
    def verdict(self) -> str:
        """Whether the limit is kept, as far as the interval allows to say."""
        if self.high <= 1 + LIMIT:
            return f"at most {LIMIT:.0%}: kept"
        if self.low > 1 + LIMIT:
            return f"more than {LIMIT:.0%}: not kept"
        return f"the interval holds {LIMIT:.0%}: too noisy to tell; measure longer (ITERS=)"


def cost_of(off_ms: Sequence[float], on_ms: Sequence[float]) -> LedgerCost:
    """Compare iterations with and without the ledger.

    Raises:
        BenchError: There are too few.
    """
    count = min(len(off_ms), len(on_ms))
    if count < _FEWEST:
        raise BenchError(f"Only {count} iterations of each kind count; raise ITERS.")
    off, on = np.asarray(off_ms[:count]), np.asarray(on_ms[:count])
    generator = np.random.default_rng(_SEED)
    drawn = [
        _fastest_half(generator.choice(on, count)) / _fastest_half(generator.choice(off, count))
        for _ in range(_DRAWS)
    ]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return LedgerCost(_fastest_half(off), _fastest_half(on), float(low), float(high), count)


def kinds(iteration_ms: Mapping[int, float]) -> tuple[list[float], list[float]]:
    """Times of odd iterations, which are not watched, and of even ones, without warm-up."""
    steady = sorted((i, ms) for i, ms in iteration_ms.items() if i > _WARM_UP)
    return [ms for i, ms in steady if i % 2], [ms for i, ms in steady if not i % 2]


def by_call(nanoseconds: tuple[float, float], calls: int, iteration_ms: float) -> str:
    """The same cost from the other end: what a call costs more, times the calls of an iteration."""
    plain, watched = nanoseconds
    share = calls * (watched - plain) / (1e6 * iteration_ms)
    return (
        f"one call: {plain / 1000:.1f} µs plain, {watched / 1000:.1f} µs watched; {calls} calls an "
        f"iteration make {calls * (watched - plain) / 1e6:.2f} ms of {iteration_ms:.1f} ms, {share:.1%}"
    )


def call_nanoseconds() -> tuple[float, float]:
    """Nanoseconds of a small all-reduce without and with the ledger, the best of three each, in turn."""
    found: dict[str, list[float]] = {"plain": [], "watched": []}
    for kind in 3 * tuple(found):
        found[kind].append(float(_python("-m", "tools.ledger.bench_call", kind)))
    return min(found["plain"]), min(found["watched"])


def main(environment: Mapping[str, str] = os.environ) -> int:
    """Measure and print; 1 if the limit is not kept for sure, 2 if a run failed."""
    target = environment.get("TARGET") or TARGET
    ensure_sample(Console(stderr=True))
    try:
        iteration_ms, calls = _train(target, environment.get("ITERS") or str(ITERATIONS))
        cost = cost_of(*kinds(iteration_ms))
    except BenchError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{target}: {cost}")
    print(cost.verdict)
    print(by_call(call_nanoseconds(), calls, cost.off_ms))
    return int(cost.low > 1 + LIMIT)


def _train(target: str, iterations: str) -> tuple[dict[int, float], int]:
    """Milliseconds of each iteration; calls of the busiest rank, groups of one rank included."""
    with tempfile.TemporaryDirectory() as folder:
        settings = {"KIT_LEDGER_ALTERNATE": "1", "ITERS": iterations, "RUNS": folder}
        _python("-m", "tools.launch", "target", target, SHARED_START="0", LEDGER="1", **settings)
        found = load_folder(find_run_folders(Path(folder))[-1])
    record = found.ledgers.communication
    calls = [sum(c.calls for c in rank.calls) for rank in record.ranks] if record else [0]
    times = {
        line.iteration: line.elapsed_ms
        for line in found.log.iterations
        if line.elapsed_ms is not None
    }
    return times, max(calls)


def _python(*words: str, **settings: str) -> str:
    """Standard output of a Python of its own."""
    process = subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        last = "\n".join((process.stdout + process.stderr).splitlines()[-5:])
        raise BenchError(f"{' '.join(words)} ended with {process.returncode}: {last}")
    return process.stdout


def _fastest_half(values: np.ndarray) -> float:
    return float(np.sort(values)[: len(values) // 2].mean())


if __name__ == "__main__":
    sys.exit(main())
