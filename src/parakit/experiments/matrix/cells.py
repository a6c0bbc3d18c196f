"""Choose cells that cover every pair of a layout and a level, and every pair of two levels.

A *choice* holds one level per feature. Choices are made so that every two legal levels occur together in one
(pairwise testing, by `allpairspy`). Each layout then takes choices until the layout has had every level. Cells of
one choice share their reference, so that few references are trained for many cells.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product

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
"""Probability with which a draw of `make verify-fuzz` changes a feature from its default."""

LevelChoice = tuple[Level, ...]
"""One level per feature, defaults included."""


def choose_cells(
    matrix: Matrix, family: Family, known: Sequence[Finding], seed: int = 1
) -> list[MatrixCell]:
    """Return cells that cover a family: each legal level in each layout, and pairs of legal levels in some layout.

    Cells of known findings come first, one for each layout that a finding affects. Cells that only pair two levels
    come last, so that few entries of the tables are missing if the time ends early. Cells have patches for known
    findings, but the cell of a finding has no patch for this finding. Another seed gives other combinations of
    levels.
    """
    choices = choose_rows(matrix, family, seed)
    covering: list[MatrixCell] = []
    for layout in family.layouts:
        covering += _choose_covering_cells(matrix, family, layout, choices)
    further = _choose_further_cells(matrix, family, choices, covering)
    finding_cells = _make_finding_cells(family, known)
    patched_covering = [apply_known_patches(cell, known) for cell in covering]
    patched_further = [apply_known_patches(cell, known) for cell in further]
    cells = (
        *order_by_reference((*finding_cells, *patched_covering)),
        *order_by_reference(patched_further),
    )
    seeded = [replace(cell, seed=seed) for cell in cells]
    # Two cells with one id are the same verification, which is made once.
    return list({cell.id: cell for cell in seeded}.values())


def _choose_further_cells(
    matrix: Matrix,
    family: Family,
    choices: Sequence[LevelChoice],
    covering: Iterable[MatrixCell],
) -> list[MatrixCell]:
    """Return a cell for each choice of levels that no layout has so far, in the next layout where it is legal.

    Layouts take turns. A choice that is legal in no layout gives no cell.
    """
    used = {cell.levels for cell in covering}
    cells: list[MatrixCell] = []
    layouts = family.layouts
    for choice in choices:
        levels = _drop_default_levels(family, choice)
        if levels in used:
            continue
        legal_layouts = [
            layout for layout in layouts if matrix.is_legal(family, choice, layout.name)
        ]
        if legal_layouts:
            cells.append(MatrixCell(family, legal_layouts[0], levels))
        layouts = (*layouts[1:], layouts[0])
    return cells


def _make_finding_cells(family: Family, known: Sequence[Finding]) -> list[MatrixCell]:
    """Return a cell for each known finding and each layout that it affects, patched against all others."""
    cells = []
    for finding in known:
        levels = find_finding_levels(finding, family)
        if levels is None:
            continue
        other_findings = [other for other in known if finding.id not in (other.id, other.behind)]
        for layout in family.layouts:
            cell = MatrixCell(family, layout, levels)
            if affects_cell(finding, cell):
                cells.append(apply_known_patches(cell, other_findings))
    return cells


def draw_cells(
    matrix: Matrix, families: Sequence[Family], known: Sequence[Finding], seed: int
) -> Iterator[MatrixCell]:
    """Yield legal random cells without end. No cell is yielded twice.

    A known finding would hide other bugs, so each cell has patches for the findings in `known`. The same seed gives
    the same cells in the same order. All cells train from the same weights on the same samples.
    """
    generator = random.Random(seed)
    yielded_ids: set[str] = set()
    while True:
        family = generator.choice(families)
        layout = generator.choice(family.layouts)
        levels = []
        for feature_levels in family.features.values():
            # The first level is the default.
            drawable = [level for level in feature_levels[1:] if not level.alone]
            if drawable and generator.random() < CHANGED_FRACTION:
                levels.append(generator.choice(drawable))
        legal_levels = matrix.select_legal_levels(family, layout, levels)
        cell = apply_known_patches(MatrixCell(family, layout, legal_levels), known)
        if cell.id not in yielded_ids:
            yielded_ids.add(cell.id)
            yield cell


def order_by_reference(cells: Iterable[MatrixCell]) -> list[MatrixCell]:
    """Return the cells in an order in which cells with the same reference follow each other.

    A reference is then trained once, and only one reference has to be stored at a time.
    """
    groups: dict[tuple[object, ...], list[MatrixCell]] = {}
    for cell in cells:
        groups.setdefault(cell.reference_key, []).append(cell)
    return [cell for group in groups.values() for cell in group]


def choose_rows(matrix: Matrix, family: Family, seed: int = 1) -> list[LevelChoice]:
    """Return choices of levels in which every two legal levels occur together. The first choice has all defaults.

    Levels that are combined with no other level (`Level.alone`) are in no choice. Another seed gives other choices.
    """
    defaults = tuple(levels[0] for levels in family.factors.values())
    generator = random.Random(seed)
    combinable: list[list[Level]] = []
    shuffled: list[list[Level]] = []
    for feature in family.factors.values():
        default, *other_levels = [level for level in feature if not level.alone]
        combinable.append([default, *other_levels])
        shuffled.append([default, *generator.sample(other_levels, len(other_levels))])
    # allpairspy wants two features, and one of them with two levels. With fewer, no two levels need to be combined.
    if len(shuffled) < 2 or all(len(levels) < 2 for levels in shuffled):
        _, *other_levels = shuffled[0]
        return [defaults, *((level, *defaults[1:]) for level in other_levels)]

    def is_legal(levels: Sequence[Level]) -> bool:
        """Return True if the levels are legal so far, and a full choice has the levels it needs."""
        if not matrix.is_legal(family, levels):
            return False
        is_full = len(levels) == len(shuffled)
        return not is_full or _has_needs(family, tuple(levels))

    drawn = (tuple(levels) for levels in AllPairs(shuffled, filter_func=is_legal))
    choices = list(dict.fromkeys((defaults, *drawn)))
    return [*choices, *_complete_missing_pairs(matrix, family, choices, combinable)]


def _complete_missing_pairs(
    matrix: Matrix,
    family: Family,
    choices: Iterable[LevelChoice],
    combinable: Iterable[Sequence[Level]],
) -> list[LevelChoice]:
    """Return further choices for the legal pairs of levels that occur in none of `choices`.

    The greedy draw of allpairspy may end with legal pairs that it did not reach.

    Args:
        matrix: The matrix, which says what is legal.
        family: Family of the levels.
        choices: The choices so far.
        combinable: For each feature, the levels that can be combined with others.
    """
    covered = {pair for choice in choices for pair in combinations(choice, 2)}
    further: list[LevelChoice] = []
    for levels, other_levels in combinations(combinable, 2):
        for pair in product(levels, other_levels):
            if pair in covered:
                continue
            choice = _complete_pair(matrix, family, pair, covered)
            if choice is not None:
                further.append(choice)
                covered |= set(combinations(choice, 2))
    return further


def _complete_pair(
    matrix: Matrix,
    family: Family,
    pair: tuple[Level, Level],
    covered: Container[tuple[Level, Level]],
) -> LevelChoice | None:
    """Return a legal choice of levels that includes a pair of levels; None if there is none.

    For every other feature, the level is chosen that forms most pairs that are not in `covered`.
    """
    pair_levels = _drop_default_levels(family, pair)
    choice = family.fill_with_defaults(family.add_needed_levels(pair_levels))
    if not set(pair) <= set(choice) or not matrix.is_legal(family, choice):
        return None
    # Features of the pair, and of the levels that the pair needs, keep their levels.
    fixed = {level.factor for level in (*pair, *_drop_default_levels(family, choice))}

    def count_new_pairs(candidate: LevelChoice) -> int:
        return sum(couple not in covered for couple in combinations(candidate, 2))

    for index, (factor, levels) in enumerate(family.factors.items()):
        if factor in fixed:
            continue
        legal = []
        for level in levels:
            candidate = (*choice[:index], level, *choice[index + 1 :])
            if level.alone or not _has_needs(family, candidate):
                continue
            if matrix.is_legal(family, candidate):
                legal.append(candidate)
        choice = max(legal, key=count_new_pairs, default=choice)
    return choice


def _has_needs(family: Family, choice: LevelChoice) -> bool:
    """Return True if the choice holds all levels that its levels need."""
    return set(family.add_needed_levels(_drop_default_levels(family, choice))) <= set(choice)


def _drop_default_levels(family: Family, choice: LevelChoice) -> tuple[Level, ...]:
    """Return the levels of a choice that are not their feature's default."""
    return tuple(level for level in choice if not family.is_default(level))


def _choose_covering_cells(
    matrix: Matrix, family: Family, layout: Layout, choices: Sequence[LevelChoice]
) -> list[MatrixCell]:
    """Return cells of one layout in which every level occurs.

    Choices that are legal in the layout are used first. Then come the other choices, with the defaults in place of
    illegal levels. A level that still does not occur gets a cell of its own.
    """
    uncovered: set[Level] = set()
    for levels in family.factors.values():
        uncovered.update(levels)
    adapted = []
    for choice in choices:
        levels = _drop_default_levels(family, choice)
        legal_levels = matrix.select_legal_levels(family, layout, levels)
        adapted.append(family.fill_with_defaults(legal_levels))
    cells: list[MatrixCell] = []
    for candidates in (choices, adapted):
        legal = [choice for choice in candidates if matrix.is_legal(family, choice, layout.name)]
        for choice in _choose_covering_choices(legal, uncovered):
            uncovered.difference_update(choice)
            cells.append(MatrixCell(family, layout, _drop_default_levels(family, choice)))
    for level in sorted(uncovered, key=lambda level: level.path):
        if not family.is_default(level):
            cells.append(MatrixCell(family, layout, family.add_needed_levels([level])))
    return cells


def _choose_covering_choices(
    choices: Sequence[LevelChoice], levels: Collection[Level]
) -> list[LevelChoice]:
    """Return few choices that have all of `levels` that any choice has; the one with most new levels comes first."""
    uncovered = set(levels)
    chosen: list[LevelChoice] = []
    while choices:
        best = max(choices, key=lambda choice: len(uncovered.intersection(choice)))
        if uncovered.isdisjoint(best):
            break
        uncovered.difference_update(best)
        chosen.append(best)
    return chosen
