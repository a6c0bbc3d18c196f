"""The search for the changes that make a gap smaller, and the prices of causes."""

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parakit.artifacts.verdict import VerifyOutcome
from parakit.config.files import ROOT
from parakit.logprob import (
    FAMILIES,
    CauseKind,
    FirstModule,
    Gap,
    GapChange,
    GapExplanation,
    LogprobVerdict,
    ModuleSide,
    TokenLogProbabilities,
    find_steps,
    measure_gap,
    price_causes,
    read_explanation,
    state_cause,
)

EPSILON, CHOICES, HEAT = "norm-epsilon=1e-06", "router-choices", "temperature=0.7"
TOLERANCE = 1e-6


def measure_sum(effects: Mapping[str, float]) -> Callable[[tuple[str, ...]], Gap]:
    """Return a measure in which each change takes its effect away from the difference of every token."""

    def measure(applied: tuple[str, ...]) -> Gap:
        difference = sum(effect for name, effect in effects.items() if name not in applied)
        training = np.full((1, 4), -5.0)
        scored = np.ones(training.shape, bool)
        return measure_gap(
            TokenLogProbabilities(training + difference, scored),
            TokenLogProbabilities(training, scored),
        )

    return measure


def find_names(effects: Mapping[str, float], *hypotheses: str) -> list[str]:
    _, steps = find_steps(measure_sum(effects), hypotheses, TOLERANCE)
    return [step.hypothesis for step in steps]


def test_the_change_that_removes_the_gap_is_the_only_cause() -> None:
    assert find_names({EPSILON: 0.1}, CHOICES, EPSILON, HEAT) == [EPSILON]


def test_two_causes_are_found_the_larger_one_first() -> None:
    assert find_names({EPSILON: 0.02, HEAT: 0.4}, CHOICES, EPSILON, HEAT) == [HEAT, EPSILON]


def test_a_gap_that_no_change_lowers_has_no_cause() -> None:
    assert find_names({"something else": 0.3}, CHOICES, EPSILON, HEAT) == []


def test_a_gap_within_rounding_is_not_explained() -> None:
    assert find_names({EPSILON: 1e-7}, EPSILON) == []


def test_of_two_changes_that_both_remove_the_gap_the_first_is_the_cause() -> None:
    def measure(applied: tuple[str, ...]) -> Gap:
        return measure_sum({"both": 0.1})(("both",) if applied else ())

    _, steps = find_steps(measure, (HEAT, EPSILON), TOLERANCE)
    assert [step.hypothesis for step in steps] == [HEAT]


def test_only_one_value_of_a_family_is_a_cause() -> None:
    effects = {"norm-epsilon=1e-06": 0.2, "norm-epsilon=1e-08": 0.1}
    assert find_names(effects, *effects) == ["norm-epsilon=1e-06"]


@given(st.dictionaries(st.sampled_from((EPSILON, CHOICES, HEAT)), st.floats(0.01, 1), min_size=1))
def test_prices_and_the_remaining_kl_add_up_to_the_gap(effects: dict[str, float]) -> None:
    measure = measure_sum({**effects, "unknown": 0.05})
    first, steps = find_steps(measure, (EPSILON, CHOICES, HEAT), TOLERANCE)
    causes = price_causes(first, [GapChange(step) for step in steps])
    remaining = steps[-1].after if steps else first
    assert sum(cause.kl_nats for cause in causes) + remaining.kl_nats == pytest.approx(
        first.kl_nats
    )


def make_verdict(
    effects: Mapping[str, float], first_module: FirstModule | None = None
) -> LogprobVerdict:
    first, steps = find_steps(measure_sum(effects), (EPSILON, CHOICES, HEAT), TOLERANCE)
    causes = price_causes(first, [GapChange(step, "4.0%") for step in steps])
    remaining = steps[-1].after if steps else first
    return LogprobVerdict(
        VerifyOutcome.DIFFERS,
        first,
        TOLERANCE,
        causes=causes,
        remaining=remaining,
        first_module=first_module,
        tried=(EPSILON, CHOICES, HEAT),
    )


def test_the_sentence_names_gap_cause_and_what_explains_nothing() -> None:
    assert make_verdict({CHOICES: 0.1}).sentence == (
        "Log probabilities differ by 0.1 on average (KL 5.2e-03), because routers send 4.0% of the choices to other "
        "experts (100% of the KL); the precision and the layout explain nothing."
    )


def test_the_sentence_says_how_much_is_unexplained() -> None:
    sentence = make_verdict({EPSILON: 0.1, "unknown": 0.1}).sentence
    assert "the norms of one engine have the epsilon 1e-06 (76% of the KL)" in sentence
    assert sentence.endswith("24% of the KL is unexplained.")


def test_the_sentence_says_that_no_change_helped() -> None:
    assert make_verdict({"unknown": 0.1}).sentence == (
        "Log probabilities differ by 0.1 on average (KL 5.2e-03), and none of the 3 changes that were tried removes "
        "30% of the KL."
    )


def test_engines_that_agree_are_said_to_agree() -> None:
    gap = measure_sum({})(())
    verdict = LogprobVerdict(VerifyOutcome.HELD, gap, TOLERANCE)
    assert verdict.sentence.startswith("Log probabilities agree: they differ by 0 on average")
    assert verdict.explained_fraction == 1
    assert list(verdict.list_lines()) == []


def test_lines_name_the_first_module_and_one_piece_of_advice_per_cause() -> None:
    module = FirstModule(
        ModuleSide.SERVING,
        "decoder.final_layernorm",
        "output",
        "models/norm.py:3",
        "[0]: 1.0, not 2.0",
        "other",
    )
    first, advice = make_verdict({EPSILON: 0.1}, module).list_lines()
    assert first == (
        "First module that differs beyond rounding, on the serving side: decoder.final_layernorm (models/norm.py:3), "
        "output: [0]: 1.0, not 2.0"
    )
    assert advice == (
        "semantics (norm-epsilon): Set --norm-epsilon of the trainer and rms_norm_eps of the served config to the "
        "same value."
    )


def test_first_module_without_a_wrong_element_has_the_kind_of_its_error() -> None:
    weight = "embedding.word_embeddings.weight"
    module = FirstModule(ModuleSide.SERVING, weight, "weight at the start", "", "", "other")
    first, _ = make_verdict({EPSILON: 0.1}, module).list_lines()
    assert first.endswith(f"{weight}, weight at the start (kind of error: other)")


def test_every_family_has_a_statement_and_advice_in_full_sentences() -> None:
    assert {family.kind for family in FAMILIES.values()} == set(CauseKind)
    for name, family in FAMILIES.items():
        assert "{" not in state_cause(f"{name}=x")
        assert family.advice.endswith(".")


def test_an_explanation_survives_its_file(tmp_path: Path) -> None:
    first, steps = find_steps(measure_sum({EPSILON: 0.1}), (EPSILON,), TOLERANCE)
    explanation = GapExplanation(first, steps, {EPSILON: "x"}, (EPSILON,))
    explanation.write(tmp_path / "explained.json")
    assert read_explanation(tmp_path / "explained.json") == explanation
    assert explanation.remaining == steps[-1].after


def test_verdict_without_generation_says_what_was_compared() -> None:
    gap = measure_sum({})(())
    reason = "Megatron's static engine does not run in this layout: it ended with 1."
    verdict = LogprobVerdict(VerifyOutcome.HELD, gap, TOLERANCE, not_compared=reason)
    assert list(verdict.list_lines()) == [
        f"Only whole sequences were compared, without generation. {reason}"
    ]


def test_every_family_of_hypotheses_is_tried() -> None:
    sources = "".join(
        path.read_text() for path in sorted((ROOT / "megatron_patches/logprob").glob("*.py"))
    )
    # The layout is the step from the trainer to one rank, which judge_sides takes.
    untried = [name for name in FAMILIES if f'"{name}' not in sources and name != "layout"]
    assert untried == []
