"""Build a report as data: rows with parity and speed verdicts. Rendering is in `parakit.reporting.render`.

The reference of a row is the row with which its speed is compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from parakit.artifacts.identity import essential_arguments
from parakit.config.published import Correction, Published
from parakit.logs import Run
from parakit.reporting.analyse.arguments import find_differing_arguments
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
    """Argument that differs between the runs of a report."""

    name: str
    values: tuple[str, ...]
    """Value per row of the report; empty if the run does not have the argument."""


@dataclass(frozen=True)
class Report:
    """Report as data, before it is rendered."""

    name: str
    created_utc: str
    entries: tuple[Entry, ...]
    problems: tuple[str, ...] = ()
    """Sentences on runs and files that could not be read."""
    arguments: tuple[ArgumentDifference, ...] = ()
    corrections: tuple[Correction, ...] = ()
    changes: tuple[Change, ...] = ()
    baseline: str = ""
    """Earlier report with which `changes` compares; empty without one."""
    planned: tuple[PlannedEntry, ...] = ()
    """Planner's predictions of the rows that it can predict."""


def build_report(
    name: str,
    runs: Sequence[Run],
    published: Published,
    problems: Sequence[str] = (),
    all_conditions: bool = False,
) -> Report:
    """Turn runs into a report: rows, verdicts on losses and speed, and the arguments that differ.

    Args:
        name: Name of the report.
        runs: Runs in the order in which the user named them.
        published: Published figures to compare with.
        problems: Sentences on what could not be read.
        all_conditions: True gives runs under older conditions rows of their own.
    """
    rows = group_into_rows(make_names_distinct(runs), all_conditions)
    parts = zip(label_rows(rows), rows, judge_parity(rows), strict=True)
    entries = _add_speeds([Entry(label, row, parity, published) for label, row, parity in parts])
    sources = {entry.figure.source.key for entry in entries if entry.figure}
    return Report(
        name=name,
        created_utc=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
        entries=tuple(entries),
        problems=tuple(problems),
        arguments=tuple(_differing_arguments(entries)),
        corrections=tuple(
            correction for correction in published.corrections if correction.source in sources
        ),
    )


def _differing_arguments(entries: Sequence[Entry]) -> Iterator[ArgumentDifference]:
    """Yield the arguments that differ between the rows, by name. A row without arguments has empty values."""
    arguments_by_row = [essential_arguments(entry.run.arguments) for entry in entries]
    known = [arguments for arguments in arguments_by_row if arguments]
    for name in find_differing_arguments(known):
        yield ArgumentDifference(
            name, tuple(arguments.get(name, "") for arguments in arguments_by_row)
        )


def _add_speeds(entries: Sequence[Entry]) -> list[Entry]:
    """Return the rows, with the speed of each compared with that of its reference.

    Verdicts are adjusted for the number of comparisons with the same reference.
    """
    result, candidates = list(entries), list(entries)
    # Judged times of the compared rows, by the name of the reference and the index of the row.
    judged_by_reference: dict[str, dict[int, TimeComparison]] = {}
    for index, entry in enumerate(entries):
        reference = _find_reference(entry, candidates, entries) if entry.estimate else None
        if reference is None or reference is entry:
            continue
        speed = compare_speed(reference.configuration, entry.configuration)
        result[index] = replace(entry, speed=speed)
        if speed.judged_time:
            # A row that is compared with another one is no reference itself.
            candidates = [other for other in candidates if other is not entry]
            judged_by_reference.setdefault(speed.reference, {})[index] = speed.judged_time
    for name, judged in judged_by_reference.items():
        reference = next(entry for entry in entries if entry.run.name == name)
        if _withhold_impossible(reference, result, tuple(judged)):
            continue
        adjusted = adjust_verdicts(list(judged.values()))
        for index, comparison in zip(judged, adjusted, strict=True):
            judged_speed = result[index].speed
            assert judged_speed is not None
            result[index] = replace(result[index], speed=judged_speed.replace_judged(comparison))
    return result


def _withhold_impossible(reference: Entry, entries: list[Entry], indexes: Sequence[int]) -> bool:
    """Remove all speed comparisons of a group if one of them is impossible; return True if they were removed.

    An impossible ratio shows that the reference was slowed down, so no row can be compared with it.

    Args:
        reference: Reference of the group.
        entries: All rows, changed in place.
        indexes: Indexes of the group's rows.
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


def _find_reference(
    entry: Entry, candidates: Sequence[Entry], entries: Sequence[Entry]
) -> Entry | None:
    """Return the row with which an entry's speed is compared; None if the entry's model is unknown.

    If one of the entries is a foreign log, the reference is the first log of the same model and device, or else the
    first log of the same size. Otherwise the reference is a run of the same model and device: runs without a patch
    file come before patched ones, and among them a baseline comes first.

    Args:
        entry: The entry, which may be its own reference.
        candidates: Entries that have no reference yet.
        entries: All entries of the report.
    """
    timed = [other for other in candidates if other.estimate]
    if any(other.run.is_foreign for other in entries):
        return _find_log_reference(entry, timed, entries)
    run = entry.run
    if not run.model:
        return None
    cohort = [
        other for other in timed if other.run.model == run.model and other.run.device == run.device
    ]
    return min(cohort, key=_reference_order)


def _reference_order(entry: Entry) -> tuple[bool, bool]:
    """Return a sort key that puts unpatched runs before patched ones, and then baseline before other strategies."""
    is_patched = entry.spec is not None and entry.spec.patch_file is not None
    return is_patched, not entry.run.is_baseline


def _find_log_reference(entry: Entry, timed: Sequence[Entry], entries: Sequence[Entry]) -> Entry:
    """Return the first entry of `timed` that is comparable with a log.

    If no other log is comparable, the first entry of the same model size is returned, which may be the log
    itself.
    """
    run = entry.run
    same_size = [other for other in timed if _are_of_one_size(other.run, run)]
    has_comparable_log = any(
        _are_of_one_size(other.run, run) and _are_comparable(other.run, run)
        for other in entries
        if other.estimate and other is not entry
    )
    if not has_comparable_log:
        return same_size[0]
    return next(other for other in same_size if _are_comparable(other.run, run))


def _are_of_one_size(first: Run, second: Run) -> bool:
    """Return True if two logs train models of one size; without a model, if their batches are equal."""
    if first.dimensions or second.dimensions:
        return first.dimensions == second.dimensions
    work = (first.global_batch_size, first.seq_length)
    return work == (second.global_batch_size, second.seq_length)


def _are_comparable(first: Run, second: Run) -> bool:
    """Return True if the devices are the same and no flag of the models differs.

    A flag that only one of the runs states counts as different.
    """
    return first.device == second.device and not first.stated_model.differences(second.stated_model)
