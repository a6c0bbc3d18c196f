"""Speeds compared, in words: which row is fastest, what others pay for, a verdict for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tools.report.analyse.comparability import SHARED, SpeedComparison
from tools.report.analyse.entry import Entry
from tools.report.analyse.report import Report
from tools.report.analyse.statistics import TimeVerdict
from tools.spec.run import RunSpec
from tools.spec.strategy import BATCH_RULE, Parallelism, batch_for
from tools.text.units import joined, number

MAX_SENTENCES = 12
"""Of one kind; more rows are summed up."""
_MAX_FLAWS = 8
_MAX_NAMED = 8
_MAX_VALUE = 40
_MAX_COSTS = 3


def compared_groups(report: Report) -> list[list[Entry]]:
    """Timed rows that are compared with one another, a reference first; the largest group first."""
    timed = {e.run.name: [e] for e in report.entries if e.estimate and not _is_compared(e)}
    for entry in report.entries:
        if entry.speed and _is_compared(entry):
            timed[entry.speed.reference].append(entry)
    return sorted(timed.values(), key=len, reverse=True)


def speed_sentences(report: Report) -> list[str]:
    """The verdict on every row; of many rows one sentence a verdict."""
    texts = [text for entry in report.entries if (text := _speed_sentence(entry, report))]
    if len(texts) <= MAX_SENTENCES:
        return texts
    groups: dict[tuple[str, TimeVerdict], list[Entry]] = {}
    for entry in report.entries:
        if entry.speed and entry.speed.per_token:
            key = entry.speed.reference, entry.speed.per_token.verdict
            groups.setdefault(key, []).append(entry)
    result = []
    for (name, verdict), members in groups.items():
        reference = next(entry for entry in report.entries if entry.run.name == name)
        ratios = sorted(map(_token_ratio, members))
        span = f"×{ratios[0]:.3f} to ×{ratios[-1]:.3f}" if len(ratios) > 1 else f"×{ratios[0]:.3f}"
        result.append(
            f"{len(members)} rows: {verdict.against(reference.label)}, {span} the time a token"
            f" ({some([entry.label for entry in members])})."
        )
    return [*result, "Each row's own verdict and interval are under 'Compared in speed'."]


def uncompared(report: Report) -> list[str]:
    """Logs that no other is comparable with, where others are."""
    used = {entry.speed.reference for entry in report.entries if entry.speed}
    timed = [e for e in report.entries if e.run.is_foreign and e.estimate]
    alone = [e.label for e in timed if not e.speed and e.run.name not in used]
    if len(timed) < 2 or not alone:
        return []
    verb, whose = ("is", "its") if len(alone) == 1 else ("are", "their")
    return [
        f"{some(alone)} {verb} compared with no other log: none is of {whose} model"
        " (and device, where the logs name one)."
    ]


def _speed_sentence(entry: Entry, report: Report) -> str:
    """The verdict on an entry's speed; empty where nothing is compared."""
    comparison = entry.speed
    if comparison is None:
        return ""
    reference = next(e for e in report.entries if e.run.name == comparison.reference)
    found = comparison.per_token
    if found is None:
        return (
            f"{entry.label} against {reference.label}: no verdict on speed, {comparison.caution}."
            if comparison.caution != SHARED
            else ""
        )
    unit = "an iteration" if comparison.per_iteration else "a token"
    span = f", {found.span}" if found.span else ""
    verdict = found.verdict.against(reference.label)
    text = f"{entry.label} is {verdict}: ×{found.ratio:.3f} the time {unit}{span}"
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
    if comparison.per_iteration is None:
        text += "; a speedup per iteration is refused, their iterations hold different work"
        text += _different_batches(reference.run.spec, entry.run.spec)
    return f"{text}{_flaws(comparison)}."


def fastest(members: Sequence[Entry], paid: Mapping[str, tuple[str, str]]) -> str:
    """The fastest row of a group, by how much, and what the others pay for."""
    reference, *others = members
    best = min(others, key=_token_ratio)
    verdicts = [e.speed.per_token.verdict for e in others if e.speed and e.speed.per_token]
    slower = verdicts.count(TimeVerdict.SLOWER)
    if TimeVerdict.FASTER in verdicts:
        text = (
            f"{best.label} is the fastest of {len(members)} rows: {number(best.time_ms)} ms an"
            f" iteration, ×{_token_ratio(best):.3f} the time a token of {reference.label}."
        )
    else:
        rest = "all within noise"
        if slower:
            some = ", the others within noise" if slower < len(others) else ""
            rest = f"{slower} slower{some}"
        of = f"{reference.label} ({number(reference.time_ms)} ms an iteration)"
        text = f"Of {len(members)} rows none is faster than {of}: {rest}."
    return text + _payments([e for e in others if e.run.name in paid and e is not best], paid)


def _payments(entries: Sequence[Entry], paid: Mapping[str, tuple[str, str]]) -> str:
    """What rows pay for, those that pay for the same together."""
    parts: dict[str, list[str]] = {}
    for entry in entries:
        amount, part = paid[entry.run.name]
        parts.setdefault(part, []).append(f"{entry.label} {amount}")
    if not parts:
        return ""
    most = sorted(parts.items(), key=lambda each: -len(each[1]))[:_MAX_COSTS]
    told = "; ".join(f"{joined(payers[:_MAX_NAMED])} for {part}" for part, payers in most)
    return f" Beyond baseline's share of the work they pay: {told}."


def _is_compared(entry: Entry) -> bool:
    return entry.speed is not None and entry.speed.per_token is not None


def _token_ratio(entry: Entry) -> float:
    found = entry.speed.per_token if entry.speed else None
    return found.ratio if found else 1.0


def _flaws(comparison: SpeedComparison) -> str:
    """What differs and is no part of the strategy, the first few by name and value."""
    flaws = [d for d in comparison.differences if not d.part_of_strategy]
    paths = [d for d in flaws if "/" in d.reference or "/" in d.other]
    flaws = [d for d in flaws if d not in paths]
    named = [f"{d.what} ({_cut(d.reference)} | {_cut(d.other)})" for d in flaws[:_MAX_FLAWS]]
    if len(flaws) > _MAX_FLAWS:
        named.append(f"{len(flaws) - _MAX_FLAWS} more")
    if paths:
        named.append(f"{len(paths)} path{'s' * (len(paths) > 1)}")
    return f"; not the same: {joined(named)}" if named else ""


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else f"{text[: _MAX_VALUE - 1]}…"


def _different_batches(reference: RunSpec | None, other: RunSpec | None) -> str:
    """The batches of different work, and that a strategy's is scaled from the model's."""
    if reference is None or other is None or reference.batch == other.batch:
        return ""
    text = f" (batch {reference.batch} | {other.batch}"
    if reference.parallelism == Parallelism() and other.batch == batch_for(
        reference.batch, other.parallelism
    ):
        text += (
            f", scaled as published: {BATCH_RULE}; MICRO_BATCH= and GLOBAL_BATCH= set one for all"
        )
    return f"{text})"


def some(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - _MAX_NAMED
    return ", ".join(names[:_MAX_NAMED]) + (f" and {more} more" if more > 0 else "")
