"""What a slow link costs: ZeRO-3 against data parallelism, by the bytes that the ledger counts."""

import os
import shutil
from statistics import quantiles

import pytest

from tests.examples.runs import Run, Trainer
from tools.launch.network import parse_rate
from tools.plan.time.cluster import link_seconds
from tools.records.measurements import read_communication
from tools.records.run import Status

CAN_SHAPE = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
LINK = parse_rate("1gbps")
ITERATIONS = 20
WARM_UP = 4
"""Iterations that start groups or are slowed by the memory ledger."""


def milliseconds(run: Run) -> list[float]:
    assert run.status.status is Status.OK
    return [line.elapsed_ms for line in run.log.iterations if line.iteration > WARM_UP]


def link_milliseconds(run: Run) -> float:
    ranks = read_communication(run.folder).ranks
    rate = LINK.bits_per_second
    return 1e3 * max(link_seconds(r.calls, run.record.spec.parallelism, rate) for r in ranks)


@pytest.mark.slow
@pytest.mark.skipif(not CAN_SHAPE, reason="needs root, ip and tc")
def test_zero3_falls_behind_at_one_gigabit_by_the_bytes_in_the_ledger(train: Trainer) -> None:
    times: dict[tuple[str, bool], list[float]] = {}
    expected: dict[str, float] = {}
    for strategy in ("dp2", "zero3"):
        for slow in (False, True):
            target = f"train-{strategy}-gpt2-tiny-2cpu"
            run = train(target, iterations=ITERATIONS, network=LINK if slow else None)
            times[strategy, slow] = milliseconds(run)
            expected[strategy] = link_milliseconds(run)
    # Whatever else the machine does only adds, so the fast iterations say what the link costs.
    found = {key: quantiles(values, n=10)[0] for key, values in times.items()}
    gap = {slow: found["zero3", slow] - found["dp2", slow] for slow in (False, True)}
    predicted = expected["zero3"] - expected["dp2"]
    assert gap[True] - gap[False] == pytest.approx(predicted, rel=0.25)
