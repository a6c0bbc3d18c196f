"""A report as data, built once here and rendered elsewhere; and what changed since an earlier one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tools.records.identity import essential
from tools.records.run import decode_run
from tools.report.analyse.comparability import compare_speed
from tools.report.analyse.configurations import (
    Configuration,
    RowIdentity,
    configurations,
    identity_of_run,
    is_patched,
    labels,
    pooled,
    row_identity,
    scatter_of,
    with_distinct_names,
)
from tools.report.analyse.entry import Entry, device_memory
from tools.report.analyse.parity import Parity, parity_of
from tools.report.analyse.planned import PlannedEntry
from tools.report.analyse.published import figure_for, match_figure, relative_to_baseline
from tools.report.analyse.rates import rates_of
from tools.report.analyse.results import RESULTS
from tools.report.analyse.statistics import TimeVerdict, compare, estimate
from tools.report.analyse.within_run import changes_within
from tools.report.read.printed import printed_spec
from tools.report.read.runs import Run, load_runs
from tools.spec.published import Correction, Published

if TYPE_CHECKING:
    from tools.report.analyse.gpu_bench import Bench

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
    gpu_bench: Bench | None = None
    """What `make bench-gpu` left beside the runs."""
    planned: tuple[PlannedEntry, ...] = ()
    """What the planner predicts of the rows that it can predict."""


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
    def fails_strict(self) -> bool:
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
    rows = configurations(with_distinct_names(runs), all_conditions)
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


def rows_of(groups: Sequence[Sequence[Path]]) -> list[Entry | None]:
    """A row for each group of run folders, newest first, whatever a report would pool.

    Parity is that of a report of all of them. None where no folder can be read.
    """
    return rows_of_runs([load_runs(folders)[0] for folders in groups])


def rows_of_runs(groups: Sequence[Sequence[Run]]) -> list[Entry | None]:
    """The same of runs that were read."""
    every = configurations([run for runs in groups for run in runs], all_conditions=True)
    verdicts = zip(every, parity_of(every), strict=True)
    parities = {run.name: parity for row, parity in verdicts for run in row.runs}
    return [
        _entry(
            runs[0].name,
            Configuration(tuple(reversed(runs)), pooled(runs)),
            parities.get(runs[0].name, Parity()),
            Published(),
        )
        if runs
        else None
        for runs in groups
    ]


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
    before = list(old)
    changes: list[Change] = []
    for entry, earlier in zip(entries, _counterparts(before, entries), strict=True):
        name = entry.run.strategy or entry.run.name
        if entry.run.is_foreign:
            name = entry.run.name
        if earlier is None:
            changes.append(Change(name, "new", "not in the earlier report"))
            continue
        changes += [*_status_changes(name, earlier, entry), *_time_changes(name, earlier, entry)]
    for earlier in before:
        name = str(earlier.get("strategy") or earlier.get("run"))
        changes.append(Change(name, "missing", "in the earlier report, but not in this one"))
    return changes


def _counterparts(
    before: list[Mapping[str, Any]], entries: Sequence[Entry]
) -> list[Mapping[str, Any] | None]:
    """The earlier row of each entry, taken out of `before`: of its identity, first those of its run.

    Rows may share an identity: by other code, or a failure beside what ended well.
    """
    identities = {id(row): _identity(row) for row in before}
    found: list[Mapping[str, Any] | None] = [None] * len(entries)
    for same_run in (True, False):
        for place, entry in enumerate(entries):
            wanted, run = identity_of_run(entry.run), entry.run.name
            if found[place] is not None:
                continue
            for row in before:
                if identities[id(row)] == wanted and (not same_run or row.get("run") == run):
                    found[place] = row
                    break
            before[:] = [row for row in before if row is not found[place]]
    return found


def _entry(label: str, row: Configuration, parity: Parity, published: Published) -> Entry:
    run, time = row.newest, row.estimate.median if row.estimate else None
    figure = figure_for(run, published)
    return Entry(
        label=label,
        configuration=row,
        rates=rates_of(run, time),
        parity=parity,
        shifts=changes_within(run),
        figure=figure,
        matches=tuple(match_figure(run, figure, time, device_memory(run)) if figure else ()),
        published_ratio=relative_to_baseline(figure, published) if figure else None,
    )


def _with_speeds(entries: list[Entry]) -> list[Entry]:
    result = []
    for entry in entries:
        reference = _reference(entry, entries) if entry.estimate else None
        if reference is None or reference is entry:
            result.append(entry)
            continue
        speed = compare_speed(reference.configuration, entry.configuration)
        result.append(replace(entry, speed=speed))
    return result


def _reference(entry: Entry, entries: Sequence[Entry]) -> Entry | None:
    """What an entry's speed is compared with: baseline; of logs the first that was named.

    Only one of the same model and device, or where one side does not say.
    """
    timed = [other for other in entries if other.estimate]
    if any(other.run.is_foreign for other in entries):
        return next(other for other in timed if _may_be_alike(other.run, entry.run))
    cohort = [other for other in timed if _cohort(other) == _cohort(entry)]
    return min(cohort, key=_as_reference) if entry.run.model else None


def _may_be_alike(one: Run, two: Run) -> bool:
    pairs = ((one.model, two.model), (one.device, two.device))
    return all(ours == theirs or not ours or not theirs for ours, theirs in pairs)


def _as_reference(entry: Entry) -> tuple[bool, bool]:
    """Baseline first, but Megatron as it is before one that a patch file changed."""
    return is_patched(entry.run.spec), not entry.run.is_baseline


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
    now = entry.estimate
    then = estimate(_samples(old), scatter=scatter_of(entry.run.device))
    if then is None or now is None:
        return []
    found = compare(then, now)
    span = f" ({found.span})" if found.span else ""
    text = f"{now.median:.1f} ms, was {then.median:.1f} ms: ×{found.ratio:.3f}{span}"
    kind = {TimeVerdict.SLOWER: "regression", TimeVerdict.FASTER: "unexpected improvement"}
    return [Change(name, kind.get(found.verdict, "same"), f"{text}, {found.verdict}")]


def _samples(old: Mapping[str, Any]) -> list[list[float]]:
    try:
        return msgspec.convert(old.get("iteration_ms_samples") or [], list[list[float]])
    except msgspec.ValidationError:
        return []


def _status_changes(name: str, old: Mapping[str, Any], entry: Entry) -> list[Change]:
    changes = []
    status = entry.status
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


def _identity(row: Mapping[str, Any]) -> RowIdentity:
    """What an earlier row was of: `provenance` is its `run.json`, a log has printed arguments."""
    device, run = row.get("device") or "", str(row.get("run"))
    try:
        if row.get("provenance"):
            record = decode_run(row["provenance"])
            return row_identity(run, device, record.spec, record, {})
        arguments = msgspec.convert(row.get("arguments") or {}, dict[str, str])
        spec = printed_spec(arguments, row.get("global_batch_size"))
        return row_identity(run, device, spec, None, arguments)
    except msgspec.ValidationError:
        return row_identity(run, device, None, None, {})
