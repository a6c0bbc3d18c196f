"""`parity-matrix.md` and `parity-cells.html`: one table a version, what differs, and every cell.

Both are templates over the cells that are kept beside them (`outcome.py`). Of those in `docs/` the matrix is
committed. The page of cells is not: `make docs` writes it into the site.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.version import InvalidVersion, Version

from parakit.artifacts.io import write_atomically
from parakit.experiments.matrix.curves import ITERATIONS
from parakit.experiments.matrix.definition import Matrix
from parakit.experiments.matrix.outcome import (
    STATUS_ORDER,
    STORED,
    CellRecord,
    CurveDistances,
    FuzzResult,
    read_json_files,
    read_stored_cells,
)
from parakit.experiments.matrix.table import LEGEND, FamilyTable, compute_bf16_costs, make_tables
from parakit.formatting.html import environment
from parakit.formatting.table import markdown_rows, markdown_text
from parakit.formatting.units import DASH
from parakit.verify import Finding, FindingStatus, list_findings

MARKDOWN, HTML = "parity-matrix.md", "parity-cells.html"
_TEMPLATES = Path(__file__).parent / "templates"

_MAX_NAMED_KITS = 3
"""Commits that a title names."""


@dataclass(frozen=True)
class MatrixOfVersion:
    """All cells of one Megatron."""

    name: str
    records: tuple[CellRecord, ...]
    matrix: Matrix
    curves: tuple[CurveDistances, ...] = ()
    drawn: tuple[FuzzResult, ...] = ()

    @cached_property
    def tables(self) -> list[FamilyTable]:
        """One a family."""
        return make_tables(self.matrix, self.records)

    @property
    def when(self) -> str:
        """The days on which its cells were verified."""
        dates = sorted({one.date for one in self.records})
        return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"

    @property
    def head(self) -> str:
        """When, which Megatron and which kit."""
        kits = sorted({one.kit for one in self.records if one.kit})
        # A matrix may take days, and the kit change meanwhile; each cell's record has its own.
        kit = f"kit {', '.join(kits) or DASH}"
        if len(kits) > _MAX_NAMED_KITS:
            kit = f"{len(kits)} states of the kit"
        megatron, cells = self.records[0].megatron, f"{len(self.records)} cells"
        return f"Megatron {megatron}, {self.when}, {kit}. {cells}: {format_counts(self.records)}"

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many pairs of a level and a strategy came to what."""
        found = [pair for table in self.tables for row in table.rows for pair in row.pairs]
        pairs = [pair.status for pair in found if not pair.is_open]
        return {
            "pairs": len(found),
            **{str(status): pairs.count(status) for status in STATUS_ORDER},
            "not known which level": len(found) - len(pairs),
            "in no cell": pairs.count(None),
        }

    @cached_property
    def known(self) -> list[tuple[Finding, list[CellRecord]]]:
        """Findings that cells of this version show."""
        shown = {one.finding for one in self.records if one.finding}
        return [
            (finding, [one for one in self.records if one.finding == finding.id])
            for finding in list_findings()
            if finding.id in shown
        ]

    @cached_property
    def new(self) -> list[CellRecord]:
        """Cells that differ and are no known finding: the smallest of each place and strategy."""
        found = [one for one in self.records if one.is_wrong and not one.finding]
        least: dict[tuple[object, ...], CellRecord] = {}
        for one in sorted(found, key=lambda one: (len(one.levels), len(one.command))):
            least.setdefault((one.layout, one.blamed or one.levels), one)
        explained = [one for one in least.values() if one.blamed is not None or len(one.levels) < 2]
        return explained or list(least.values())

    @cached_property
    def sentences(self) -> list[tuple[str, list[CellRecord]]]:
        """What was not compared: each sentence with the cells that it is about, fewest levels first."""
        found: dict[str, list[CellRecord]] = {}
        for one in sorted(self.records, key=lambda one: len(one.levels)):
            if not (one.is_right or one.is_wrong):
                found.setdefault(f"{one.status}: {one.reason}", []).append(one)
        return sorted(found.items())

    @cached_property
    def bf16(self) -> tuple[list[str], dict[str, list[float | None]]]:
        """What bf16 costs by stage, for the strategies of the first family."""
        first = self.tables[0]
        own = [one for one in self.records if one.family == first.family.name]
        return list(first.layouts), compute_bf16_costs(own, first.layouts)


def format_counts(records: Sequence[CellRecord]) -> str:
    """How many cells came to what: `3 held, 1 differs`."""
    found = Counter(one.status for one in records)
    return ", ".join(f"{found[status]} {status}" for status in STATUS_ORDER if found[status])


def make_overview(versions: Sequence[MatrixOfVersion]) -> list[list[str]]:
    """What the pairs of each version came to: a head and a row a version, without columns of zeros."""
    kinds = [kind for one in versions[:1] for kind in one.counts]
    kinds = [kind for kind in kinds if any(one.counts[kind] for one in versions)]
    rows = (
        [
            one.name,
            one.records[0].megatron,
            one.when,
            ", ".join(table.family.name for table in one.tables),
            str(len(one.records)),
            *(str(one.counts[kind]) for kind in kinds),
        ]
        for one in versions
    )
    return [["version", "Megatron", "verified", "families", "cells", *kinds], *rows]


def write_pages(folder: Path, matrix: Matrix) -> tuple[Path, Path]:
    """Write both pages of all cells that are stored in a folder into that folder; return their paths."""
    versions = _read_versions(folder, matrix)
    return _write_page(MARKDOWN, versions, folder), _write_page(HTML, versions, folder)


def write_cells_page(stored: Path, folder: Path, matrix: Matrix) -> Path:
    """Write the page of all cells that are stored in one folder into another folder; return its path."""
    return _write_page(HTML, _read_versions(stored, matrix), folder)


def _read_versions(folder: Path, matrix: Matrix) -> list[MatrixOfVersion]:
    """Return every version that has cells in a folder, the newest version first."""
    stored = sorted(
        (folder / STORED).glob("*.jsonl"), key=lambda path: _parse_release(path.stem), reverse=True
    )
    return [
        MatrixOfVersion(
            path.stem,
            tuple(records),
            matrix,
            next(
                iter(
                    read_json_files(
                        path.parent, f"{path.stem}.bf16.json", tuple[CurveDistances, ...]
                    )
                ),
                (),
            ),
            drawn=tuple(read_json_files(path.parent, f"{path.stem}.fuzz-*.json", FuzzResult)),
        )
        for path in stored
        if (records := read_stored_cells(path))
    ]


def _write_page(name: str, versions: Sequence[MatrixOfVersion], folder: Path) -> Path:
    """Render the template of a page and write the page into a folder; return its path."""
    legend = [(status.replace(" ", "-"), *said) for status, said in LEGEND.items()]
    order = list(FindingStatus)
    judged = sorted(list_findings(), key=lambda one: order.index(one.verdict))
    given = {
        **_TEMPLATE_NAMES,
        "versions": versions,
        "legend": legend,
        "overview": make_overview(versions),
    }
    template = environment(_TEMPLATES).overlay(autoescape=name == HTML)
    text = template.get_template(f"{name}.j2").render(**given, judged=judged)
    path = folder / name
    write_atomically(path, text)
    return path


def _parse_release(name: str) -> Version:
    """A commit is before all releases."""
    try:
        return Version(name)
    except InvalidVersion:
        return Version("0")


def _make_table_rows(version: MatrixOfVersion, table: FamilyTable) -> list[list[str]]:
    """A table's rows in Markdown: a feature's name once, and each pair with a link to its cell."""
    lines, before = [], ""
    for row in table.rows:
        cells = (
            pair.text
            if pair.record is None or pair.record.is_right
            else f"[{pair.text}]({HTML}#{version.name}.{pair.record.id})"
            for pair in row.pairs
        )
        factor = row.level.factor
        lines.append([factor if factor != before else "", row.level.name, *cells])
        before = factor
    return lines


def _format_layouts(records: Iterable[CellRecord]) -> str:
    """Families with their strategies, each once."""
    found: dict[str, dict[str, None]] = {}
    for one in records:
        found.setdefault(one.family, {})[one.layout] = None
    return ", ".join(f"{family} in {', '.join(layouts)}" for family, layouts in found.items())


_TEMPLATE_NAMES = {
    "html": HTML,
    "dash": DASH,
    "iterations": ITERATIONS,
    "rows": markdown_rows,
    "escaped": markdown_text,
    "lines": _make_table_rows,
    "places": _format_layouts,
    "counts_of": format_counts,
    "plain": str,
}
"""What the templates use."""
