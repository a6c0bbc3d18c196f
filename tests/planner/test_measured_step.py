"""One measured step of any configuration sets the host's time per layer: CALIBRATE="200 ms on 231"."""

from dataclasses import replace

import pytest

from parakit.planner.measured_step import resolve_measured_step
from parakit.planner.one_strategy import time_strategy
from parakit.planner.options import PlanOptions, RequestError

SMALL_STEP = "STRATEGY=tp2 MODEL=gpt2-large MICRO_BATCH=1 GLOBAL_BATCH=1"
PLANNED = PlanOptions(model="gpt3-13b", gpu="h100", gpus=8, global_batch=64)


def stated(text: str) -> str:
    """Return CALIBRATE= of a plan after its measured step was replaced."""
    return resolve_measured_step(replace(PLANNED, calibrate=text)).calibrate or ""


def predicted_ms(calibrate: str, options: PlanOptions) -> float:
    seconds = time_strategy(replace(options, calibrate=calibrate)).candidate.seconds
    return 1e3 * seconds.total


def test_step_of_the_tutorial_is_named_by_its_id() -> None:
    tutorial_run = PlanOptions(
        model="gpt2-1.2b",
        gpu="h100",
        gpus=1,
        strategy="baseline",
        micro_batch=8,
        global_batch=8,
        dtype="bf16",
        extra="--hidden-dropout 0.1 --attention-dropout 0.1",
    )
    calibrate = stated("230 ms on 231")
    assert calibrate.endswith(" ms per layer")
    assert predicted_ms(calibrate, tutorial_run) == pytest.approx(230, rel=1e-3)


def test_step_of_any_strategy_is_named_by_variables() -> None:
    run = PlanOptions(
        model="gpt2-large", gpu="h100", gpus=2, strategy="tp2", micro_batch=1, global_batch=1
    )
    calibrate = stated(f"150 ms on {SMALL_STEP}")
    assert predicted_ms(calibrate, run) == pytest.approx(150, rel=1e-3)
    assert stated(f"0.15 s on {SMALL_STEP}") == calibrate


def test_longer_step_means_a_slower_host() -> None:
    fast, slow = (float(stated(f"{step} ms on {SMALL_STEP}").split()[0]) for step in (100, 200))
    assert slow > 1.9 * fast


def test_step_is_predicted_with_the_rates_that_are_stated_with_it() -> None:
    rate = "600 TFLOP/s on 8k x 8k x 8k"
    assert stated(f"{rate}, 150 ms on {SMALL_STEP}").startswith(f"{rate},")


def test_options_without_a_step_are_unchanged() -> None:
    for text in (None, "700 TFLOP/s on 4k x 4k x 4k", "3.5 ms per layer"):
        options = replace(PLANNED, calibrate=text)
        assert resolve_measured_step(options) is options


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 ms on 231", "computes for"),
        ("1530 ms on 112", "hardly waits for the host"),
        ("200 ms on 999", "no timed run of the tutorial"),
        ("200 ms on 121", "no timed run of the tutorial"),
        ("200 ms on MODEL=gpt2-large", "add STRATEGY="),
        (f"200 ms on 231, 100 ms on {SMALL_STEP}", "two measured steps"),
        ("200 ms on STRATEGY=tp2 MODLE=gpt2-large", 'CALIBRATE has "MODLE=gpt2-large"'),
    ],
)
def test_step_that_does_not_tell_the_host_time_is_refused(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        stated(text)
