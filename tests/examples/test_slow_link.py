"""Minimum cost of a slow link from the bytes in the communication log, for ZeRO-3 and data parallelism."""

import os
import shutil
from statistics import mean

import pytest

from parakit.artifacts.measurements import CommunicationRecord, read_measurements
from parakit.artifacts.run import Status
from parakit.costs.shared_link import link_seconds
from parakit.launch.network import parse_rate
from tests.examples.runs import Run, Trainer

CAN_SHAPE = os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
LINK = parse_rate("1gbps")
ITERATIONS = 20
WARM_UP = 4
"""Iterations that create groups or are slowed by the memory measurement."""


def milliseconds(run: Run) -> list[float]:
    assert run.status.status is Status.OK
    return [line.elapsed_ms for line in run.log.iterations if line.iteration > WARM_UP]


def link_milliseconds(run: Run) -> float:
    ranks = read_measurements(run.folder, CommunicationRecord).ranks
    return 1e3 * max(link_seconds(r.calls, run.record.spec.parallelism, LINK) for r in ranks)


@pytest.mark.slow
@pytest.mark.skipif(not CAN_SHAPE, reason="needs root, ip and tc")
def test_iterations_at_1_gbit_take_at_least_the_time_of_their_bytes_and_zero3_sends_more(
    train: Trainer,
) -> None:
    needed: dict[str, float] = {}
    for strategy in ("dp2", "zero3"):
        run = train(
            f"train-{strategy}-gpt2-tiny-2cpu", iterations=ITERATIONS, link_bits_per_second=LINK
        )
        needed[strategy] = link_milliseconds(run)
        # The link limits the bytes per second, whatever the speed of the machine.
        assert mean(milliseconds(run)) > 0.95 * needed[strategy]
    assert needed["zero3"] > 1.2 * needed["dp2"]
