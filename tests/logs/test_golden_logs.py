"""Every value of every dialect is scraped. logs/README.md names the source of each log."""

import json
from pathlib import Path

import msgspec
import pytest

from parakit.artifacts.run import Status
from parakit.logs.diagnosis import classify_log
from parakit.logs.dialects.megatron import MICROSECONDS, MICROSECONDS_GTP, SECONDS
from parakit.logs.scrape import scrape_log
from parakit.logs.window import select_window

LOGS = Path(__file__).parents[1] / "reporting" / "logs"
GENERATIONS = {
    "0.12": SECONDS,
    "0.14": SECONDS,
    "f4fa7d6b": SECONDS,
    "0.16.1": MICROSECONDS,
    "0.18.2": MICROSECONDS,
    "0.19.0": MICROSECONDS_GTP,
}
FLAGS = ("first_of_start", "averaged", "after_pause")


def golden(version):
    path = LOGS / f"megatron-{version}.log"
    return scrape_log(path), json.loads(path.with_suffix(".json").read_text())


def sizes(reading):
    return (
        reading.allocated_mib,
        reading.max_allocated_mib,
        reading.reserved_mib,
        reading.max_reserved_mib,
    )


@pytest.mark.parametrize("version", GENERATIONS)
def test_every_value_of_the_log_is_scraped(version):
    log, expected = golden(version)
    iterations = [
        {k: v for k, v in msgspec.to_builtins(i).items() if v is not None and k not in FLAGS}
        for i in log.iterations
    ]
    assert iterations == expected["iterations"]
    parameters = {f"{c.tensor_rank},{c.pipeline_rank}": c.parameters for c in log.parameters}
    assert parameters == expected["parameters"]
    memory = [[m.rank, m.after_iterations, *sizes(m)] for m in log.memory]
    assert memory == expected["memory"]
    assert [[v.iteration, v.losses["lm loss"]] for v in log.validation] == expected["validation"]
    assert [[c.action, c.iteration] for c in log.checkpoints] == expected["checkpoints"]
    assert log.theoretical_parameters_billions == expected["billions"]
    theory = log.theoretical_memory
    assert theory is not None
    assert [
        theory.weight_and_optimizer_mb,
        theory.activation_mb,
        theory.total_mb,
    ] == expected["theoretical"]
    assert log.arguments == expected["arguments"]
    assert log.exit_reason == expected["exit"]
    timers = {t.name: [t.count, t.min_ms, t.max_ms] for t in log.timers}
    assert timers.keys() == expected["timers"].keys()
    for name, values in expected["timers"].items():
        assert timers[name] == pytest.approx(values), name


@pytest.mark.parametrize(("version", "generation"), GENERATIONS.items())
def test_generation_and_ending_are_recognised(version, generation):
    log, _ = golden(version)
    assert log.generation == generation
    assert classify_log(log).status is Status.OK
    assert log.restarts == ()


@pytest.mark.parametrize("version", ["f4fa7d6b", "0.16.1", "0.18.2", "0.19.0"])
def test_window_of_a_real_run_leaves_out_the_known_traps(version):
    log, _ = golden(version)
    left_out = {1, 6, 9, 11} | ({2} if log.generation.averages_second_line else set())
    assert set(select_window(log).iterations) == set(range(1, 13)) - left_out


def test_averaged_line_contains_the_mean_of_two_losses():
    """The second loss that Megatron 0.19 prints is the mean of the first two, shown on real logs."""
    undisturbed, _ = golden("f4fa7d6b")
    averaging, _ = golden("0.19.0")
    first, second = (i.lm_loss for i in undisturbed.iterations[:2])
    assert averaging.iterations[1].averaged
    assert averaging.iterations[1].lm_loss == pytest.approx((first + second) / 2, abs=2e-5)
    losses = [
        (a.lm_loss, b.lm_loss)
        for a, b in zip(undisturbed.iterations, averaging.iterations, strict=True)
    ]
    del losses[1]
    assert all(a == pytest.approx(b, abs=2e-5) for a, b in losses)


def test_memory_report_of_another_rank_in_the_same_line_is_read():
    log, _ = golden("0.12")
    assert [reading.rank for reading in log.memory] == [2, 0]
    assert log.iterations[0].extra_metrics == {"load_balancing_loss": 1.013402}
