import pytest

from tests.examples.runs import SharedRuns
from tests.patches.fused.updated import ALL, SAME_ARITHMETIC, Figures

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def fused_updates(shared_runs: SharedRuns) -> dict[str, Figures]:
    """Return the figures of each set of patches, computed concurrently with other tests."""
    figures_by_patches: dict[str, Figures] = shared_runs.scenario("fused_updates")
    for fused, figures in figures_by_patches.items():
        patched = {name.removeprefix("fused ") for name in figures["applied"] if "fused " in name}
        assert patched == set(filter(None, fused.split(",")))
    return figures_by_patches


@pytest.mark.parametrize(
    ("fused", "precision", "tolerance"), [(ALL, "fp32", 3e-6), (SAME_ARITHMETIC, "bf16", 1e-6)]
)
def test_three_updates_with_patches_equal_those_of_unpatched_megatron(
    fused_updates: dict[str, Figures], fused: str, precision: str, tolerance: float
) -> None:
    alone, patched = fused_updates[""][precision], fused_updates[fused][precision]
    for figure in ("losses", "norms", "total"):
        assert patched[figure] == pytest.approx(alone[figure], rel=tolerance)
    assert alone["losses"][2] < alone["losses"][1] < alone["losses"][0]


def test_other_patches_stay_within_the_rounding_of_bf16(
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
