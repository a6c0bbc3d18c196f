"""What to verify: few cells that cover each pair of a strategy and a level, and each pair of two levels.

Rows are choices of a level of each feature, every two of which occur together in one (`allpairspy`).
Each strategy then takes rows until it has had every level. Cells of one row share their reference, so
rows are few and strategies of a row many.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from allpairspy import AllPairs

from parakit.experiments.matrix.cell import (
    MatrixCell,
    affects_cell,
    apply_known_patches,
    find_finding_levels,
)
from parakit.experiments.matrix.definition import Family, Layout, Level, Matrix
from parakit.verify import Finding

CHANGED_FRACTION = 0.5
"""Of the features that a draw changes; others are as the model has them."""

LevelChoice = tuple[Level, ...]
"""A level of each feature, first ones included."""


def choose_cells(
    matrix: Matrix, family: Family, known: Sequence[Finding], seed: int = 1
) -> list[MatrixCell]:
    """Cells that cover a family, those with one reference after each other.

    Those that cover a pair of a strategy and a level come first, those that pair two levels last: where
    the time ends early, few of the tables' entries are missing. A finding that is known is verified once
    by itself in each strategy, with the patches of the others; in all other cells its patch is applied
    as well, so that it hides nothing. Another seed gives other combinations of levels.
    """
    rows = choose_rows(matrix, family, seed)
    drawn = [
        cell
        for layout in family.layouts
        for cell in _choose_covering_cells(matrix, family, layout, rows)
    ]
    used = {cell.levels for cell in drawn}
    rest, order = list[MatrixCell](), family.layouts
    for row in rows:
        if (levels := _drop_first_levels(family, row)) in used:
            continue
        # A row that no strategy needed has pairs of levels that no other row has.
        suited = [one for one in order if matrix.legal(family, row, one.name)]
        rest += [MatrixCell(family, layout, levels) for layout in suited[:1]]
        order = (*order[1:], order[0])
    shown = ((finding, find_finding_levels(finding, family)) for finding in known)
    alone = [
        apply_known_patches(cell, [one for one in known if finding.id not in (one.id, one.behind)])
        for finding, levels in shown
        if levels is not None
        for layout in family.layouts
        if affects_cell(finding, cell := MatrixCell(family, layout, levels))
    ]
    covering = order_by_reference((*alone, *(apply_known_patches(cell, known) for cell in drawn)))
    further = order_by_reference(apply_known_patches(cell, known) for cell in rest)
    seeded = (replace(cell, seed=seed) for cell in (*covering, *further))
    return list({cell.id: cell for cell in seeded}.values())


def draw_cells(
    matrix: Matrix, families: Sequence[Family], known: Sequence[Finding], seed: int
) -> Iterator[MatrixCell]:
    """Legal cells without end, each once; the same for the same seed, and for the first n of any number.

    The seed is the draw's alone: weights and samples are the same for all.
    """
    order, seen = random.Random(seed), set[str]()
    while True:
        family = order.choice(families)
        layout = order.choice(family.layouts)
        levels = [
            order.choice(drawn)
            for given in family.features.values()
            if (drawn := [one for one in given[1:] if not one.alone])
            and order.random() < CHANGED_FRACTION
        ]
        cell = apply_known_patches(
            MatrixCell(family, layout, matrix.fitting(family, layout, levels)), known
        )
        if cell.id not in seen:
            seen.add(cell.id)
            yield cell


def order_by_reference(cells: Iterable[MatrixCell]) -> list[MatrixCell]:
    """Cells of one reference after each other: a reference is trained once, and few are kept."""
    groups: dict[tuple[object, ...], list[MatrixCell]] = {}
    for cell in cells:
        groups.setdefault(cell.reference, []).append(cell)
    return [cell for group in groups.values() for cell in group]


def choose_rows(matrix: Matrix, family: Family, seed: int = 1) -> list[LevelChoice]:
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
            if pair not in covered and (row := _complete_pair(matrix, family, pair, covered)):
                rows.append(row)
                covered |= set(combinations(row, 2))
    return rows


def _complete_pair(
    matrix: Matrix,
    family: Family,
    pair: tuple[Level, Level],
    covered: Container[tuple[Level, Level]],
) -> LevelChoice | None:
    """A row that has a pair, and of other features what makes most new pairs; None if none is legal."""
    row = family.row(family.with_needs(_drop_first_levels(family, pair)))
    if not set(pair) <= set(row) or not matrix.legal(family, row):
        return None
    fixed = {level.factor for level in (*pair, *_drop_first_levels(family, row))}

    def new_pairs(one: LevelChoice) -> int:
        return sum(couple not in covered for couple in combinations(one, 2))

    for place, (factor, levels) in enumerate(family.factors.items()):
        if factor not in fixed:
            drawn = (level for level in levels if not level.alone)
            tried = ((*row[:place], level, *row[place + 1 :]) for level in drawn)
            legal = [one for one in tried if _has_needs(family, one) and matrix.legal(family, one)]
            row = max(legal, key=new_pairs, default=row)
    return row


def _has_needs(family: Family, row: LevelChoice) -> bool:
    return set(family.with_needs(_drop_first_levels(family, row))) <= set(row)


def _drop_first_levels(family: Family, row: LevelChoice) -> tuple[Level, ...]:
    return tuple(level for level in row if not family.is_first(level))


def _choose_covering_cells(
    matrix: Matrix, family: Family, layout: Layout, rows: Sequence[LevelChoice]
) -> list[MatrixCell]:
    """Cells of one strategy with every level: rows, rows without what does not fit, levels alone."""
    left = {level for levels in family.factors.values() for level in levels}
    cells: list[MatrixCell] = []
    # Of what does not fit, the first levels take the place.
    adapted = [
        family.row(matrix.fitting(family, layout, _drop_first_levels(family, row))) for row in rows
    ]
    for some in (rows, adapted):
        choice = [row for row in some if matrix.legal(family, row, layout.name)]
        while choice:
            best = max(choice, key=lambda row: len(left & set(row)))
            if not left & set(best):
                break
            left -= set(best)
            cells.append(MatrixCell(family, layout, _drop_first_levels(family, best)))
    for level in sorted(left, key=lambda one: one.path):
        if not family.is_first(level):
            cells.append(MatrixCell(family, layout, family.with_needs([level])))
    return cells
