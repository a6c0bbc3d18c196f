"""Questions with measured answers are drawn over the sources, and a guess gets the score of a guess."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from parakit.config.files import ROOT
from parakit.config.run import RunSpec
from parakit.config.settings import SEED
from tests.bench.questions import (
    QUESTIONS_PER_KIND,
    Kind,
    MeasuredLayout,
    Question,
    Tool,
    bridge_distance,
    bridge_ranges,
    choose_smallest,
    format_scores,
    has_clear_answer,
    make_questions,
    rule_of_thumb_cost,
    score_choice,
    score_layouts,
    wilson_interval,
)
from tests.planner.test_out_of_memory import build_gh200_run


def layout(
    strategy: str, seconds: float, predicted: float, model: str = "llama3-8b"
) -> MeasuredLayout:
    return MeasuredLayout(build_gh200_run(model, strategy, 1, ""), seconds, predicted)


def spec(strategy: str, model: str = "llama3-8b") -> RunSpec:
    return build_gh200_run(model, strategy, 1, "")


def test_equal_choices_score_the_chance_of_a_guess() -> None:
    assert choose_smallest(("a", "b", "c"), (1.0, 1.0, 2.0)) == ["a", "b"]
    assert score_choice(["a", "b"], "a") == 0.5
    assert score_choice(["b"], "a") == 0.0
    assert score_choice(["a"], "a") == 1.0


def test_layouts_within_five_percent_have_no_clear_answer() -> None:
    fast, near, slow = (
        layout("tp2dp4", 1.0, 1.0),
        layout("tp4dp2", 1.04, 1.0),
        layout("tp8", 1.2, 1.0),
    )
    assert has_clear_answer((fast, slow))
    assert not has_clear_answer((fast, near, slow))
    other_batch = replace(fast.spec, batch=replace(fast.spec.batch, micro_batch_size=2))
    assert not has_clear_answer((fast, replace(slow, spec=other_batch)))


def test_ranges_are_those_of_the_published_table() -> None:
    assert bridge_ranges(spec("tp2dp4")) == {
        "tensor": (2, 4),
        "pipeline": (1, 1),
        "context": (1, 1),
    }
    assert bridge_ranges(spec("tp4pp4dp2", "140b"))["pipeline"] == (4, 8)
    assert bridge_ranges(spec("ep8", "mixtral-8x7b"))["expert"] == (8, 16)


def test_distance_counts_the_doublings_outside_of_the_ranges() -> None:
    assert bridge_distance(spec("tp2dp4")) == 0.0
    assert bridge_distance(spec("dp8")) == 1.0
    assert bridge_distance(spec("tp8pp4dp2")) == 3.0


def test_small_mixture_has_no_upper_limit_of_expert_parallelism() -> None:
    mixture = spec("ep8", "mixtral-8x7b")
    small = replace(mixture, shape=replace(mixture.shape, layers=4))
    assert bridge_ranges(small)["expert"] == (1, math.inf)
    assert bridge_distance(small) == 0.0
    split = replace(small.parallelism, tensor=4, sequence_parallel=True)
    assert bridge_distance(replace(small, parallelism=split)) == 2.0


def test_rule_of_thumb_splits_as_little_as_possible() -> None:
    costs = [rule_of_thumb_cost(spec(name)) for name in ("dp8", "tp2dp4", "pp2dp4", "tp8")]
    assert costs == sorted(costs)


def test_the_planner_is_scored_by_its_predicted_times() -> None:
    scores = score_layouts((layout("dp8", 2.0, 3.0), layout("tp2dp4", 1.0, 1.0)))
    assert scores == {Tool.PLANNER: 1.0, Tool.BRIDGE: 1.0, Tool.RULE: 0.0, Tool.GUESS: 0.5}


def test_interval_of_half_of_forty_is_that_of_the_formula() -> None:
    low, high = wilson_interval(0.5, 40)
    assert (round(low, 3), round(high, 3)) == (0.352, 0.648)
    assert wilson_interval(1.0, 5)[1] == 1.0


def test_table_has_a_row_per_kind_and_one_for_all() -> None:
    scores = {Tool.PLANNER: 1.0, Tool.BRIDGE: 0.5, Tool.RULE: 0.0, Tool.GUESS: 0.5}
    questions = [Question(kind, "a", "?", ("x", "y"), "x", scores) for kind in Kind]
    lines = format_scores(questions).splitlines()
    assert len(lines) == 2 + 4
    assert lines[-1].startswith("| all | 3 | 1 | 100.0% (")


@pytest.fixture(scope="module")
def questions() -> list[Question]:
    return make_questions(seed=SEED.default)


def test_120_questions_of_many_sources_are_answered_better_than_by_a_guess(
    questions: list[Question],
) -> None:
    assert len(questions) == 3 * QUESTIONS_PER_KIND
    assert len({question.source for question in questions}) >= 10
    for question in questions:
        assert question.answer in question.options
        assert all(math.isfinite(score) for score in question.scores.values())
    total = {tool: sum(question.scores[tool] for question in questions) for tool in Tool}
    assert total[Tool.PLANNER] > 1.3 * total[Tool.GUESS]


def test_the_table_in_the_docs_is_the_one_that_the_command_prints(
    questions: list[Question],
) -> None:
    assert format_scores(questions) in (ROOT / "docs/agents.md").read_text()
