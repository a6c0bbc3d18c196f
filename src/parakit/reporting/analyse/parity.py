"""Do the loss curves agree? Residual line by line, only between runs that must agree.

What may differ: one unit of the last printed digit, because each side is rounded by half a unit; what
the precision's rounding was measured to add in each iteration (`ROUNDING_AN_ITERATION`); and on GPUs
what repeats of one strategy by the same code differ by. CPU ranks repeat to the last digit, so there a
difference between repeats is reported and never a tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from parakit.artifacts.measurements import count_tokens_per_expert, find_routing_divergence
from parakit.formatting.units import plural
from parakit.logs import IterationTable, Run
from parakit.reporting.analyse.configurations import Configuration
from parakit.reporting.analyse.must_agree import UNPROVEN, why_shape_is_unknown
from parakit.reporting.analyse.must_agree import why_losses_may_differ as _stated_obstacle

REFERENCE = "reference"
HELD = "held"
NOT_COMPARABLE = "not comparable"
_PRINTED_DIGITS = 7
_SLACK = 1.000001
"""Absorbs the binary representation of decimal digits, nothing more."""

ROUNDING_PER_ITERATION = {"fp32": 3e-9, "bf16": 6e-6, "fp16": 1.5e-6}
"""By how much of itself a loss may differ for each iteration trained, by precision.

Measured on CPU ranks with gpt2-tiny from one start, global batch 8, Megatron 0.19.0. The largest
difference from baseline over its iteration's number, of healthy strategies: in fp32 one printed unit at
most in 100 iterations (tp2, sp2, pp2), and 2.2e-9 beyond that unit in 500 (tp2, global batch 4); in bf16
3.8e-6 (tp2, sp2, cp2, pp2, dp2, two seeds, 50 iterations); in fp16 6.3e-7 (tp2, sp2, cp2, pp2, 50
iterations). An sp2 whose norms' gradients are not reduced differs by 7e-6 to 3e-5 in all three and is
broken at iteration 3 or 4; a tp2 whose input gradient is 1% too large by 2e-6 to 8e-6 in bf16, which is
near the limit of what its losses show.
"""
BACKEND_ROUNDING_PER_ITERATION = 4e-8
"""The same in fp32 between two backends. Plain PyTorch's baseline was beyond one printed unit by 3.2e-8
at most in 2,000 iterations (`make experiment NAME=long_run`), and one unit off in the last of them."""
LOGS_AGREE = 2e-4
"""By how much of themselves losses of two foreign logs may differ in any iteration.

Public logs of one seed and data order agree to 1.6e-4; nothing is known of their devices' repeats.
"""
_FEWEST_OF_LOGS = 5
"""Iterations that two logs must share before their agreement stands for a common start."""
MAX_HALF_PRECISION_ITERATIONS = 50
"""In bf16 and fp16 losses are compared up to here.

Where a step is unstable rounding grows by itself: healthy bf16 strategies that differed by 2e-5 in
iteration 80 differed by 4e-3 in iteration 82, as much as a broken one.
"""

Curve = dict[int, float]


@dataclass(frozen=True)
class Parity:
    """The verdict on one configuration."""

    verdict: str = ""
    """`reference`, `held`, `broken@<iteration>`, `not comparable`, or empty: nothing to compare."""
    reason: str = ""
    """Why it is not comparable."""
    reference: str = ""
    """Name of the run it was compared with."""
    compared: int = 0
    """Iterations that both curves have."""
    max_difference: float | None = None
    max_units: float | None = None
    """The same in units of the last printed digit."""
    repeats: int = 0
    """Pairs of repeats that the tolerance rests on; 0: rounding alone."""
    diverged: int | None = None
    """The iteration in which a token took another expert: nothing is compared from there on."""
    until: int | None = None
    """The last iteration compared, where later ones are not because of the precision."""
    judged: str = ""
    """Name of the row's run that the verdict is on: the newest, unless an older one is broken."""
    without_baseline: str = ""
    """Why a baseline that is there is not the reference; empty where it is, or there is none."""
    repeats_units: float | None = None
    """By how many units repeats differ that should be equal; None where they are, or there are none."""

    @property
    def repeats_differ(self) -> str:
        """What its repeats show, a sentence's end; empty where there is none."""
        if self.repeats_units is None:
            return ""
        return (
            f"repeats differ by {plural(round(self.repeats_units), 'unit')} of the last printed digit: "
            "not deterministic, or not the same code"
        )


def judge_parity(rows: Sequence[Configuration]) -> list[Parity]:
    """The verdict on each row, against the reference of those it must agree with.

    The reference is a run of `baseline` where one can be, also an older run of its row. A row that need
    not agree with any other of its model is not comparable, with the reason against the model's main
    reference.
    """
    models: dict[str, list[int]] = {}
    result = [Parity() for _ in rows]
    with_losses = [index for index, row in enumerate(rows) if len(loss_points(row.newest)[0])]
    models_of_kit = {row.newest.model for row in rows if not row.newest.is_foreign}
    for index in with_losses:
        run = rows[index].newest
        if run.model:
            # A log's model is known by its flags: those of one size have another name if they differ.
            name = run.model if run.model in models_of_kit else run.dimensions
            models.setdefault(name, []).append(index)
        elif len(with_losses) > 1 and (reason := why_shape_is_unknown(run)):
            result[index] = Parity(NOT_COMPARABLE, reason)
    for places in models.values():
        # Baseline first, of all rows those that ended well, and Megatron as it is before a changed one;
        # of logs the first that was named.
        members = sorted((rows[place] for place in places), key=_rank)
        against_others = {place: _compared(rows[place], members) for place in places}
        references = {parity.reference for parity in against_others.values() if parity}
        for place, compared in against_others.items():
            row = rows[place]
            parity = compared or _without_other(row, members, references)
            result[place] = replace(
                parity,
                without_baseline=_without_baseline(row, parity, [rows[each] for each in places]),
                repeats_units=_difference_of_repeats(row),
            )
    return result


def _rank(row: Configuration) -> tuple[bool, bool, bool]:
    run = row.newest
    is_patched = bool(run.spec and run.spec.patch_file)
    return not run.has_measurements, is_patched, not (run.is_baseline or run.is_foreign)


def single_step_losses(lines: IterationTable) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Iterations and losses; averaged lines and losses that are not numbers are left out."""
    losses = lines.values("lm_loss")
    left_out = lines.known("averaged") | (lines.values("skipped_iterations") > 0)
    kept = np.isfinite(losses) & ~left_out
    return lines.numbers[kept], losses[kept]


def loss_points(run: Run) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The same of a run, with what it resumed from."""
    numbers, losses = single_step_losses(run.log.iterations)
    if not run.earlier_iterations:
        return numbers, losses
    earlier, before = single_step_losses(IterationTable.of(run.earlier_iterations))
    alone = ~np.isin(earlier, numbers)
    return np.concatenate([earlier[alone], numbers]), np.concatenate([before[alone], losses])


def loss_curve(run: Run) -> Curve:
    """Loss by iteration, of what `loss_points` gives."""
    numbers, losses = loss_points(run)
    return dict(zip(numbers.tolist(), losses.tolist(), strict=True))


def _apart(one: Curve, two: Curve) -> list[tuple[int, float, float]]:
    """How far losses are apart in each iteration that both have, and the larger of them."""
    common = sorted(one.keys() & two.keys())
    return [(n, abs(one[n] - two[n]), max(abs(one[n]), abs(two[n]))) for n in common]


def last_digit_unit(value: float) -> float:
    """One unit of the last digit that Megatron prints of a loss (`{:.6E}`)."""
    if value == 0:
        return 10.0 ** (1 - _PRINTED_DIGITS)
    return float(10.0 ** (math.floor(math.log10(abs(value))) + 1 - _PRINTED_DIGITS))


def allowed_difference(unit: float, rounding: float, largest: float) -> float:
    """Return how far two printed values may differ.

    Args:
        unit: One unit of the last printed digit, and what repeats differ by.
        rounding: What else rounding may change, relative to the larger value.
        largest: The absolute value of the larger one.
    """
    return (unit + rounding * largest) * _SLACK


def _obstacle(reference: Run, other: Run) -> str:
    """Why two runs need not print the same losses; of two logs that do, nothing."""
    reason = _stated_obstacle(reference, other)
    if reason not in UNPROVEN or not (reference.is_foreign and other.is_foreign):
        return reason
    common = _apart(loss_curve(reference), loss_curve(other))
    if len(common) < _FEWEST_OF_LOGS:
        return reason
    worst = max(difference / max(largest, 1e-30) for _, difference, largest in common)
    return "" if worst <= LOGS_AGREE else f"{reason}, and the losses differ by up to {worst:.2g}"


def _without_other(
    row: Configuration, rows: Sequence[Configuration], references: Collection[str]
) -> Parity:
    """Of a row that is compared with no other: the reference of others, or not comparable, or alone."""
    used = next((run.name for run in row.runs if run.name in references), None)
    if used:
        return Parity(REFERENCE, reference=used, judged=used)
    if row is rows[0]:
        return Parity()
    reason = _obstacle(rows[0].newest, row.newest) or "nothing to compare"
    return Parity(NOT_COMPARABLE, reason, rows[0].newest.name)


def _compared(row: Configuration, rows: Sequence[Configuration]) -> Parity | None:
    """The verdict against another row's run; None where no run of the row need agree with another's.

    On CPU ranks each of its runs is judged, and the newest that is broken decides.
    """
    verdicts = []
    for run in reversed(row.runs):
        # The best comes first, so that of a hundred rows few are looked at; a run may be its own.
        found = next(
            (
                (other, reference)
                for other in rows
                for reference in reversed(other.runs)
                if not _obstacle(reference, run) and len(loss_points(reference)[0])
            ),
            None,
        )
        if found is None or found[0] is row:
            continue
        verdicts.append(_verdict_between(found[1], run, *_spread(rows, found[1])))
        if not _repeats_exactly(run):
            break
    broken = (parity for parity in verdicts if parity.verdict.startswith("broken"))
    return next(broken, verdicts[0] if verdicts else None)


def _repeats_exactly(run: Run) -> bool:
    """On CPU ranks, in any precision: sums over gloo are always in the same order."""
    return run.device == "cpu"


def _without_baseline(row: Configuration, parity: Parity, rows: Sequence[Configuration]) -> str:
    """Why a row is compared, and not with the baseline of its model and device that is there."""
    if not parity.reference or parity.verdict == NOT_COMPARABLE:
        return ""
    run = next(run for each in rows for run in each.runs if run.name == parity.reference)
    newest = [each.newest for each in rows]
    there = [o for o in newest if o.is_baseline and o.device == row.newest.device]
    if run.is_baseline or not there or run.is_foreign:
        return ""
    return min((_obstacle(o, run) for o in there), key=len) or f"it is {there[0].status.status}"


def _verdict_between(reference: Run, other: Run, spread: Curve, pairs: int) -> Parity:
    dtype = other.spec.dtype if other.spec else ""
    one, two = reference.measurements.routing, other.measurements.routing
    diverged = (
        find_routing_divergence(count_tokens_per_expert(one), count_tokens_per_expert(two), dtype)
        if one and two
        else None
    )
    until = MAX_HALF_PRECISION_ITERATIONS if dtype in ("bf16", "fp16") else None
    common = _apart(loss_curve(reference), loss_curve(other))
    common = [each for each in common if each[0] < (diverged or math.inf)]
    if until and common and common[-1][0] > until:
        common = [each for each in common if each[0] <= until]
    else:
        until = None
    if not common:
        where = f" before tokens took other experts in iteration {diverged}" if diverged else ""
        where = f" up to {until}, after which {dtype} is not compared" if until else where
        reason = f"no iteration in common{where}"
        return Parity(NOT_COMPARABLE, reason, reference.name, judged=other.name)
    # By how much of themselves losses may differ for each iteration, and in any.
    rate = ROUNDING_PER_ITERATION.get(dtype, 0.0)
    specs = reference.spec, other.spec
    if not all(specs) or len({spec.backend for spec in specs if spec}) > 1:
        rate = max(rate, BACKEND_ROUNDING_PER_ITERATION)
    between_logs = LOGS_AGREE if reference.is_foreign and other.is_foreign else 0.0
    repeated, broken = 0.0, None
    worst, worst_units = 0.0, 0.0
    for number, difference, largest in common:
        repeated = max(repeated, spread.get(number, 0.0))
        unit = last_digit_unit(largest)
        worst, worst_units = max(worst, difference), max(worst_units, difference / unit)
        rounding = max(rate * number, between_logs)
        allowed = allowed_difference(repeated + unit, rounding, largest)
        if broken is None and difference > allowed:
            broken = number
    verdict = HELD if broken is None else f"broken@{broken}"
    figures = (len(common), worst, worst_units, pairs, diverged, until)
    return Parity(verdict, "", reference.name, *figures, judged=other.name)


def resumption_sentence(run: Run) -> str:
    """Whether the iterations that were trained before and after a resumption print the same losses.

    Empty where the run did not resume, or trained none twice.
    """
    if not run.replaced_iterations:
        return ""
    numbers, losses = single_step_losses(IterationTable.of(run.replaced_iterations))
    before, after = dict(zip(numbers.tolist(), losses.tolist(), strict=True)), loss_curve(run)
    common = sorted(before.keys() & after.keys())
    if not common:
        return ""
    units = max(abs(before[n] - after[n]) / last_digit_unit(before[n]) for n in common)
    how = "the same to" if units < 0.5 else f"off by up to {plural(round(units), 'unit')} of"
    return (
        f"Iterations {common[0]} to {common[-1]} were trained before and after it resumed: their losses "
        f"({len(common)} compared) are {how} the last printed digit."
    )


def _difference_of_repeats(row: Configuration) -> float | None:
    """Units by which repeats differ that repeat exactly; None where they do."""
    worst = 0.0
    for place, one in enumerate(row.runs):
        for two in row.runs[place + 1 :]:
            if not _repeats_exactly(one) or _obstacle(one, two):
                continue
            # A run that was resumed in another strategy may be off by one until then.
            allowed = 1.5 if one.restarts or two.restarts else 0.5
            for _, difference, largest in _apart(loss_curve(one), loss_curve(two)):
                units = difference / last_digit_unit(largest)
                worst = max(worst, units if units > allowed else 0.0)
    return worst or None


def _spread(rows: Sequence[Configuration], reference: Run) -> tuple[Curve, int]:
    """Largest difference between repeats of any one strategy, by iteration, and pairs seen.

    Only of runs that the reference is comparable with, and that are known to be of the same code.
    """
    spread: Curve = {}
    pairs = 0
    for row in rows:
        known = (run for run in row.runs if run.record is not None and run.record.code is not None)
        may = (run for run in known if not _repeats_exactly(run))
        curves = [loss_curve(run) for run in may if not _obstacle(reference, run)]
        for theirs in curves[1:]:
            pairs += 1
            for number, difference, _ in _apart(curves[0], theirs):
                spread[number] = max(spread.get(number, 0.0), difference)
    return spread, pairs
