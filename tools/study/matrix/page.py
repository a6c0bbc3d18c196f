"""`docs/parity-matrix.md` and `parity-cells.html`: one table a version, what differs, and every cell.

Both are made from the cells that are kept beside them (`stored.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from packaging.version import InvalidVersion, Version

from tools.records.io import write_whole
from tools.study.matrix.curves import ITERATIONS
from tools.study.matrix.definition import Matrix
from tools.study.matrix.outcome import (
    STATUSES,
    STORED,
    CellRecord,
    CellStatus,
    Curve,
    Drawn,
    read_curves,
    read_drawn,
    read_stored,
)
from tools.study.matrix.table import (
    MEANINGS,
    SIGNS,
    FamilyTable,
    LevelResult,
    bf16_costs,
    tables,
)
from tools.text.html import environment
from tools.text.table import Column, Table, markdown_rows, markdown_table, markdown_text
from tools.text.units import DASH
from tools.verify.findings import Finding, Judged, findings

MARKDOWN, HTML = "parity-matrix.md", "parity-cells.html"
_TEMPLATES = Path(__file__).parent / "templates"

_NAMED_KITS = 3
"""Commits that a title names."""
UNEXPLAINED, UNTRIED = "not known which level", "in no cell"
"""Of pairs that are only in cells of which it is not known what is wrong, and of those left."""


@dataclass(frozen=True)
class MatrixOfVersion:
    """All cells of one Megatron."""

    name: str
    records: tuple[CellRecord, ...]
    matrix: Matrix
    curves: tuple[Curve, ...] = ()
    drawn: tuple[Drawn, ...] = ()

    @cached_property
    def tables(self) -> list[FamilyTable]:
        """One a family."""
        return tables(self.matrix, self.records)

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
        if len(kits) > _NAMED_KITS:
            kit = f"{len(kits)} states of the kit"
        cells = [one.status for one in self.records]
        said = ", ".join(f"{number} {what}" for what, number in _counted(cells).items() if number)
        return (
            f"Megatron {self.records[0].megatron}, {self.when}, {kit}. {len(cells)} cells: {said}"
        )

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many pairs of a level and a layout came to what."""
        found = [pair for table in self.tables for row in table.rows for pair in row.pairs]
        pairs = [pair.status for pair in found if not pair.is_open]
        return {
            "pairs": len(found),
            **_counted(pairs),
            UNEXPLAINED: len(found) - len(pairs),
            UNTRIED: pairs.count(None),
        }

    @cached_property
    def known(self) -> list[tuple[Finding, list[CellRecord]]]:
        """Findings that cells of this version show."""
        shown = {one.finding for one in self.records if one.finding}
        return [
            (finding, [one for one in self.records if one.finding == finding.id])
            for finding in findings()
            if finding.id in shown
        ]

    @cached_property
    def new(self) -> list[CellRecord]:
        """Cells that differ and are no known finding: the smallest of each place and layout."""
        wrong = (CellStatus.DIFFERS, CellStatus.FLAKY)
        found = [one for one in self.records if one.status in wrong and not one.finding]
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
            if one.status not in (CellStatus.HELD, CellStatus.DIFFERS, CellStatus.FLAKY):
                found.setdefault(f"{one.status}: {one.reason}", []).append(one)
        return sorted(found.items())

    @cached_property
    def bf16(self) -> tuple[list[str], dict[str, list[float | None]]]:
        """What bf16 costs by stage, for the layouts of the first family."""
        first = self.tables[0]
        own = [one for one in self.records if one.family == first.family.name]
        return list(first.layouts), bf16_costs(own, first.layouts)


def _counted(statuses: Sequence[CellStatus | None]) -> dict[str, int]:
    return {str(status): statuses.count(status) for status in STATUSES}


def overview(versions: Sequence[MatrixOfVersion]) -> list[list[str]]:
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
    """Write both pages of all that is stored in a folder."""
    stored = sorted(
        (folder / STORED).glob("*.jsonl"), key=lambda path: _release(path.stem), reverse=True
    )
    versions = [
        MatrixOfVersion(path.stem, tuple(records), matrix, read_curves(path), read_drawn(path))
        for path in stored
        if (records := read_stored(path))
    ]
    markdown, html = folder / MARKDOWN, folder / HTML
    write_whole(markdown, markdown_page(versions))
    write_whole(html, html_page(versions))
    return markdown, html


def _release(name: str) -> Version:
    """A commit is before all releases."""
    try:
        return Version(name)
    except InvalidVersion:
        return Version("0")


def html_page(versions: Sequence[MatrixOfVersion]) -> str:
    """The whole page, which opens offline."""
    return (
        environment(_TEMPLATES)
        .get_template("cells.html.j2")
        .render(versions=versions, legend=_legend(), overview=overview(versions), judged=_judged())
    )


def _legend() -> list[tuple[str, str, str]]:
    """Class, sign and meaning of each status."""
    return [(css_of(status), SIGNS[status], MEANINGS[status]) for status in STATUSES]


def css_of(status: CellStatus | None) -> str:
    """The class of a status."""
    return (status or "none").replace(" ", "-")


def markdown_page(versions: Sequence[MatrixOfVersion]) -> str:
    """The whole page."""
    signs = [(sign, meaning) for _, sign, meaning in _legend()] + _OF_PAIRS
    head, *rows = overview(versions)
    lines = [_HEAD, markdown_rows(("sign", ""), signs), ""]
    lines += ["Pairs of a level and a layout:", "", markdown_rows(head, rows), ""]
    for version in versions:
        lines += _version(version)
    return "\n".join((*lines, *_judged_lines())) + "\n"


_OF_PAIRS = [
    ("✓ᵖ", "held with the patch of a known finding, which it would else show"),
    ("✗?", "one of the cell's levels differs, and it is not known yet which"),
    ("✗ with …", "differs only together with that level"),
    (DASH, "in no cell"),
]


_HEAD = f"""# Parity matrix

Which model features of unmodified Megatron-LM are numerically right under which layouts: every tensor of
a training step against one rank's, with tolerances that the reference measures
([verify](../tools/verify/README.md)), on CPU ranks. Each pair of a layout and a level of a feature is in
at least one cell, and a cell has many features at once: a pair shows the worst of its cells, and of a
cell that is wrong the levels that are to blame. Every cell with its command is in
[{HTML}]({HTML}). [matrix.yaml](../examples/matrix.yaml) says what levels and layouts are.

Made by `make verify-matrix PAGE=docs` (`MEGATRON_LM=` for another version); the cells are kept in
`docs/{STORED}/`.
"""


def _version(version: MatrixOfVersion) -> list[str]:
    lines = [f"## {version.name}", "", f"{version.head}.", ""]
    for table in version.tables:
        lines += [f"### {version.name}, {table.family.name} ({table.family.model})", ""]
        rows = []
        before = ""
        for row in table.rows:
            shown = row.level.factor if row.level.factor != before else ""
            before = row.level.factor
            cells = [_markdown_cell(version.name, pair) for pair in row.pairs]
            rows.append([shown, row.level.name, *cells])
        lines += [markdown_rows(["feature", "level", *table.layouts], rows, str), ""]
    measured = (*_bf16(version), *_curves(version))
    return [*lines, *_wrong(version), *_not_compared(version), *_drawn(version), *measured]


def _wrong(version: MatrixOfVersion) -> list[str]:
    if not version.known and not version.new:
        return [f"### {version.name}: nothing differs", ""]
    lines = [f"### {version.name}: what differs", ""]
    for finding, records in version.known:
        places = ", ".join(_places(records))
        thread = (
            f" Described in {finding.thread}." if finding.thread else " In no thread that we know."
        )
        report = f" [Report](upstream/{finding.report.name})." if finding.report else ""
        lines += [
            f"**{finding.title}** ({finding.id}). Seen in {places}; {_first(finding)}."
            f"{thread}{report}{_effect(finding)}",
            "",
            f"    {finding.command(finding.shown_with)}",
            "",
        ]
    for one in version.new:
        levels = ", ".join(one.blamed or one.levels) or "as it is"
        lines += [
            f"**Not judged yet: {one.family} {one.layout}, {levels}**: {one.status}; {one.sentence}.",
            "",
            f"    {one.smallest or one.command}",
            "",
        ]
    return lines


def _markdown_cell(version: str, pair: LevelResult) -> str:
    if pair.record is None or pair.record.is_right:
        return pair.text
    return f"[{pair.text}]({HTML}#{version}.{pair.record.id})"


def _places(records: Iterable[CellRecord]) -> list[str]:
    """Families with their layouts, each once."""
    found: dict[str, dict[str, None]] = {}
    for one in records:
        found.setdefault(one.family, {})[one.layout] = None
    return [f"{family} in {', '.join(layouts)}" for family, layouts in found.items()]


def _first(finding: Finding) -> str:
    """As what it is seen."""
    if finding.fails:
        return f"the run ends: `{finding.fails}`"
    if finding.stage is None:
        return "what is wrong first changes from run to run"
    return f"first wrong: {finding.stage}, `{finding.module}`: {finding.kind}"


def _effect(finding: Finding) -> str:
    effect = finding.effect
    if effect is None:
        return ""
    return (
        f" After {effect.iterations} iterations the loss is {effect.loss:.2g} off (cured: "
        f"{effect.cured_loss:.2g}) and the weights {effect.weights:.2g} of their way "
        f"(cured: {effect.cured_weights:.2g})."
    )


def _not_compared(version: MatrixOfVersion) -> list[str]:
    if not version.sentences:
        return []
    lines = [f"### {version.name}: what was not compared, and why", ""]
    for sentence, records in version.sentences:
        first = records[0]
        levels = ", ".join(path.partition("/")[2] for path in first.blamed or first.levels)
        layouts = ", ".join(dict.fromkeys(one.layout for one in records))
        lines.append(
            f"- {first.family}, {levels or 'as it is'}, in {layouts}: {markdown_text(sentence)}"
        )
    return [*lines, ""]


def _drawn(version: MatrixOfVersion) -> list[str]:
    if not version.drawn:
        return []
    lines = [f"### {version.name}: drawn configurations", ""]
    for one in version.drawn:
        numbers = _counted([record.status for record in one.records])
        counts = ", ".join(f"{number} {what}" for what, number in numbers.items() if number)
        lines += [
            f"`make verify-fuzz SEED={one.seed}`, {one.records[0].date}: {len(one.records)} verified: "
            f"{counts}. {len(one.found) or 'None'} that no finding explains.",
            "",
        ]
        for record in one.found:
            lines += [f"{record.sentence}:", "", f"    {record.smallest}", ""]
        failed = [record for record in one.records if not record.is_right and record.reason]
        lines += [
            f"- {record.family}, {', '.join(record.levels) or 'as it is'}, in {record.layout}: "
            f"{record.status}: {markdown_text(record.reason or '')}"
            for record in failed
        ]
        lines += [""] if failed else []
    return lines


def _bf16(version: MatrixOfVersion) -> list[str]:
    layouts, costs = version.bf16
    if not costs:
        return []
    return [
        f"### {version.name}: what bf16 costs without any bug",
        "",
        "The largest relative error of a tensor in a cell that held, over bf16's rounding (2⁻⁸).",
        "",
        markdown_rows(
            ["stage", *layouts],
            [
                [stage, *(DASH if cost is None else f"{cost:.2g}" for cost in row)]
                for stage, row in costs.items()
            ],
        ),
        "",
    ]


def _curves(version: MatrixOfVersion) -> list[str]:
    if not version.curves:
        return []
    return [
        f"### {version.name}: losses of {ITERATIONS} iterations in bf16",
        "",
        "Largest and mean difference of the loss, dense model as it is (`make verify-bf16`); then the "
        "last iteration's losses in fp32 and in bf16.",
        "",
        markdown_table(Table(_CURVES, version.curves)),
        "",
    ]


def _two(values: tuple[float, float], digits: int = 2) -> str:
    return ", ".join(f"{value:.{digits}g}" for value in values)


_CURVES: tuple[Column[Curve], ...] = (
    Column("layout", lambda one: one.layout),
    Column("fp32, from one rank", lambda one: one.fp32, _two),
    Column("bf16, from one rank", lambda one: one.bf16, _two),
    Column("bf16, from fp32", lambda one: one.cost, _two),
    Column("last losses", lambda one: _two((one.last_fp32, one.last_bf16), 5)),
)


def _judged() -> list[tuple[Finding, str]]:
    """Every finding, by verdict, with the versions that have it."""
    order = list(Judged)
    found = sorted(findings(), key=lambda one: order.index(one.verdict))
    return [(one, _present(one.present)) for one in found]


def _present(versions: Mapping[str, object]) -> str:
    return ", ".join(f"{name} ({basis})" for name, basis in versions.items()) or "none"


def _judged_lines() -> list[str]:
    rows = [
        [
            f"{markdown_text(one.title)} (`{one.id}`)",
            markdown_text(one.thread) or "none known",
            one.verdict,
            present,
        ]
        for one, present in _judged()
    ]
    head = ("finding", "thread", "verdict", "versions that have it")
    return ["## Findings, judged", "", markdown_rows(head, rows, str)]
