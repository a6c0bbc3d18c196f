"""Arrange a comparison as a map: one row per module, one column per stage of the iteration.

Rows are in the order of the forward pass and nested as modules are; columns are in the order of an
iteration. A cell holds the comparisons of one module in one stage, and its level is the colour of the worst.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from parakit.artifacts.capture import RECOMPUTED_PREFIX, CaptureStage
from parakit.verify.captured import PARAMETERS
from parakit.verify.compare import STAGES
from parakit.verify.comparison import CaptureComparison, ComparisonKey, TensorComparison

BOUNDS = (0.01, 0.1, 1.0, 10.0, 100.0, 1e4)
"""Values of error over tolerance at which a cell's colour changes."""
WRONG = 4
"""First level of a tensor that is wrong, shown in red."""
MAX_VISIBLE_ROWS = 80
"""Number of rows above which layers without an error are folded."""


@dataclass(frozen=True)
class MapColumn:
    """A stage, or one side of it if its modules have inputs and outputs."""

    stage: CaptureStage
    side: str = ""
    """`in` for inputs of modules, `out` for outputs; empty if the stage has no sides."""


COLUMNS = (
    MapColumn(CaptureStage.INPUTS),
    MapColumn(CaptureStage.OUTPUTS, "in"),
    MapColumn(CaptureStage.OUTPUTS, "out"),
    MapColumn(CaptureStage.LOSS),
    MapColumn(CaptureStage.ACTIVATION_GRADIENTS, "out"),
    MapColumn(CaptureStage.ACTIVATION_GRADIENTS, "in"),
    # The log prints values of no module, so it has no column.
    *(
        MapColumn(stage)
        for stage in STAGES[
            STAGES.index(CaptureStage.LOCAL_GRADIENTS) : STAGES.index(CaptureStage.LOG)
        ]
    ),
)
_STAGES_WITH_SIDES = (CaptureStage.OUTPUTS, CaptureStage.ACTIVATION_GRADIENTS)
_Position = tuple[int, float]
"""Position of a tensor or module in the map: index of the stage, and order of the tensor in the computation."""
_ACTIVATION_SLOT = re.compile(r"(?:recomputed\.)?(input|output)(?:\.\w+)?(?:@[\w.]+)?")
_PARAMETER_SUFFIXES = (".weight", ".bias")


@dataclass
class MapCell:
    """Comparisons of the tensors of one module in one stage."""

    tensors: list[TensorComparison] = field(default_factory=list)
    not_compared: bool = False
    """Whether the module has tensors in the stage, but none that could be compared."""
    first: bool = False
    """Whether the first wrong tensor is in this cell."""

    @property
    def worst(self) -> TensorComparison | None:
        """Comparison with the largest error over tolerance, wrong tensors first; None without tensors."""
        return max(
            self.tensors,
            key=lambda comparison: (comparison.differs, comparison.ratio),
            default=None,
        )

    @property
    def level(self) -> int | None:
        """Colour level of the cell; None if nothing was compared."""
        worst = self.worst
        return None if worst is None else colour_level(worst.ratio, worst.differs)


@dataclass
class MapRow:
    """A module with its own parameters."""

    name: str
    label: str
    """Name without that of the parent row."""
    parent: MapRow | None
    """Row of the module around this one; None for an outermost module."""
    cells: tuple[MapCell, ...] = field(default_factory=lambda: tuple(MapCell() for _ in COLUMNS))
    children: list[MapRow] = field(default_factory=list)
    open: bool = True
    """Whether the children are shown."""

    @property
    def depth(self) -> int:
        """Number of rows around this row."""
        return 0 if self.parent is None else 1 + self.parent.depth

    @property
    def shown(self) -> bool:
        """True if all rows around this row are open."""
        return self.parent is None or (self.parent.open and self.parent.shown)

    def within(self) -> Iterator[MapRow]:
        """Yield this row and all rows inside it, in order."""
        yield self
        for child in self.children:
            yield from child.within()

    def levels_within(self) -> list[int | None]:
        """Return the worst level of each column over this row and all rows inside it.

        None in a column means that no tensor of the column was compared.
        """
        worst_levels: list[int | None] = []
        for column_index in range(len(COLUMNS)):
            levels = [row.cells[column_index].level for row in self.within()]
            worst_levels.append(max((level for level in levels if level is not None), default=None))
        return worst_levels

    @property
    def red(self) -> bool:
        """True if a tensor of this row, or of a row inside it, is wrong."""
        return any((level or 0) >= WRONG for level in self.levels_within())

    @property
    def has_first(self) -> bool:
        """True if the first wrong tensor is in this row or in a row inside it."""
        return any(cell.first for row in self.within() for cell in row.cells)


def colour_level(ratio: float, differs: bool) -> int:
    """Return the colour level of a tensor's cell.

    A right tensor has at most level `WRONG` - 1, and level 0 if it has no error. A wrong tensor has at least level
    `WRONG`.

    Args:
        ratio: The tensor's error divided by its tolerance.
        differs: True if the tensor is wrong. It may be wrong with a small error, for example if copies differ.
    """
    if differs:
        return max(WRONG, 1 + bisect_right(BOUNDS, ratio))
    return 0 if ratio == 0 else min(WRONG - 1, 1 + bisect_right(BOUNDS, ratio))


def build_map_rows(compared: CaptureComparison, first: ComparisonKey | None) -> list[MapRow]:
    """Return all rows of the map in order, with layers folded if there are too many rows.

    Args:
        compared: Comparisons to show.
        first: Key of the first wrong tensor; None if all tensors are right.
    """
    comparisons_by_module = _group_by_module(compared.comparisons)
    skipped_columns = _find_columns_not_compared(compared.not_aligned)
    rows: list[MapRow] = []
    for root in _build_tree(comparisons_by_module, skipped_columns):
        rows.extend(root.within())
    for row in rows:
        for comparison in comparisons_by_module.get(row.name, ()):
            cell = row.cells[_column_index(comparison.key)]
            cell.tensors.append(comparison)
            if comparison.key == first:
                cell.first = True
        for column_index in skipped_columns.get(row.name, ()):
            cell = row.cells[column_index]
            cell.not_compared = not cell.tensors
    _fold_rows(rows)
    return rows


def _group_by_module(
    comparisons: Iterable[TensorComparison],
) -> dict[str, list[TensorComparison]]:
    """Return the comparisons of each module, by its name. A parameter belongs to the module that owns it."""
    comparisons_by_module: defaultdict[str, list[TensorComparison]] = defaultdict(list)
    for comparison in comparisons:
        stage, name, _ = comparison.key
        # Activations are named after their module. The last part of a parameter's name, such as `weight`, is its own.
        module = name.rpartition(".")[0] if stage in PARAMETERS else name
        comparisons_by_module[module or name].append(comparison)
    return dict(comparisons_by_module)


def _column_index(key: ComparisonKey) -> int:
    """Return the index of the column that a tensor belongs to."""
    stage, _, slot = key
    if stage not in _STAGES_WITH_SIDES:
        return COLUMNS.index(MapColumn(stage))
    side = "in" if slot.removeprefix(RECOMPUTED_PREFIX).startswith("input") else "out"
    return COLUMNS.index(MapColumn(stage, side))


def _fold_rows(rows: Sequence[MapRow]) -> None:
    """Close layers and experts if more than `MAX_VISIBLE_ROWS` rows are visible.

    Layers and experts without a wrong tensor are closed first. If there are still too many rows, the others are
    closed too, except for those that contain the first wrong tensor of the comparison.
    """
    layers = [row for row in rows if row.children and row.label.rpartition(".")[2].isdigit()]
    if sum(row.shown for row in rows) > MAX_VISIBLE_ROWS:
        for row in layers:
            row.open = row.red
    if sum(row.shown for row in rows) > MAX_VISIBLE_ROWS:
        for row in layers:
            row.open = row.has_first


def _find_columns_not_compared(lines: Sequence[str]) -> dict[str, set[int]]:
    """Return the indices of the columns in which a tensor was not compared, by module.

    Args:
        lines: Lines of `CaptureComparison.not_aligned`, which name an activation as `module slot` and a
            parameter by its full name.
    """
    columns_by_module: defaultdict[str, set[int]] = defaultdict(set)
    tokens = [token.rstrip(":") for line in lines for token in line.split()]
    for name, slot in pairwise(tokens):
        match = _ACTIVATION_SLOT.fullmatch(slot)
        if match:
            side = "in" if match[1] == "input" else "out"
            columns_by_module[name] |= _find_columns_of_side(side)
    parameter_columns = {COLUMNS.index(MapColumn(stage)) for stage in PARAMETERS}
    for token in tokens:
        if token.endswith(_PARAMETER_SUFFIXES):
            module = token.rpartition(".")[0]
            columns_by_module[module] |= parameter_columns
    return columns_by_module


def _find_columns_of_side(side: str) -> set[int]:
    """Return the indices of the columns that show a module's inputs (`in`) or outputs (`out`)."""
    return {index for index, column in enumerate(COLUMNS) if column.side == side}


def _build_tree(
    comparisons_by_module: Mapping[str, Sequence[TensorComparison]], other_modules: Iterable[str]
) -> list[MapRow]:
    """Return the outermost rows of the map; inner modules are the children of their rows.

    Rows of one parent are ordered by the first compared tensor of their modules. A module of `other_modules`,
    which has no comparisons, takes the position of the first compared module inside it. If no module inside it
    is compared, the module comes last.
    """
    order_by_name = _order_modules(comparisons_by_module, other_modules)
    rows: dict[str, MapRow] = {}
    roots: list[MapRow] = []
    # Outer modules come first, so that the row of a parent exists before the rows of its children.
    for name in sorted(order_by_name, key=lambda name: name.count(".")):
        parent = _find_parent(name, rows)
        label = name.removeprefix(f"{parent.name}.") if parent else name
        rows[name] = MapRow(name, label, parent)
        siblings = parent.children if parent else roots
        siblings.append(rows[name])
    for siblings in (roots, *(row.children for row in rows.values())):
        siblings.sort(key=lambda row: order_by_name[row.name])
    return roots


def _order_modules(
    comparisons_by_module: Mapping[str, Sequence[TensorComparison]], other_modules: Iterable[str]
) -> dict[str, _Position]:
    """Return the position of each module, layer and expert in the map, by name.

    A compared module has the position of its first compared tensor. A module of `other_modules`, which was not
    compared, has the first position of all compared modules inside it. If no module inside it was compared, the
    module comes after all others. A layer or an expert has the first position of all modules inside it.
    """
    compared_positions = {
        name: min(map(_find_position, comparisons))
        for name, comparisons in comparisons_by_module.items()
    }
    positions = dict(compared_positions)
    for name in other_modules:
        if name not in positions:
            positions[name] = _find_first_position_inside(name, compared_positions)
    # Layers and experts get a row even if they have no tensors of their own.
    layer_positions: dict[str, _Position] = {}
    for name, position in positions.items():
        for layer in _list_layers_around(name):
            layer_positions[layer] = min(position, layer_positions.get(layer, position))
    return positions | layer_positions


def _find_position(comparison: TensorComparison) -> _Position:
    """Return the position of a compared tensor."""
    stage, _, _ = comparison.key
    return STAGES.index(stage), comparison.order


def _find_first_position_inside(module: str, positions: Mapping[str, _Position]) -> _Position:
    """Return the first of the positions of modules inside `module`; the position after all others without any."""
    positions_inside = [
        position for name, position in positions.items() if name.startswith(f"{module}.")
    ]
    after_all_stages = (len(STAGES), 0.0)
    return min(positions_inside, default=after_all_stages)


def _list_layers_around(name: str) -> list[str]:
    """Return the names of the layers and experts that contain a module, outermost first.

    Their last part is a number. A layer contains itself.
    """
    parts = name.split(".")
    return [
        ".".join(parts[:num_parts])
        for num_parts, part in enumerate(parts, start=1)
        if part.isdigit()
    ]


def _find_parent(name: str, rows: Mapping[str, MapRow]) -> MapRow | None:
    """Return the row of the closest module around a module; None if no module around it has a row."""
    module = name
    while "." in module:
        module = module.rpartition(".")[0]
        if module in rows:
            return rows[module]
    return None
