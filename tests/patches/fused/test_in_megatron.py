import pytest

from tests.examples.runs import SharedRuns
from tests.patches.fused.updated import ALL, SAME_ARITHMETIC, Figures

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fused_updates(shared_runs: SharedRuns) -> dict[str, Figures]:
    """What each set of patches gives, made beside the other tests."""
    found: dict[str, Figures] = shared_runs.scenario("fused_updates")
    for fused, figures in found.items():
        patched = {name.removeprefix("fused ") for name in figures["applied"] if "fused " in name}
        assert patched == set(filter(None, fused.split(",")))
    return found


@pytest.mark.parametrize(
    ("fused", "precision", "tolerance"), [(ALL, "fp32", 3e-6), (SAME_ARITHMETIC, "bf16", 1e-6)]
)
def test_three_updates_of_a_gpt_are_those_of_megatron_alone(
    fused_updates: dict[str, Figures], fused: str, precision: str, tolerance: float
) -> None:
    alone, patched = fused_updates[""][precision], fused_updates[fused][precision]
    for figure in ("losses", "norms", "total"):
        assert patched[figure] == pytest.approx(alone[figure], rel=tolerance)
    assert alone["losses"][2] < alone["losses"][1] < alone["losses"][0]


def test_in_bf16_the_other_patches_stay_within_its_rounding(
    fused_updates: dict[str, Figures],
) -> None:
    alone, patched = fused_updates[""]["bf16"], fused_updates[ALL]["bf16"]
    eps = 2**-8
    assert patched["losses"] == pytest.approx(alone["losses"], rel=eps)
    assert patched["norms"][0] == pytest.approx(alone["norms"][0], rel=eps)


def test_megatron_alone_loads_no_compiler_and_a_fused_patch_may_use_it(
    fused_updates: dict[str, Figures],
) -> None:
    assert fused_updates[""]["compiler"] is False
    assert [fused for fused in fused_updates if "no_dynamo" in fused_updates[fused]["applied"]] == [
        ""
    ]
