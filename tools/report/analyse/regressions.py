"""What changed since an earlier report: regressions and unexpected improvements alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tools.report.analyse.rows import Row
from tools.report.analyse.statistics import Verdict, compare, estimate

JSON_FILE = "results.json"
_IDENTITY = (
    "backend strategy model device world_size micro_batch_size global_batch_size seq_length dtype"
)


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
    old: Sequence[Mapping[str, Any]],
    rows: Sequence[Row],
    samples: Sequence[Sequence[Sequence[float]]],
) -> list[Change]:
    """Compare rows with an earlier report's.

    Args:
        old: Rows of `read_baseline`.
        rows: Rows of now.
        samples: Of each row the samples of each pooled run, in ms.
    """
    before = {_identity(row): row for row in old}
    changes: list[Change] = []
    for row, runs in zip(rows, samples, strict=True):
        now = {name: getattr(row, name) for name in _IDENTITY.split()}
        name = row.strategy or row.run
        earlier = before.pop(_identity(now), None)
        if earlier is None:
            changes.append(Change(name, "new", "not in the earlier report"))
            continue
        changes += _row_changes(name, earlier, row, runs)
    for earlier in before.values():
        name = str(earlier.get("strategy") or earlier.get("run"))
        changes.append(Change(name, "missing", "in the earlier report, but not in this one"))
    return changes


def _row_changes(
    name: str, old: Mapping[str, Any], row: Row, samples: Sequence[Sequence[float]]
) -> list[Change]:
    changes = [*_status_changes(name, old, row)]
    then = estimate(_samples(old))
    now = estimate(samples)
    if then is not None and now is not None:
        found = compare(then, now)
        span = f" (95%: {found.low:.3f} to {found.high:.3f})" if found.low and found.high else ""
        text = f"{now.median:.1f} ms, was {then.median:.1f} ms: ×{found.ratio:.3f}{span}"
        kind = {Verdict.SLOWER: "regression", Verdict.FASTER: "unexpected improvement"}
        changes.append(Change(name, kind.get(found.verdict, "same"), f"{text}, {found.verdict}"))
    return changes


def _samples(old: Mapping[str, Any]) -> list[list[float]]:
    try:
        return msgspec.convert(old.get("iteration_ms_samples") or [], list[list[float]])
    except msgspec.ValidationError:
        return []


def _status_changes(name: str, old: Mapping[str, Any], row: Row) -> list[Change]:
    changes = []
    if old.get("status") != row.status:
        kind = "regression" if old.get("status") == "ok" else "unexpected improvement"
        changes.append(Change(name, kind, f"status {row.status}, was {old.get('status')}"))
    was, now = old.get("parity") or "", row.parity or ""
    if was != now:
        good = ("held", "reference", "")
        kind = "regression" if now not in good else "unexpected improvement"
        kind = "same" if was in good and now in good else kind
        changes.append(Change(name, kind, f"parity {now or 'empty'}, was {was or 'empty'}"))
    for field in ("parameters_total", "peak_memory_bytes", "comm_bytes_per_iteration"):
        then, here = old.get(field), getattr(row, field)
        if then and here and abs(here / then - 1) > 0.01:
            kind = "regression" if here > then else "unexpected improvement"
            changes.append(Change(name, kind, f"{field} {here:,}, was {then:,}"))
    return changes


def _identity(row: Mapping[str, Any]) -> tuple[str, ...]:
    values = tuple(str(row.get(name) or "") for name in _IDENTITY.split())
    return values if row.get("model") else (*values, str(row.get("run")))
