"""What changed since an earlier report: regressions and unexpected improvements alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tools.records.run import decode_run
from tools.report.analyse.configurations import Identity, identity, identity_of
from tools.report.analyse.entry import RESULTS, Entry
from tools.report.analyse.statistics import Verdict, compare, estimate
from tools.report.read.runs import printed_spec

JSON_FILE = "results.json"
_EXACT = ("parameters_total", "peak_memory_bytes", "comm_bytes_per_iteration")
"""Columns that hardly scatter."""
_TOLERANCE = 0.01


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
    if old.get("status") != status:
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
