"""Do the loss curves agree? Residual line by line, only between runs that must agree.

The tolerance is what repeats of one configuration differ by, plus one unit of the last printed
digit: each side is rounded by half a unit. Without repeats it is the rounding alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tools.records.measurements import choices, first_other_choice
from tools.report.analyse.configurations import Configuration, is_planted
from tools.report.read.runs import Run

REFERENCE = "reference"
HELD = "held"
NOT_COMPARABLE = "not comparable"
_PRINTED_DIGITS = 7
_SLACK = 1.000001
"""Absorbs the binary representation of decimal digits, nothing more."""

Curve = dict[int, float]


@dataclass(frozen=True)
class Parity:
    """The verdict on one configuration."""

    verdict: str = ""
    """`reference`, `held`, `broken@<iteration>`, `not comparable`, or empty: nothing to compare."""
    reason: str = ""
    reference: str = ""
    """Name of the run it was compared with."""
    compared: int = 0
    """Iterations that both curves have."""
    max_difference: float | None = None
    max_units: float | None = None
    """The same in units of the last printed digit."""
    repeats: int = 0
    """Pairs of repeats that the tolerance rests on; 0: rounding alone."""
    parted: int | None = None
    """The iteration in which a token took another expert: nothing is compared from there on."""


def parity_of(rows: Sequence[Configuration]) -> list[Parity]:
    """The verdict on each row, against the reference of those it must agree with.

    The reference is `baseline` where there is one. A row that need not agree with any other of its
    model is not comparable, with the reason against the model's main reference.
    """
    models: dict[str, list[int]] = {}
    for place, row in enumerate(rows):
        if row.newest.model and loss_curve(row.newest):
            models.setdefault(row.newest.model, []).append(place)
    result = [Parity() for _ in rows]
    for places in models.values():
        main = min(places, key=lambda place: _rank(rows[place]))
        for group in _comparable(rows, places):
            verdicts = _verdicts_of([rows[place] for place in group])
            for place, parity in zip(group, verdicts, strict=True):
                result[place] = parity
        for place in places:
            if place != main and not result[place].verdict:
                reason = _obstacle(rows[main].newest, rows[place].newest)
                name = rows[main].newest.name
                result[place] = Parity(NOT_COMPARABLE, reason or "nothing to compare", name)
    return result


def loss_curve(run: Run) -> Curve:
    """Loss by iteration; averaged lines and losses that are not numbers are left out."""
    return {
        found.iteration: found.lm_loss
        for found in (*run.before, *run.log.iterations)
        if found.lm_loss is not None
        and math.isfinite(found.lm_loss)
        and not found.averaged
        and not found.skipped_iterations
    }


def last_digit(value: float) -> float:
    """One unit of the last digit that Megatron prints of a loss (`{:.6E}`)."""
    if value == 0:
        return 10.0 ** (1 - _PRINTED_DIGITS)
    return float(10.0 ** (math.floor(math.log10(abs(value))) + 1 - _PRINTED_DIGITS))


def _comparable(rows: Sequence[Configuration], places: Sequence[int]) -> list[list[int]]:
    """Groups of at least two rows that must print the same losses."""
    groups: list[list[int]] = []
    for place in places:
        for group in groups:
            if not _obstacle(rows[group[0]].newest, rows[place].newest):
                group.append(place)
                break
        else:
            groups.append([place])
    return [group for group in groups if len(group) > 1]


def _verdicts_of(rows: Sequence[Configuration]) -> list[Parity]:
    reference = min(rows, key=_rank)
    spread, pairs = _spread(rows)
    return [
        Parity(REFERENCE, reference=row.newest.name)
        if row is reference
        else _verdict_between(reference.newest, row.newest, spread, pairs)
        for row in rows
    ]


def _verdict_between(reference: Run, other: Run, spread: Curve, pairs: int) -> Parity:
    ours, theirs = loss_curve(reference), loss_curve(other)
    parted = _parted(reference, other)
    common = sorted(i for i in ours.keys() & theirs.keys() if parted is None or i < parted)
    if not common:
        until = f" before tokens took other experts in iteration {parted}" if parted else ""
        return Parity(NOT_COMPARABLE, f"no iteration in common{until}", reference.name)
    allowed, broken = 0.0, None
    worst, worst_units = 0.0, 0.0
    for number in common:
        allowed = max(allowed, spread.get(number, 0.0))
        unit = last_digit(max(abs(ours[number]), abs(theirs[number])))
        difference = abs(ours[number] - theirs[number])
        worst, worst_units = max(worst, difference), max(worst_units, difference / unit)
        if broken is None and difference > (allowed + unit) * _SLACK:
            broken = number
    verdict = HELD if broken is None else f"broken@{broken}"
    return Parity(verdict, "", reference.name, len(common), worst, worst_units, pairs, parted)


def _parted(reference: Run, other: Run) -> int | None:
    one, two = reference.ledgers.routing, other.ledgers.routing
    return first_other_choice(choices(one), choices(two)) if one and two else None


def _obstacle(reference: Run, other: Run) -> str:
    """Why two runs need not print the same losses; empty if they must."""
    if reference.start_checkpoint is None or reference.start_checkpoint != other.start_checkpoint:
        return "no shared starting checkpoint"
    ours, theirs = _of_losses(reference), _of_losses(other)
    differing = [name for name in ours if ours[name] != theirs[name]]
    if differing:
        return f"different {', '.join(differing)}"
    if not all(run.spec and run.spec.dropout == 0 for run in (reference, other)):
        return "dropout is on, and its random numbers differ by layout"
    return ""


def _of_losses(run: Run) -> dict[str, object]:
    """What losses depend on, whatever the strategy."""
    spec = run.spec
    return {
        "device": run.device,
        "data": run.data,
        "seed": spec and spec.seed,
        "global batch": run.global_batch_size,
        "sequence length": spec and spec.shape.seq_length,
        "precision": spec and spec.dtype,
        "optimizer": spec and spec.optimizer,
        "plant": spec and spec.plant,
    }


def _spread(rows: Sequence[Configuration]) -> tuple[Curve, int]:
    """Largest difference between repeats of any one configuration, by iteration, and pairs seen."""
    spread: Curve = {}
    pairs = 0
    for row in rows:
        first = row.runs[0]
        for other in row.runs[1:]:
            if _obstacle(first, other):
                continue
            pairs += 1
            ours, theirs = loss_curve(first), loss_curve(other)
            for number in ours.keys() & theirs.keys():
                difference = abs(ours[number] - theirs[number])
                spread[number] = max(spread.get(number, 0.0), difference)
    return spread, pairs


def _rank(row: Configuration) -> tuple[int, int, int]:
    """Baseline first, of all rows those that ended well, and Megatron as it is before a changed one."""
    run = row.newest
    return (0 if run.counts else 1, 1 if is_planted(run.spec) else 0, 0 if run.is_baseline else 1)
