"""Judge whether the loss curves of runs agree that must print the same losses.

The tolerance at an iteration has three parts. Each side is rounded, so losses may differ by one unit of the
last printed digit. The precision adds rounding per iteration (`ROUNDING_PER_ITERATION`, measured). On GPUs,
repeats of one strategy by the same code differ too. CPU ranks repeat to the last digit, so a difference
between their repeats is reported and is no tolerance.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from parakit.artifacts.measurements import count_tokens_per_expert, find_routing_divergence
from parakit.formatting.units import plural
from parakit.logs import IterationTable, Run
from parakit.reporting.analyse.configurations import Configuration
from parakit.reporting.analyse.must_agree import (
    DAMAGED_FILE,
    UNPROVEN,
    why_losses_may_differ,
    why_shape_is_unknown,
)

REFERENCE = "reference"
HELD = "held"
NOT_COMPARABLE = "not comparable"
_PRINTED_DIGITS = 7
_SLACK = 1.000001
"""Factor on the tolerance that absorbs the binary representation of decimal digits."""

ROUNDING_PER_ITERATION = {"fp32": 3e-9, "bf16": 6e-6, "fp16": 1.5e-6}
"""Fraction of a loss by which it may differ per trained iteration, by precision.

Measured on CPU ranks with gpt2-tiny from one start, global batch 8, Megatron 0.19.0. The largest
difference from baseline over its iteration's number, of healthy strategies: in fp32 one printed unit at
most in 100 iterations (tp2, sp2, pp2), and 2.2e-9 beyond that unit in 500 (tp2, global batch 4); in bf16
3.8e-6 (tp2, sp2, cp2, pp2, dp2, two seeds, 50 iterations); in fp16 6.3e-7 (tp2, sp2, cp2, pp2, 50
iterations). An sp2 whose norms' gradients are not reduced differs by 7e-6 to 3e-5 in all three and is
broken at iteration 3 or 4; a tp2 whose input gradient is 1% too large by 2e-6 to 8e-6 in bf16, which is
near the limit of what its losses show.
"""
BACKEND_ROUNDING_PER_ITERATION = 4e-8
"""Fraction of a loss by which it may differ per iteration in fp32 between two backends.

Plain PyTorch's baseline exceeded one printed unit by 3.2e-8 at most in 2,000 iterations (`make experiment
NAME=long_run`), and differed by one unit in the last iteration.
"""
LOGS_AGREE = 2e-4
"""Fraction by which losses of two foreign logs may differ in any iteration.

Public logs of one seed and data order agree to 1.6e-4. Nothing is known of repeats on their devices.
"""
_FEWEST_OF_LOGS = 5
"""Iterations that two logs must share before their agreement proves a common start."""
MAX_HALF_PRECISION_ITERATIONS = 50
"""Last iteration in which losses are compared in bf16 and fp16.

After an unstable step, rounding grows by itself: healthy bf16 strategies that differed by 2e-5 in
iteration 80 differed by 4e-3 in iteration 82, as much as a broken one.
"""

Curve = dict[int, float]
"""Loss by iteration."""


@dataclass(frozen=True)
class LastLosses:
    """Losses of two runs after their last common iteration."""

    iteration: int
    loss: float
    reference_loss: float


@dataclass(frozen=True)
class Parity:
    """Verdict on the losses of one row."""

    verdict: str = ""
    """`reference`, `held`, `broken@<iteration>`, `not comparable`, or empty if there is nothing to compare."""
    reason: str = ""
    """Reason why the row is not comparable; empty otherwise."""
    reference: str = ""
    """Name of the reference run."""
    compared: int = 0
    """Number of iterations that both curves have."""
    max_difference: float | None = None
    max_units: float | None = None
    """Largest difference in units of the last printed digit."""
    repeats: int = 0
    """Number of pairs of repeats on which the tolerance rests; 0 if it is rounding alone."""
    diverged: int | None = None
    """First iteration in which a token took another expert; it and later ones are not compared."""
    until: int | None = None
    """Last compared iteration if the precision excludes later ones, else None."""
    judged: str = ""
    """Name of the row's run that was judged: the newest, unless an older one is broken."""
    without_baseline: str = ""
    """Reason why an existing baseline is not the reference; empty if it is, or if there is none."""
    repeats_units: float | None = None
    """Units of the last digit by which repeats differ that should be equal; None if none do."""
    last_losses: LastLosses | None = None
    """Losses of a row and of the reference with the same work, if they need not agree; else None."""

    @property
    def is_broken(self) -> bool:
        """True if the losses differ from the reference's by more than the tolerance."""
        return self.verdict.startswith("broken")

    @property
    def repeats_differ(self) -> str:
        """Clause that says by how much repeats differ although they should be equal; empty if no repeats differ."""
        if self.repeats_units is None:
            return ""
        return (
            f"repeats differ by {plural(round(self.repeats_units), 'unit')} of the last printed digit: "
            "not deterministic, or not the same code"
        )


def judge_parity(rows: Sequence[Configuration]) -> list[Parity]:
    """Return a verdict per row: whether its losses agree with those of the row's reference.

    Rows of one model are compared with each other. The reference is a run of `baseline` if possible, even an
    older one. A row that need not agree with any other row of its model is not comparable, and the reason
    compares it with the first choice of reference. A row without losses gets an empty verdict.
    """
    verdicts = [Parity() for _ in rows]
    indexes_by_model: dict[str, list[int]] = defaultdict(list)
    with_losses = [index for index, row in enumerate(rows) if len(loss_points(row.newest)[0])]
    models_of_kit = {row.newest.model for row in rows if not row.newest.is_foreign}
    for index in with_losses:
        run = rows[index].newest
        if run.has_damaged_file:
            verdicts[index] = Parity(NOT_COMPARABLE, DAMAGED_FILE)
            continue
        if run.model:
            # The model of a log is known by its flags, so logs of one size may have different names.
            name = run.model if run.model in models_of_kit else run.dimensions
            indexes_by_model[name].append(index)
            continue
        reason = why_shape_is_unknown(run)
        if reason and len(with_losses) > 1:
            verdicts[index] = Parity(NOT_COMPARABLE, reason)
    for indexes in indexes_by_model.values():
        verdicts_of_model = _judge_rows_of_model([rows[index] for index in indexes])
        for index, parity in zip(indexes, verdicts_of_model, strict=True):
            verdicts[index] = parity
    return verdicts


def _judge_rows_of_model(rows: Sequence[Configuration]) -> list[Parity]:
    """Return a loss verdict per row. All rows must be of one model."""
    ranked_rows = sorted(rows, key=_reference_rank)
    against_others = [_judge_against_others(row, ranked_rows) for row in rows]
    references = {parity.reference for parity in against_others if parity}
    verdicts = []
    for row, compared in zip(rows, against_others, strict=True):
        parity = compared or _judge_uncompared(row, ranked_rows, references)
        verdicts.append(
            replace(
                parity,
                without_baseline=_why_not_against_baseline(row, parity, rows),
                repeats_units=_difference_of_repeats(row),
            )
        )
    return verdicts


def _reference_rank(row: Configuration) -> tuple[bool, bool, bool]:
    """Return a sort key that puts the best reference first.

    Successful runs come before failed ones, runs of unpatched Megatron before patched ones, and baseline before
    other strategies.
    """
    run = row.newest
    is_patched = bool(run.spec and run.spec.patch_file)
    return not run.has_measurements, is_patched, not (run.is_baseline or run.is_foreign)


def single_step_losses(lines: IterationTable) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the iteration numbers and losses of the lines that report a single trained step, as two arrays.

    Left out are lines that average several steps, skipped steps, and losses that are not finite.
    """
    losses = lines.values("lm_loss")
    left_out = lines.known("averaged") | (lines.values("skipped_iterations") > 0)
    usable = np.isfinite(losses) & ~left_out
    return lines.numbers[usable], losses[usable]


def loss_points(run: Run) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the iteration numbers of a run and the losses, as two arrays of equal length.

    A resumed run includes the iterations of its parent run, except those that it trained again.
    """
    numbers, losses = single_step_losses(run.log.iterations)
    if not run.earlier_iterations:
        return numbers, losses
    earlier_numbers, earlier_losses = single_step_losses(IterationTable.of(run.earlier_iterations))
    is_replaced = np.isin(earlier_numbers, numbers)
    return (
        np.concatenate([earlier_numbers[~is_replaced], numbers]),
        np.concatenate([earlier_losses[~is_replaced], losses]),
    )


def loss_curve(run: Run) -> Curve:
    """Return the losses of `loss_points` as a dictionary by iteration number."""
    numbers, losses = loss_points(run)
    return dict(zip(numbers.tolist(), losses.tolist(), strict=True))


@dataclass(frozen=True)
class _LossPair:
    """Losses of two runs in one iteration."""

    iteration: int
    difference: float
    largest: float
    """Larger one of the two absolute values."""


def _pair_losses(curve: Curve, other: Curve) -> list[_LossPair]:
    """Return a pair of losses for each iteration that both curves have, in the order of the iterations."""
    return [
        _LossPair(
            iteration,
            difference=abs(curve[iteration] - other[iteration]),
            largest=max(abs(curve[iteration]), abs(other[iteration])),
        )
        for iteration in sorted(curve.keys() & other.keys())
    ]


def last_digit_unit(value: float) -> float:
    """Return one unit of the last digit that Megatron prints of a loss (`{:.6E}`)."""
    if value == 0:
        return 10.0 ** (1 - _PRINTED_DIGITS)
    return float(10.0 ** (math.floor(math.log10(abs(value))) + 1 - _PRINTED_DIGITS))


def allowed_difference(unit: float, rounding: float, largest: float) -> float:
    """Return how far apart two printed losses may be and still count as equal.

    Args:
        unit: Absolute tolerance: one unit of the last printed digit plus the difference between repeats.
        rounding: Relative tolerance for other rounding, as a fraction of `largest`.
        largest: Absolute value of the larger loss.
    """
    return (unit + rounding * largest) * _SLACK


def _why_not_comparable(reference: Run, other: Run) -> str:
    """Return why two runs need not print the same losses; empty if they must.

    For two foreign logs, an unproven reason does not count if their losses agree.
    """
    reason = why_losses_may_differ(reference, other)
    if reason not in UNPROVEN or not (reference.is_foreign and other.is_foreign):
        return reason
    pairs = _pair_losses(loss_curve(reference), loss_curve(other))
    if len(pairs) < _FEWEST_OF_LOGS:
        return reason
    worst = max(pair.difference / max(pair.largest, 1e-30) for pair in pairs)
    return "" if worst <= LOGS_AGREE else f"{reason}, and the losses differ by up to {worst:.2g}"


def _judge_uncompared(
    row: Configuration, rows: Sequence[Configuration], references: Collection[str]
) -> Parity:
    """Return the verdict on a row whose losses are not compared with another row's.

    The verdict is `reference` if another row uses one of its runs as reference. Otherwise it is empty for the
    first row, and `not comparable` with a reason for every other row.
    """
    reference_run = next((run.name for run in row.runs if run.name in references), None)
    if reference_run:
        return Parity(REFERENCE, reference=reference_run, judged=reference_run)
    if row is rows[0]:
        return Parity()
    reference, run = rows[0].newest, row.newest
    reason = _why_not_comparable(reference, run) or "nothing to compare"
    last_losses = _find_last_losses(reference, run)
    return Parity(NOT_COMPARABLE, reason, reference.name, last_losses=last_losses)


def _find_last_losses(reference: Run, other: Run) -> LastLosses | None:
    """Return the losses of two runs of the same work after the last iteration that both have.

    None means that their models, batches or sequence lengths differ or are not known to be equal, or that they
    share no iteration.
    """
    batch, seq_length = reference.global_batch_size, reference.seq_length
    if not batch or not seq_length:
        return None
    if (other.global_batch_size, other.seq_length) != (batch, seq_length):
        return None
    if reference.stated_model.differences(other.stated_model):
        return None
    curve, reference_curve = loss_curve(other), loss_curve(reference)
    common = curve.keys() & reference_curve.keys()
    if not common:
        return None
    last = max(common)
    return LastLosses(last, curve[last], reference_curve[last])


def _judge_against_others(row: Configuration, rows: Sequence[Configuration]) -> Parity | None:
    """Return the verdict on a row against its reference; None if no other row has to have the same losses.

    Only the newest run that has a reference is judged. On CPU ranks, where repeats are exact, every run is
    judged, and the newest run with wrong losses decides.

    Args:
        row: The row.
        rows: All rows of the model, the best reference first.
    """
    verdicts = []
    for run in reversed(row.runs):
        reference = _find_reference_run(run, rows)
        if reference is None or any(reference is own_run for own_run in row.runs):
            continue
        spread, num_pairs = _spread_of_repeats(rows, reference)
        verdicts.append(_compare_losses(reference, run, spread, num_pairs))
        if not _repeats_exactly(run):
            break
    for parity in verdicts:
        if parity.is_broken:
            return parity
    return verdicts[0] if verdicts else None


def _find_reference_run(run: Run, rows: Sequence[Configuration]) -> Run | None:
    """Return the run with which the losses of `run` must agree; None if there is no such run.

    The rows are searched in order. The result is the newest run of a row that has losses and is comparable with
    `run`. It can be `run` itself.
    """
    for row in rows:
        for reference in reversed(row.runs):
            if not _why_not_comparable(reference, run) and len(loss_points(reference)[0]):
                return reference
    return None


def _repeats_exactly(run: Run) -> bool:
    """Return True for a run on CPU ranks: gloo always sums in the same order, in any precision."""
    return run.device == "cpu"


def _why_not_against_baseline(
    row: Configuration, parity: Parity, rows: Sequence[Configuration]
) -> str:
    """Return why the reference of a row is not the existing baseline of its model and device.

    The text is empty if the reference is baseline or a foreign log, if there is no baseline, or if the row is not
    compared.
    """
    if not parity.reference or parity.verdict == NOT_COMPARABLE:
        return ""
    all_runs = (run for other in rows for run in other.runs)
    reference = next(run for run in all_runs if run.name == parity.reference)
    if reference.is_baseline or reference.is_foreign:
        return ""
    newest_runs = [other.newest for other in rows]
    baselines = [run for run in newest_runs if run.is_baseline and run.device == row.newest.device]
    if not baselines:
        return ""
    reasons = [_why_not_comparable(baseline, reference) for baseline in baselines]
    shortest_reason = min(reasons, key=len)
    # A comparable baseline without a single loss is no reference, and its status says why.
    return shortest_reason or f"it is {baselines[0].status.status}"


def _compare_losses(reference: Run, other: Run, spread: Curve, num_pairs: int) -> Parity:
    """Return the verdict on the losses of a run against its reference.

    Args:
        reference: The reference.
        other: The run that is judged.
        spread: Largest difference between repeats, by iteration.
        num_pairs: Number of pairs of repeats behind `spread`.
    """
    dtype = other.spec.dtype if other.spec else ""
    losses = _list_comparable_losses(reference, other, dtype)
    pairs = losses.pairs
    if not pairs:
        reason = f"no iteration in common{_describe_limit(losses, dtype)}"
        return Parity(NOT_COMPARABLE, reason, reference.name, judged=other.name)
    broken_at = _find_broken_iteration(
        pairs,
        spread,
        rounding_rate=_rounding_rate(reference, other, dtype),
        least_rounding=LOGS_AGREE if reference.is_foreign and other.is_foreign else 0.0,
    )
    return Parity(
        verdict=HELD if broken_at is None else f"broken@{broken_at}",
        reference=reference.name,
        compared=len(pairs),
        max_difference=max(pair.difference for pair in pairs),
        max_units=max(pair.difference / last_digit_unit(pair.largest) for pair in pairs),
        repeats=num_pairs,
        diverged=losses.diverged,
        until=losses.last_compared,
        judged=other.name,
    )


@dataclass(frozen=True)
class _ComparableLosses:
    """Pairs of losses that may be compared, and what excludes the pairs of later iterations."""

    pairs: Sequence[_LossPair]
    """Pairs in the order of the iterations; empty if the runs share no iteration within the limits."""
    diverged: int | None
    """First iteration in which a token took another expert; None if that never happened."""
    last_compared: int | None
    """Last iteration that the precision allows; None if the precision excludes no pair."""


def _list_comparable_losses(reference: Run, other: Run, dtype: str) -> _ComparableLosses:
    """Return the pairs of losses of two runs up to the iteration after which losses may differ.

    Tokens that take other experts, and in bf16 and fp16 the rounding of many iterations, make later losses differ.
    """
    pairs = _pair_losses(loss_curve(reference), loss_curve(other))
    diverged = _find_other_expert_choice(reference, other, dtype)
    if diverged:
        pairs = [pair for pair in pairs if pair.iteration < diverged]
    is_half_precision = dtype in ("bf16", "fp16")
    if not is_half_precision or not pairs or pairs[-1].iteration <= MAX_HALF_PRECISION_ITERATIONS:
        return _ComparableLosses(pairs, diverged, last_compared=None)
    pairs = [pair for pair in pairs if pair.iteration <= MAX_HALF_PRECISION_ITERATIONS]
    return _ComparableLosses(pairs, diverged, last_compared=MAX_HALF_PRECISION_ITERATIONS)


def _describe_limit(losses: _ComparableLosses, dtype: str) -> str:
    """Return the end of a sentence on what limits the compared iterations; empty without a limit."""
    if losses.last_compared:
        return f" up to {losses.last_compared}, after which {dtype} is not compared"
    if losses.diverged:
        return f" before tokens took other experts in iteration {losses.diverged}"
    return ""


def _find_broken_iteration(
    pairs: Sequence[_LossPair], spread: Curve, rounding_rate: float, least_rounding: float
) -> int | None:
    """Return the first iteration whose two losses differ by more than the tolerance; None if all losses agree.

    Args:
        pairs: Losses of the two runs in the order of the iterations.
        spread: Largest difference between repeats, by iteration. The largest one so far is tolerated.
        rounding_rate: Fraction of a loss by which rounding may change the loss per trained iteration.
        least_rounding: Fraction of a loss that is tolerated in any iteration.
    """
    largest_spread = 0.0
    for pair in pairs:
        largest_spread = max(largest_spread, spread.get(pair.iteration, 0.0))
        allowed = allowed_difference(
            unit=largest_spread + last_digit_unit(pair.largest),
            rounding=max(rounding_rate * pair.iteration, least_rounding),
            largest=pair.largest,
        )
        if pair.difference > allowed:
            return pair.iteration
    return None


def _find_other_expert_choice(reference: Run, other: Run, dtype: str) -> int | None:
    """Return the first iteration in which an expert got different numbers of tokens in the two runs.

    None means that the numbers never differ, or that a run has no `routing.json`. None is also returned if, in
    fp32, more tokens moved than rounding can explain (`find_routing_divergence`).
    """
    record, other_record = reference.measurements.routing, other.measurements.routing
    if not record or not other_record:
        return None
    return find_routing_divergence(
        count_tokens_per_expert(record), count_tokens_per_expert(other_record), dtype
    )


def _rounding_rate(reference: Run, other: Run, dtype: str) -> float:
    """Return the relative loss difference per iteration that rounding explains in a dtype.

    It is larger if the runs have different backends, or if the configuration of one run is unknown.
    """
    rate = ROUNDING_PER_ITERATION.get(dtype, 0.0)
    if reference.spec and other.spec and reference.spec.backend == other.spec.backend:
        return rate
    return max(rate, BACKEND_ROUNDING_PER_ITERATION)


def resumption_sentence(run: Run) -> str:
    """Return a sentence on whether the iterations that a resumed run trained twice have equal losses.

    A run trains iterations a second time if they came after the checkpoint from which it resumed. The text is
    empty if the run was not resumed or trained no iteration twice.
    """
    if not run.replaced_iterations:
        return ""
    numbers, losses = single_step_losses(IterationTable.of(run.replaced_iterations))
    before, after = dict(zip(numbers.tolist(), losses.tolist(), strict=True)), loss_curve(run)
    common = sorted(before.keys() & after.keys())
    if not common:
        return ""
    units = max(abs(before[n] - after[n]) / last_digit_unit(before[n]) for n in common)
    agreement = "the same to the last printed digit"
    if units >= 0.5:
        agreement = f"different by up to {plural(round(units), 'unit')} of the last printed digit"
    return (
        f"Iterations {common[0]} to {common[-1]} were trained before and after it resumed: their losses "
        f"({len(common)} compared) are {agreement}."
    )


def _difference_of_repeats(row: Configuration) -> float | None:
    """Return the largest loss difference between repeats that must be equal, in units of the last printed digit.

    Only repeats on CPU ranks must be equal. None means that all such differences are within the rounding of the
    printed digits, or that there are no such repeats.
    """
    worst = 0.0
    for run, repeat in itertools.combinations(row.runs, 2):
        if not _repeats_exactly(run) or _why_not_comparable(run, repeat):
            continue
        # A run that was resumed in another strategy may differ by one unit until then.
        allowed_units = 1.5 if run.restarts or repeat.restarts else 0.5
        for pair in _pair_losses(loss_curve(run), loss_curve(repeat)):
            units = pair.difference / last_digit_unit(pair.largest)
            if units > allowed_units:
                worst = max(worst, units)
    return worst or None


def _spread_of_repeats(rows: Sequence[Configuration], reference: Run) -> tuple[Curve, int]:
    """Return the largest loss difference between repeats by iteration, and the number of pairs that were compared.

    Repeats are runs in one row. Only runs count that are comparable with the reference, record their code, and
    are on devices where repeats may differ.
    """
    spread: Curve = {}
    num_pairs = 0
    for row in rows:
        curves = [
            loss_curve(run)
            for run in row.runs
            if run.record is not None
            and run.record.code is not None
            and not _repeats_exactly(run)
            and not _why_not_comparable(reference, run)
        ]
        for curve in curves[1:]:
            num_pairs += 1
            for pair in _pair_losses(curves[0], curve):
                spread[pair.iteration] = max(spread.get(pair.iteration, 0.0), pair.difference)
    return spread, num_pairs
