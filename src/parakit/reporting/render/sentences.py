"""The verdicts of a report in sentences; of many rows of one kind the first, or one for all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from parakit.artifacts.run import Status
from parakit.config.run import RunSpec
from parakit.config.strategy import BATCH_RULE, Parallelism, scale_batch
from parakit.formatting.units import joined, number, plural, signed_percent
from parakit.logs import Run
from parakit.reporting.analyse.comparability import (
    DISTURBED,
    IMPOSSIBLE,
    OVERSUBSCRIBED,
    WITHHELD,
    SpeedComparison,
    why_withheld,
)
from parakit.reporting.analyse.disturbance import ranks_and_cores, why_disturbed
from parakit.reporting.analyse.earlier import UNDECIDED
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.must_agree import NO_SHAPE
from parakit.reporting.analyse.parity import LOGS_AGREE, NOT_COMPARABLE
from parakit.reporting.analyse.report import Report
from parakit.reporting.analyse.results import describe_disagreement
from parakit.reporting.analyse.statistics import TimeVerdict, smallest_visible_difference

_MAX_FLAWS = 8
MAX_NAMED = 8
_MAX_VALUE = 40
_MAX_SENTENCES = 12
"""Of one kind; more rows are summed up."""


def write_sentences(report: Report) -> list[str]:
    """The verdicts of a report, one sentence each."""
    entries = report.entries
    if not entries:
        first = "" if report.problems else ": train one (make demo), or name logs with LOGS="
        return [f"There is no run to report on{first}."]
    rows = [entry.configuration for entry in entries]
    runs = sum(len((*row.runs, *row.failed_before, *row.running)) for row in rows)
    ended = _first([said for entry in entries for said in _endings(entry)], "did not end well")
    told = f"; {'; '.join(ended)}." if ended else ", all ended well."
    result = [f"{plural(runs, 'run')} in {plural(len(rows), 'configuration')}{told}"]
    timed = [(entry, entry.estimate) for entry in entries if entry.estimate]
    if any(entry.run.device == "cpu" for entry, _ in timed):
        result.append(
            "Times on CPU ranks are illustrative: ranks share cores, and no GPU's balance of "
            "compute and communication is in them; losses, parameters and bytes are exact."
        )
    if counts := sorted({found.count for _, found in timed}):
        span = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
        result.append(
            f"Medians rest on {span} samples a row; which lines were left out, and why, is under"
            " 'How it was measured' in report.html and report.md."
        )
    result += [*withheld_sentences(report), *_speed_sentences(report)]
    result += [*_assumed_device(report), *_uncompared(report)]
    within = [f"Within {e.label}, {shift.text}." for e in entries for shift in e.changes_within_run]
    result += _first(within, "changes within runs are in the notes of their rows.")
    result += _power_sentences(report)
    result += [
        f"Repeats of {entry.label} disagree: {describe_disagreement(entry)}."
        for entry, found in timed
        if found.repeats_disagree
    ]
    result += _parity_sentences(report)
    result += [
        f"{entry.label}: published {match.quantity} "
        f"{' and '.join(number(v) for v in match.published)} {match.unit}, measured "
        f"{number(match.measured)} {match.unit}: {match.verdict} (expected"
        f" {number(match.expected_low)} to {number(match.expected_high)})."
        for entry in entries
        for match in entry.matches
        if match.verdict != "not comparable"
    ]
    return [*result, *_beside_others(report)]


def _first(texts: list[str], others: str) -> list[str]:
    """As many as are told of one kind, then how many more there are."""
    more = len(texts) - _MAX_SENTENCES
    return [*texts[:_MAX_SENTENCES], f"{more} more {others}"] if more > 0 else texts


def _beside_others(report: Report) -> Iterator[str]:
    """How the planner's times compare, over all rows that it can predict; and what changed since."""
    errors = {each.entry.label: each.error for each in report.planned if each.error is not None}
    if errors:
        worst = max(errors, key=lambda label: abs(errors[label]))
        mean = sum(map(abs, errors.values())) / len(errors)
        yield (
            f"The planner's times are {mean:.0%} off in the mean over {plural(len(errors), 'row')}, "
            f"{worst}'s most ({signed_percent(errors[worst], 0)}, positive: predicted too slow)."
        )
    if report.baseline:
        told = [c for c in report.changes if c.fails_strict or c.kind == UNDECIDED]
        said = "; ".join(f"{c.row}: {c.kind}, {c.text}" for c in told) or "nothing changed"
        yield f"Against {report.baseline}: {said}."


def group_compared_rows(report: Report) -> list[list[Entry]]:
    """Timed rows that are compared with one another, a reference first; the largest group first."""
    timed = {e.run.name: [e] for e in report.entries if e.estimate and not e.per_token}
    for entry in report.entries:
        if entry.speed and entry.per_token:
            timed[entry.speed.reference].append(entry)
    return sorted(timed.values(), key=len, reverse=True)


def token_ratio(entry: Entry) -> float:
    """Time a token over the reference's; 1 where nothing is compared."""
    return entry.per_token.ratio if entry.per_token else 1.0


def judged_ratio(entry: Entry) -> float:
    """Return the ratio that the verdict is on; 1 where nothing is compared."""
    return entry.judged_time.ratio if entry.judged_time else 1.0


def join_first_names(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _power_sentences(report: Report) -> list[str]:
    """What the intervals assume of runs that were not repeated, and what repeats would show."""
    found = [
        e.estimate for e in report.entries if e.estimate and e.estimate.standard_error is not None
    ]
    groups = [str(len(group) - 1) for group in group_compared_rows(report) if len(group) > 2]
    told = [
        f"Of {joined(groups)} comparisons with one reference all verdicts are right"
        " together with 95% (Holm); an interval is of its pair alone."
    ]
    told = told if groups else []
    for scatter in dict.fromkeys(each.scatter for each in found if each.degrees_of_freedom is None):
        one, three = (
            smallest_visible_difference(*of) for of in ((1, scatter.assumed), (3, scatter.typical))
        )
        told.append(
            f"One or two runs cannot show how much runs scatter, so {scatter.assumed:.1%} is assumed"
            f" ({scatter.source}). With one run each, a difference below {one:.1%} cannot be seen; with"
            f" three runs each that scatter by {scatter.typical:.1%}, one below {three:.1%}."
        )
    return told


def withheld_sentences(report: Report) -> list[str]:
    """Return why rows are not compared in speed, one sentence per reason; empty where all are."""
    disturbed, taking_turns = [], []
    for entry in report.entries:
        reason = why_withheld(entry.configuration)
        if reason == DISTURBED:
            disturbed.append(f"{entry.label} ({why_disturbed(entry.run)})")
        elif reason == OVERSUBSCRIBED and (known := ranks_and_cores(entry.run)):
            ranks, cores = known
            taking_turns.append(
                f"{entry.label} ({plural(ranks, 'rank')} on {plural(cores, 'core')})"
            )
    texts = []
    if disturbed:
        texts.append(
            f"No speed is compared with {join_first_names(disturbed)}: other programs used the cores. Close them"
            " and run again."
        )
    if taking_turns:
        texts.append(
            f"No speed is compared with {join_first_names(taking_turns)}: with more ranks than cores, times say"
            " nothing about speed."
        )
    return texts + [
        speed_sentence(entry, report)
        for entry in report.entries
        if entry.speed and IMPOSSIBLE in entry.speed.caution
    ]


def _speed_sentences(report: Report) -> list[str]:
    """The verdict on every row; of many rows one sentence a verdict."""
    told = [e for e in report.entries if e.speed and IMPOSSIBLE not in e.speed.caution]
    texts = [text for entry in told if (text := speed_sentence(entry, report))]
    if len(texts) <= _MAX_SENTENCES:
        return texts
    groups: dict[tuple[str, TimeVerdict, bool], list[Entry]] = {}
    for entry in report.entries:
        if entry.speed and entry.per_token:
            judged = entry.speed.judged_time or entry.per_token
            key = entry.speed.reference, judged.verdict, bool(entry.speed.per_device_token)
            groups.setdefault(key, []).append(entry)
    result = []
    labels = {entry.run.name: entry.label for entry in report.entries}
    for (name, verdict, is_per_device), members in groups.items():
        ratios = sorted(map(judged_ratio, members))
        what = "device time a token" if is_per_device else "time a token"
        span = f"×{ratios[0]:.3f} to ×{ratios[-1]:.3f}" if len(ratios) > 1 else f"×{ratios[0]:.3f}"
        result.append(
            f"{plural(len(members), 'row')}: {verdict.against(labels[name])}, {span} the {what}"
            f" ({join_first_names([entry.label for entry in members])})."
        )
    return [*result, "Each row's own verdict and interval are under 'Compared in speed'."]


def _uncompared(report: Report) -> list[str]:
    """Logs that no other is comparable with, where others are."""
    used = {entry.speed.reference for entry in report.entries if entry.speed}
    timed = [e for e in report.entries if e.run.is_foreign and e.estimate]
    alone = [e.label for e in timed if not e.speed and e.run.name not in used]
    if len(timed) < 2 or not alone:
        return []
    verb, whose = ("is", "its") if len(alone) == 1 else ("are", "their")
    return [
        f"{join_first_names(alone)} {verb} compared with no other log: none is of {whose} model"
        " (and device, where the logs name one; of equal batch, where they name no model)."
    ]


def speed_sentence(entry: Entry, report: Report) -> str:
    """The verdict on an entry's speed; empty where nothing is compared."""
    comparison = entry.speed
    if comparison is None:
        return ""
    reference = next(e for e in report.entries if e.run.name == comparison.reference)
    found = comparison.judged_time
    if found is None:
        return (
            f"{entry.label} against {reference.label}: no verdict on speed, {comparison.caution}."
            if comparison.caution not in WITHHELD
            else ""
        )
    unit = "the time an iteration" if comparison.per_iteration else "the time a token"
    if comparison.per_device_token:
        unit = "the device time a token"
    span = f", {found.span}" if found.span else ""
    verdict = found.verdict.against(reference.label)
    text = f"{entry.label} is {verdict}: ×{found.ratio:.3f} {unit}{span}"
    if comparison.per_device_token:
        text = f"Per device {text}{_time_with_all_devices(entry, reference)}"
    if found.verdict is TimeVerdict.UNKNOWN:
        text = f"{entry.label} against {reference.label}: too few samples for a verdict"
    elif found.among:
        text += (
            f"; alone that would be a difference, among {found.among} comparisons it is none (Holm)"
        )
    elif found.verdict is TimeVerdict.NOISE and found.resolution:
        text += f"; {found.resolution}"
    if comparison.caution:
        text += f"; {comparison.caution}"
    if comparison.model_doubt:
        text += f"; {comparison.model_doubt}, so only times a token are compared"
    elif comparison.per_iteration is None and not comparison.per_device_token:
        text += "; a speedup per iteration is refused, their iterations hold different work"
        text += _different_batches(reference.run.spec, entry.run.spec)
    return f"{text}{_flaws(comparison)}."


def _time_with_all_devices(entry: Entry, reference: Entry) -> str:
    """Return the ratio of times with all devices of both rows, which is no verdict."""
    counts = f"{entry.run.num_devices} devices against {reference.run.num_devices}"
    return f"; with {counts} it takes ×{token_ratio(entry):.3g} the time a token"


def _assumed_device(report: Report) -> list[str]:
    """Return that logs are compared as if they ran on one device; nothing where they name it."""
    compared = [e for e in report.entries if e.speed and e.speed.device_is_assumed]
    if not compared:
        return []
    logs = {e.run.name for e in compared} | {e.speed.reference for e in compared if e.speed}
    who = "Neither log names its device" if len(logs) == 2 else "The logs do not name their device"
    return [f"{who}; the same one is assumed (`DEVICE=` states it)."]


def _flaws(comparison: SpeedComparison) -> str:
    """What differs and is no part of the strategy, the first few by name and value."""
    flaws = [
        found
        for found in comparison.differences
        if not found.part_of_strategy and found.what not in comparison.model_doubt
    ]
    told = [found for found in flaws if "/" not in found.reference + found.other]
    named = []
    for found in told[:_MAX_FLAWS]:
        sides = (found.reference, found.other)
        cut = [s if len(s) <= _MAX_VALUE else f"{s[: _MAX_VALUE - 1]}…" for s in sides]
        named.append(f"{found.what} ({' | '.join(cut)})")
    more, paths = len(told) - _MAX_FLAWS, len(flaws) - len(told)
    named += [f"{more} more"] * (more > 0) + [plural(paths, "path")] * bool(paths)
    return f"; not the same: {joined(named)}" if named else ""


def _different_batches(reference: RunSpec | None, other: RunSpec | None) -> str:
    """The batches of different work, and that a strategy's is scaled from the model's."""
    if reference is None or other is None or reference.batch == other.batch:
        return ""
    text = f" (batch {reference.batch} | {other.batch}"
    if reference.parallelism == Parallelism() and other.batch == scale_batch(
        reference.batch, other.parallelism
    ):
        text += (
            f", scaled as published: {BATCH_RULE}; MICRO_BATCH= and GLOBAL_BATCH= set one for all"
        )
    return f"{text})"


def _endings(entry: Entry) -> Iterator[str]:
    """What is to be said of an entry's runs but for those that ended well."""
    row = entry.configuration
    if entry.run.status.status is not Status.OK:
        yield f"{entry.label} is {_ending(entry.run)}"
    if failed := row.failed_before:
        newest = _ending(failed[-1])
        several = f"{len(failed)} earlier attempts of {entry.label} failed, the newest is {newest}"
        one = f"an earlier attempt of {entry.label} is {newest}"
        yield several if len(failed) > 1 else one
    if row.running:
        yield f"one more of {entry.label} is {_ending(row.running[-1])}"


def _ending(run: Run) -> str:
    reason = f" ({run.status.reason.rstrip('.')})" if run.status.reason else ""
    return f"{run.status.status.replace('_', ' ')}{reason}"


def _parity_sentences(report: Report) -> list[str]:
    entries, result = report.entries, []
    if held := [e for e in entries if e.parity.verdict == "held"]:
        units = round(max(e.parity.max_units or 0 for e in held))
        worst = f"no loss is more than {plural(units, 'unit')} of the last printed digit off"
        worst = worst if units else "no printed loss differs"
        fewest = min(e.parity.compared for e in held)
        basis = "the rounding alone"
        if all(e.run.is_foreign for e in held):
            basis = f"{LOGS_AGREE:g} of a loss between logs"
        elif any(e.parity.repeats for e in held):
            basis = "the spread of repeats and the rounding"
        result.append(
            f"Loss parity held for {join_first_names([e.label for e in held])}: over {fewest} iterations"
            f" {worst} (tolerance: {basis})."
        )
    result += [
        f"Loss parity of {e.label} is {e.parity.verdict}: the largest difference is"
        f" {e.parity.max_difference:.3g}."
        for e in entries
        if e.parity.verdict.startswith("broken")
    ]
    result += _unjudged(entries)
    differ = [e for e in entries if e.parity.repeats_differ]
    result += [f"Of {e.label}, {e.parity.repeats_differ}." for e in differ]
    lost: dict[str, list[str]] = {}
    for entry in entries:
        if entry.parity.without_baseline:
            lost.setdefault(entry.parity.without_baseline, []).append(entry.label)
    result += [
        f"Loss parity of {join_first_names(labels)} is not against baseline: {why}."
        for why, labels in lost.items()
    ]
    return result


def _unjudged(entries: Sequence[Entry]) -> list[str]:
    """Return why the losses of foreign logs are not judged, one sentence per reason."""
    without_shape: list[str] = []
    labels: dict[str, list[str]] = {}
    for entry in entries:
        if not entry.run.is_foreign or entry.parity.verdict != NOT_COMPARABLE:
            continue
        if entry.parity.reason == f"{entry.run.name} {NO_SHAPE}":
            without_shape.append(entry.label)
        else:
            labels.setdefault(entry.parity.reason, []).append(entry.label)
    result = []
    if without_shape:
        is_one = len(without_shape) == 1
        states = NO_SHAPE if is_one else "do not state their models' shapes"
        whose = "its" if is_one else "their"
        result.append(
            f"{join_first_names(without_shape)} {states}, so {whose} losses are not judged."
        )
    for reason, names in labels.items():
        result.append(f"The losses of {join_first_names(names)} are not judged: {reason}.")
    return _first(result, "reasons are in the notes of their rows.")
