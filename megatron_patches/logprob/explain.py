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
    GENERATED_FOLDER,
    SCORES_FILE,
    WHOLE_FOLDER,
    Gap,
    GapExplanation,
    ScoreRequest,
    TokenLogProbabilities,
    find_steps,
    measure_gap,
)

WHOLE_SEQUENCES = "whole-sequences"
"""Hypothesis that compares with the serving engine's forward pass of whole sequences in place of generation."""


def explain_gap(scorer: Scorer, request: ScoreRequest) -> None:
    """Measure the gap with the changes in effect, and write the explanation."""
    served = Path(request.serving)
    serving_by_folder = {
        folder: TokenLogProbabilities.read(served / folder / SCORES_FILE)
        for folder in (GENERATED_FOLDER, WHOLE_FOLDER)
        if (served / folder / SCORES_FILE).is_file()
    }
    with scorer.replay() as rewind:
        bridge = Bridge.open(scorer, served / "capture" / "rank-0", request.prompt_tokens)
        changes = bridge.list_changes()
        measure = _make_measure(scorer, rewind, changes, serving_by_folder)
        hypotheses = list(changes)
        if WHOLE_FOLDER in serving_by_folder and GENERATED_FOLDER in serving_by_folder:
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
    serving_by_folder: dict[str, TokenLogProbabilities],
) -> Callable[[tuple[str, ...]], Gap]:
    """Return the function that scores the tokens with changes in effect, and returns the gap to the serving engine.

    Scores of the same changes are computed once.
    """
    scores_by_changes: dict[tuple[str, ...], Scores] = {}

    def measure(applied: tuple[str, ...]) -> Gap:
        folder = (
            WHOLE_FOLDER
            if WHOLE_SEQUENCES in applied or GENERATED_FOLDER not in serving_by_folder
            else GENERATED_FOLDER
        )
        model_changes = tuple(name for name in applied if name != WHOLE_SEQUENCES)
        if model_changes not in scores_by_changes:
            edits = PassEdits()
            with ExitStack() as contexts:
                for name in model_changes:
                    contexts.enter_context(changes[name](edits))
                scores_by_changes[model_changes] = score_tokens(scorer, rewind, edits)
        nats = scores_by_changes[model_changes][:, : serving_by_folder[folder].nats.shape[1]]
        is_scored = np.ones(nats.shape, bool)
        return measure_gap(TokenLogProbabilities(nats, is_scored), serving_by_folder[folder])

    return measure
