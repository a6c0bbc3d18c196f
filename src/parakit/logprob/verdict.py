"""The verdict on two engines: the gap, its causes with their prices, and the first module that differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from parakit.artifacts.verdict import VerifyOutcome
from parakit.logprob.explain import LEAST_FRACTION, GapStep
from parakit.logprob.gap import Gap
from parakit.logprob.hypotheses import FAMILIES, CauseKind, split_hypothesis, state_cause

NEGLIGIBLE_FRACTION = 0.005
"""Fraction of KL up to which the unexplained part of a gap is not stated."""


class ModuleSide(StrEnum):
    """Side whose module differs first from the bridge, which is the trainer on one rank."""

    TRAINING = "training"
    SERVING = "serving"


class Cause(msgspec.Struct, frozen=True):
    """One cause of a gap, with what the gap loses if the cause is removed."""

    kind: CauseKind
    hypothesis: str
    statement: str
    """Clause that says what differs."""
    advice: str
    kl_nats: float
    """Part of KL that the cause explains. It is negative if the cause hides a part of another one."""
    mean_abs_nats: float
    """Part of the average absolute difference that the cause explains."""
    fraction_of_kl: float
    p99_abs_nats: float
    """99th percentile of the absolute differences before the cause is removed."""
    worst_sequence: int
    worst_position: int
    worst_training_nats: float
    worst_serving_nats: float
    worst_token: str = ""
    """Number of the token with the largest difference, and its text if the model has a tokenizer."""


class FirstModule(msgspec.Struct, frozen=True):
    """First module whose output differs from the bridge's beyond rounding."""

    side: ModuleSide
    module: str
    tensor: str
    source: str
    """File and line of the module's forward pass; empty if unknown."""
    worst: str
    """Element with the largest error: index, value, and the bridge's value; empty if no element has one."""
    kind: str


class LogprobVerdict(msgspec.Struct, frozen=True):
    """Verdict of `make verify-logprob`, as in `logprob.json`."""

    outcome: VerifyOutcome
    gap: Gap
    """Gap between the trainer in its layout and the serving engine as it generates."""
    relative_tolerance: float
    causes: tuple[Cause, ...] = ()
    """Causes in the order in which they were removed."""
    remaining: Gap | None = None
    """Gap that is left when all causes are removed; None if the engines agree."""
    first_module: FirstModule | None = None
    tried: tuple[str, ...] = ()
    """Hypotheses that were measured."""
    not_compared: str = ""
    """Sentence on a part of the serving side that did not run; empty if all parts were compared."""

    @property
    def explained_fraction(self) -> float:
        """Fraction of KL that the causes explain together."""
        if self.remaining is None or self.gap.kl_nats == 0:
            return 1.0
        return 1 - self.remaining.kl_nats / self.gap.kl_nats

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        gap = self.gap
        size = f"{gap.mean_abs_nats:.2g} on average (KL {gap.kl_nats:.1e})"
        if self.outcome is VerifyOutcome.HELD:
            return f"Log probabilities agree: they differ by {size}, which rounding explains."
        if not self.causes:
            return (
                f"Log probabilities differ by {size}, and none of the {len(self.tried)} changes that were tried "
                f"removes {LEAST_FRACTION:.0%} of the KL."
            )
        sentence = f"Log probabilities differ by {size}, because {self._state_main_cause()}"
        clauses = [*self._list_other_causes(), *self._list_excluded_kinds()]
        unexplained = 1 - self.explained_fraction
        if unexplained > NEGLIGIBLE_FRACTION:
            clauses.append(f"{unexplained:.0%} of the KL is unexplained")
        return f"{'; '.join((sentence, *clauses))}."

    def _sort_causes(self) -> list[Cause]:
        """Return the causes, the one that explains most of the KL first."""
        return sorted(self.causes, key=lambda cause: -cause.fraction_of_kl)

    def _state_main_cause(self) -> str:
        """Return the clause on the cause that explains most of the KL."""
        main = self._sort_causes()[0]
        return f"{main.statement} ({main.fraction_of_kl:.0%} of the KL)"

    def _list_other_causes(self) -> Iterator[str]:
        """Yield a clause per further cause."""
        for cause in self._sort_causes()[1:]:
            yield f"{_name_kind(cause)} explains {cause.fraction_of_kl:.0%}"

    def _list_excluded_kinds(self) -> Iterator[str]:
        """Yield at most one clause: which of precision and layout are no causes."""
        kinds_of_causes = {cause.kind for cause in self.causes}
        excluded_kinds = [
            kind for kind in (CauseKind.PRECISION, CauseKind.LAYOUT) if kind not in kinds_of_causes
        ]
        if excluded_kinds:
            names = " and ".join(f"the {kind}" for kind in excluded_kinds)
            yield f"{names} {'explains' if len(excluded_kinds) == 1 else 'explain'} nothing"

    def list_lines(self) -> Iterator[str]:
        """Yield the lines after the table of causes: what was not compared, the first module, and what to do."""
        if self.not_compared:
            yield f"Only whole sequences were compared, without generation. {self.not_compared}"
        module = self.first_module
        if module is not None:
            source = f" ({module.source})" if module.source else ""
            detail = f": {module.worst}" if module.worst else f" (kind of error: {module.kind})"
            yield (
                f"First module that differs beyond rounding, on the {module.side} side: {module.module}{source}, "
                f"{module.tensor}{detail}"
            )
        for cause in self.causes:
            yield f"{_name_kind(cause)}: {cause.advice}"


def _name_kind(cause: Cause) -> str:
    """Return the name of a cause's kind with its family, such as `semantics (norm-epsilon)`."""
    return f"{cause.kind} ({split_hypothesis(cause.hypothesis)[0]})"


@dataclass(frozen=True)
class GapChange:
    """A change, with the gap before and after it, and what was observed besides the gap."""

    step: GapStep
    evidence: str = ""


def price_causes(total: Gap, changes: Sequence[GapChange]) -> tuple[Cause, ...]:
    """Return one cause per change, with the part of the total KL that the change removes.

    Each part is the KL before the change minus the KL after the change. So the parts and the remaining KL add up to
    the total KL.
    """
    causes = []
    for change in changes:
        step = change.step
        name, _ = split_hypothesis(step.hypothesis)
        removed = step.before.kl_nats - step.after.kl_nats
        causes.append(
            Cause(
                kind=FAMILIES[name].kind,
                hypothesis=step.hypothesis,
                statement=state_cause(step.hypothesis, change.evidence),
                advice=FAMILIES[name].advice,
                kl_nats=removed,
                mean_abs_nats=step.before.mean_abs_nats - step.after.mean_abs_nats,
                fraction_of_kl=removed / total.kl_nats if total.kl_nats else 0.0,
                p99_abs_nats=step.before.p99_abs_nats,
                worst_sequence=step.before.worst_sequence,
                worst_position=step.before.worst_position,
                worst_training_nats=step.before.worst_training_nats,
                worst_serving_nats=step.before.worst_serving_nats,
            )
        )
    return tuple(causes)
