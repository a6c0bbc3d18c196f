"""One thing to verify: a model with some levels in a strategy, and what is known to be wrong in it."""

from __future__ import annotations

import functools
import hashlib
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_patches.patch_file import SEPARATOR
from parakit.config.files import relative_to_root
from parakit.config.flags import drop_flags, values_by_flag
from parakit.config.model import load_model
from parakit.config.run import DeviceKind, OptimizerName
from parakit.config.strategy import parse_strategy
from parakit.experiments.matrix.definition import Family, Layout, Level
from parakit.experiments.verify.pairs import MICRO_BATCH, PREFIX, LaunchPair
from parakit.launch import (
    NO_OPTIONS,
    SMALL_SAMPLE,
    Job,
    Options,
    format_make_command,
    read_patch_file,
)
from parakit.verify import Finding

_VARIABLES = (
    *("DATA", "GLOBAL_BATCH", "OPTIMIZER", "SEED"),
    *("EXTRA", "EXTRA_B", "PATCH_FILE", "MEGATRON_LM"),
)
"""Of a cell's command, in this order."""


@dataclass(frozen=True)
class MatrixCell:
    """One thing to verify."""

    family: Family
    layout: Layout
    levels: tuple[Level, ...] = ()
    """Those that are not a feature's first."""
    more: tuple[str, ...] = ()
    """Further flags of strategy and reference."""
    patch: str = ""
    """Patch files that cure known findings (`PATCH_FILE=`), so that what these would hide is seen."""
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
        return f"{PREFIX}{self.layout.strategy}-{self.family.model}-{self.layout.devices}cpu"

    @property
    def flags(self) -> tuple[str, ...]:
        """Of strategy and reference."""
        family, chosen = self.family, {level.factor for level in self.levels}
        # First levels may have flags too, where no other takes their place.
        firsts = (levels[0] for name, levels in family.factors.items() if name not in chosen)
        of_firsts, of_levels = (
            [word for level in levels for word in level.flags] for levels in (firsts, self.levels)
        )
        return (*family.base, *of_firsts, *self.layout.flags, *of_levels, *self.more)

    @property
    def own(self) -> tuple[str, ...]:
        """Of the strategy alone."""
        return (*self.layout.own, *(word for level in self.levels for word in level.own))

    @property
    def reference(self) -> tuple[object, ...]:
        """What its reference follows from: cells in which this is the same share one."""
        flags = shlex.join(self.flags)
        return (self.family.name, flags, self.samples, self.optimizer, self.patch)

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

    def pair(self, options: Options = NO_OPTIONS) -> LaunchPair:
        """What is verified, under the options of a matrix."""
        own = replace(
            options,
            seed=self.seed,
            extra=self.flags,
            global_batch_size=self.samples,
            optimizer=self.optimizer,
            data=options.data or SMALL_SAMPLE,
            iterations=None,
            patch_file=read_patch_file(self.patch) if self.patch else None,
        )
        model, layout = load_model(self.family.model), self.layout
        job = Job(layout.strategy, model, layout.devices, DeviceKind.CPU, own)
        return LaunchPair(job, flags=self.own)

    def command(self, megatron_lm: str = "") -> str:
        """What repeats it alone."""
        pair = self.pair()
        given = {**pair.variables, "MEGATRON_LM": megatron_lm}
        return format_make_command(pair.target, {name: given.get(name, "") for name in _VARIABLES})

    def only(self, levels: Iterable[Level]) -> MatrixCell:
        """The same strategy with some levels, and what these need."""
        return replace(self, levels=self.family.with_needs(levels))

    def without(self, level: Level) -> MatrixCell:
        """The same without a level and those that need it."""
        kept = [one for one in self.levels if one != level and level.name not in one.needs]
        return self.only(kept)


def apply_known_patches(cell: MatrixCell, known: Iterable[Finding]) -> MatrixCell:
    """The cell with the patches of the known findings that would be seen in it.

    What ends a run hides nothing in other cells, unless it ends every run of a strategy.
    """
    found = [
        one for one in find_uncured(cell, known) if not (one.fails and (one.flags or one.own_flags))
    ]
    before = {one.behind for one in found}  # A patch cures what comes before its own finding too.
    patches = [relative_to_root(one.patch) for one in found if one.id not in before]
    return replace(cell, patch=SEPARATOR.join(patches)) if patches else cell


def find_uncured(cell: MatrixCell, known: Iterable[Finding]) -> list[Finding]:
    """The known findings that are seen in a cell and that its patches do not cure."""
    found = [one for one in known if affects_cell(one, cell)]
    patches = cell.patch.split(SEPARATOR)
    cured = [one for one in found if relative_to_root(one.patch) in patches]
    names = {name for one in cured for name in (one.id, one.behind)}
    return [one for one in found if one.id not in names]


def affects_cell(finding: Finding, cell: MatrixCell) -> bool:
    """Whether a finding is seen in a cell: its flags, and all that its strategy splits."""
    if not finding.patch.is_file() or not has_flags(finding.own_flags, cell.own):
        return False
    if has_experts(finding.model) and not has_experts(cell.family.model):
        return False
    degrees = list_split_dimensions(cell.layout.strategy, cell.layout.devices)
    layouts = (list_split_dimensions(one, finding.devices) for one in finding.strategies)
    return has_flags(finding.flags, cell.flags) and any(one <= degrees for one in layouts)


@functools.cache
def has_experts(model: str) -> bool:
    """Whether a model's name is that of one with experts."""
    return load_model(model).shape.experts > 0


def has_flags(flags: Sequence[str], others: Sequence[str]) -> bool:
    """Whether the others have all of some flags, with their values."""
    return values_by_flag(flags).items() <= values_by_flag(others).items()


def list_split_dimensions(strategy: str, devices: int) -> set[str]:
    """Names of what a strategy splits."""
    degrees = parse_strategy(strategy, devices)
    names = ("data", "tensor", "pipeline", "context", "expert", "virtual_stages")
    found = {name for name in names if getattr(degrees, name) > 1}
    return found | {str(degrees.sharding)} - {""}


def find_finding_levels(finding: Finding, family: Family) -> tuple[Level, ...] | None:
    """The levels of a family that make up a finding's flags; None if there are none such."""
    rest = drop_flags(finding.flags, [word for word in family.base if word.startswith("--")])
    levels = [one for one in family.levels if one.flags and has_flags(one.flags, rest)]
    chosen = family.with_needs(levels)
    whole = MatrixCell(family, family.layouts[0], chosen).flags
    return chosen if has_flags(finding.flags, whole) else None
