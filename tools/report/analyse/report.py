"""A report as data, built once here and rendered elsewhere; and what changed since an earlier one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from tools.records.gpu_bench import GpuBench
from tools.records.run import decode_run
from tools.report.analyse.comparability import compare_speed
from tools.report.analyse.configurations import (
    Configuration,
    Identity,
    configurations,
    essential,
    identity,
    identity_of,
    is_planted,
    labels,
)
from tools.report.analyse.entry import RESULTS, Entry, device_memory
from tools.report.analyse.parity import Parity, parity_of
from tools.report.analyse.published import figure_for, match_figure, relative_to_baseline
from tools.report.analyse.rates import rates_of
from tools.report.analyse.statistics import Verdict, compare, estimate
from tools.report.read.printed import printed_spec
from tools.report.read.runs import Run
from tools.spec.published import Correction, Published

JSON_FILE = "results.json"
_EXACT = ("parameters_total", "peak_memory_bytes", "comm_bytes_per_iteration")
"""Columns that hardly scatter."""
_TOLERANCE = 0.01


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


class BaselineError(ValueError):
    """An earlier report that cannot be compared with."""


@dataclass(frozen=True)
class Change:
    """One thing that is not as it was."""

    row: str
    kind: str
    """`regression`, `unexpected improvement`, `same`, `new` or `missing`."""
    text: str

    @property
    def is_finding(self) -> bool:
        """Whether a strict comparison fails on it."""
        return self.kind not in ("same", "new")


@dataclass(frozen=True)
class _EarlierReport:
    rows: list[dict[str, Any]]


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


def read_baseline(folder: Path) -> list[dict[str, Any]]:
    """Rows of an earlier report, with their samples.

    Raises:
        BaselineError: There is no report; the message names what is missing.
    """
    path = folder / JSON_FILE if folder.is_dir() else folder
    try:
        return msgspec.json.decode(path.read_bytes(), type=_EarlierReport).rows
    except FileNotFoundError:
        raise BaselineError(
            f"{folder} holds no {JSON_FILE}; name the folder of an earlier report."
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BaselineError(
            f"{path} is no report of this kit ({error}); make that report again."
        ) from None


def compare_with_baseline(
    old: Sequence[Mapping[str, Any]], entries: Sequence[Entry]
) -> list[Change]:
    """Compare a report's entries with the rows of an earlier one (`read_baseline`)."""
    before = {_identity(row): row for row in old}
    changes: list[Change] = []
    for entry in entries:
        name = entry.run.strategy or entry.run.name
        earlier = before.pop(identity_of(entry.run), None)
        if earlier is None:
            changes.append(Change(name, "new", "not in the earlier report"))
            continue
        changes += [*_status_changes(name, earlier, entry), *_time_changes(name, earlier, entry)]
    for earlier in before.values():
        name = str(earlier.get("strategy") or earlier.get("run"))
        changes.append(Change(name, "missing", "in the earlier report, but not in this one"))
    return changes


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
    for entry in sorted(entries, key=_as_reference):
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


def _as_reference(entry: Entry) -> tuple[bool, bool]:
    """Baseline first, but Megatron as it is before one that a plant changed."""
    return is_planted(entry.run.spec), not entry.run.is_baseline


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


def _time_changes(name: str, old: Mapping[str, Any], entry: Entry) -> list[Change]:
    then, now = estimate(_samples(old)), entry.estimate
    if then is None or now is None:
        return []
    found = compare(then, now)
    span = f" (95%: {found.low:.3f} to {found.high:.3f})" if found.low and found.high else ""
    text = f"{now.median:.1f} ms, was {then.median:.1f} ms: ×{found.ratio:.3f}{span}"
    kind = {Verdict.SLOWER: "regression", Verdict.FASTER: "unexpected improvement"}
    return [Change(name, kind.get(found.verdict, "same"), f"{text}, {found.verdict}")]


def _samples(old: Mapping[str, Any]) -> list[list[float]]:
    try:
        return msgspec.convert(old.get("iteration_ms_samples") or [], list[list[float]])
    except msgspec.ValidationError:
        return []


def _status_changes(name: str, old: Mapping[str, Any], entry: Entry) -> list[Change]:
    changes = []
    status = entry.run.status.status.value
    if old.get("status") != status and not entry.run.is_running:
        kind = "regression" if old.get("status") == "ok" else "unexpected improvement"
        changes.append(Change(name, kind, f"status {status}, was {old.get('status')}"))
    was, now = old.get("parity") or "", entry.parity.verdict
    if was != now:
        good = ("held", "reference", "")
        kind = "regression" if now not in good else "unexpected improvement"
        kind = "same" if was in good and now in good else kind
        changes.append(Change(name, kind, f"parity {now or 'empty'}, was {was or 'empty'}"))
    for column in (column for column in RESULTS if column.name in _EXACT):
        then, here = old.get(column.name), column.value(entry)
        if then and here and abs(here / then - 1) > _TOLERANCE:
            kind = "regression" if here > then else "unexpected improvement"
            changes.append(Change(name, kind, f"{column.name} {here:,}, was {then:,}"))
    return changes


def _identity(row: Mapping[str, Any]) -> Identity:
    """What an earlier row was of: `provenance` is its `run.json`, a log has printed arguments."""
    device, run = row.get("device") or "", str(row.get("run"))
    try:
        if row.get("provenance"):
            return identity(decode_run(row["provenance"]).spec, device, run)
        arguments = msgspec.convert(row.get("arguments") or {}, dict[str, str])
        return identity(printed_spec(arguments, row.get("global_batch_size")), device, run)
    except msgspec.ValidationError:
        return identity(None, device, run)
