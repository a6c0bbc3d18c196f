"""What one watched call costs: a small all-reduce in a group of one, again and again.

`python -m tools.ledger.bench_call watched|plain` prints nanoseconds of a call with its wait: the fastest
tenth's, which other load on the machine does not reach.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import distributed

from tools.ledger.communication import CommunicationLedger
from tools.ledger.process_groups import CallWatcher
from tools.ledger.timeline import Timeline

CALLS = 20_000


def main(kind: str) -> int:
    """Measure with the watcher or without."""
    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{Path(folder) / 'store'}"
        distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
        try:
            if kind == "watched":
                CallWatcher(CommunicationLedger(), Timeline()).install()
            print(_undisturbed_ns())
        finally:
            distributed.destroy_process_group()
    return 0


def _undisturbed_ns() -> float:
    tensor = torch.zeros(1)
    elapsed = []
    for _ in range(CALLS):
        started = time.perf_counter_ns()
        distributed.all_reduce(tensor)
        elapsed.append(time.perf_counter_ns() - started)
    return statistics.quantiles(elapsed, n=10)[0]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
