"""An earlier report beside this one: what is not as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from parakit.artifacts.run import decode_run
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
    TimeVerdict,
    compare_times,
    estimate_time,
    smallest_visible_difference,
)

JSON_FILE = "results.json"
_EXACT = ("parameters_total", "peak_memory_bytes", "comm_bytes_per_iteration")
"""Columns that hardly scatter."""
_TOLERANCE = 0.01
REGRESSION, IMPROVEMENT = "regression", "unexpected improvement"
UNDECIDED = "undecided"
"""A time that is further off than repeats usually are, and not so far that these runs can show it."""


class BaselineError(ValueError):
    """An earlier report that cannot be compared with."""


@dataclass(frozen=True)
class Change:
    """One thing that is not as it was."""

    row: str
    kind: str
    """`regression`, `unexpected improvement`, `undecided`, `same`, `new` or `missing`."""
    text: str

    @property
    def fails_strict(self) -> bool:
        """Whether a strict comparison fails on it."""
        return self.kind not in ("same", "new", UNDECIDED)


@dataclass(frozen=True)
class _EarlierReport:
    rows: list[dict[str, Any]]


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
    changes: list[Change] = []
    counterparts = _counterparts(old, entries)
    for place, entry in enumerate(entries):
        name = entry.run.name if entry.run.is_foreign else entry.run.strategy or entry.run.name
        if place not in counterparts:
            changes.append(Change(name, "new", "not in the earlier report"))
            continue
        earlier = old[counterparts[place]]
        changes += [*_status_changes(name, earlier, entry), *_time_changes(name, earlier, entry)]
    for at, earlier in enumerate(old):
        if at not in counterparts.values():
            name = str(earlier.get("strategy") or earlier.get("run"))
            changes.append(Change(name, "missing", "in the earlier report, but not in this one"))
    return changes


def _counterparts(old: Sequence[Mapping[str, Any]], entries: Sequence[Entry]) -> dict[int, int]:
    """By the places of entries those of their earlier rows: of its identity, first those of its run.

    Rows may share an identity: by other code, or a failure beside what ended well.
    """
    left = {at: (_identity_of_row(row), row.get("run")) for at, row in enumerate(old)}
    found: dict[int, int] = {}
    for same_run in (True, False):
        for place, entry in enumerate(entries):
            wanted, name = build_row_identity(entry.run), entry.run.name
            for at, (identity, run) in left.items() if place not in found else ():
                if identity == wanted and (not same_run or run == name):
                    found[place] = at
                    del left[at]
                    break
    return found


def _time_changes(name: str, old: Mapping[str, Any], entry: Entry) -> list[Change]:
    now = entry.estimate
    try:
        samples = msgspec.convert(old.get("iteration_ms_samples") or [], list[list[float]])
    except msgspec.ValidationError:
        return []
    then = estimate_time(samples, scatter=device_scatter(entry.run.device))
    if then is None or now is None:
        return []
    found = compare_times(then, now)
    span = f" ({found.span})" if found.span else ""
    text = (
        f"{now.median:.1f} ms, was {then.median:.1f} ms: ×{found.ratio:.3f}{span}, {found.verdict}"
    )
    kind = {TimeVerdict.SLOWER: REGRESSION, TimeVerdict.FASTER: IMPROVEMENT}
    if found.verdict is not TimeVerdict.NOISE or not found.smallest:
        return [Change(name, kind.get(found.verdict, "same"), text)]
    usual = smallest_visible_difference(min(then.runs, now.runs), now.scatter.typical)
    off = f"{change(found.ratio, 1)}, below the {found.smallest:.1%} that these runs can show"
    # Where enough runs show their own scatter there is nothing left to decide.
    decided = (then.degrees_of_freedom and now.degrees_of_freedom) or abs(found.ratio - 1) <= usual
    return [Change(name, "same" if decided else UNDECIDED, f"{text}: {off}")]


def _status_changes(name: str, old: Mapping[str, Any], entry: Entry) -> list[Change]:
    changes = []
    before, status = old.get("status"), entry.status
    if before != status and not entry.run.is_running:
        kind = REGRESSION if before == "ok" else IMPROVEMENT
        changes.append(Change(name, kind, f"status {status}, was {before}"))
    was, now = old.get("parity") or "", entry.parity.verdict
    if was != now:
        good = ("held", "reference", "")
        kind = REGRESSION if now not in good else "same" if was in good else IMPROVEMENT
        changes.append(Change(name, kind, f"parity {now or 'empty'}, was {was or 'empty'}"))
    for column in (column for column in RESULTS if column.name in _EXACT):
        then, here = old.get(column.name), column.value(entry)
        if then and here and abs(here / then - 1) > _TOLERANCE:
            kind = REGRESSION if here > then else IMPROVEMENT
            changes.append(Change(name, kind, f"{column.name} {here:,}, was {then:,}"))
    return changes


def _identity_of_row(row: Mapping[str, Any]) -> RowIdentity:
    """What an earlier row was of: `provenance` is its `run.json`, a log has printed arguments."""
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
