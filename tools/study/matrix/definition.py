"""What the matrix is made of: families of models with their features, and layouts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec
from packaging.version import Version

from tools.spec.errors import LaunchError
from tools.spec.files import ROOT, from_root, read_yaml
from tools.spec.run import OptimizerName

FILE = ROOT / "examples" / "matrix.yaml"
_RELEASE = re.compile(r"\d+\.\d+")
SAMPLES = 8
"""In an iteration, unless a layout has its own: the same for nearly all, which so share references."""


@dataclass(frozen=True)
class Level:
    """One choice of one feature."""

    factor: str
    name: str
    flags: tuple[str, ...] = ()
    """Megatron's, of layout and reference."""
    own: tuple[str, ...] = ()
    """Of the layout alone."""
    needs: tuple[str, ...] = ()
    """Names of levels of the family without which it is refused."""
    micro_batches: int | None = None
    """Of each rank in an iteration; None is what the layout's samples are."""
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


@dataclass(frozen=True)
class Layout:
    """A strategy, with what it asks of the model."""

    name: str
    strategy: str
    devices: int = 2
    flags: tuple[str, ...] = ()
    """Of layout and reference."""
    own: tuple[str, ...] = ()
    """Of the layout alone."""
    samples: int = SAMPLES
    """In an iteration."""
    families: tuple[str, ...] = ()
    """Those that it is for; empty is all."""


@dataclass(frozen=True)
class Family:
    """A tiny model and its features."""

    name: str
    model: str
    base: tuple[str, ...]
    """Flags of all its cells."""
    factors: Mapping[str, tuple[Level, ...]]
    """Levels by feature; the first is the model as it is."""
    fuzzed: Mapping[str, tuple[Level, ...]]
    """Further ones, which only a draw has."""
    smaller: tuple[tuple[str, ...], ...]
    layouts: tuple[Layout, ...]

    @property
    def levels(self) -> tuple[Level, ...]:
        """All that are not a feature's first."""
        every = (*self.factors.values(), *self.fuzzed.values())
        return tuple(level for levels in every for level in levels[1:])

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
class Apart:
    """What is not drawn together: patterns of `family/factor/level`, and at most one of layouts."""

    levels: tuple[str, ...]
    layout: str = ""
    release: str = ""
    """`major.minor` of the only Megatron in which it is so; empty for all."""

    def forbids(self, family: str, paths: Iterable[str], layout: str = "") -> bool:
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
    apart: tuple[Apart, ...]

    def of(self, megatron: Version) -> Matrix:
        """As it is for a version."""
        release = f"{megatron.major}.{megatron.minor}"
        return replace(self, apart=tuple(one for one in self.apart if one.release in ("", release)))

    def legal(self, family: Family, levels: Sequence[Level], layout: str = "") -> bool:
        """Whether they may be drawn together; the file's first levels count as well.

        Args:
            family: Whose levels.
            levels: One of each feature, first ones included.
            layout: Its name; empty for any.
        """
        paths = [level.path for level in levels]
        return not any(
            one.forbids(family.name, paths, layout)
            for one in self.apart
            if layout or not one.layout
        )


class _Level(msgspec.Struct, forbid_unknown_fields=True):
    flags: str = ""
    own: str = ""
    needs: list[str] = msgspec.field(default_factory=list, name="with")
    micro_batches: int | None = None
    optimizer: OptimizerName | None = None
    since: str | None = None
    before: str | None = None
    alone: bool = False


class _Layout(msgspec.Struct, forbid_unknown_fields=True):
    strategy: str
    devices: int = 2
    flags: str = ""
    own: str = ""
    global_batch: int = SAMPLES
    families: list[str] = []


class _Family(msgspec.Struct, forbid_unknown_fields=True):
    model: str
    factors: dict[str, dict[str, str | _Level]]
    base: str = ""
    fuzz: dict[str, dict[str, str | _Level]] = {}
    smaller: list[str] = []


class _MatrixFile(msgspec.Struct):
    families: dict[str, _Family]
    layouts: dict[str, _Layout]
    apart: list[list[str]]


def load_matrix(path: Path = FILE) -> Matrix:
    """Read the file.

    Raises:
        LaunchError: A key is not known, or a value is not of its kind.
    """
    try:
        file = msgspec.convert(read_yaml(path), _MatrixFile)
    except msgspec.ValidationError as error:
        raise LaunchError(f"{from_root(path)}: {error}; correct it.") from None
    layouts = {name: _layout(name, one) for name, one in file.layouts.items()}
    families = tuple(_family(name, one, layouts) for name, one in file.families.items())
    return Matrix(families, tuple(_apart(names, layouts) for names in file.apart))


def _layout(name: str, one: _Layout) -> Layout:
    words = tuple(shlex.split(one.flags)), tuple(shlex.split(one.own))
    families = tuple(one.families)
    return Layout(name, one.strategy, one.devices, *words, one.global_batch, families)


def _family(name: str, one: _Family, layouts: Mapping[str, Layout]) -> Family:
    suited = (one for one in layouts.values() if not one.families or name in one.families)
    return Family(
        name,
        one.model,
        tuple(shlex.split(one.base)),
        _levels(one.factors),
        _levels(one.fuzz),
        tuple(tuple(shlex.split(flags)) for flags in one.smaller),
        tuple(suited),
    )


def _levels(factors: Mapping[str, Mapping[str, str | _Level]]) -> dict[str, tuple[Level, ...]]:
    return {
        factor: tuple(_level(factor, name, given) for name, given in levels.items())
        for factor, levels in factors.items()
    }


def _level(factor: str, name: str, given: str | _Level) -> Level:
    one = _Level(flags=given) if isinstance(given, str) else given
    return Level(
        factor,
        name,
        tuple(shlex.split(one.flags)),
        tuple(shlex.split(one.own)),
        tuple(one.needs),
        one.micro_batches,
        one.optimizer,
        Version(one.since) if one.since else None,
        Version(one.before) if one.before else None,
        one.alone,
    )


def _apart(names: Sequence[str], layouts: Mapping[str, Layout]) -> Apart:
    levels = tuple(name for name in names if "/" in name)
    releases = [name for name in names if _RELEASE.fullmatch(name)]
    of_layout = [name for name in names if "/" not in name and name not in releases]
    matched = any(fnmatchcase(name, pattern) for pattern in of_layout for name in layouts)
    if len(of_layout) > 1 or (of_layout and not matched):
        raise LaunchError(
            f"{from_root(FILE)}: apart: {', '.join(names)} names no layout, or two; name one."
        )
    return Apart(levels, "".join(of_layout), "".join(releases[:1]))
