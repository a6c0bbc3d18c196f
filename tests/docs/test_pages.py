"""Pages state what is recomputed here; each kind of claim is judged by its own arithmetic."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.docs.claims import Claim, judge, load_claims
from tests.docs.pages import GUIDE, PAGES, PLANNER, placed, renewed
from tests.docs.practitioners import practitioners_table
from tests.docs.predictions import SizeRow, request_of, size_sentence
from tests.docs.rules import CASES, rules_table
from tests.golden.commands_of_the_kit import check_golden
from tools.plan.advise import INFERENCE

_SAYS_WHAT_IT_IS_ABOUT = {"about", "layout", "model", "gpus", "part", "caution"} | {
    "data_parallel"  # Has a test of its own below; without it the strategy has no number of GPUs.
}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.parent.name)
def test_a_page_holds_the_figures_of_today(page: Path) -> None:
    check_golden(page, renewed(page, PAGES[page]()))


@pytest.mark.slow
def test_the_rules_of_thumb_are_those_of_today() -> None:
    check_golden(GUIDE, renewed(GUIDE, [rules_table(CASES)]))


@pytest.mark.slow
def test_what_practitioners_chose_stands_beside_what_the_search_finds_today() -> None:
    check_golden(PLANNER, renewed(PLANNER, [practitioners_table()]))


def test_the_rules_of_thumb_of_few_devices_are_those_of_today() -> None:
    assert rules_table(CASES[:5]) in GUIDE.read_text(encoding="utf-8")


def test_the_guide_says_of_inference_what_advise_says() -> None:
    assert INFERENCE in " ".join(GUIDE.read_text(encoding="utf-8").split())


def test_a_text_takes_the_place_of_the_one_that_begins_alike() -> None:
    page = "- Case one: 1.5 s, then\n  more. Kept.\n\n| a | b |\n|--|--|\n| 1 | 2 |\n\nkept"
    page = placed(page, "Case one: 2.5 s.")
    assert placed(page, "| a | b |\n| 3 | 4 |") == (
        "- Case one: 2.5 s. Kept.\n\n| a | b |\n| 3 | 4 |\n\nkept"
    )
    with pytest.raises(LookupError, match="0 texts begin with 'Case two'"):
        placed(page, "Case two: 2 s.")


def row(plain_seconds: float, split_seconds: float) -> SizeRow:
    plain, split = (
        cast(Any, SimpleNamespace(seconds=SimpleNamespace(total=seconds)))
        for seconds in (plain_seconds, split_seconds)
    )
    return SizeRow(request_of("dense-5b", 2, "h100"), plain, split)


def test_a_crossover_is_where_splitting_is_ahead_by_more_than_the_planners_error() -> None:
    assert [row(1.0, ratio).ahead for ratio in (1.06, 0.98, 0.94)] == [
        *("data parallel", "within noise", "split")
    ]
    assert ": none; of 2 cases data parallelism is ahead in 1," in size_sentence(
        (row(1, 2), row(1, 1))
    )
    assert ": splitting is ahead for dense-5b on 2; of 1 cases" in size_sentence((row(2, 1),))


def test_every_figure_of_the_file_s_claims_is_judged() -> None:
    claims = load_claims()
    assert len(claims) >= 17
    for claim in claims:
        for name in claim.keys() - _SAYS_WHAT_IT_IS_ABOUT:
            without = Claim({key: value for key, value in claim.items() if key != name})
            assert judge(without) != judge(claim), (claim.about, name)


@pytest.mark.parametrize(("mfu", "is_so"), [(0.449, True), (0.52, False)])
def test_a_share_of_the_peak_is_judged_by_the_rate_beside_it(mfu: float, is_so: bool) -> None:
    (found,) = judge(Claim(tflops_per_device=140, mfu=mfu))
    assert found[1:] == (is_so, "140 of 312 are 44.9%")


def test_degrees_that_do_not_multiply_to_the_gpus_contradict_themselves() -> None:
    for gpus, is_so in ((1960, True), (2048, False)):
        claim = Claim(layout="tp8pp35", gpus=gpus, data_parallel=7)
        assert [found[1] for found in judge(claim)] == [is_so]


def test_what_names_no_layout_cannot_be_judged() -> None:
    (found,) = judge(Claim(training_days=38))
    assert found[1] is None
