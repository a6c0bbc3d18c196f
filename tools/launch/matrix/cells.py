"""What to verify: few cells that cover each pair of a layout and a level, and each pair of two levels.

Rows are choices of a level of each feature, every two of which occur together in one (`allpairspy`).
Each layout then takes rows until it has had every level. Cells of one row share their reference, so
rows are few and layouts of a row many.
"""

from __future__ import annotations

import hashlib
import random
import shlex
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import combinations

from allpairspy import AllPairs
from packaging.version import Version

from tools.launch.compose import SMALL_SAMPLE
from tools.launch.errors import LaunchError
from tools.launch.matrix.definition import Family, Layout, Level, Matrix
from tools.launch.options import Options, read_plant
from tools.launch.pairs import MICRO_BATCH, PREFIX, Difference
from tools.spec.files import from_root
from tools.spec.flags import drop_flags
from tools.spec.run import OptimizerName
from tools.spec.strategy import parse_strategy
from tools.verify.findings import Finding

Row = tuple[Level, ...]
"""A level of each feature, first ones included."""


@dataclass(frozen=True)
class Cell:
    """One thing to verify."""

    family: Family
    layout: Layout
    levels: tuple[Level, ...] = ()
    """Those that are not a feature's first."""
    more: tuple[str, ...] = ()
    """Further flags of layout and reference."""
    patch: str = ""
    """A plant that cures a known finding, so that what it would hide is seen."""
    seed: int = Options.seed

    @property
    def id(self) -> str:
        """Names of all that is verified, and a hash of the flags that they mean."""
        words = (self.target, *self.flags, "own", *self.own, str(self.samples), str(self.optimizer))
        words = (*words, self.patch, str(self.seed))
        key = hashlib.sha256(" ".join(words).encode()).hexdigest()[:10]
        return f"{self.family.name}.{self.layout.name}.{key}"

    @property
    def target(self) -> str:
        """The make target."""
        name = f"{self.layout.strategy}-{self.family.model}-{self.layout.devices}cpu"
        return f"{PREFIX}{name}"

    @property
    def flags(self) -> tuple[str, ...]:
        """Of layout and reference."""
        of_levels = (word for level in self.levels for word in level.flags)
        return (*self.family.base, *self._first_flags, *self.layout.flags, *of_levels, *self.more)

    @property
    def own(self) -> tuple[str, ...]:
        """Of the layout alone."""
        return (*self.layout.own, *(word for level in self.levels for word in level.own))

    @property
    def difference(self) -> Difference:
        """In what layout and reference differ."""
        return Difference(flags=self.own)

    @property
    def _first_flags(self) -> tuple[str, ...]:
        """Of first levels that have flags, where no other level takes their place."""
        chosen = {level.factor for level in self.levels}
        firsts = (levels[0] for name, levels in self.family.factors.items() if name not in chosen)
        return tuple(word for level in firsts for word in level.flags)

    @property
    def samples(self) -> int:
        """Of an iteration."""
        micro_batches = [level.micro_batches for level in self.levels if level.micro_batches]
        if not micro_batches:
            return self.layout.samples
        degrees = parse_strategy(self.layout.strategy, self.layout.devices)
        return MICRO_BATCH * degrees.data * micro_batches[-1]

    @property
    def optimizer(self) -> OptimizerName:
        """The last level's that has one."""
        chosen = [level.optimizer for level in self.levels if level.optimizer]
        return chosen[-1] if chosen else OptimizerName.ADAMW

    def options(self, options: Options | None = None) -> Options:
        """The make variables."""
        options = options or Options()
        return replace(
            options,
            seed=self.seed,
            extra=self.flags,
            global_batch_size=self.samples,
            optimizer=self.optimizer,
            data=options.data or SMALL_SAMPLE,
            iterations=None,
            plant=read_plant(self.patch) if self.patch else None,
        )

    def command(self, megatron_lm: str = "") -> str:
        """What repeats it alone."""
        given = {
            "DATA": SMALL_SAMPLE,
            "GLOBAL_BATCH": str(self.samples),
            "OPTIMIZER": "" if self.optimizer is OptimizerName.ADAMW else self.optimizer,
            "SEED": "" if self.seed == Options.seed else str(self.seed),
            "EXTRA": shlex.join(self.flags),
            "EXTRA_B": shlex.join(self.own),
            "PLANT": self.patch,
            "MEGATRON_LM": megatron_lm,
        }
        words = (f"{name}={shlex.quote(text)}" for name, text in given.items() if text)
        return " ".join(("make", self.target, *words))

    def only(self, levels: Iterable[Level]) -> Cell:
        """The same layout with some levels, and what these need."""
        return replace(self, levels=self.family.with_needs(levels))

    def without(self, level: Level) -> Cell:
        """The same without a level and those that need it."""
        kept = [one for one in self.levels if one != level and level.name not in one.needs]
        return self.only(kept)


@dataclass(frozen=True)
class Asked:
    """Which part of the matrix: names or patterns of families, features, levels and layouts."""

    features: tuple[str, ...] = ()
    layouts: tuple[str, ...] = ()

    def families(self, matrix: Matrix, megatron: Version) -> tuple[Family, ...]:
        """Families with the features, levels and layouts that are asked for and that a version has.

        Raises:
            LaunchError: A name is of nothing in the matrix.
        """
        self._refuse_unknown(matrix)
        names = [family.name for family in matrix.families]
        rest = [name for name in self.features if not _any_matches(names, name)]
        named = [name for name in self.features if name not in rest]
        asked = (
            self._family(family, rest, megatron)
            for family in matrix.families
            if not named or any(fnmatchcase(family.name, name) for name in named)
        )
        return tuple(
            family
            for family in asked
            if family.layouts and (not rest or any(len(one) > 1 for one in family.factors.values()))
        )

    def _family(self, family: Family, names: Sequence[str], megatron: Version) -> Family:
        """A family with the levels of these names, or all."""
        factors = {
            factor: tuple(
                level
                for level in levels
                if level == levels[0] or (level.is_in(megatron) and _is_named(level, names))
            )
            for factor, levels in family.factors.items()
        }
        layouts = tuple(
            layout
            for layout in family.layouts
            if not self.layouts or any(fnmatchcase(layout.name, name) for name in self.layouts)
        )
        return replace(family, factors=factors, layouts=layouts)

    def _refuse_unknown(self, matrix: Matrix) -> None:
        families = [family.name for family in matrix.families]
        levels = [
            name for family in matrix.families for level in _every(family) for name in _names(level)
        ]
        layouts = [layout.name for family in matrix.families for layout in family.layouts]
        for variable, given, known in (
            ("FEATURES", self.features, sorted({*families, *levels})),
            ("LAYOUTS", self.layouts, sorted(set(layouts))),
        ):
            for name in given:
                if not _any_matches(known, name):
                    raise LaunchError(
                        f"{variable}={name} is none of the matrix's; name some of {', '.join(known)}."
                    )


def _any_matches(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _every(family: Family) -> Iterator[Level]:
    for levels in family.factors.values():
        yield from levels


def _names(level: Level) -> tuple[str, str, str]:
    return (level.factor, level.name, level.path)


def _is_named(level: Level, names: Sequence[str]) -> bool:
    return not names or any(fnmatchcase(one, name) for name in names for one in _names(level))


def cells_of(matrix: Matrix, family: Family, known: Sequence[Finding], seed: int = 1) -> list[Cell]:
    """Cells that cover a family, those with one reference after each other.

    A finding that is known is verified once by itself in each layout; in all other cells its patch is
    applied, so that it hides nothing.

    Args:
        matrix: What may not be drawn together.
        family: Its features and layouts.
        known: Bugs of this Megatron.
        seed: Of the order of the levels, so that another seed gives other combinations.
    """
    rows = rows_of(matrix, family, seed)
    drawn = [cell for layout in family.layouts for cell in _cover(matrix, family, layout, rows)]
    used = {cell.levels for cell in drawn}
    turn = 0
    for row in rows:
        if (levels := _not_first(family, row)) in used:
            continue
        # A row that no layout needed has pairs of levels that no other row has.
        order = (*family.layouts[turn:], *family.layouts[:turn])
        turn = (turn + 1) % len(family.layouts)
        suited = [one for one in order if matrix.legal(family, row, one.name)]
        drawn += [Cell(family, layout, levels) for layout in suited[:1]]
    shown = ((finding, _levels_of(finding, family)) for finding in known)
    alone = [
        cell
        for finding, levels in shown
        if levels is not None
        for layout in family.layouts
        if applies(finding, cell := Cell(family, layout, levels))
    ]
    chosen = (*alone, *(patched(cell, known) for cell in drawn))
    cells = {cell.id: cell for cell in (replace(one, seed=seed) for one in chosen)}
    return in_order(cells.values())


def patched(cell: Cell, known: Iterable[Finding]) -> Cell:
    """The cell with the patch of a known finding that would be seen in it: of the most particular."""
    found = [one for one in known if applies(one, cell)]
    chosen = max(found, key=lambda one: len(one.flags), default=None)
    return replace(cell, patch=from_root(chosen.patch)) if chosen else cell


def applies(finding: Finding, cell: Cell) -> bool:
    """Whether a finding is seen in a cell: its flags, and all that its layout splits."""
    if not finding.patch.is_file() or not is_within(finding.own_flags, cell.own):
        return False
    degrees = split(cell.layout.strategy, cell.layout.devices)
    layouts = (split(one, finding.devices) for one in finding.layouts)
    return is_within(finding.flags, cell.flags) and any(one <= degrees for one in layouts)


def _levels_of(finding: Finding, family: Family) -> tuple[Level, ...] | None:
    """The levels that make up a finding's flags; None if there are none such."""
    rest = drop_flags(finding.flags, [word for word in family.base if word.startswith("--")])
    levels = [one for one in family.levels if one.flags and is_within(one.flags, rest)]
    chosen = family.with_needs(levels)
    whole = Cell(family, family.layouts[0], chosen).flags
    return chosen if is_within(finding.flags, whole) else None


def is_within(flags: Sequence[str], others: Sequence[str]) -> bool:
    """Whether the others have all of some flags, with their values."""
    groups = [" ".join(group) for group in _grouped(others)]
    return all(" ".join(group) in groups for group in _grouped(flags))


def _grouped(words: Sequence[str]) -> list[list[str]]:
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    return groups


def split(strategy: str, devices: int) -> set[str]:
    """Names of what a strategy splits."""
    degrees = parse_strategy(strategy, devices)
    names = ("data", "tensor", "pipeline", "context", "expert", "virtual_stages")
    found = {name for name in names if getattr(degrees, name) > 1}
    return found | {str(degrees.sharding)} - {""}


def in_order(cells: Iterable[Cell]) -> list[Cell]:
    """Cells of one reference after each other: a reference is trained once, and few are kept."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        key = f"{cell.family.name} {shlex.join(cell.flags)} {cell.samples} {cell.optimizer}"
        groups.setdefault(key, []).append(cell)
    return [cell for group in groups.values() for cell in group]


def rows_of(matrix: Matrix, family: Family, seed: int = 1) -> list[Row]:
    """Rows that hold every two levels that may be together; the first row is the model as it is."""
    first = tuple(levels[0] for levels in family.factors.values())
    order = random.Random(seed)
    drawn = [[one for one in levels if not one.alone] for levels in family.factors.values()]
    choices = [[levels[0], *order.sample(levels[1:], len(levels) - 1)] for levels in drawn]
    if max((len(levels) for levels in choices), default=0) < 2 or len(choices) < 2:
        return [first, *((level, *first[1:]) for level in choices[0][1:])]

    def legal(row: Sequence[Level]) -> bool:
        whole = len(row) == len(choices)
        return matrix.legal(family, row) and (not whole or _has_needs(family, tuple(row)))

    rows = [first, *(tuple(row) for row in AllPairs(choices, filter_func=legal))]
    rows = list(dict.fromkeys(rows))
    covered = {pair for row in rows for pair in combinations(row, 2)}
    # The greedy draw ends where it is stuck.
    for levels, others in combinations(drawn, 2):
        for pair in ((one, other) for one in levels for other in others):
            if pair not in covered and (row := _filled(matrix, family, pair, covered)):
                rows.append(row)
                covered |= set(combinations(row, 2))
    return rows


def _filled(
    matrix: Matrix,
    family: Family,
    pair: tuple[Level, Level],
    covered: Container[tuple[Level, Level]],
) -> Row | None:
    """A row that has a pair, and of other features what makes most new pairs; None if none is legal."""
    row = _row_of(family, family.with_needs(one for one in pair if not _is_first(family, one)))
    if not set(pair) <= set(row) or not matrix.legal(family, row):
        return None
    fixed = {level.factor for level in (*pair, *_not_first(family, row))}

    def new_pairs(one: Row) -> int:
        return sum(couple not in covered for couple in combinations(one, 2))

    for place, (factor, levels) in enumerate(family.factors.items()):
        if factor not in fixed:
            drawn = (level for level in levels if not level.alone)
            tried = ((*row[:place], level, *row[place + 1 :]) for level in drawn)
            legal = [one for one in tried if _has_needs(family, one) and matrix.legal(family, one)]
            row = max(legal, key=new_pairs, default=row)
    return row


def _has_needs(family: Family, row: Row) -> bool:
    return set(family.with_needs(_not_first(family, row))) <= set(row)


def _is_first(family: Family, level: Level) -> bool:
    return {**family.factors, **family.fuzzed}[level.factor][0] == level


def _row_of(family: Family, levels: Iterable[Level]) -> Row:
    chosen = {level.factor: level for level in levels}
    return tuple(chosen.get(factor, given[0]) for factor, given in family.factors.items())


def _not_first(family: Family, row: Row) -> tuple[Level, ...]:
    return tuple(level for level in row if not _is_first(family, level))


def _cover(matrix: Matrix, family: Family, layout: Layout, rows: Sequence[Row]) -> list[Cell]:
    """Cells of one layout with every level: rows, rows without what does not fit, levels alone."""
    left = {level for levels in family.factors.values() for level in levels}
    cells: list[Cell] = []
    fitting = [row for row in rows if matrix.legal(family, row, layout.name)]
    adapted = [_adapted(matrix, family, layout, row) for row in rows]
    for choice in (fitting, [row for row in adapted if row is not None]):
        while choice:
            best = max(choice, key=lambda row: len(left & set(row)))
            if not left & set(best):
                break
            left -= set(best)
            cells.append(Cell(family, layout, _not_first(family, best)))
    for level in sorted(left, key=lambda one: one.path):
        if not _is_first(family, level):
            cells.append(Cell(family, layout, family.with_needs([level])))
    return cells


def _adapted(matrix: Matrix, family: Family, layout: Layout, row: Row) -> Row | None:
    """A row with first levels in the place of those that do not fit a layout; None if there are none."""
    kept: tuple[Level, ...] = ()
    for level in _not_first(family, row):
        tried = family.with_needs((*kept, level))
        if matrix.legal(family, _row_of(family, tried), layout.name):
            kept = tried
    whole = _row_of(family, kept)
    return whole if matrix.legal(family, whole, layout.name) else None
