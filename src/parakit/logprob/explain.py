"""Split a gap into causes: apply the change that lowers it most, measure again, and go on from there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from parakit.artifacts.io import atomic_write
from parakit.logprob.gap import Gap
from parakit.logprob.hypotheses import split_hypothesis

Measure = Callable[[tuple[str, ...]], Gap]
"""Function that returns the gap when the named changes are applied together."""

LEAST_FRACTION = 0.3
"""Fraction of the remaining KL that a change must remove to be a cause."""
MOST_CAUSES = 4
"""Largest number of changes that are applied together."""


class GapStep(msgspec.Struct, frozen=True):
    """One change that lowered the gap, with the gap before and after it."""

    hypothesis: str
    before: Gap
    after: Gap


class GapExplanation(msgspec.Struct, frozen=True):
    """The changes that lower a gap, in the order in which they were applied."""

    first: Gap
    """Gap without any change."""
    steps: tuple[GapStep, ...]
    evidence: dict[str, str] = {}
    """What was observed about a hypothesis besides the gap, by hypothesis."""
    tried: tuple[str, ...] = ()
    """All hypotheses that were measured."""

    @property
    def remaining(self) -> Gap:
        """Gap with all changes applied."""
        return self.steps[-1].after if self.steps else self.first

    def write(self, path: Path) -> None:
        """Write the explanation as JSON."""
        with atomic_write(path) as file:
            file.write(msgspec.json.encode(self))


def read_explanation(path: Path) -> GapExplanation:
    """Read an explanation that `GapExplanation.write` wrote."""
    return msgspec.json.decode(path.read_bytes(), type=GapExplanation)


def find_steps(
    measure: Measure, hypotheses: Sequence[str], relative_tolerance: float
) -> tuple[Gap, tuple[GapStep, ...]]:
    """Return the gap without changes, and the changes that lower the gap to rounding, or as far as possible.

    In each round every hypothesis is measured together with the changes so far, and the hypothesis with the smallest
    KL is kept. A round ends early at the first hypothesis that leaves only rounding. The caller therefore lists
    specific changes before general changes.

    Args:
        measure: Applies changes and returns the gap.
        hypotheses: Names of the changes, `family` or `family=value`. At most one change per family is kept.
        relative_tolerance: Relative error up to which rounding explains a gap.
    """
    first = current = measure(())
    steps: list[GapStep] = []
    while current.relative_error > relative_tolerance and len(steps) < MOST_CAUSES:
        applied = tuple(step.hypothesis for step in steps)
        used_families = {split_hypothesis(hypothesis)[0] for hypothesis in applied}
        best: GapStep | None = None
        for hypothesis in hypotheses:
            if split_hypothesis(hypothesis)[0] in used_families:
                continue
            after = measure((*applied, hypothesis))
            if best is None or after.kl_nats < best.after.kl_nats:
                best = GapStep(hypothesis, current, after)
            if after.relative_error <= relative_tolerance:
                best = GapStep(hypothesis, current, after)
                break
        if best is None or best.after.kl_nats > (1 - LEAST_FRACTION) * current.kl_nats:
            break
        steps.append(best)
        current = best.after
    return first, tuple(steps)
