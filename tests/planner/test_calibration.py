from dataclasses import replace

import pytest

from parakit.config.run import Fp8Recipe
from parakit.planner.calibration import calibrate_from_text
from parakit.planner.options import RequestError
from parakit.planner.readings.published import usual_cluster
from parakit.planner.time.compute import product_seconds
from parakit.planner.time.rates import compute_device_rates

H100 = usual_cluster("h100", 8)


def reached(text: str, size: int, recipe: Fp8Recipe = Fp8Recipe.NONE) -> float:
    """Return the predicted FLOP/s of a square product after calibration with the stated text."""
    cluster = replace(H100, calibration=calibrate_from_text(text, H100, "bf16"))
    rate = compute_device_rates(cluster, "bf16", recipe)
    return 2 * size**3 / product_seconds(size, size, size, 2, rate, 1, bool(recipe))


def test_calibration_reproduces_the_stated_rate() -> None:
    assert reached("700 TFLOP/s on 4k x 4k x 4k", 4096) == pytest.approx(700e12, rel=1e-6)
    assert reached("0.6 PFLOPS on 8192x8192x8192", 8192) == pytest.approx(600e12, rel=1e-6)


def test_attention_and_fp8_change_by_the_factor_of_a_stated_product() -> None:
    constants = calibrate_from_text("600 TFLOP/s on 8k x 8k x 8k", H100, "bf16")
    assert constants.matmul is not None
    factor = constants.matmul / H100.constants.matmul
    assert factor < 1
    assert constants.attention == pytest.approx(factor * H100.constants.attention)
    assert constants.matmul_fp8 == pytest.approx(factor * H100.constants.matmul_fp8)


def test_stated_fp8_rate_does_not_change_other_rates() -> None:
    text = "1200 TFLOP/s on 8k x 8k x 8k in fp8"
    assert reached(text, 8192, Fp8Recipe.TENSORWISE) == pytest.approx(1200e12, rel=1e-6)
    constants = calibrate_from_text(text, H100, "bf16")
    assert (constants.matmul, constants.attention) == (None, None)


def test_stated_rate_has_precedence_over_a_derived_rate() -> None:
    fp8, bf16 = "1200 TFLOP/s on 8k x 8k x 8k in fp8", "600 TFLOP/s on 8k x 8k x 8k"
    for text in (f"{fp8}, {bf16}", f"{bf16}, {fp8}"):
        assert reached(text, 8192) == pytest.approx(600e12, rel=1e-6)
        assert reached(text, 8192, Fp8Recipe.TENSORWISE) == pytest.approx(1200e12, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "which is no rate of a product and no time of a step"),
        ("700 TFLOP/s", "which is no rate of a product and no time of a step"),
        ("0 TFLOP/s on 4k x 4k x 4k", "which is no rate of a product and no time of a step"),
        ("1.2.3 TFLOP/s on 4k x 4k x 4k", "which is no rate of a product and no time of a step"),
        ("700 TFLOP/s on 0 x 4k x 4k", "which is no rate of a product and no time of a step"),
        (
            "1300 TFLOP/s on 4k x 4k x 4k",
            "which H100 SXM 80 GB cannot reach on 4,096 x 4,096 x 4,096",
        ),
        ("700 TFLOP/s on 64 x 64 x 64", "cannot reach on 64 x 64 x 64"),
    ],
)
def test_rate_above_the_peak_of_the_device_is_refused(text: str, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        calibrate_from_text(text, H100, "bf16")


def test_stated_host_time_per_layer_is_taken_beside_rates() -> None:
    constants = calibrate_from_text("3.5 ms per layer, 700 TFLOP/s on 4k x 4k x 4k", H100, "bf16")
    assert constants.layer_launch_seconds == pytest.approx(0.0035)
    assert constants.matmul is not None
