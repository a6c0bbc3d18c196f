"""Read `examples/matrix.yaml`: families of models with their features, strategies, and what excludes what.

A *feature* of a family (also called factor, as in the file) has several *levels*. The first level is the model's
default. A *layout* is a strategy with the flags that the strategy needs. An *exclusion* says which levels cannot be
combined.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from typing import Any

import msgspec
from packaging.version import Version

from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, read_yaml, relative_to_root
from parakit.config.run import OptimizerName

MATRIX_FILE = ROOT / "examples" / "matrix.yaml"
_RELEASE = re.compile(r"\d+\.\d+")
SAMPLES = 8
"""Samples per iteration of a layout that sets no number. Layouts with equal samples share a reference."""


class FlagList(tuple[str, ...]):
    """Flags and values of a command line."""

    def __new__(cls, flags: str | Sequence[str] = ()) -> FlagList:
        """Return the flags; a text is split as a shell would split it."""
        return super().__new__(cls, shlex.split(flags) if isinstance(flags, str) else flags)


class Level(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One choice of one feature."""

    factor: str
    name: str
    flags: FlagList = FlagList()
    """Megatron's flags for strategy and reference."""
    strategy_flags: FlagList = msgspec.field(default=FlagList(), name="own")
    """Megatron's flags for the strategy alone."""
    needs: tuple[str, ...] = msgspec.field(default=(), name="with")
    """Names of levels of the family without which Megatron refuses this level."""
    micro_batches: int | None = None
    """Micro batches per rank and iteration; None follows from the layout's samples."""
    optimizer: OptimizerName | None = None
    resumed: str = ""
    """Strategy that saves the checkpoint from which the cell resumes; `1` is its own, empty is none."""
    since: Version | None = None
    before: Version | None = None
    alone: bool = False
    """Whether the level is combined with no other level.

    Such a level cannot be trained on CPU ranks. It is verified once, to record the sentence of the refusal.
    """

    @property
    def path(self) -> str:
        """Feature and level as `factor/name`."""
        return f"{self.factor}/{self.name}"

    def is_in(self, megatron: Version) -> bool:
        """Return True if this version of Megatron has the level's flags."""
        return (self.since is None or self.since <= megatron) and (
            self.before is None or megatron < self.before
        )


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A strategy with its devices, and with the flags that the strategy needs."""

    name: str
    strategy: str
    devices: int = 2
    flags: FlagList = FlagList()
    """Flags for strategy and reference."""
    strategy_flags: FlagList = msgspec.field(default=FlagList(), name="own")
    """Flags for the strategy alone."""
    samples: int = msgspec.field(default=SAMPLES, name="global_batch")
    """Samples per iteration."""
    families: tuple[str, ...] = ()
    """Names of the families that are verified in this layout; empty means all."""


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tiny model and its features."""

    name: str
    model: str
    factors: dict[str, tuple[Level, ...]]
    """Levels by feature; the first level is the model's default."""
    base: FlagList = FlagList()
    """Flags of all cells of the family."""
    fuzzed: dict[str, tuple[Level, ...]] = msgspec.field(default_factory=dict, name="fuzz")
    """Further levels by feature, which only `make verify-fuzz` draws."""
    smaller: tuple[FlagList, ...] = ()
    """Flags that may make the model smaller, in the order in which they are tried."""
    layouts: tuple[Layout, ...] = ()

    @property
    def features(self) -> dict[str, tuple[Level, ...]]:
        """All levels by feature, with those that only `make verify-fuzz` draws."""
        return self.factors | self.fuzzed

    @property
    def levels(self) -> tuple[Level, ...]:
        """All levels that are not a feature's default."""
        return tuple(level for levels in self.features.values() for level in levels[1:])

    @property
    def is_resumed(self) -> bool:
        """True if every cell of the family resumes from a checkpoint."""
        return any(levels[0].resumed for levels in self.factors.values())

    def is_default(self, level: Level) -> bool:
        """Return True if the level is its feature's first level, which the model has anyway."""
        return self.features[level.factor][0] == level

    def fill_with_defaults(
        self, levels: Iterable[Level], with_fuzzed: bool = False
    ) -> tuple[Level, ...]:
        """Return one level per feature: these levels, and the defaults of all other features."""
        chosen = {level.factor: level for level in levels}
        features = self.features if with_fuzzed else self.factors
        return tuple(chosen.get(name, choices[0]) for name, choices in features.items())

    def find_level(self, path: str) -> Level:
        """Return the level of a path `factor/name`; the level must exist and be no default."""
        return next(level for level in self.levels if level.path == path)

    def add_needed_levels(self, levels: Iterable[Level]) -> tuple[Level, ...]:
        """Return the levels and the levels that they need, in the order of the features."""
        chosen = {level.factor: level for level in levels}
        for level in tuple(chosen.values()):
            for name in level.needs:
                needed = next(candidate for candidate in self.levels if candidate.name == name)
                chosen.setdefault(needed.factor, needed)
        return tuple(level for level in self.levels if chosen.get(level.factor) == level)


@dataclass(frozen=True)
class Exclusion:
    """Levels that cannot be combined, in all layouts or in some."""

    levels: tuple[str, ...]
    """Patterns of `family/factor/level`, or of the end of it."""
    layout: str = ""
    """Pattern of the layouts in which this holds; empty means all layouts."""
    release: str = ""
    """The only Megatron release in which this holds, as `major.minor`; empty means all releases."""

    def forbids(self, matched_patterns: set[str], layout: str) -> bool:
        """Return True if the layout matches, and every pattern of this exclusion is one of the matched ones."""
        if not matched_patterns.issuperset(self.levels):
            return False
        return not self.layout or fnmatchcase(layout, self.layout)


@dataclass(frozen=True)
class Matrix:
    """All families with their layouts, and all exclusions."""

    families: tuple[Family, ...]
    exclusions: tuple[Exclusion, ...]

    def select_release(self, megatron: Version) -> Matrix:
        """Return the matrix with only the exclusions that hold in this version of Megatron."""
        release = f"{megatron.major}.{megatron.minor}"
        exclusions = (
            exclusion for exclusion in self.exclusions if exclusion.release in ("", release)
        )
        return replace(self, exclusions=tuple(exclusions))

    def is_legal(self, family: Family, levels: Sequence[Level], layout: str = "") -> bool:
        """Return True if no exclusion forbids the levels in a layout.

        Without a layout, exclusions that hold in some layouts only are not considered.
        """
        matched_patterns: set[str] = set()
        for level in levels:
            matched_patterns |= _match_patterns(f"{family.name}/{level.path}", self._patterns)
        for exclusion in self.exclusions:
            is_considered = bool(layout) or not exclusion.layout
            if is_considered and exclusion.forbids(matched_patterns, layout):
                return False
        return True

    @cached_property
    def _patterns(self) -> tuple[str, ...]:
        """Distinct patterns of levels in all exclusions."""
        return tuple({pattern for exclusion in self.exclusions for pattern in exclusion.levels})

    def select_legal_levels(
        self, family: Family, layout: Layout, levels: Iterable[Level]
    ) -> tuple[Level, ...]:
        """Return the levels, with those that they need, that are legal together in a layout.

        Levels are tried in order: one that is illegal with the levels before it is left out.
        """
        legal_levels: tuple[Level, ...] = ()
        for level in levels:
            candidates = family.add_needed_levels((*legal_levels, level))
            choice = family.fill_with_defaults(candidates, with_fuzzed=True)
            if self.is_legal(family, choice, layout.name):
                legal_levels = candidates
        return legal_levels


class _MatrixFile(msgspec.Struct):
    """The keys of `examples/matrix.yaml`."""

    families: dict[str, Family]
    layouts: dict[str, Layout]
    apart: list[list[str]]


@lru_cache(maxsize=4096)
def _match_patterns(name: str, patterns: tuple[str, ...]) -> frozenset[str]:
    """Return the patterns of levels that a name matches. A matrix asks for the same names many times.

    Args:
        name: Name of a level, `family/factor/level`.
        patterns: Patterns, which may leave out the family.
    """
    return frozenset(pattern for pattern in patterns if fnmatchcase(name, f"*{pattern}"))


def load_matrix() -> Matrix:
    """Read `examples/matrix.yaml`.

    Raises:
        LaunchError: A key is unknown, a value has the wrong type, or an exclusion names no layout or two.
    """
    try:
        file = msgspec.convert(
            _add_names(read_yaml(MATRIX_FILE)), _MatrixFile, dec_hook=lambda kind, text: kind(text)
        )
    except msgspec.ValidationError as error:
        raise LaunchError(f"{relative_to_root(MATRIX_FILE)}: {error}; correct it.") from None
    families = []
    for family in file.families.values():
        layouts = tuple(
            layout
            for layout in file.layouts.values()
            if not layout.families or family.name in layout.families
        )
        families.append(msgspec.structs.replace(family, layouts=layouts))
    exclusions = tuple(_parse_exclusion(names, file.layouts) for names in file.apart)
    return Matrix(tuple(families), exclusions)


def _add_names(file: dict[str, Any]) -> dict[str, Any]:
    """Return the file's data with a `name` added to each family, layout and level: the key of its entry."""
    families = {}
    for name, family in file["families"].items():
        features = {
            key: _parse_features(family[key]) for key in ("factors", "fuzz") if key in family
        }
        families[name] = {**family, **features, "name": name}
    layouts = {name: {**layout, "name": name} for name, layout in file["layouts"].items()}
    return {**file, "families": families, "layouts": layouts}


def _parse_features(
    features: Mapping[str, Mapping[str, str | dict[str, Any]]],
) -> dict[str, list[dict[str, Any]]]:
    """Return, for each feature, a list of its levels. A level is a dictionary of the fields of `Level`."""
    return {
        factor: [_parse_level(factor, name, value) for name, value in levels.items()]
        for factor, levels in features.items()
    }


def _parse_level(factor: str, name: str, value: str | dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a level; a value that is a text is the level's flags."""
    fields = value if isinstance(value, dict) else {"flags": value}
    return {**fields, "factor": factor, "name": name}


def _parse_exclusion(names: Sequence[str], layouts: Mapping[str, Layout]) -> Exclusion:
    """Return an exclusion from its names: levels with a slash, a release such as `0.19`, at most one layout.

    The layout may be a pattern.

    Raises:
        LaunchError: Of the names that are neither levels nor a release, there are two, or one that matches no layout.
    """
    levels: list[str] = []
    releases: list[str] = []
    layout_patterns: list[str] = []
    for name in names:
        if "/" in name:
            levels.append(name)
        elif _RELEASE.fullmatch(name):
            releases.append(name)
        else:
            layout_patterns.append(name)
    layout = layout_patterns[0] if layout_patterns else ""
    matches_none = bool(layout) and not any(fnmatchcase(name, layout) for name in layouts)
    if len(layout_patterns) > 1 or matches_none:
        raise LaunchError(
            f"{relative_to_root(MATRIX_FILE)}: apart: {', '.join(names)} names no strategy, or two; name one."
        )
    return Exclusion(tuple(levels), layout=layout, release=releases[0] if releases else "")
