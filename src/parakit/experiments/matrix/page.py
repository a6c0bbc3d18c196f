"""Write the pages `parity-matrix.md` and `parity-cells.html`: the tables of each version, and every cell.

Both pages are templates, filled from the cells that are stored next to them (`outcome.py`). In `docs/` only the
matrix is committed; `make docs` writes the page of cells into the site.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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
from parakit.experiments.matrix.table import (
    LEGEND,
    FamilyTable,
    LevelResult,
    LevelRow,
    compute_bf16_costs,
    make_tables,
)
from parakit.formatting.html import environment
from parakit.formatting.table import markdown_rows, markdown_text
from parakit.formatting.units import DASH
from parakit.verify import Finding, FindingStatus, list_findings

MARKDOWN, HTML = "parity-matrix.md", "parity-cells.html"
DIFFERENCES = "parity-differences.html"
_TEMPLATES = Path(__file__).parent / "templates"

_MAX_NAMED_KITS = 3
"""Commits of the kit that a version's summary lists; more are only counted."""


@dataclass(frozen=True)
class MatrixOfVersion:
    """All results of one version of Megatron."""

    name: str
    records: tuple[CellRecord, ...]
    matrix: Matrix
    curves: tuple[CurveDistances, ...] = ()
    drawn: tuple[FuzzResult, ...] = ()

    @cached_property
    def tables(self) -> list[FamilyTable]:
        """Tables of features × layouts, one per family."""
        return make_tables(self.matrix, self.records)

    @property
    def when(self) -> str:
        """Day on which the cells were verified, or the first and the last day."""
        dates = sorted({record.date for record in self.records})
        return dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"

    @property
    def head(self) -> str:
        """Summary: version of Megatron, days, commits of the kit, and counts of the cells."""
        kits = sorted({record.kit for record in self.records if record.kit})
        # A matrix may take days, during which the kit changes; each record names its commit.
        kit = f"kit {', '.join(kits) or DASH}"
        if len(kits) > _MAX_NAMED_KITS:
            kit = f"{len(kits)} states of the kit"
        megatron, cells = self.records[0].megatron, f"{len(self.records)} cells"
        return f"Megatron {megatron}, {self.when}, {kit}. {cells}: {format_counts(self.records)}"

    @cached_property
    def counts(self) -> dict[str, int]:
        """Number of pairs of a level and a layout by their status."""
        pairs: list[LevelResult] = []
        for table in self.tables:
            for row in table.rows:
                pairs += row.pairs
        num_open = sum(pair.is_open for pair in pairs)
        statuses = Counter(pair.status for pair in pairs if not pair.is_open)
        return {
            "pairs": len(pairs),
            **{str(status): statuses[status] for status in STATUS_ORDER},
            "not known which level": num_open,
            "in no cell": statuses[None],
        }

    @cached_property
    def known(self) -> list[tuple[Finding, list[CellRecord]]]:
        """Known findings that cells of this version show, each with the records of these cells."""
        findings = []
        for finding in list_findings():
            records = [record for record in self.records if record.finding == finding.id]
            if records:
                findings.append((finding, records))
        return findings

    @property
    def new(self) -> list[CellRecord]:
        """Records with wrong tensors that no known finding explains.

        For each layout and set of blamed levels, only the smallest cell is listed. Cells whose blamed levels are
        unknown are left out, unless there are no others.
        """
        wrong = [record for record in self.records if record.is_wrong and not record.finding]
        wrong.sort(key=lambda record: (len(record.levels), len(record.command)))
        smallest: dict[tuple[object, ...], CellRecord] = {}
        for record in wrong:
            levels = record.blamed or record.levels
            smallest.setdefault((record.layout, levels), record)
        explained = []
        for record in smallest.values():
            # A cell with one level needs no search for the level to blame.
            if record.blamed is not None or len(record.levels) < 2:
                explained.append(record)
        return explained or list(smallest.values())

    @cached_property
    def sentences(self) -> list[tuple[str, list[CellRecord]]]:
        """Reasons why cells were not compared, in alphabetical order, each with the records of these cells."""
        records_by_reason: dict[str, list[CellRecord]] = {}
        for record in sorted(self.records, key=lambda record: len(record.levels)):
            if not (record.is_right or record.is_wrong):
                reason = f"{record.status}: {record.reason}"
                records_by_reason.setdefault(reason, []).append(record)
        return sorted(records_by_reason.items())

    @cached_property
    def bf16(self) -> tuple[list[str], dict[str, list[float | None]]]:
        """Layouts of the first family, and by stage the cost of bf16 in each (see `compute_bf16_costs`)."""
        first = self.tables[0]
        records = [record for record in self.records if record.family == first.family.name]
        return list(first.layouts), compute_bf16_costs(records, first.layouts)


def format_counts(records: Sequence[CellRecord]) -> str:
    """Return the number of cells per status, such as `3 held, 1 differs`; empty without cells."""
    counts = Counter(record.status for record in records)
    return ", ".join(f"{counts[status]} {status}" for status in STATUS_ORDER if counts[status])


def make_overview(versions: Sequence[MatrixOfVersion]) -> list[list[str]]:
    """Return the table of pairs per status: a header, and a row per version; columns of zeros are left out."""
    shown_counts: list[str] = []
    if versions:
        for name in versions[0].counts:
            if any(version.counts[name] for version in versions):
                shown_counts.append(name)
    rows = [["version", "Megatron", "verified", "families", "cells", *shown_counts]]
    for version in versions:
        families = ", ".join(table.family.name for table in version.tables)
        megatron, num_cells = version.records[0].megatron, str(len(version.records))
        counts = [str(version.counts[name]) for name in shown_counts]
        rows.append([version.name, megatron, version.when, families, num_cells, *counts])
    return rows


def write_pages(folder: Path, matrix: Matrix) -> tuple[Path, Path]:
    """Write both pages of all cells that are stored in a folder into that folder; return their paths."""
    versions = _read_versions(folder, matrix)
    return _write_page(MARKDOWN, versions, folder), _write_page(HTML, versions, folder)


def write_cells_page(stored: Path, folder: Path, matrix: Matrix) -> Path:
    """Write the page of all cells that are stored in one folder into another folder; return its path."""
    return _write_page(HTML, _read_versions(stored, matrix), folder)


@dataclass(frozen=True)
class DifferenceRow:
    """A level that did not hold in some layouts, with one result and one reason: a row of the page of differences."""

    version: str
    family: str
    level: str
    result: str
    status: str
    """Status as a name of a class in CSS."""
    why: str
    """The finding, or the first wrong tensor, or the reason why nothing was compared."""
    cells: dict[str, str] = field(default_factory=dict, compare=False)
    """Anchor of the cell in the page of cells, by layout."""


def list_differences(versions: Sequence[MatrixOfVersion]) -> list[DifferenceRow]:
    """Return all pairs that did not hold, the newest version and its wrong pairs first.

    Layouts in which a level has the same result for the same reason share a row.
    """
    rows: list[DifferenceRow] = []
    for version in versions:
        version_rows: dict[DifferenceRow, DifferenceRow] = {}
        for table in version.tables:
            for row in table.rows:
                for layout, pair in zip(table.layouts, row.pairs, strict=True):
                    if pair.record is not None and not pair.record.is_right:
                        made = _make_difference(version, table, row, pair)
                        shared = version_rows.setdefault(made, made)
                        shared.cells[layout] = f"{version.name}.{pair.record.id}"
        wrong_first = ("differs", "flaky", "crashed")
        rows += sorted(version_rows, key=lambda row: row.status not in wrong_first)
    return rows


def _make_difference(
    version: MatrixOfVersion, table: FamilyTable, row: LevelRow, pair: LevelResult
) -> DifferenceRow:
    """Return the row of a pair whose deciding cell did not hold, without its cell."""
    record = pair.record
    assert record is not None
    titles = {finding.id: finding.title for finding in list_findings()}
    first_wrong = ", ".join(filter(None, (record.stage, record.module, record.kind)))
    result = str(record.status)
    if pair.partners:
        result += f" with {', '.join(path.partition('/')[2] for path in pair.partners)}"
    reason = first_wrong if record.is_wrong else record.reason or ""
    return DifferenceRow(
        version=version.name,
        family=table.family.name,
        level=f"{row.level.factor}: {row.level.name}",
        result=result,
        status=str(record.status).replace(" ", "-"),
        why=titles.get(record.finding, reason),
    )


def write_differences_page(stored: Path, folder: Path, matrix: Matrix) -> Path:
    """Write the searchable page of all pairs that did not hold into a folder; return its path."""
    versions = _read_versions(stored, matrix)
    counts = [version.counts for version in versions]
    text = (
        environment(_TEMPLATES)
        .overlay(autoescape=True)
        .get_template(f"{DIFFERENCES}.j2")
        .render(
            versions=versions,
            rows=list_differences(versions),
            held=f"{sum(count['held'] for count in counts):,}",
            pairs=f"{sum(count['pairs'] for count in counts):,}",
        )
    )
    path = folder / DIFFERENCES
    write_atomically(path, text)
    return path


def _read_versions(folder: Path, matrix: Matrix) -> list[MatrixOfVersion]:
    """Return every version that has cells in a folder, the newest version first."""
    versions = []
    for path in (folder / STORED).glob("*.jsonl"):
        records = read_stored_cells(path)
        if records:
            versions.append(_read_version(path, records, matrix))
    versions.sort(key=lambda version: _parse_release(version.name), reverse=True)
    return versions


def _read_version(path: Path, records: Iterable[CellRecord], matrix: Matrix) -> MatrixOfVersion:
    """Return the results of a version: its cells, and the curves and fuzz results that are stored next to them.

    Args:
        path: File of the cells, which is named after the version.
        records: The cells.
        matrix: The matrix.
    """
    name = path.stem
    curve_files = read_json_files(path.parent, f"{name}.bf16.json", tuple[CurveDistances, ...])
    fuzz_results = read_json_files(path.parent, f"{name}.fuzz-*.json", FuzzResult)
    return MatrixOfVersion(
        name,
        tuple(records),
        matrix,
        curves=curve_files[0] if curve_files else (),
        drawn=tuple(fuzz_results),
    )


def _write_page(name: str, versions: Sequence[MatrixOfVersion], folder: Path) -> Path:
    """Render the template of a page and write the page into a folder; return its path."""
    legend = [(status.replace(" ", "-"), *texts) for status, texts in LEGEND.items()]
    order = list(FindingStatus)
    judged = sorted(list_findings(), key=lambda finding: order.index(finding.verdict))
    values = {
        **_TEMPLATE_NAMES,
        "versions": versions,
        "legend": legend,
        "overview": make_overview(versions),
    }
    template = environment(_TEMPLATES).overlay(autoescape=name == HTML)
    text = template.get_template(f"{name}.j2").render(**values, judged=judged)
    path = folder / name
    write_atomically(path, text)
    return path


def _parse_release(name: str) -> Version:
    """Return the version of a file's name; a commit counts as older than all releases."""
    try:
        return Version(name)
    except InvalidVersion:
        return Version("0")


def _make_table_rows(version: MatrixOfVersion, table: FamilyTable) -> list[list[str]]:
    """Return the Markdown rows of a table: feature, level, and a text per layout.

    Consecutive rows of one feature name the feature once. What is not right links to its cell on the HTML page.
    """
    rows, previous = [], ""
    for row in table.rows:
        texts = []
        for pair in row.pairs:
            if pair.record is None or pair.record.is_right:
                texts.append(pair.text)
            else:
                texts.append(f"[{pair.text}]({HTML}#{version.name}.{pair.record.id})")
        factor = row.level.factor
        rows.append([factor if factor != previous else "", row.level.name, *texts])
        previous = factor
    return rows


def _format_layouts(records: Iterable[CellRecord]) -> str:
    """Return the families of the records, each with its layouts: `dense in tp2, pp2`."""
    layouts_by_family: dict[str, dict[str, None]] = {}
    for record in records:
        layouts_by_family.setdefault(record.family, {})[record.layout] = None
    return ", ".join(
        f"{family} in {', '.join(layouts)}" for family, layouts in layouts_by_family.items()
    )


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
"""Functions and constants that the templates use, by the name that the templates give them."""
