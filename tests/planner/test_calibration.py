from dataclasses import replace

import pytest

from parakit.config.run import Fp8Recipe
from parakit.planner.calibration import calibrate_from_stated_products
from parakit.planner.options import RequestError
from parakit.planner.readings.published import usual_cluster
from parakit.planner.time.compute import product_seconds
from parakit.planner.time.rates import compute_device_rates

H100 = usual_cluster("h100", 8)


def reached(text: str, size: int, recipe: Fp8Recipe = Fp8Recipe.NONE) -> float:
    """FLOP/s of a square product on a machine that is said to reach this."""
    cluster = replace(H100, calibration=calibrate_from_stated_products(text, H100, "bf16"))
    rate = compute_device_rates(cluster, "bf16", recipe)
    return 2 * size**3 / product_seconds(size, size, size, 2, rate, 1, bool(recipe))


def test_a_stated_product_is_then_predicted_as_stated() -> None:
    assert reached("700 TFLOP/s on 4k x 4k x 4k", 4096) == pytest.approx(700e12, rel=1e-6)
    assert reached("0.6 PFLOPS on 8192x8192x8192", 8192) == pytest.approx(600e12, rel=1e-6)


def test_attention_and_fp8_change_by_the_factor_of_a_stated_product() -> None:
    found = calibrate_from_stated_products("600 TFLOP/s on 8k x 8k x 8k", H100, "bf16")
    assert found.matmul is not None
    factor = found.matmul / H100.constants.matmul
    assert factor < 1
    assert found.attention == pytest.approx(factor * H100.constants.attention)
    assert found.matmul_fp8 == pytest.approx(factor * H100.constants.matmul_fp8)


def test_an_fp8_product_says_nothing_of_others() -> None:
    text = "1200 TFLOP/s on 8k x 8k x 8k in fp8"
    assert reached(text, 8192, Fp8Recipe.TENSORWISE) == pytest.approx(1200e12, rel=1e-6)
    found = calibrate_from_stated_products(text, H100, "bf16")
    assert (found.matmul, found.attention) == (None, None)


def test_what_is_stated_stands_before_what_follows_from_another_product() -> None:
    one, other = "1200 TFLOP/s on 8k x 8k x 8k in fp8", "600 TFLOP/s on 8k x 8k x 8k"
    for text in (f"{one}, {other}", f"{other}, {one}"):
        assert reached(text, 8192) == pytest.approx(600e12, rel=1e-6)
        assert reached(text, 8192, Fp8Recipe.TENSORWISE) == pytest.approx(1200e12, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fast", "which is no rate of a product"),
        ("700 TFLOP/s", "which is no rate of a product"),
        ("0 TFLOP/s on 4k x 4k x 4k", "which is no rate of a product"),
        ("1.2.3 TFLOP/s on 4k x 4k x 4k", "which is no rate of a product"),
        ("700 TFLOP/s on 0 x 4k x 4k", "which is no rate of a product"),
        (
            "1300 TFLOP/s on 4k x 4k x 4k",
            "which H100 SXM 80 GB cannot reach on 4,096 x 4,096 x 4,096",
        ),
        ("700 TFLOP/s on 64 x 64 x 64", "cannot reach on 64 x 64 x 64"),
    ],
)
def test_what_no_machine_reaches_is_refused(text: str, said: str) -> None:
    with pytest.raises(RequestError, match=said):
        calibrate_from_stated_products(text, H100, "bf16")
