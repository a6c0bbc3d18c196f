"""A report as data, built once here and rendered elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from parakit.artifacts.identity import essential_arguments
from parakit.config.published import Correction, Published
from parakit.logs import Run
from parakit.reporting.analyse.comparability import SLOWED_REFERENCE, compare_speed, why_impossible
from parakit.reporting.analyse.configurations import (
    group_into_rows,
    label_rows,
    make_names_distinct,
)
from parakit.reporting.analyse.earlier import Change
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.parity import judge_parity
from parakit.reporting.analyse.planned import PlannedEntry
from parakit.reporting.analyse.statistics import TimeComparison, adjust_verdicts


@dataclass(frozen=True)
class ArgumentDifference:
    """An argument that is not the same in all runs."""

    name: str
    values: tuple[str, ...]
    """One a row of the report; empty where the run does not have it."""


@dataclass(frozen=True)
class Report:
    """A report before it is rendered."""

    name: str
    created_utc: str
    entries: tuple[Entry, ...]
    problems: tuple[str, ...] = ()
    arguments: tuple[ArgumentDifference, ...] = ()
    corrections: tuple[Correction, ...] = ()
    changes: tuple[Change, ...] = ()
    baseline: str = ""
    """The earlier report that `changes` compares with."""
    planned: tuple[PlannedEntry, ...] = ()
    """What the planner predicts of the rows that it can predict."""


def build_report(
    name: str,
    runs: Sequence[Run],
    published: Published,
    problems: Sequence[str] = (),
    all_conditions: bool = False,
) -> Report:
    """Turn runs into a report."""
    rows = group_into_rows(make_names_distinct(runs), all_conditions)
    made = zip(label_rows(rows), rows, judge_parity(rows), strict=True)
    entries = _add_speeds([Entry(*each, published) for each in made])
    used = {entry.figure.source.key for entry in entries if entry.figure}
    sets = [essential_arguments(entry.run.arguments) for entry in entries]
    known = [arguments for arguments in sets if arguments]
    differing = [
        ArgumentDifference(name, tuple(arguments.get(name, "") for arguments in sets))
        for name in sorted({name for arguments in known for name in arguments})
        if len({arguments.get(name) for arguments in known}) > 1
    ]
    return Report(
        name=name,
        created_utc=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
        entries=tuple(entries),
        problems=tuple(problems),
        arguments=tuple(differing),
        corrections=tuple(c for c in published.corrections if c.source in used),
    )


def _add_speeds(entries: list[Entry]) -> list[Entry]:
    """With comparisons, and verdicts adjusted for their number among those of one reference."""
    result, candidates = list(entries), entries
    groups: dict[str, dict[int, TimeComparison]] = {}
    for place, entry in enumerate(entries):
        reference = _reference(entry, candidates, entries) if entry.estimate else None
        if reference is None or reference is entry:
            continue
        speed = compare_speed(reference.configuration, entry.configuration)
        result[place] = replace(entry, speed=speed)
        if speed.judged_time:
            # What is compared with another is no reference itself.
            candidates = [other for other in candidates if other is not entry]
            groups.setdefault(speed.reference, {})[place] = speed.judged_time
    for name, group in list(groups.items()):
        reference = next(entry for entry in entries if entry.run.name == name)
        if _withhold_impossible(reference, result, tuple(group)):
            del groups[name]
    for group in groups.values():
        for place, token in zip(group, adjust_verdicts(list(group.values())), strict=True):
            plain = result[place].speed
            assert plain is not None
            result[place] = replace(result[place], speed=plain.replace_judged(token))
    return result


def _withhold_impossible(reference: Entry, entries: list[Entry], indexes: Sequence[int]) -> bool:
    """Take the comparisons at some indexes back if one of them is impossible; return whether one is.

    An impossible ratio shows that the reference was slowed down, so nothing can be compared with it.
    """
    reasons = {}
    for index in indexes:
        entry, speed = entries[index], entries[index].speed
        assert speed is not None
        reasons[index] = why_impossible(reference.configuration, entry.configuration, speed)
    if not any(reasons.values()):
        return False
    for index, reason in reasons.items():
        speed = entries[index].speed
        assert speed is not None
        withheld = replace(
            speed,
            per_iteration=None,
            per_token=None,
            per_device_token=None,
            per_device=None,
            caution=reason or SLOWED_REFERENCE,
        )
        entries[index] = replace(entries[index], speed=withheld)
    return True


def _reference(entry: Entry, candidates: Sequence[Entry], entries: Sequence[Entry]) -> Entry | None:
    """What an entry's speed is compared with: baseline, but Megatron as it is before one that a patch
    file changed; of logs the first of the same model that was named.

    A log without another of its model and device is compared with the first of its size; what differs
    then decides whether there is a verdict.

    Args:
        entry: The entry, which may be its own reference.
        candidates: Those that are not compared with another.
        entries: All of the report.
    """
    run, timed = entry.run, [other for other in candidates if other.estimate]
    if any(other.run.is_foreign for other in entries):
        of_size = [other for other in timed if _are_of_one_size(other.run, run)]
        first = next(other for other in of_size if _are_comparable(other.run, run))
        runs = [other.run for other in entries if other.estimate and other is not entry]
        has_peers = any(_are_of_one_size(o, run) and _are_comparable(o, run) for o in runs)
        return first if has_peers else of_size[0]
    cohort = [o for o in timed if (o.run.model, o.run.device) == (run.model, run.device)]
    first = min(cohort, key=lambda o: (bool(o.spec and o.spec.patch_file), not o.run.is_baseline))
    return first if run.model else None


def _are_of_one_size(one: Run, two: Run) -> bool:
    """Return whether two logs train models of one size.

    Of two logs that name no model, return whether their batches are equal.
    """
    alike = True
    if not one.dimensions and not two.dimensions:
        work = (one.global_batch_size, one.seq_length), (two.global_batch_size, two.seq_length)
        alike = work[0] == work[1]
    return alike and one.dimensions == two.dimensions


def _are_comparable(one: Run, two: Run) -> bool:
    """Return whether their devices are the same and no flag of their models differs.

    A flag that one of them alone states counts as different.
    """
    return one.device == two.device and not one.stated_model.differences(two.stated_model)
