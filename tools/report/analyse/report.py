"""Everything a report says, as data: built once here, rendered elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from tools.records.gpu_bench import GpuBench
from tools.report.analyse.comparability import compare_speed
from tools.report.analyse.configurations import Configuration, configurations, essential, labels
from tools.report.analyse.entry import Entry, device_memory
from tools.report.analyse.parity import Parity, parity_of
from tools.report.analyse.published import figure_for, match_figure, relative_to_baseline
from tools.report.analyse.rates import rates_of
from tools.report.analyse.regressions import Change
from tools.report.read.runs import Run
from tools.spec.published import Correction, Published


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
    changes: tuple[Change, ...] = field(default=())
    baseline: str = ""
    """The earlier report that `changes` compares with."""
    gpu_bench: GpuBench | None = None
    """What `make bench-gpu` left beside the runs."""


def build_report(
    name: str,
    runs: Sequence[Run],
    published: Published,
    problems: Sequence[str] = (),
    all_conditions: bool = False,
) -> Report:
    """Turn runs into a report."""
    rows = configurations(runs, all_conditions)
    parities = parity_of(rows)
    entries = [
        _entry(label, row, parity, published)
        for label, row, parity in zip(labels(rows), rows, parities, strict=True)
    ]
    entries = _with_speeds(entries)
    used = {entry.figure.source.key for entry in entries if entry.figure}
    return Report(
        name=name,
        created_utc=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S"),
        entries=tuple(entries),
        problems=tuple(problems),
        arguments=tuple(_argument_differences(entries)),
        corrections=tuple(c for c in published.corrections if c.source in used),
    )


def _entry(label: str, row: Configuration, parity: Parity, published: Published) -> Entry:
    run, time = row.newest, row.estimate.median if row.estimate else None
    figure = figure_for(run, published)
    return Entry(
        label=label,
        configuration=row,
        rates=rates_of(run, time),
        parity=parity,
        figure=figure,
        matches=tuple(match_figure(run, figure, time, device_memory(run)) if figure else ()),
        published_ratio=relative_to_baseline(figure, published) if figure else None,
    )


def _with_speeds(entries: list[Entry]) -> list[Entry]:
    references: dict[tuple[str, str], Entry] = {}
    for entry in sorted(entries, key=lambda e: not e.run.is_baseline):
        if entry.estimate and entry.run.model:
            references.setdefault(_cohort(entry), entry)
    result = []
    for entry in entries:
        reference = references.get(_cohort(entry))
        if reference is None or reference is entry or not entry.estimate:
            result.append(entry)
            continue
        speed = compare_speed(reference.configuration, entry.configuration)
        result.append(replace(entry, speed=speed))
    return result


def _cohort(entry: Entry) -> tuple[str, str]:
    """Runs that are compared in speed: one model on one kind of device."""
    return entry.run.model, entry.run.device


def _argument_differences(entries: Sequence[Entry]) -> list[ArgumentDifference]:
    sets = [essential(entry.run.arguments) for entry in entries]
    known = [arguments for arguments in sets if arguments]
    if len(known) < 2:
        return []
    names = sorted({name for arguments in known for name in arguments})
    return [
        ArgumentDifference(name, tuple(arguments.get(name, "") for arguments in sets))
        for name in names
        if len({arguments.get(name) for arguments in known}) > 1
    ]
