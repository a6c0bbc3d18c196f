"""Judge two scored sides: whether they agree within rounding, and if not, why and where."""

from __future__ import annotations

import msgspec

from parakit.artifacts.verdict import VerifyOutcome, VerifyVerdict
from parakit.experiments.logprob.sides import Sides
from parakit.logprob import (
    Cause,
    FirstModule,
    GapChange,
    GapStep,
    LogprobVerdict,
    ModuleSide,
    measure_gap,
    price_causes,
)
from parakit.verify import Capture, VerifyError, judge

LAYOUT = "layout"


def judge_sides(sides: Sides) -> LogprobVerdict:
    """Score both sides, and return the verdict.

    The gap is split along a path of changes from the trainer to the serving engine. The first change takes the
    trainer's layout away. All further changes are made on one rank. If the gap is within rounding, nothing is changed.
    """
    prompt_tokens, tolerance = sides.prompt_tokens, sides.relative_tolerance
    training = sides.training.select(prompt_tokens)
    serving = sides.read_serving()
    total = measure_gap(training, serving)
    if total.relative_error <= tolerance:
        return LogprobVerdict(VerifyOutcome.HELD, total, tolerance, not_compared=sides.problem)
    bridge = sides.bridge.select(prompt_tokens)
    explanation = sides.explain()
    changes = []
    if measure_gap(training, bridge).relative_error > tolerance:
        changes.append(GapChange(GapStep(LAYOUT, total, measure_gap(bridge, serving))))
    for step in explanation.steps:
        changes.append(GapChange(step, explanation.evidence.get(step.hypothesis, "")))
    return LogprobVerdict(
        VerifyOutcome.DIFFERS,
        total,
        tolerance,
        causes=tuple(
            msgspec.structs.replace(cause, worst_token=_describe_worst_token(sides, cause))
            for cause in price_causes(total, changes)
        ),
        remaining=explanation.remaining,
        first_module=_find_first_module(sides),
        tried=explanation.tried,
        not_compared=sides.problem,
    )


def _describe_worst_token(sides: Sides, cause: Cause) -> str:
    """Return the number of the token with the largest difference, and its text if the served model has a tokenizer."""
    token = int(sides.bridge.tokens[cause.worst_sequence, cause.worst_position + 1])
    text = sides.texts_by_token.get(str(token))
    return f"{token} {text!r}" if text is not None else str(token)


def _find_first_module(sides: Sides) -> FirstModule | None:
    """Return the first module whose output differs from the bridge's: the trainer's, or else the serving engine's.

    None means that no captured module differs, or that the captures cannot be compared.
    """
    captures = {ModuleSide.TRAINING: sides.training.capture}
    if sides.serving_capture is not None:
        captures[ModuleSide.SERVING] = sides.serving_capture
    for side, capture in captures.items():
        verdict = _find_first_wrong(sides.bridge.capture, capture)
        if verdict is not None:
            return FirstModule(
                side=side,
                module=verdict.module or "",
                tensor=verdict.tensor or "",
                source=verdict.source or "",
                worst=verdict.worst or "",
                kind=verdict.kind or "",
            )
    return None


def _find_first_wrong(reference: Capture, capture: Capture) -> VerifyVerdict | None:
    """Return the verdict on a capture that differs from the reference; None if all compared tensors agree."""
    try:
        verdict = judge(reference, capture).verdict
    except VerifyError:
        return None
    return verdict if verdict.verdict is VerifyOutcome.DIFFERS else None
