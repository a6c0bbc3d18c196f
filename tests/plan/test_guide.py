"""docs/guide.md states what is recomputed here; each kind of claim is judged by its own arithmetic."""

import pytest

from tools.plan.guide import ClaimVerdict, claims_table, judge, predictions
from tools.spec.files import ROOT
from tools.spec.published import Claim, load_published

GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")


def test_the_guide_s_claims_are_judged_as_it_says() -> None:
    assert claims_table() in GUIDE


def test_the_guide_s_predictions_are_the_planner_s() -> None:
    words = " ".join(GUIDE.split())
    for sentence in predictions():
        assert sentence in words


def test_every_claim_of_the_file_is_judged() -> None:
    claims = load_published().claims
    assert len(claims) >= 16
    assert all(judge(claim) for claim in claims)


@pytest.mark.parametrize(
    ("mfu", "verdict"), [(0.449, ClaimVerdict.CONFIRMED), (0.52, ClaimVerdict.CONTRADICTED)]
)
def test_a_share_of_the_peak_is_judged_by_the_rate_beside_it(
    mfu: float, verdict: ClaimVerdict
) -> None:
    (found,) = judge(Claim(source="001", about="x", tflops_per_device=140, mfu=mfu))
    assert (found.verdict, found.evidence) == (verdict, "140 of 312 are 44.9%")


def test_degrees_that_do_not_multiply_to_the_gpus_contradict_themselves() -> None:
    for data, gpus, verdict in (
        (7, 1960, ClaimVerdict.CONFIRMED),
        (7, 2048, ClaimVerdict.CONTRADICTED),
    ):
        claim = Claim(source="001", about="x", layout="tp8pp35", gpus=gpus, data_parallel=data)
        assert [found.verdict for found in judge(claim)] == [verdict]


def test_what_names_no_layout_cannot_be_judged() -> None:
    (found,) = judge(Claim(source="001", about="x", training_days=38))
    assert found.verdict is ClaimVerdict.OPEN
