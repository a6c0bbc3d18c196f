from dataclasses import replace

import pytest

from parakit.config.errors import LaunchError
from parakit.config.run import DeviceKind
from parakit.launch import microbenchmark
from parakit.launch.microbenchmark import Figures, Workload
from parakit.launch.microbenchmark_rank import (
    added_seconds,
    measure_local_figures,
    pair_neighbouring_nodes,
    slowest_figures,
)

SMALL = Workload(
    matmul_size=64,
    attention_shape=(2, 16, 8),
    copy_bytes=1 << 18,
    layer=True,
    parameters=1 << 12,
    all_reduce_bytes=1 << 16,
    latency=True,
    node_pairs=True,
    seconds_each=0.01,
)


def test_ceilings_are_rates() -> None:
    figures = measure_local_figures(
        replace(SMALL, mean=True, attention_shape=None, layer=False), "cpu"
    )
    assert (figures.matmul_flops or 0) > 0
    assert (figures.copy_bytes_per_second or 0) > 0
    assert figures.attention_flops is figures.layer_seconds is None


def test_of_several_ranks_the_slowest_counts() -> None:
    ranks: list[dict[str, float | None]] = [
        {"matmul_flops": 2e9, "layer_seconds": 0.1, "copy_bytes_per_second": None},
        {"matmul_flops": 1e9, "layer_seconds": 0.2, "copy_bytes_per_second": None},
    ]
    assert slowest_figures(ranks) == {"matmul_flops": 1e9, "layer_seconds": 0.2}
    rates: list[dict[str, float | None]] = [
        {"all_reduce_bytes_per_second": 3e9},
        {"all_reduce_bytes_per_second": 2e9},
    ]
    assert slowest_figures(rates) == {"all_reduce_bytes_per_second": 2e9}


def test_a_call_that_now_and_then_waits_long_adds_what_it_adds_in_the_mean() -> None:
    assert added_seconds([2.0, 2.0, 2.0, 6.0], [1.0, 1.0, 1.0, 1.0]) == 2.0


def test_neighbours_go_around_the_ring_and_two_nodes_are_one_pair() -> None:
    assert pair_neighbouring_nodes([0]) == []
    assert pair_neighbouring_nodes([0, 8]) == [(0, 8)]
    assert pair_neighbouring_nodes([0, 8, 16]) == [(0, 8), (8, 16), (16, 0)]


@pytest.mark.ranks
def test_a_failure_is_reported_by_the_ranks_last_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbenchmark, "torchrun_command", lambda *_: ("sh", "-c", FAILING))
    with pytest.raises(LaunchError, match=r"^RuntimeError: the device is on fire$"):
        microbenchmark.run_workload(SMALL, DeviceKind.CPU, 2)
    monkeypatch.setattr(microbenchmark, "torchrun_command", lambda *_: ("sh", "-c", KILLED))
    with pytest.raises(LaunchError, match=r"^Signal 6 \(SIGABRT\) received by PID 40$"):
        microbenchmark.run_workload(SMALL, DeviceKind.CPU, 2)
    monkeypatch.setattr(
        microbenchmark, "torchrun_command", lambda *_: ("sh", "-c", "exec sleep 600")
    )
    with pytest.raises(LaunchError, match="the ranks did not end within 0 s"):
        microbenchmark.run_workload(SMALL, DeviceKind.CPU, 2, timeout_seconds=0.1)


FAILING = """
echo 'RuntimeError: the device is on fire
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
====' >&2
exit 1
"""

KILLED = """
echo 'Failures:
  traceback : Signal 15 (SIGTERM) received by PID 41
Root Cause (first observed failure):
  traceback : Signal 6 (SIGABRT) received by PID 40
====' >&2
exit 1
"""


@pytest.mark.slow
def test_two_cpu_ranks_measure_everything_that_is_asked_for() -> None:
    figures = microbenchmark.run_workload(SMALL, DeviceKind.CPU, 2)
    assert isinstance(figures, Figures)
    assert len(figures.nodes) == 1
    assert figures.pair_bytes_per_second == ()
    assert (figures.matmul_flops or 0) > 0
    assert (figures.attention_flops or 0) > 0
    assert (figures.all_reduce_bytes_per_second or 0) > 0
    assert (figures.layer_seconds or 0) > 0
    assert (figures.all_reduce_latency_seconds or 0) > 0


@pytest.mark.slow
def test_one_rank_alone_has_no_link() -> None:
    figures = microbenchmark.run_workload(SMALL, DeviceKind.CPU, 1)
    assert figures is not None
    assert figures.all_reduce_bytes_per_second is None
    assert (figures.copy_bytes_per_second or 0) > 0
