"""Find on one rank which changes make Megatron report what the serving engine reports."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from megatron_patches.capture.routing import capture_routing
from megatron_patches.logprob.choices import ChoiceComparison
from megatron_patches.logprob.interventions import ROUTER_CHOICES, Bridge, Change
from megatron_patches.logprob.passes import PassEdits, Scores, score_tokens
from megatron_patches.logprob.scorer import Scorer
from parakit.logprob import (
    EXPLAINED_FILE,
    SCORES_FILE,
    Gap,
    GapExplanation,
    ScoreRequest,
    TokenLogProbabilities,
    find_steps,
    measure_gap,
)

GENERATED, WHOLE = "generated", "whole"
WHOLE_SEQUENCES = "whole-sequences"
"""Hypothesis that compares with the serving engine's forward pass of whole sequences in place of generation."""


def explain_gap(scorer: Scorer, request: ScoreRequest) -> None:
    """Measure the gap under every change, and write the explanation."""
    served = Path(request.serving)
    targets = {
        way: TokenLogProbabilities.read(served / way / SCORES_FILE)
        for way in (GENERATED, WHOLE)
        if (served / way / SCORES_FILE).is_file()
    }
    with scorer.replay() as rewind:
        bridge = Bridge.open(scorer, served / "capture" / "rank-0", request.prompt_tokens)
        changes = bridge.list_changes()
        measure = _make_measure(scorer, rewind, changes, targets)
        hypotheses = list(changes)
        if WHOLE in targets and GENERATED in targets:
            hypotheses.append(WHOLE_SEQUENCES)
        first, steps = find_steps(measure, hypotheses, request.relative_tolerance)
        evidence = {}
        if any(step.hypothesis == ROUTER_CHOICES for step in steps):
            evidence[ROUTER_CHOICES] = f"{_count_flips(bridge, rewind):.1%}"
    explanation = GapExplanation(first, steps, evidence, tuple(hypotheses))
    explanation.write(Path(request.folder) / EXPLAINED_FILE)


def _count_flips(bridge: Bridge, rewind: Callable[[], None]) -> float:
    """Return the fraction of the routers' choices that the serving engine does not make."""
    assert bridge.served is not None
    flips = ChoiceComparison(bridge.served)
    with capture_routing(bridge.scorer.chunks, bridge.scorer.names, flips):
        score_tokens(bridge.scorer, rewind, PassEdits())
    return flips.num_flips / max(1, flips.num_choices)


def _make_measure(
    scorer: Scorer,
    rewind: Callable[[], None],
    changes: dict[str, Change],
    targets: dict[str, TokenLogProbabilities],
) -> Callable[[tuple[str, ...]], Gap]:
    """Return the function that scores the tokens under some changes, and returns the gap to the serving engine."""
    scores_by_changes: dict[tuple[str, ...], Scores] = {}

    def measure(applied: tuple[str, ...]) -> Gap:
        way = WHOLE if WHOLE_SEQUENCES in applied or GENERATED not in targets else GENERATED
        on_model = tuple(name for name in applied if name != WHOLE_SEQUENCES)
        if on_model not in scores_by_changes:
            edits = PassEdits()
            with ExitStack() as contexts:
                for name in on_model:
                    contexts.enter_context(changes[name](edits))
                scores_by_changes[on_model] = score_tokens(scorer, rewind, edits)
        nats = scores_by_changes[on_model][:, : targets[way].nats.shape[1]]
        is_scored = np.ones(nats.shape, bool)
        return measure_gap(TokenLogProbabilities(nats, is_scored), targets[way])

    return measure
