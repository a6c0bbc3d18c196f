"""Figures on pages equal what is computed here; each kind of claim is judged by its arithmetic."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from parakit.config.files import ROOT
from parakit.config.strategy import Batch
from parakit.formatting.units import MIB
from parakit.planner.readings.blind import (
    BLIND_FOLDER,
    group_blind_by_kind,
    predict_blind_measurements,
)
from parakit.planner.readings.published import h200_figures, h200_spec, usual_cluster
from parakit.planner.readings.table import MEASUREMENTS_FILE, read_rows
from parakit.planner.time.iteration import iteration_seconds
from tests.docs.claims import Claim, judge, load_claims
from tests.docs.pages import CLAIMS, PAGES, PLANNER, placed, renewed
from tests.docs.practitioners import practitioners_table, recipes_table
from tests.docs.predictions import SizeRow, request_of, size_sentence
from tests.docs.residuals import h200_residuals
from tests.docs.rules import CASES, rules_table
from tests.golden.commands_of_the_kit import check_golden

_SAYS_WHAT_IT_IS_ABOUT = (
    {"about", "layout", "model", "gpus", "part", "caution"}
    | {
        "data_parallel"  # This field has a separate test below; without it the strategy has no number of GPUs.
    }
)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_page_contains_current_figures(page: Path) -> None:
    check_golden(page, renewed(page, PAGES[page]()))


@pytest.mark.slow
def test_rules_of_thumb_are_current() -> None:
    check_golden(CLAIMS, renewed(CLAIMS, [rules_table(CASES)]))


@pytest.mark.slow
def test_comparison_with_choices_of_practitioners_is_current() -> None:
    check_golden(PLANNER, renewed(PLANNER, [practitioners_table()]))


@pytest.mark.slow
def test_comparison_with_recipes_whose_time_nobody_published_is_current() -> None:
    check_golden(PLANNER, renewed(PLANNER, [recipes_table()]))


def test_rules_of_thumb_for_few_devices_are_current() -> None:
    assert rules_table(CASES[:4]) in CLAIMS.read_text(encoding="utf-8")


def test_text_replaces_the_text_of_a_page_with_the_same_beginning() -> None:
    page = "- Case one: 1.5 s, then\n  more. Kept.\n\n| a | b |\n|--|--|\n| 1 | 2 |\n\nkept"
    page = placed(page, "Case one: 2.5 s.")
    assert placed(page, "| a | b |\n| 3 | 4 |") == (
        "- Case one: 2.5 s. Kept.\n\n| a | b |\n| 3 | 4 |\n\nkept"
    )
    with pytest.raises(LookupError, match="0 texts begin with 'Case two'"):
        placed(page, "Case two: 2 s.")


def test_memory_of_the_published_runs_is_stated_in_mib_and_converted_to_gb() -> None:
    def both(mib: int) -> str:
        return f"{mib:,} MiB ({mib * MIB / 1e9:.1f} GB)"

    published = {figure.strategy: figure.device_memory_mib for figure in h200_figures()}
    sp2, dp2 = (both(max(published[strategy])) for strategy in ("sp2", "dp2"))
    lab_guide = (ROOT / "examples" / "gpt3" / "README.md").read_text(encoding="utf-8")
    baseline = max(published["baseline"])
    converted = f"{baseline:,} MiB are {baseline * MIB / 1e9:.1f} GB"
    sentences = " ".join(lab_guide.split())
    assert converted in sentences
    assert f"SP 2 needs {sp2} per device where DP 2 needs {dp2} (" in sentences
    header = next(line for line in lab_guide.splitlines() if line.startswith("| target |"))
    assert header.split(" | ")[4] == "MiB per GPU"
    for strategy, memories in published.items():
        row = next(line for line in lab_guide.splitlines() if f"`train-{strategy}-gpt2-l" in line)
        assert row.split(" | ")[4].split(" / ")[0] == f"{memories[0]:,}"


def test_sentences_of_the_lab_guide_state_what_the_planner_predicts() -> None:
    cluster = usual_cluster("h200", 2)
    tp2, cp2 = (iteration_seconds(h200_spec(strategy), cluster) for strategy in ("tp2", "cp2"))
    exposed_tp, exposed_cp = 1e3 * tp2.tensor_parallel, 1e3 * cp2.context_parallel
    predicted_ms = {residual.case: residual.predicted for residual in h200_residuals()}
    slower = predicted_ms["dp2"] - predicted_ms["baseline"]
    lab_guide = (ROOT / "examples" / "gpt3" / "README.md").read_text(encoding="utf-8")
    sentences = " ".join(lab_guide.split())
    assert f"{exposed_tp:.0f} of TP's 106 ms and {exposed_cp:.0f} of CP's 79 ms" in sentences
    assert f"predicted, it is {slower:.1f} ms slower" in sentences
    for samples, sentence in (
        (16, "The planner predicts {} ms"),
        (4, "the planner predicts {} ms"),
    ):
        spec = replace(h200_spec("pp2"), batch=Batch(samples, 64))
        milliseconds = 1e3 * iteration_seconds(spec, cluster).total
        assert sentence.format(f"{milliseconds:,.0f}") in sentences


def test_the_planners_readme_states_the_errors_of_blind_rows() -> None:
    readme = (ROOT / "src" / "parakit" / "planner" / "README.md").read_text(encoding="utf-8")
    table = readme.partition("| kind of run, held out by source |")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.split(" |")] for line in table.splitlines()[2:]]
    stated = {cells[0].removeprefix("| "): cells[-2] for cells in rows if cells[-2]}
    residuals = predict_blind_measurements()
    groups = group_blind_by_kind(residuals)
    errors = {kind: f"{group.figures['mean_abs_error']:.1%}" for kind, group in groups.items()}
    sentences = " ".join(readme.split())
    for kind, description in (
        ("GeForce RTX 4090", "one run on RTX 4090"),
        ("MI350X", "one on MI350X"),
        ("peak memory", "three peak memories"),
    ):
        assert f"{description} ({errors.pop(kind)})" in sentences
    assert stated == {
        kind: f"{error} ({len(groups[kind].errors)} rows)" for kind, error in errors.items()
    }
    predicted = len(residuals.predicted)
    assert (
        f"{predicted + len(residuals.refused)} rows of other sources, of which {predicted} are"
        in sentences
    )


def test_blind_measurements_are_not_fitted() -> None:
    columns = ("url_or_path", "model", "gpu", "gpus", "metric", "value")
    (path,) = BLIND_FOLDER.glob("*.csv")
    fitted, blind = (
        {tuple(row[column] for column in columns) for _, row in read_rows(path)[1]}
        for path in (MEASUREMENTS_FILE, path)
    )
    assert len(blind) == 31
    assert not blind & fitted


def row(plain_seconds: float, split_seconds: float) -> SizeRow:
    plain, split = (
        cast(Any, SimpleNamespace(seconds=SimpleNamespace(total=seconds)))
        for seconds in (plain_seconds, split_seconds)
    )
    return SizeRow(request_of("dense-5b", 2, "h100"), plain, split)


def test_crossover_needs_a_lead_beyond_the_error_of_the_planner() -> None:
    assert [row(1.0, ratio).ahead for ratio in (1.06, 0.98, 0.94)] == [
        *("data parallel", "within noise", "split")
    ]
    assert ": none; of 2 cases data parallelism is ahead in 1," in size_sentence(
        (row(1, 2), row(1, 1))
    )
    assert ": splitting is ahead for dense-5b on 2; of 1 cases" in size_sentence((row(2, 1),))


def test_every_figure_of_every_claim_is_judged() -> None:
    claims = load_claims()
    assert len(claims) >= 17
    for claim in claims:
        for name in claim.keys() - _SAYS_WHAT_IT_IS_ABOUT:
            without = Claim({key: value for key, value in claim.items() if key != name})
            assert judge(without) != judge(claim), (claim.about, name)


@pytest.mark.parametrize(("mfu", "is_so"), [(0.449, True), (0.52, False)])
def test_mfu_claim_is_judged_by_the_rate_of_the_same_claim(mfu: float, is_so: bool) -> None:
    (statement,) = judge(Claim(tflops_per_device=140, mfu=mfu))
    assert statement[1:] == (is_so, "140 of 312 are 44.9%")


def test_degrees_that_do_not_multiply_to_the_gpus_are_a_contradiction() -> None:
    for gpus, is_so in ((1960, True), (2048, False)):
        claim = Claim(layout="tp8pp35", gpus=gpus, data_parallel=7)
        assert [statement[1] for statement in judge(claim)] == [is_so]


def test_claim_without_a_strategy_cannot_be_judged() -> None:
    (statement,) = judge(Claim(training_days=38))
    assert statement[1] is None
