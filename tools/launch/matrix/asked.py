"""Which part of the matrix is asked for: FEATURES= and LAYOUTS=."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from packaging.version import Version

from tools.launch.errors import LaunchError
from tools.launch.matrix.definition import Family, Level, Matrix


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
