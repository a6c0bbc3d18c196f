"""Verify cells of the parity matrix, store one JSON record per cell, and shrink the cells that are wrong.

A cell that has a record is not verified again, so an interrupted matrix continues where it stopped. A cell that
differs is verified twice. For a cell that is not right, the fewest levels with the same outcome are searched: they
are blamed. The cell is then verified without each blamed level, so that its other levels are covered, too.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from parakit.artifacts.io import write_record
from parakit.config.errors import LaunchError
from parakit.experiments.matrix.cell import MatrixCell, find_uncured
from parakit.experiments.matrix.definition import Level
from parakit.experiments.matrix.outcome import (
    CellRecord,
    CellStatus,
    read_json_files,
    summarise_judgement,
)
from parakit.experiments.verify.reasons import shorten_reason
from parakit.experiments.verify.verifier import Verifier
from parakit.formatting.terminal import say
from parakit.launch import Options, find_entry, read_kit_commit
from parakit.verify import Finding, refuse_comparison

VerifyCell = Callable[[MatrixCell], CellRecord]
"""Function that verifies a cell and returns the cell's record."""
_MAX_REASON_LENGTH = 600
"""Characters of a reason that a record stores."""


@dataclass
class CellVerifier:
    """Function that verifies a cell with one version of Megatron."""

    verifier: Verifier
    options: Options
    known: tuple[Finding, ...] = ()
    """Known bugs of this version of Megatron."""
    _reference_key: tuple[object, ...] = field(default=(), init=False)
    """Key of the reference that `verifier` stores."""

    def __call__(self, cell: MatrixCell) -> CellRecord:
        """Verify a cell and return its record.

        A crash is tried once more, because a rank may be killed under load. A difference that no known finding
        explains is verified a second time: if the outcomes differ, the cell is flaky.
        """
        began = time.monotonic()
        record = self._verify_once(cell)
        if record.status is CellStatus.CRASHED:
            record = self._verify_once(cell)
        finding = self._find_finding(cell, record)
        if record.status is CellStatus.DIFFERS and not finding:
            self.verifier.remove_references()
            second = self._verify_once(cell)
            if _summarise_outcome(record) != _summarise_outcome(second):
                reason = f"first {record.sentence}; then {second.status}: {second.sentence}"
                record = replace(record, status=CellStatus.FLAKY, reason=reason)
        return replace(record, seconds=round(time.monotonic() - began, 1), finding=finding)

    def _find_finding(self, cell: MatrixCell, record: CellRecord) -> str:
        """Return the id of the known finding that explains a record; empty if none does.

        A run that crashed or was refused is explained by a finding whose message is in the run's reason. A cell that
        differs is explained by a finding without a message that no patch of the cell cures. If the finding names a
        stage, it must be the stage of the record.
        """
        if record.status in (CellStatus.CRASHED, CellStatus.REFUSED):
            reason = str(record.reason)
            for finding in self.known:
                if finding.fails and finding.fails in reason:
                    return finding.id
        elif record.status is CellStatus.DIFFERS:
            for finding in find_uncured(cell, self.known):
                is_of_stage = finding.stage is None or finding.stage == record.stage
                if is_of_stage and not finding.fails:
                    return finding.id
        return ""

    def _verify_once(self, cell: MatrixCell) -> CellRecord:
        """Verify a cell and return its record. A stored reference is used if it belongs to the cell."""
        if cell.reference_key != self._reference_key:
            self.verifier.remove_references()
            self._reference_key = cell.reference_key
        outcome = self._judge(cell)
        reason = shorten_reason(outcome["reason"] or "", _MAX_REASON_LENGTH)
        outcome["reason"] = reason or None
        entry = find_entry(self.options.megatron_lm)
        commit = f" ({entry.megatron_commit})" if entry.megatron_commit else ""
        checkout = "<checkout>" if self.options.megatron_lm else ""
        return CellRecord(
            id=cell.id,
            family=cell.family.name,
            layout=cell.layout.name,
            levels=tuple(level.path for level in cell.levels),
            command=cell.format_command(checkout),
            **outcome,
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            megatron=f"{entry.megatron_version}{commit}",
            kit=read_kit_commit() or "",
            more=cell.more,
            patch=cell.patch,
        )

    def _judge(self, cell: MatrixCell) -> dict[str, Any]:
        """Verify a cell and return the fields of its record that the judgement decides.

        An error of the verification itself gives the status `NOT_JUDGED`, with the error and its place in the code.
        """
        try:
            pair = cell.make_pair(self.options)
            return summarise_judgement(self.verifier.verify(pair, both=True))
        except LaunchError as error:
            return summarise_judgement(refuse_comparison(str(error)))
        except Exception as error:  # One cell that cannot be judged must not stop the matrix.
            frame = traceback.extract_tb(error.__traceback__)[-1]
            source = f"{Path(frame.filename).name}:{frame.lineno}"
            reason = f"{type(error).__name__}: {error} ({source})"
            return {"status": CellStatus.NOT_JUDGED, "reason": reason}


def _summarise_outcome(record: CellRecord) -> tuple[CellStatus, str | None, str | None]:
    """Return a record's status, and stage and module of its first wrong tensor."""
    return record.status, record.stage, record.module


@dataclass
class MatrixRun:
    """The records of one version of Megatron, and the folder that stores them."""

    folder: Path
    verify: VerifyCell
    console: Console
    deadline: float | None = None
    """Value of `time.monotonic` after which no further cell is verified; None is no limit."""
    records: dict[str, CellRecord] = field(init=False)
    """Records by the id of their cell."""

    def __post_init__(self) -> None:
        """Read the records that the folder holds already."""
        self.folder.mkdir(parents=True, exist_ok=True)
        stored = read_json_files(self.folder, "*.json", CellRecord)
        self.records = {record.id: record for record in stored}

    @property
    def is_over(self) -> bool:
        """True if the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def run(self, cells: Iterable[MatrixCell]) -> bool:
        """Verify cells, then find the levels that make cells wrong; return False if the time ended first."""
        unexplained: list[MatrixCell] = []
        to_verify = iter(cells)
        while not self.is_over:
            cell = next(to_verify, None)
            if cell is not None:
                record = self.get_record(cell)
                if cell.levels and not record.is_right and not record.finding:
                    unexplained.append(cell)
            elif unexplained:
                to_verify = self._explain(unexplained.pop(0))
            else:
                return True
        return False

    def get_record(self, cell: MatrixCell) -> CellRecord:
        """Return the record of a cell; a cell without a record is verified, stored and printed."""
        if cell.id in self.records:
            return self.records[cell.id]
        record = self._store(self.verify(cell))
        style = {CellStatus.HELD: "green", CellStatus.DIFFERS: "red"}.get(record.status, "yellow")
        levels = " ".join(path.partition("/")[2] for path in record.levels) or "as it is"
        line = f"{record.status}: {record.layout} {record.family}, {levels}: {record.sentence}"
        say(self.console, f"{line} ({record.seconds:.0f} s)", style)
        return record

    def verify_draws(self, cells: Iterator[MatrixCell]) -> Iterator[CellRecord]:
        """Verify cells until the time is over. Yield each cell that differs, reduced to the fewest features
        that still differ.
        """
        while not self.is_over:
            cell = next(cells)
            record = self.get_record(cell)
            if record.status is CellStatus.DIFFERS and not record.finding:
                blamed = self.find_blamed_levels(cell, record)
                smallest = self.shrink_model(cell.keep_levels(blamed))
                yield replace(self.get_record(smallest), smallest=smallest.format_command())

    def _store(self, record: CellRecord) -> CellRecord:
        """Write a record to the folder, in place of an older one, and return the record."""
        write_record(self.folder / f"{record.id}.json", record)
        self.records[record.id] = record
        return record

    def _explain(self, cell: MatrixCell) -> Iterator[MatrixCell]:
        """Store the levels that make a cell wrong; then yield the cell without each of these levels, one by one.

        Nothing is stored or yielded if the time ends during the search.
        """
        record = self.get_record(cell)
        if record.blamed is None:
            blamed = self.find_blamed_levels(cell, record)
            if self.is_over:
                return
            paths, smallest = tuple(level.path for level in blamed), ""
            if record.status is CellStatus.DIFFERS:
                smallest = self.shrink_model(cell.keep_levels(blamed)).format_command()
                if self.is_over:
                    return
            record = self._store(replace(record, blamed=paths, smallest=smallest))
            self.console.print(f"  because of {', '.join(paths) or cell.layout.name}")
        for path in record.blamed or ():
            yield cell.remove_level(cell.family.find_level(path))

    def find_blamed_levels(self, cell: MatrixCell, record: CellRecord) -> tuple[Level, ...]:
        """Return the fewest levels of a cell that give the record's status; empty if the layout alone does."""
        return minimize_parts(
            cell.levels, lambda levels: self._has_status(cell.keep_levels(levels), record.status)
        )

    def shrink_model(self, cell: MatrixCell) -> MatrixCell:
        """Return the cell with a smaller model that gives the same status.

        Each of the family's `smaller` flags is added if the status stays the same with it.
        """
        status, smallest = self.get_record(cell).status, cell
        for flags in cell.family.smaller:
            smaller = replace(smallest, more=(*smallest.more, *flags))
            if self._has_status(smaller, status):
                smallest = smaller
        return smallest

    def _has_status(self, cell: MatrixCell, status: CellStatus) -> bool:
        """Return True if a cell has this status; False if no time is left to verify it."""
        return not self.is_over and self.get_record(cell).status is status


def minimize_parts[T](
    parts: Sequence[T], is_failing: Callable[[tuple[T, ...]], bool]
) -> tuple[T, ...]:
    """Return a minimal subset of `parts` that still fails: no single part of the result can be left out.

    This is ddmin of Zeller and Hildebrandt (IEEE TSE 28, 2002). It tries halves first, so that one guilty part
    among n is found in about 2·log2(n) tests. All `parts` together must fail, which is not tested. The result is
    empty if the empty subset fails, too.
    """
    if not parts or is_failing(()):
        return ()
    subset, num_chunks = tuple(parts), 2
    while len(subset) > 1:
        chunk_size = math.ceil(len(subset) / num_chunks)
        failing_chunk = _find_failing(_list_chunks(subset, chunk_size), is_failing)
        if failing_chunk is not None:
            subset, num_chunks = failing_chunk, 2
            continue
        # No chunk fails alone. So try the subset without one chunk.
        failing_complement = _find_failing(_list_complements(subset, chunk_size), is_failing)
        if failing_complement is not None:
            subset, num_chunks = failing_complement, max(num_chunks - 1, 2)
        elif chunk_size > 1:
            num_chunks = min(len(subset), 2 * num_chunks)
        else:
            break  # Each chunk is one part, and none of them can be left out.
    return subset


def _find_failing[T](
    subsets: Iterable[tuple[T, ...]], is_failing: Callable[[tuple[T, ...]], bool]
) -> tuple[T, ...] | None:
    """Return the first subset that fails, or None. Later subsets are not tested."""
    for subset in subsets:
        if is_failing(subset):
            return subset
    return None


def _list_chunks[T](parts: tuple[T, ...], size: int) -> list[tuple[T, ...]]:
    """Return the parts cut into chunks of `size`; empty if one chunk would have all parts."""
    if size >= len(parts):
        return []
    return [parts[start : start + size] for start in range(0, len(parts), size)]


def _list_complements[T](parts: tuple[T, ...], size: int) -> list[tuple[T, ...]]:
    """Return the parts without one chunk of `size`, for each chunk.

    The list is empty for two chunks or fewer: the complement of one half is the other half, which was tested.
    """
    starts = range(0, len(parts), size)
    if len(starts) <= 2:
        return []
    return [(*parts[:start], *parts[start + size :]) for start in starts]
