"""Compare a report with an earlier one: which rows changed, appeared or are missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from parakit.artifacts.run import Status, decode_run
from parakit.formatting.units import change
from parakit.logs import parse_printed_spec
from parakit.reporting.analyse.configurations import (
    RowIdentity,
    build_row_identity,
    build_row_identity_from_parts,
    device_scatter,
)
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.results import RESULTS
from parakit.reporting.analyse.statistics import (
    Estimate,
    TimeVerdict,
    compare_times,
    describe_ratio,
    describe_ratio_interval,
    estimate_time,
    smallest_visible_difference,
)

JSON_FILE = "results.json"
_EXACT = ("parameters_total", "peak_memory_bytes", "comm_bytes_per_iteration")
"""Columns of `results.csv` that hardly scatter between runs."""
_TOLERANCE = 0.01
"""Relative difference of such a column that is no change."""
REGRESSION, IMPROVEMENT = "regression", "unexpected improvement"
UNDECIDED = "undecided"
"""Kind of a time that differs by more than repeats usually do, and by less than these runs can show."""


class BaselineError(ValueError):
    """Error that an earlier report cannot be read."""


@dataclass(frozen=True)
class Change:
    """Difference between a row of the report and the same row of an earlier report."""

    row: str
    kind: str
    """`regression`, `unexpected improvement`, `undecided`, `same`, `new` or `missing`."""
    text: str

    @property
    def fails_strict(self) -> bool:
        """True if the change makes a strict comparison fail."""
        return self.kind not in ("same", "new", UNDECIDED)


@dataclass(frozen=True)
class _EarlierReport:
    """Part of `results.json` that is read from an earlier report."""

    rows: list[dict[str, Any]]


def read_baseline(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of an earlier report's `results.json`.

    Args:
        folder: Folder of the report, or its `results.json`.

    Raises:
        BaselineError: The file does not exist or is no report.
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
    """Return what changed between the rows of an earlier report (`old`) and the rows of this report.

    A row that only this report has is `new`, and a row that only the earlier report has is `missing`.
    """
    changes: list[Change] = []
    earlier_indexes = _match_rows(old, entries)
    for index, entry in enumerate(entries):
        name = entry.run.name if entry.run.is_foreign else entry.run.strategy or entry.run.name
        if index not in earlier_indexes:
            changes.append(Change(name, "new", "not in the earlier report"))
            continue
        earlier = old[earlier_indexes[index]]
        changes += [*_status_changes(name, earlier, entry), *_time_changes(name, earlier, entry)]
    for earlier_index, earlier in enumerate(old):
        if earlier_index not in earlier_indexes.values():
            name = str(earlier.get("strategy") or earlier.get("run"))
            changes.append(Change(name, "missing", "in the earlier report, but not in this one"))
    return changes


def _match_rows(old: Sequence[Mapping[str, Any]], entries: Sequence[Entry]) -> dict[int, int]:
    """Return, by the index of an entry, the index of the matching row of the earlier report.

    Entries without a match are left out. Rows match if they have the same identity, and each earlier row matches
    at most one entry. Several rows may have one identity (another version of the code, or a failure next to a
    success), so rows of the same run are matched first.
    """
    unmatched = {index: (_row_identity(row), row.get("run")) for index, row in enumerate(old)}
    earlier_indexes: dict[int, int] = {}
    for must_be_same_run in (True, False):
        for index, entry in enumerate(entries):
            if index in earlier_indexes:
                continue
            identity = build_row_identity(entry.run)
            for earlier_index, (earlier_identity, earlier_run) in unmatched.items():
                is_run_accepted = not must_be_same_run or earlier_run == entry.run.name
                if earlier_identity == identity and is_run_accepted:
                    earlier_indexes[index] = earlier_index
                    del unmatched[earlier_index]
                    break
    return earlier_indexes


def _time_changes(name: str, old: Mapping[str, Any], entry: Entry) -> list[Change]:
    """Return the change of a row's time as a list of one element; empty if one of the two reports has no time."""
    estimate = entry.estimate
    try:
        samples = msgspec.convert(old.get("iteration_ms_samples") or [], list[list[float]])
    except msgspec.ValidationError:
        return []
    earlier = estimate_time(samples, scatter=device_scatter(entry.run.device))
    if earlier is None or estimate is None:
        return []
    comparison = compare_times(earlier, estimate)
    interval = ""
    if comparison.low and comparison.high:
        interval = f" (95%: {describe_ratio_interval(comparison.low, comparison.high)})"
    text = (
        f"{estimate.median:.1f} ms, was {earlier.median:.1f} ms:"
        f" {describe_ratio(comparison.ratio)}{interval}, {comparison.outcome}"
    )
    if comparison.verdict is TimeVerdict.SLOWER:
        return [Change(name, REGRESSION, text)]
    if comparison.verdict is TimeVerdict.FASTER:
        return [Change(name, IMPROVEMENT, text)]
    if comparison.verdict is not TimeVerdict.NOISE or not comparison.smallest:
        return [Change(name, "same", text)]
    text += f": {change(comparison.ratio, 1)}, below the {comparison.smallest:.1%} that these runs can show"
    kind = "same" if _is_no_change(earlier, estimate, comparison.ratio) else UNDECIDED
    return [Change(name, kind, text)]


def _is_no_change(earlier: Estimate, estimate: Estimate, ratio: float) -> bool:
    """Return True if a ratio within noise counts as no change; False if more runs could still show a change."""
    # With enough runs on both sides their own scatter has decided, and repeating them would not help.
    if earlier.degrees_of_freedom and estimate.degrees_of_freedom:
        return True
    usual_difference = smallest_visible_difference(
        min(earlier.runs, estimate.runs),
        estimate.scatter.typical,
        estimate.scatter.degrees_of_freedom,
    )
    return abs(ratio - 1) <= usual_difference


def _status_changes(name: str, old: Mapping[str, Any], entry: Entry) -> list[Change]:
    """Return the changes of a row's status, of its loss verdict, and of the columns that must be equal exactly."""
    changes = []
    old_status, status = old.get("status"), entry.status
    if old_status != status and not entry.run.is_running:
        kind = _judge_status_change(old_status, status)
        changes.append(Change(name, kind, f"status {status}, was {old_status}"))
    old_parity, parity = old.get("parity") or "", entry.parity.verdict
    if old_parity != parity:
        text = f"parity {parity or 'empty'}, was {old_parity or 'empty'}"
        changes.append(Change(name, _judge_parity_change(old_parity, parity), text))
    for column in RESULTS:
        if column.name not in _EXACT:
            continue
        old_value, value = old.get(column.name), column.value(entry)
        if not old_value or not value:
            continue
        if abs(value / old_value - 1) > _TOLERANCE:
            kind = REGRESSION if value > old_value else IMPROVEMENT
            changes.append(Change(name, kind, f"{column.name} {value:,}, was {old_value:,}"))
    return changes


def _judge_status_change(old_status: str | None, status: str) -> str:
    """Return the kind of a change from one status to another. Between two failures neither is better."""
    if old_status == Status.OK:
        return REGRESSION
    if status == Status.OK:
        return IMPROVEMENT
    return "same"


def _judge_parity_change(old_parity: str, parity: str) -> str:
    """Return the kind of a change from one loss verdict to another; `same` if both are good."""
    good_verdicts = ("held", "reference", "")
    if parity not in good_verdicts:
        return REGRESSION
    return "same" if old_parity in good_verdicts else IMPROVEMENT


def _row_identity(row: Mapping[str, Any]) -> RowIdentity:
    """Return the identity of a row of an earlier report.

    It is built from the row's `run.json`, or from the arguments that its log printed. A row with neither, or with
    unreadable data, is identified by its run's name alone.
    """
    device, run = row.get("device") or "", str(row.get("run"))
    try:
        if row.get("provenance"):
            record = decode_run(row["provenance"])
            return build_row_identity_from_parts(run, device, record.spec, record, {})
        arguments = msgspec.convert(row.get("arguments") or {}, dict[str, str])
        spec = parse_printed_spec(arguments, row.get("global_batch_size"))
        return build_row_identity_from_parts(run, device, spec, None, arguments)
    except msgspec.ValidationError:
        return build_row_identity_from_parts(run, device, None, None, {})
