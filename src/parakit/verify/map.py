"""The map of a comparison: modules as the forward pass orders them, stages as an iteration does."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from parakit.artifacts.capture import RECOMPUTED, Stage
from parakit.verify.captured import PARAMETERS
from parakit.verify.compare import STAGES
from parakit.verify.comparison import CaptureComparison, ComparisonKey, TensorComparison

BOUNDS = (0.01, 0.1, 1.0, 10.0, 100.0, 1e4)
"""Error over tolerance at which a cell's colour changes."""
WRONG = 4
"""The first level that is red."""
MOST_OPEN = 80
"""Rows that are shown at once; of more, calm layers are folded."""


@dataclass(frozen=True)
class MapColumn:
    """A stage, or one side of it where modules have inputs and outputs."""

    stage: Stage
    side: str = ""


COLUMNS = (
    MapColumn(Stage.INPUTS),
    MapColumn(Stage.OUTPUTS, "in"),
    MapColumn(Stage.OUTPUTS, "out"),
    MapColumn(Stage.LOSS),
    MapColumn(Stage.ACTIVATION_GRADIENTS, "out"),
    MapColumn(Stage.ACTIVATION_GRADIENTS, "in"),
    # What is printed is of no module, so the log has no column.
    *(
        MapColumn(stage)
        for stage in STAGES[STAGES.index(Stage.LOCAL_GRADIENTS) : STAGES.index(Stage.LOG)]
    ),
)
_SIDED = (Stage.OUTPUTS, Stage.ACTIVATION_GRADIENTS)
_SLOT = re.compile(r"(?:recomputed\.)?(input|output)(?:\.\w+)?(?:@[\w.]+)?")
_LEAVES = (".weight", ".bias")


@dataclass
class MapCell:
    """Tensors of one module in one stage."""

    tensors: list[TensorComparison] = field(default_factory=list)
    not_compared: bool = False
    """Whether there was a tensor, but none that could be compared."""
    first: bool = False
    """Whether the first wrong tensor is here."""

    @property
    def worst(self) -> TensorComparison | None:
        """The tensor with the largest error over tolerance."""
        return max(self.tensors, key=lambda one: (one.differs, one.ratio), default=None)

    @property
    def level(self) -> int | None:
        """Which colour; None if nothing was compared."""
        worst = self.worst
        return None if worst is None else colour_level(worst.ratio, worst.differs)


@dataclass
class MapRow:
    """A module, with the parameters that are its own."""

    name: str
    label: str
    """Its name without that of the module it is in."""
    parent: MapRow | None
    cells: tuple[MapCell, ...] = field(default_factory=lambda: tuple(MapCell() for _ in COLUMNS))
    children: list[MapRow] = field(default_factory=list)
    open: bool = True

    @property
    def depth(self) -> int:
        """Modules that it is in."""
        return 0 if self.parent is None else 1 + self.parent.depth

    @property
    def shown(self) -> bool:
        """Whether all that it is in are open."""
        return self.parent is None or (self.parent.open and self.parent.shown)

    def within(self) -> Iterator[MapRow]:
        """This row and all in it, in order."""
        yield self
        for child in self.children:
            yield from child.within()

    def levels_within(self) -> list[int | None]:
        """The worst level of each column over this row and all in it."""
        found = [[row.cells[place].level for row in self.within()] for place in range(len(COLUMNS))]
        return [max((one for one in of if one is not None), default=None) for of in found]

    @property
    def red(self) -> bool:
        """Whether this row, or one in it, is wrong."""
        return any((level or 0) >= WRONG for level in self.levels_within())

    @property
    def has_first(self) -> bool:
        """Whether the first wrong tensor is in this row, or in one in it."""
        return any(cell.first for row in self.within() for cell in row.cells)


def colour_level(ratio: float, differs: bool) -> int:
    """The colour of an error over its tolerance: 0 for none, from `WRONG` on for what is wrong."""
    if differs:
        return max(WRONG, 1 + bisect_right(BOUNDS, ratio))
    return 0 if ratio == 0 else min(WRONG - 1, 1 + bisect_right(BOUNDS, ratio))


def build_map_rows(compared: CaptureComparison, first: ComparisonKey | None) -> list[MapRow]:
    """Every row of the map, in order; folded where the whole map is long."""
    members: defaultdict[str, list[TensorComparison]] = defaultdict(list)
    for one in compared.comparisons:
        stage, name, _ = one.key
        module = name.rpartition(".")[0] if stage in PARAMETERS else ""
        members[module or name].append(one)
    skipped = _not_compared(compared.not_aligned)
    roots = _tree(members, skipped)
    rows = [row for root in roots for row in root.within()]
    for row in rows:
        for one in members.get(row.name, ()):
            stage, _, slot = one.key
            side = "in" if slot.removeprefix(RECOMPUTED).startswith("input") else "out"
            cell = row.cells[COLUMNS.index(MapColumn(stage, side if stage in _SIDED else ""))]
            cell.tensors.append(one)
            cell.first |= one.key == first
        for place in skipped.get(row.name, ()):
            row.cells[place].not_compared = not row.cells[place].tensors
    # Folded are calm layers and experts, then those after the first wrong one, until the map is short.
    layers = [row for row in rows if row.children and row.label.rpartition(".")[2].isdigit()]
    keeps: tuple[Callable[[MapRow], bool], ...] = (lambda row: row.red, lambda row: row.has_first)
    for keep in keeps:
        if sum(row.shown for row in rows) > MOST_OPEN:
            for row in layers:
                row.open = keep(row)
    return rows


def _not_compared(lines: Sequence[str]) -> dict[str, set[int]]:
    """Columns of each module of which some tensor was not compared.

    The lines name activations as `module slot`, and parameters by their whole name (`Compared`).
    """
    found: defaultdict[str, set[int]] = defaultdict(set)
    words = [word.rstrip(":") for line in lines for word in line.split()]
    for name, slot in pairwise(words):
        if match := _SLOT.fullmatch(slot):
            side = "in" if match[1] == "input" else "out"
            found[name] |= {place for place, column in enumerate(COLUMNS) if column.side == side}
    for word in words:
        if word.endswith(_LEAVES):
            stages = (COLUMNS.index(MapColumn(stage)) for stage in PARAMETERS)
            found[word.rpartition(".")[0]] |= {*stages}
    return found


def _tree(members: Mapping[str, Sequence[TensorComparison]], others: Iterable[str]) -> list[MapRow]:
    """Rows that are in no other, in order of their first tensors, each with those in it."""
    when = {
        name: min((STAGES.index(one.key[0]), one.order) for one in found)
        for name, found in members.items()
    }
    for name in others:
        inner = [at for other, at in when.items() if other.startswith(f"{name}.")]
        when.setdefault(name, min(inner, default=(len(STAGES), 0)))
    for name in [*when]:
        parts = name.split(".")
        for place, part in enumerate(parts, start=1):
            if part.isdigit():  # Layers and experts stand in the map even without tensors.
                around = ".".join(parts[:place])
                when[around] = min(when[name], when.get(around, when[name]))
    rows: dict[str, MapRow] = {}
    roots: list[MapRow] = []
    for name in sorted(when, key=lambda one: one.count(".")):
        above = [name[:place] for place, letter in enumerate(name) if letter == "."]
        parent = next((rows[one] for one in reversed(above) if one in rows), None)
        label = name.removeprefix(f"{parent.name}.") if parent else name
        rows[name] = MapRow(name, label, parent)
        (parent.children if parent else roots).append(rows[name])
    for siblings in (roots, *(row.children for row in rows.values())):
        siblings.sort(key=lambda row: when[row.name])
    return roots
