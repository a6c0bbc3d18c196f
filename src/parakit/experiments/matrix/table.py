"""Features × strategies: for each pair of a level and a strategy what its cells say together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from packaging.version import Version

from parakit.experiments.matrix.definition import Family, Level, Matrix
from parakit.experiments.matrix.outcome import BF16, STATUS_ORDER, CellRecord, CellStatus


@dataclass(frozen=True)
class LevelResult:
    """A level in a strategy."""

    record: CellRecord | None = None
    """The cell that says what it comes to; None: in no cell."""
    ratio: float | None = None
    """Of what held, the largest error over tolerance."""
    beside: tuple[str, ...] = ()
    """Levels with which alone it is wrong."""
    is_open: bool = False
    """Whether any level of the cell may be to blame: it was not found out yet."""

    @property
    def status(self) -> CellStatus | None:
        """What it comes to; None: in no cell."""
        return self.record.status if self.record else None

    @property
    def text(self) -> str:
        """In a table's cell."""
        if self.record is None:
            return "–"
        if self.record.is_right:
            return f"✓{'ᵖ' if self.record.patch else ''} {self.ratio or 0:.2f}"
        mark = LEGEND[self.record.status][0]
        if self.is_open:
            return f"{mark}?"
        names = ", ".join(path.partition("/")[2] for path in self.beside)
        return f"{mark} with {names}" if names else mark

    @property
    def short(self) -> str:
        """Where columns are narrow."""
        if self.record and self.record.is_right:
            ratio = "0" if not self.ratio else f"{self.ratio:.2f}".lstrip("0")
            return f"{ratio}ᵖ" if self.record.patch else ratio
        return f"{LEGEND[self.record.status][0]}*" if self.record and self.beside else self.text

    @property
    def sentence(self) -> str:
        """All of it, where there is room."""
        if self.record is None:
            return "not tried"
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
"""Each status' sign in a table, and what that means."""


@dataclass(frozen=True)
class LevelRow:
    """One level in all strategies."""

    level: Level
    pairs: tuple[LevelResult, ...]


@dataclass(frozen=True)
class FamilyTable:
    """One family's features × strategies."""

    family: Family
    layouts: tuple[str, ...]
    rows: tuple[LevelRow, ...]


def make_tables(matrix: Matrix, records: Iterable[CellRecord]) -> list[FamilyTable]:
    """A table a family of which something was verified; strategies that were.

    Of the levels those whose flags the records' Megatron knows.
    """
    found = list(records)
    megatron = Version(found[0].megatron.split()[0]) if found else Version("0")
    made = []
    for family in matrix.families:
        own = [one for one in found if one.family == family.name]
        names = {one.layout for one in own}
        layouts = tuple(one.name for one in family.layouts if one.name in names)
        if layouts:
            rows = (
                LevelRow(
                    level, tuple(judge_level(family, level, layout, own) for layout in layouts)
                )
                for levels in family.factors.values()
                for level in levels
                if level.is_in(megatron)
            )
            made.append(FamilyTable(family, layouts, tuple(rows)))
    return made


def judge_level(
    family: Family, level: Level, layout: str, records: Iterable[CellRecord]
) -> LevelResult:
    """What the cells of a strategy that have a level say of it.

    A wrong cell counts against the levels that are to blame for it; until these are known it counts
    against none that is right in another cell.
    """
    first = family.is_first(level)

    def has(record: CellRecord) -> bool:
        own = [path for path in record.levels if path.startswith(f"{level.factor}/")]
        return record.layout == layout and own == ([] if first else [level.path])

    having = [one for one in records if has(one)]
    wrong = [one for one in having if not one.is_right]
    blamed = [one for one in wrong if _is_to_blame(one, level, first)]
    if blamed:
        return LevelResult(max(blamed, key=lambda one: STATUS_ORDER.index(one.status)))
    held = [one for one in having if one.is_right]
    beside = [one for one in wrong if level.path in (one.blamed or ())]
    if held and beside:
        others = tuple(path for path in beside[0].blamed or () if path != level.path)
        return LevelResult(beside[0], beside=others)
    if held:
        # A cell without a patch says more.
        unpatched = [one for one in held if not one.patch] or held
        ratio = max(one.worst_ratio or 0.0 for one in held)
        return LevelResult(max(unpatched, key=lambda one: one.worst_ratio or 0.0), ratio)
    unexplained = [one for one in wrong if one.blamed is None and not one.finding]
    if unexplained:
        least = min(unexplained, key=lambda one: (len(one.levels), -STATUS_ORDER.index(one.status)))
        return LevelResult(least, is_open=len(least.levels) > 1)
    return LevelResult()


def _is_to_blame(record: CellRecord, level: Level, first: bool) -> bool:
    """Whether the level alone, or the strategy as it is, is as wrong."""
    if record.blamed is not None:
        return record.blamed == (level.path,) or not record.blamed
    # A known finding, or a level by itself: nothing else is there to blame.
    return (
        not first
        and record.levels[-1:] == (level.path,)
        and bool(record.finding or len(record.levels) == 1)
    )


BF16_EPSILON = 2.0**-8
"""bf16's rounding, half the distance from 1 to the next number: it keeps 8 bits."""


def compute_bf16_costs(
    records: Iterable[CellRecord], layouts: Sequence[str]
) -> dict[str, list[float | None]]:
    """By stage and strategy the largest relative error of a family's cells in bf16 that held, over
    `EPSILON`."""
    found: dict[str, dict[str, float]] = {}
    for one in records:
        if one.is_right and BF16 in one.levels:
            for stage, error in one.stages.items():
                before = found.setdefault(stage, {}).get(one.layout, 0.0)
                found[stage][one.layout] = max(before, error.error / BF16_EPSILON)
    return {stage: [row.get(name) for name in layouts] for stage, row in found.items()}
