"""Define a cell of the parity matrix, and find out which known bugs of Megatron show in the cell.

A cell is one thing to verify: a model with some levels of its features, in one layout. A *finding* is a known bug
of Megatron, with a patch that cures the bug.
"""

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
    *("DATA", "GLOBAL_BATCH", "OPTIMIZER", "SEED", "REFERENCE", "RESUMED"),
    *("EXTRA", "EXTRA_B", "PATCH_FILE", "MEGATRON_LM"),
)
"""Make variables of a cell's command, in this order."""


@dataclass(frozen=True)
class MatrixCell:
    """A model with some levels in a layout, to be verified against a reference."""

    family: Family
    layout: Layout
    levels: tuple[Level, ...] = ()
    """The chosen levels that are not a feature's default."""
    more: tuple[str, ...] = ()
    """Further flags for strategy and reference."""
    patch: str = ""
    """Patch files (`PATCH_FILE=`) that cure known findings, which would otherwise hide further bugs."""
    seed: int = Options.seed

    @property
    def id(self) -> str:
        """Family, layout, and a hash of all flags and variables that the cell's runs depend on."""
        parts = (
            self.target,
            *self.flags,
            "own",  # Separates the flags of both runs from those of the strategy alone.
            *self.strategy_flags,
            str(self.samples),
            str(self.optimizer),
            self.patch,
            str(self.seed),
            # Ids of cells that do not resume stay as they were before cells could resume.
            *((self.resumed,) if self.resumed else ()),
        )
        digest = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:10]
        return f"{self.family.name}.{self.layout.name}.{digest}"

    @property
    def target(self) -> str:
        """Make target that verifies the cell's strategy, model and devices."""
        return f"{PREFIX}{self.layout.strategy}-{self.family.model}-{self.layout.devices}cpu"

    @property
    def flags(self) -> tuple[str, ...]:
        """Megatron's flags that strategy and reference have in common.

        They are those of the family, of its default levels, of the layout, of the chosen levels, and `more`.
        """
        changed_features = {level.factor for level in self.levels}
        # A default level may have flags too, which count unless another level replaces the default.
        default_flags: list[str] = []
        for feature, levels in self.family.factors.items():
            if feature not in changed_features:
                default_flags += levels[0].flags
        level_flags: list[str] = []
        for level in self.levels:
            level_flags += level.flags
        return (
            *self.family.base,
            *default_flags,
            *self.layout.flags,
            *level_flags,
            *self.more,
        )

    @property
    def strategy_flags(self) -> tuple[str, ...]:
        """Megatron's flags for the strategy alone."""
        level_flags = [flag for level in self.levels for flag in level.strategy_flags]
        return (*self.layout.strategy_flags, *level_flags)

    @property
    def reference_key(self) -> tuple[object, ...]:
        """Key of the reference run; cells with equal keys share it.

        It holds family, flags, samples, optimizer, patches, and whether the cell resumes, which takes an iteration
        more.
        """
        flags = shlex.join(self.flags)
        is_resumed = bool(self.resumed)
        return (self.family.name, flags, self.samples, self.optimizer, self.patch, is_resumed)

    @property
    def samples(self) -> int:
        """Samples per iteration, over all ranks."""
        micro_batches = [level.micro_batches for level in self.levels if level.micro_batches]
        if not micro_batches:
            return self.layout.samples
        degrees = parse_strategy(self.layout.strategy, self.layout.devices)
        return MICRO_BATCH * degrees.data * micro_batches[-1]

    @property
    def optimizer(self) -> OptimizerName:
        """Optimizer of the last level that sets one; AdamW if none does."""
        optimizers = [level.optimizer for level in self.levels if level.optimizer]
        return optimizers[-1] if optimizers else OptimizerName.ADAMW

    @property
    def resumed(self) -> str:
        """Strategy that saves the checkpoint from which the cell resumes (see `Level.resumed`)."""
        levels = self.family.fill_with_defaults(self.levels)
        strategies = [level.resumed for level in levels if level.resumed]
        return strategies[-1] if strategies else ""

    def make_pair(self, options: Options = NO_OPTIONS) -> LaunchPair:
        """Return the pair of strategy and reference to verify. The reference never resumes.

        The cell sets seed, flags, batch, optimizer and patches; `options` set all other variables.
        """
        cell_options = replace(
            options,
            seed=self.seed,
            extra=self.flags,
            global_batch_size=self.samples,
            optimizer=self.optimizer,
            data=options.data or SMALL_SAMPLE,
            iterations=None,
            patch_file=read_patch_file(self.patch) if self.patch else None,
        )
        layout = self.layout
        job = Job(
            layout.strategy,
            load_model(self.family.model),
            devices=layout.devices,
            device=DeviceKind.CPU,
            options=cell_options,
        )
        # A pair that resumes would otherwise be compared with its own strategy, which cells cannot share.
        reference = "baseline" if self.resumed else ""
        return LaunchPair(job, reference, self.strategy_flags, resumed=self.resumed)

    def format_command(self, megatron_lm: str = "") -> str:
        """Return the make command that verifies this cell alone."""
        pair = self.make_pair()
        variables = {**pair.variables, "MEGATRON_LM": megatron_lm}
        return format_make_command(
            pair.target, {name: variables.get(name, "") for name in _VARIABLES}
        )

    def keep_levels(self, levels: Iterable[Level]) -> MatrixCell:
        """Return the cell with only these levels, and the levels that they need."""
        return replace(self, levels=self.family.add_needed_levels(levels))

    def remove_level(self, level: Level) -> MatrixCell:
        """Return the cell without a level, and without the levels that need it."""
        return self.keep_levels(
            other for other in self.levels if other != level and level.name not in other.needs
        )


def apply_known_patches(cell: MatrixCell, known: Iterable[Finding]) -> MatrixCell:
    """Return the cell with patches for the known findings that would show in it and could hide other bugs.

    The cell is unchanged if there is no such finding. A finding that ends runs under certain flags is not patched,
    because it hides nothing in cells without these flags.
    """
    findings = []
    for finding in find_uncured(cell, known):
        needs_flags = bool(finding.flags or finding.own_flags)
        if not (finding.fails and needs_flags):
            findings.append(finding)
    # The patch of a finding also cures the finding that it is `behind`.
    cured_by_others = {finding.behind for finding in findings}
    patches = [
        relative_to_root(finding.patch) for finding in findings if finding.id not in cured_by_others
    ]
    if not patches:
        return cell
    return replace(cell, patch=SEPARATOR.join(patches))


def find_uncured(cell: MatrixCell, known: Iterable[Finding]) -> list[Finding]:
    """Return the known findings that show in a cell and that the cell's patches do not cure."""
    findings = [finding for finding in known if affects_cell(finding, cell)]
    patches = cell.patch.split(SEPARATOR)
    cured = [finding for finding in findings if relative_to_root(finding.patch) in patches]
    cured_ids = {name for finding in cured for name in (finding.id, finding.behind)}
    return [finding for finding in findings if finding.id not in cured_ids]


def affects_cell(finding: Finding, cell: MatrixCell) -> bool:
    """Return True if the finding's error is expected in the cell.

    The cell must have all flags of the finding, and its strategy must split each dimension that one of the
    finding's strategies splits. A finding without a patch file affects no cell, a finding on a model with
    experts affects only cells whose model has experts, and a finding on a resumed run affects only cells that resume
    from a checkpoint of the same strategy.
    """
    if finding.resumed and finding.resumed != cell.resumed:
        return False
    if not finding.patch.is_file() or not has_flags(finding.own_flags, cell.strategy_flags):
        return False
    if has_experts(finding.model) and not has_experts(cell.family.model):
        return False
    if not has_flags(finding.flags, cell.flags):
        return False
    dimensions = list_split_dimensions(cell.layout.strategy, cell.layout.devices)
    return any(
        list_split_dimensions(strategy, finding.devices) <= dimensions
        for strategy in finding.strategies
    )


@functools.cache
def has_experts(model: str) -> bool:
    """Return True if the model of this name is a mixture of experts."""
    return load_model(model).shape.experts > 0


def has_flags(flags: Sequence[str], all_flags: Sequence[str]) -> bool:
    """Return True if `all_flags` holds every flag of `flags` with the same value."""
    return values_by_flag(flags).items() <= values_by_flag(all_flags).items()


def list_split_dimensions(strategy: str, devices: int) -> set[str]:
    """Return the parallel dimensions that a strategy splits, such as `tensor`, and its sharding."""
    degrees = parse_strategy(strategy, devices)
    names = ("data", "tensor", "pipeline", "context", "expert", "virtual_stages")
    dimensions = {name for name in names if getattr(degrees, name) > 1}
    return dimensions | {str(degrees.sharding)} - {""}


def find_finding_levels(finding: Finding, family: Family) -> tuple[Level, ...] | None:
    """Return the levels of a family that give a finding's flags; None if no levels give them all."""
    base_flag_names = [word for word in family.base if word.startswith("--")]
    missing_flags = drop_flags(finding.flags, base_flag_names)
    levels = [
        level for level in family.levels if level.flags and has_flags(level.flags, missing_flags)
    ]
    chosen = family.add_needed_levels(levels)
    cell_flags = MatrixCell(family, family.layouts[0], chosen).flags
    if not has_flags(finding.flags, cell_flags):
        return None
    return chosen
