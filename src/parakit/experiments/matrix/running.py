"""Verify cells, leave one JSON each; what is wrong is shrunk, and the rest covered again.

A cell that exists is not verified anew, so a matrix that was interrupted continues where it was. A cell
that differs is verified twice. Of one that is not right the fewest levels are looked for that are as
wrong; the cell is then verified again without each of them, so that no other level goes uncovered.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

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
from parakit.experiments.verify.verifier import Verifier
from parakit.formatting.terminal import say
from parakit.launch import Options, find_entry, read_kit_commit
from parakit.verify import Finding, refuse_comparison

VerifyCell = Callable[[MatrixCell], CellRecord]
"""Verifies a cell once."""
_REASON_LENGTH = 600
_LOG = re.compile(r" The log is \S+$")
"""Which is removed with the cell's tensors."""


@dataclass
class CellVerifier:
    """Verifies cells of one Megatron."""

    verifier: Verifier
    options: Options
    known: tuple[Finding, ...] = ()
    """Bugs of this Megatron."""
    _reference: tuple[object, ...] = field(default=(), init=False)

    def __call__(self, cell: MatrixCell) -> CellRecord:
        """Verify a cell; one that differs twice, unless that is a known finding."""
        began = time.monotonic()
        record = self._once(cell)
        if record.status is CellStatus.CRASHED:
            record = self._once(cell)  # Under load a rank may be killed.
        finding = self._finding(cell, record)
        if record.status is CellStatus.DIFFERS and not finding:
            self.verifier.forget()
            again = self._once(cell)
            places = [(one.status, one.stage, one.module) for one in (record, again)]
            if places[0] != places[1]:
                said = f"first {record.sentence}; then {again.status}: {again.sentence}"
                record = replace(record, status=CellStatus.FLAKY, reason=said)
        return replace(record, seconds=round(time.monotonic() - began, 1), finding=finding)

    def _finding(self, cell: MatrixCell, record: CellRecord) -> str:
        """The known one that a cell without its patch shows; empty if there is none."""
        if record.status in (CellStatus.CRASHED, CellStatus.REFUSED):
            ends = (one.id for one in self.known if one.fails and one.fails in str(record.reason))
            return next(ends, "")
        if record.status is not CellStatus.DIFFERS:
            return ""
        shown = (one for one in find_uncured(cell, self.known) if not one.fails)
        return next((one.id for one in shown if one.stage in (None, record.stage)), "")

    def _once(self, cell: MatrixCell) -> CellRecord:
        if cell.reference != self._reference:
            self.verifier.forget()
            self._reference = cell.reference
        try:
            found = summarise_judgement(self.verifier.verify(cell.pair(self.options), both=True))
        except LaunchError as error:
            found = summarise_judgement(refuse_comparison(str(error)))
        except Exception as error:  # One cell that cannot be judged does not stop the rest.
            where = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            found = {"status": CellStatus.NOT_JUDGED, "reason": said}
        found["reason"] = _LOG.sub("", found["reason"] or "")[:_REASON_LENGTH] or None
        entry = find_entry(self.options.megatron_lm)
        commit = f" ({entry.megatron_commit})" if entry.megatron_commit else ""
        return CellRecord(
            cell.id,
            cell.family.name,
            cell.layout.name,
            tuple(level.path for level in cell.levels),
            cell.command("<checkout>" if self.options.megatron_lm else ""),
            **found,
            date=datetime.now(UTC).strftime("%Y-%m-%d"),
            megatron=f"{entry.megatron_version}{commit}",
            kit=read_kit_commit() or "",
            more=cell.more,
            patch=cell.patch,
        )


@dataclass
class MatrixRun:
    """Cells of one version, and the folder that keeps them."""

    folder: Path
    verify: VerifyCell
    console: Console
    deadline: float | None = None
    """`time.monotonic` after which no further cell is begun."""
    records: dict[str, CellRecord] = field(init=False)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.records = {one.id: one for one in read_json_files(self.folder, "*.json", CellRecord)}

    @property
    def is_over(self) -> bool:
        """Whether there is no time left."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    def run(self, cells: Iterable[MatrixCell]) -> bool:
        """Verify cells and what follows from them; False where the time was over before the end.

        Those that need no explanation come first: every pair once, then the reasons.
        """
        wrong: list[MatrixCell] = []
        left = iter(cells)
        while not self.is_over:
            cell = next(left, None)
            if cell is not None:
                record = self.record(cell)
                if cell.levels and not record.is_right and not record.finding:
                    wrong.append(cell)
            elif wrong:
                left = self._explained(wrong.pop(0))
            else:
                return True
        return False

    def record(self, cell: MatrixCell) -> CellRecord:
        """A cell's record: as it is kept, or verified now."""
        if cell.id in self.records:
            return self.records[cell.id]
        record = self._keep(self.verify(cell))
        style = {CellStatus.HELD: "green", CellStatus.DIFFERS: "red"}.get(record.status, "yellow")
        levels = " ".join(path.partition("/")[2] for path in record.levels) or "as it is"
        line = f"{record.status}: {record.layout} {record.family}, {levels}: {record.sentence}"
        say(self.console, f"{line} ({record.seconds:.0f} s)", style)
        return record

    def draw(self, cells: Iterator[MatrixCell]) -> Iterator[CellRecord]:
        """Verify draws until the time is over; gives the least of each that differs."""
        while not self.is_over:
            cell = next(cells)
            record = self.record(cell)
            if record.status is CellStatus.DIFFERS and not record.finding:
                least = self.shrunk(cell.only(self.blamed(cell, record)))
                yield replace(self.record(least), smallest=least.command())

    def _keep(self, record: CellRecord) -> CellRecord:
        write_record(self.folder / f"{record.id}.json", record)
        self.records[record.id] = record
        return record

    def _explained(self, cell: MatrixCell) -> Iterator[MatrixCell]:
        """Look for the levels that make a cell wrong; gives the cells that cover the others again."""
        record = self.record(cell)
        if record.blamed is None:
            blamed = self.blamed(cell, record)
            if self.is_over:
                return
            paths, least = tuple(level.path for level in blamed), ""
            if record.status is CellStatus.DIFFERS:
                least = self.shrunk(cell.only(blamed)).command()
                if self.is_over:
                    return
            record = self._keep(replace(record, blamed=paths, smallest=least))
            self.console.print(f"  because of {', '.join(paths) or cell.layout.name}")
        for path in record.blamed or ():
            yield cell.without(cell.family.level(path))

    def blamed(self, cell: MatrixCell, record: CellRecord) -> tuple[Level, ...]:
        """The fewest levels of a cell that come to the same."""
        return minimize_parts(cell.levels, lambda levels: self._is_as(cell.only(levels), record))

    def shrunk(self, cell: MatrixCell) -> MatrixCell:
        """The smallest model and the fewest flags that differ as a cell does."""
        record, least = self.record(cell), cell
        for flags in cell.family.smaller:
            smaller = replace(least, more=(*least.more, *flags))
            least = smaller if self._is_as(smaller, record) else least
        return least

    def _is_as(self, cell: MatrixCell, record: CellRecord) -> bool:
        """Whether a cell comes to what a record says; not where there is no time to find out."""
        return not self.is_over and self.record(cell).status is record.status


def minimize_parts[T](parts: Sequence[T], shows: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """The parts of which none can be left out; all of them show it, and none of them alone may.

    Zeller and Hildebrandt's ddmin (IEEE TSE 28, 2002): halves first, so that one guilty part of n is
    found in about 2·log2(n) tries.
    """
    if not parts or shows(()):
        return ()
    kept, pieces = tuple(parts), 2
    while len(kept) > 1:
        size = -(-len(kept) // pieces)
        chunks = [kept[at : at + size] for at in range(0, len(kept), size)]
        smaller = next((chunk for chunk in chunks if len(chunk) < len(kept) and shows(chunk)), None)
        if smaller is not None:
            kept, pieces = smaller, 2
            continue
        rests = ((*kept[:at], *kept[at + size :]) for at in range(0, len(kept), size))
        # Of two halves each is the other's rest, and was tried.
        rest = next((one for one in rests if one and len(chunks) > 2 and shows(one)), None)
        if rest is not None:
            kept, pieces = rest, max(pieces - 1, 2)
        elif size == 1:
            break
        else:
            pieces = min(len(kept), 2 * pieces)
    return kept
