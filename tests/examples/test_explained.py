"""Explanations of real runs in the report: every prediction with its measurement."""

import pytest

from parakit.config.published import Published
from parakit.logs.runs import load_folder
from parakit.reporting.analyse.report import build_report
from parakit.reporting.explain.explanation import Explanation, explain
from parakit.reporting.explain.predicted import PredictionEvidence, compare_run_with_predictions
from parakit.reporting.explain.timelines import build_scene, select_passes, traced_idle_over_work
from tests.examples.runs import Run

NAMES = ("baseline", "dp2", "tp2", "sp2", "cp2", "pp2", "vpp2", "zero1")


@pytest.fixture(scope="module")
def evidence(eight: dict[str, Run]) -> dict[str, PredictionEvidence]:
    return {
        name: compare_run_with_predictions(load_folder(run.folder)) for name, run in eight.items()
    }


@pytest.fixture(scope="module")
def explanation(eight: dict[str, Run]) -> Explanation:
    runs = [load_folder(run.folder) for run in eight.values()]
    return explain(build_report("r", runs, Published()))


@pytest.mark.parametrize("name", NAMES)
def test_parameters_and_every_byte_on_the_wire_are_predicted(
    evidence: dict[str, PredictionEvidence], name: str
) -> None:
    run_evidence = evidence[name]
    assert run_evidence.notes == ()
    assert run_evidence.parameters
    assert all(compared.is_exact for compared in run_evidence.parameters)
    for comparison in run_evidence.calls:
        assert comparison.unattributed == ()
        assert all(row.residual_wire_bytes == 0 for row in comparison.rows)


@pytest.mark.parametrize("name", NAMES)
def test_peak_of_every_rank_is_predicted_except_for_small_omitted_tensors(
    evidence: dict[str, PredictionEvidence], name: str
) -> None:
    peaks = [row for row in evidence[name].memory if row.component == "peak of live tensors"]
    assert len(peaks) == (1 if name == "baseline" else 2)
    for peak in peaks:
        # The closed form omits ids, masks and norm statistics. The peak is 4 to 8 MiB.
        assert 0 <= peak.residual < 320 << 10


@pytest.mark.parametrize("name", NAMES)
def test_shares_of_a_rank_sum_to_its_iteration(
    evidence: dict[str, PredictionEvidence], name: str
) -> None:
    for shares in evidence[name].shares:
        assert sum(shares.phases.values()) == pytest.approx(1)
        assert 0 <= shares.exposed_communication < 1


@pytest.mark.parametrize(("name", "passes_a_rank"), [("pp2", 8), ("vpp2", 16), ("tp2", 8)])
def test_trace_numbers_every_pass_of_the_schedule(
    eight: dict[str, Run], name: str, passes_a_rank: int
) -> None:
    scene = build_scene(load_folder(eight[name].folder))
    worked = select_passes(scene.pieces)
    assert [sum(p.rank == rank for p in worked) for rank in (0, 1)] == [passes_a_rank] * 2
    assert all(piece.step for piece in worked)


def test_idle_fraction_of_both_pipeline_stages_is_shown_with_the_ideal_fraction(
    eight: dict[str, Run], evidence: dict[str, PredictionEvidence]
) -> None:
    idle = traced_idle_over_work(build_scene(load_folder(eight["pp2"].folder)).pieces)
    assert all(share > 0 for share in idle.values())
    first, last = evidence["pp2"].bubble
    assert first.measured > 0
    assert last.measured > 0
    assert first.predicted == last.predicted == 0.25


def test_every_question_is_answered_for_the_eight(explanation: Explanation) -> None:
    assert len(explanation.topics) == 7
    text = " ".join(sentence for topic in explanation.topics for sentence in topic.sentences)
    assert "for this rank it has 1,111,564 bytes, measured are 1,111,564." in text
    assert "Not attributed" not in text
    assert "and dropout masks, are split over 2 ranks. The final norm alone: " in text
