"""Make the tables of features × layouts: for each pair of a level and a layout, what its cells show together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from packaging.version import Version

from parakit.experiments.matrix.definition import Family, Level, Matrix
from parakit.experiments.matrix.outcome import BF16, STATUS_ORDER, CellRecord, CellStatus


@dataclass(frozen=True)
class LevelResult:
    """Result of a level in a layout, over all cells that have both."""

    record: CellRecord | None = None
    """Record of the cell that decides the result; None if no cell has the pair."""
    ratio: float | None = None
    """Largest error over tolerance among the cells that held; None if the result is not that they held."""
    partners: tuple[str, ...] = ()
    """Paths of the other levels that are blamed together with this one; empty if this level alone is."""
    is_open: bool = False
    """Whether any level of the cell may be to blame, because the search has not been made yet."""

    @property
    def status(self) -> CellStatus | None:
        """Status of the deciding cell; None if no cell has the pair."""
        return self.record.status if self.record else None

    @property
    def text(self) -> str:
        """Text of the result in the Markdown table.

        If the level held, the text is the largest error over its tolerance, such as `✓ 0.42`. Else it is the sign of
        the status. A `ᵖ` marks cells that were patched, a `?` a search for the level that has not been made.
        """
        if self.record is None:
            return "–"
        if self.record.is_right:
            mark = "ᵖ" if self.record.patch else ""
            return f"✓{mark} {self.ratio or 0:.2f}"
        sign = LEGEND[self.record.status][0]
        if self.is_open:
            return f"{sign}?"
        if not self.partners:
            return sign
        names = [path.partition("/")[2] for path in self.partners]
        return f"{sign} with {', '.join(names)}"

    @property
    def short(self) -> str:
        """Short text for the HTML table: the error over its tolerance, such as `.42`, or the sign of the status."""
        record = self.record
        if record is None:
            return self.text
        if record.is_right:
            ratio = f"{self.ratio:.2f}".lstrip("0") if self.ratio else "0"
            return f"{ratio}ᵖ" if record.patch else ratio
        if self.partners:
            return f"{LEGEND[record.status][0]}*"
        return self.text

    @property
    def sentence(self) -> str:
        """Status and outcome in full."""
        if self.record is None:
            return "untested"
        return f"{self.record.status}: {self.record.sentence}"


LEGEND = {
    CellStatus.HELD: ("✓", "held: the largest error over its tolerance"),
    CellStatus.NOT_COMPARABLE: ("n/c", "the strategy trains something else by definition"),
    CellStatus.MISSING: ("no CPU", "needs what no CPU rank has"),
    CellStatus.REFUSED: ("refused", "Megatron refuses it"),
    CellStatus.CRASHED: ("crash", "Megatron crashes"),
    CellStatus.NOT_JUDGED: ("?", "could not be judged"),
    CellStatus.FLAKY: ("~", "not the same twice"),
    CellStatus.DIFFERS: ("✗", "differs"),
}
"""Sign of each status in a table, and its meaning."""


@dataclass(frozen=True)
class LevelRow:
    """One level with its results in all layouts."""

    level: Level
    pairs: tuple[LevelResult, ...]


@dataclass(frozen=True)
class FamilyTable:
    """Table of one family: a row per level, a column per layout."""

    family: Family
    layouts: tuple[str, ...]
    rows: tuple[LevelRow, ...]


def make_tables(matrix: Matrix, records: Iterable[CellRecord]) -> list[FamilyTable]:
    """Return a table per family that has records, with the layouts that have records.

    Levels whose flags the records' version of Megatron does not have are left out.
    """
    all_records = list(records)
    if not all_records:
        return []
    megatron = Version(all_records[0].megatron.split()[0])
    tables = []
    for family in matrix.families:
        family_records = [record for record in all_records if record.family == family.name]
        names = {record.layout for record in family_records}
        layouts = tuple(layout.name for layout in family.layouts if layout.name in names)
        if layouts:
            rows = _make_rows(family, megatron, layouts, family_records)
            tables.append(FamilyTable(family, layouts, tuple(rows)))
    return tables


def _make_rows(
    family: Family, megatron: Version, layouts: Sequence[str], records: Sequence[CellRecord]
) -> list[LevelRow]:
    """Return a row per level of a family that this version of Megatron has, with one result per layout."""
    rows = []
    for levels in family.factors.values():
        for level in levels:
            if level.is_in(megatron):
                results = [judge_level(family, level, layout, records) for layout in layouts]
                rows.append(LevelRow(level, tuple(results)))
    return rows


def judge_level(
    family: Family, level: Level, layout: str, records: Iterable[CellRecord]
) -> LevelResult:
    """Return the result of a level in a layout, from the records of the cells that have both.

    The first of these rules that applies decides:

    1. The level alone is blamed for a cell that did not hold: the worst such cell is the result.
    2. A cell held: the level is right, or blamed together with other levels for another cell.
    3. Nobody has searched yet for the level to blame: the simplest such cell is the result.
    4. No record says anything about the level: the result is empty.
    """
    is_default = family.is_default(level)
    level_records = [
        record
        for record in records
        if record.layout == layout and _has_level(record, level, is_default)
    ]
    right = [record for record in level_records if record.is_right]
    wrong = [record for record in level_records if not record.is_right]
    blamed_alone = [record for record in wrong if _is_to_blame(record, level, is_default)]
    if blamed_alone:
        return LevelResult(max(blamed_alone, key=_get_severity))
    if right:
        blamed_together = [record for record in wrong if level.path in (record.blamed or ())]
        if blamed_together:
            return _make_shared_result(blamed_together[0], level)
        return _make_held_result(right)
    unexplained = [record for record in wrong if record.blamed is None and not record.finding]
    if unexplained:
        return _make_unexplained_result(unexplained)
    return LevelResult()


def _make_unexplained_result(unexplained: Sequence[CellRecord]) -> LevelResult:
    """Return the result of a level from cells that did not hold, before the level to blame was searched.

    The cell with the fewest levels decides, because the fewest levels may be to blame for it. Of several such cells,
    the worst decides.
    """
    fewest_levels = min(len(record.levels) for record in unexplained)
    simplest = [record for record in unexplained if len(record.levels) == fewest_levels]
    worst = max(simplest, key=_get_severity)
    return LevelResult(worst, is_open=fewest_levels > 1)


def _has_level(record: CellRecord, level: Level, is_default: bool) -> bool:
    """Return True if a record's cell has the level. A cell has a default level if it has no other of the feature."""
    feature_paths = [path for path in record.levels if path.startswith(f"{level.factor}/")]
    if is_default:
        return not feature_paths
    return feature_paths == [level.path]


def _get_severity(record: CellRecord) -> int:
    """Return the position of a record's status in `STATUS_ORDER`, which begins with `held`."""
    return STATUS_ORDER.index(record.status)


def _make_shared_result(record: CellRecord, level: Level) -> LevelResult:
    """Return the result of a level that is blamed for a record together with other levels."""
    partners = tuple(path for path in record.blamed or () if path != level.path)
    return LevelResult(record, partners=partners)


def _make_held_result(right: Sequence[CellRecord]) -> LevelResult:
    """Return the result of a level from the records of its cells that held, at least one.

    A cell that held without a patch is shown rather than one that needed a patch. The ratio is over both.
    """
    shown = [record for record in right if not record.patch] or right
    deciding = max(shown, key=lambda record: record.worst_ratio or 0.0)
    ratio = max(record.worst_ratio or 0.0 for record in right)
    return LevelResult(deciding, ratio)


def _is_to_blame(record: CellRecord, level: Level, is_default: bool) -> bool:
    """Return True if a record that did not hold is due to this level alone, or to no level at all."""
    if record.blamed is not None:
        is_layout_alone = not record.blamed
        return is_layout_alone or record.blamed == (level.path,)
    if is_default or record.levels[-1:] != (level.path,):
        return False
    # The cell of a known finding, and a cell with this level only, leave no other level to blame.
    return bool(record.finding or len(record.levels) == 1)


BF16_EPSILON = 2.0**-8
"""Largest relative rounding error of bf16, which has 8 significant bits."""


def compute_bf16_costs(
    records: Iterable[CellRecord], layouts: Sequence[str]
) -> dict[str, list[float | None]]:
    """Return the largest relative error of bf16 cells in units of `BF16_EPSILON`: by stage, one number per layout.

    Only cells that held are used. None means that no such cell of the layout has this stage.
    """
    costs_by_stage: dict[str, dict[str, float]] = {}
    for record in records:
        if not record.is_right or BF16 not in record.levels:
            continue
        for stage, stage_error in record.stages.items():
            cost = stage_error.error / BF16_EPSILON
            costs_by_layout = costs_by_stage.setdefault(stage, {})
            largest = costs_by_layout.get(record.layout, 0.0)
            costs_by_layout[record.layout] = max(largest, cost)
    return {
        stage: [costs_by_layout.get(layout) for layout in layouts]
        for stage, costs_by_layout in costs_by_stage.items()
    }
