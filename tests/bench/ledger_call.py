"""Measure the cost of a watched call: a small all-reduce in a group of a single rank, repeated many times.

`python -m tests.bench.ledger_call watched|plain` prints nanoseconds per call with its wait. The figure is the
mean of the fastest tenth of the calls, which other load on the machine does not affect.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed

from parakit.accounting.communication import CommunicationLog
from parakit.accounting.process_groups import CallWatcher
from parakit.accounting.timeline import Timeline

ITERATIONS, CALLS = 400, 50


def main(kind: str) -> int:
    """Measure with the watcher or without."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{Path(folder) / 'store'}"
        distributed.init_process_group("gloo", init_method=address, rank=0, world_size=1)
        try:
            print(_undisturbed_ns(_watch() if kind == "watched" else _nothing))
        finally:
            distributed.destroy_process_group()
    return 0


def _watch() -> Callable[[], None]:
    """Start watching calls. Return the function that ends an iteration."""
    ledger, timeline = CommunicationLog(), Timeline()
    watcher = CallWatcher(ledger, timeline)
    watcher.install()

    def end_iteration() -> None:
        ledger.end_iteration(timeline.take_phase_nanoseconds(), timeline.clock)
        watcher.forget_pending()

    return end_iteration


def _nothing() -> None:
    pass


def _undisturbed_ns(end_iteration: Callable[[], None]) -> float:
    tensor = torch.zeros(1)
    elapsed = []
    for _ in range(ITERATIONS):
        started = time.perf_counter_ns()
        for _ in range(CALLS):
            distributed.all_reduce(tensor)
        end_iteration()
        elapsed.append((time.perf_counter_ns() - started) / CALLS)
    return statistics.quantiles(elapsed, n=10)[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
