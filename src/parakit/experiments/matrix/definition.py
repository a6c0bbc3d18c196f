"""What the matrix is made of: families of models with their features, and strategies."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import msgspec
from packaging.version import Version

from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, read_yaml, relative_to_root
from parakit.config.run import OptimizerName

MATRIX_FILE = ROOT / "examples" / "matrix.yaml"
_RELEASE = re.compile(r"\d+\.\d+")
SAMPLES = 8
"""In an iteration, unless a strategy has its own: the same for nearly all, which so share references."""


class FlagList(tuple[str, ...]):
    """Of a command line."""

    def __new__(cls, given: str | Sequence[str] = ()) -> FlagList:
        """Of a text as a shell splits it, or words already."""
        return super().__new__(cls, shlex.split(given) if isinstance(given, str) else given)


class Level(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One choice of one feature."""

    factor: str
    name: str
    flags: FlagList = FlagList()
    """Megatron's, of strategy and reference."""
    own: FlagList = FlagList()
    """Of the strategy alone."""
    needs: tuple[str, ...] = msgspec.field(default=(), name="with")
    """Names of levels of the family without which it is refused."""
    micro_batches: int | None = None
    """Of each rank in an iteration; None is what the strategy's samples are."""
    optimizer: OptimizerName | None = None
    since: Version | None = None
    before: Version | None = None
    alone: bool = False
    """In no cell with others: it cannot be trained here, and is tried for the sentence."""

    @property
    def path(self) -> str:
        """`factor/name`."""
        return f"{self.factor}/{self.name}"

    def is_in(self, megatron: Version) -> bool:
        """Whether that version has its flags."""
        return (self.since is None or self.since <= megatron) and (
            self.before is None or megatron < self.before
        )


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A strategy, with what it asks of the model."""

    name: str
    strategy: str
    devices: int = 2
    flags: FlagList = FlagList()
    """Of strategy and reference."""
    own: FlagList = FlagList()
    """Of the strategy alone."""
    samples: int = msgspec.field(default=SAMPLES, name="global_batch")
    """In an iteration."""
    families: tuple[str, ...] = ()
    """Those that it is for; empty is all."""


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tiny model and its features."""

    name: str
    model: str
    factors: dict[str, tuple[Level, ...]]
    """Levels by feature; the first is the model as it is."""
    base: FlagList = FlagList()
    """Flags of all its cells."""
    fuzzed: dict[str, tuple[Level, ...]] = msgspec.field(default_factory=dict, name="fuzz")
    """Further ones, which only a draw has."""
    smaller: tuple[FlagList, ...] = ()
    """Flags that may make its model smaller, in the order in which they are tried."""
    layouts: tuple[Layout, ...] = ()

    @property
    def features(self) -> dict[str, tuple[Level, ...]]:
        """All levels by feature."""
        return self.factors | self.fuzzed

    @property
    def levels(self) -> tuple[Level, ...]:
        """All that are not a feature's first."""
        return tuple(level for levels in self.features.values() for level in levels[1:])

    def is_first(self, level: Level) -> bool:
        """Whether it is the model as it is."""
        return self.features[level.factor][0] == level

    def row(self, levels: Iterable[Level], with_fuzzed: bool = False) -> tuple[Level, ...]:
        """A level of each feature: these, and the first of the others."""
        chosen = {level.factor: level for level in levels}
        features = self.features if with_fuzzed else self.factors
        return tuple(chosen.get(name, given[0]) for name, given in features.items())

    def level(self, path: str) -> Level:
        """By `factor/name`."""
        return next(level for level in self.levels if level.path == path)

    def with_needs(self, levels: Iterable[Level]) -> tuple[Level, ...]:
        """The levels and what they need, in the order of the features."""
        chosen = {level.factor: level for level in levels}
        for level in tuple(chosen.values()):
            for name in level.needs:
                needed = next(one for one in self.levels if one.name == name)
                chosen.setdefault(needed.factor, needed)
        return tuple(level for level in self.levels if chosen.get(level.factor) == level)


@dataclass(frozen=True)
class Exclusion:
    """What is not drawn together: patterns of `family/factor/level`, and at most one of strategies."""

    levels: tuple[str, ...]
    layout: str = ""
    release: str = ""
    """`major.minor` of the only Megatron in which it is so; empty for all."""

    def forbids(self, family: str, paths: Iterable[str], layout: str) -> bool:
        """Whether these are some that it names."""
        if self.layout and not fnmatchcase(layout, self.layout):
            return False
        names = [f"{family}/{path}" for path in paths]
        return all(
            any(fnmatchcase(name, f"*{pattern}") for name in names) for pattern in self.levels
        )


@dataclass(frozen=True)
class Matrix:
    """The whole file."""

    families: tuple[Family, ...]
    apart: tuple[Exclusion, ...]

    def of(self, megatron: Version) -> Matrix:
        """As it is for a version."""
        release = f"{megatron.major}.{megatron.minor}"
        return replace(self, apart=tuple(one for one in self.apart if one.release in ("", release)))

    def legal(self, family: Family, levels: Sequence[Level], layout: str = "") -> bool:
        """Whether levels, one of each feature, may be drawn together in a strategy, or in any."""
        paths = [level.path for level in levels]
        return not any(
            one.forbids(family.name, paths, layout)
            for one in self.apart
            if layout or not one.layout
        )

    def fitting(self, family: Family, layout: Layout, levels: Iterable[Level]) -> tuple[Level, ...]:
        """Those levels, with what they need, that may be drawn for a strategy with those before them."""
        kept: tuple[Level, ...] = ()
        for level in levels:
            tried = family.with_needs((*kept, level))
            if self.legal(family, family.row(tried, with_fuzzed=True), layout.name):
                kept = tried
        return kept


class _MatrixFile(msgspec.Struct):
    families: dict[str, Family]
    layouts: dict[str, Layout]
    apart: list[list[str]]


def load_matrix() -> Matrix:
    """Read the file.

    Raises:
        LaunchError: A key is not known, or a value is not of its kind.
    """
    try:
        file = msgspec.convert(
            _add_names(read_yaml(MATRIX_FILE)), _MatrixFile, dec_hook=lambda kind, text: kind(text)
        )
    except msgspec.ValidationError as error:
        raise LaunchError(f"{relative_to_root(MATRIX_FILE)}: {error}; correct it.") from None
    families = []
    for family in file.families.values():
        suited = (
            one for one in file.layouts.values() if not one.families or family.name in one.families
        )
        families.append(msgspec.structs.replace(family, layouts=tuple(suited)))
    return Matrix(
        tuple(families), tuple(_parse_exclusion(names, file.layouts) for names in file.apart)
    )


def _add_names(file: dict[str, Any]) -> dict[str, Any]:
    """The file with the names that its keys give."""
    families = {}
    for name, one in file["families"].items():
        features = {
            key: {
                factor: [_parse_level(factor, *given) for given in levels.items()]
                for factor, levels in one[key].items()
            }
            for key in {"factors", "fuzz"} & one.keys()
        }
        families[name] = {**one, **features, "name": name}
    layouts = {name: {**one, "name": name} for name, one in file["layouts"].items()}
    return {**file, "families": families, "layouts": layouts}


def _parse_level(factor: str, name: str, given: str | dict[str, Any]) -> dict[str, Any]:
    """One that is a text is flags."""
    fields = given if isinstance(given, dict) else {"flags": given}
    return {**fields, "factor": factor, "name": name}


def _parse_exclusion(names: Sequence[str], layouts: Mapping[str, Layout]) -> Exclusion:
    levels = tuple(name for name in names if "/" in name)
    releases = [name for name in names if _RELEASE.fullmatch(name)]
    of_layout = [name for name in names if "/" not in name and name not in releases]
    matched = any(fnmatchcase(name, pattern) for pattern in of_layout for name in layouts)
    if len(of_layout) > 1 or (of_layout and not matched):
        raise LaunchError(
            f"{relative_to_root(MATRIX_FILE)}: apart: {', '.join(names)} names no strategy, or two; name one."
        )
    return Exclusion(levels, "".join(of_layout), "".join(releases[:1]))
