"""Run `make verify-matrix`, `make verify-fuzz` and `make bench NAME=bf16`."""

from __future__ import annotations

import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import islice
from pathlib import Path

import msgspec
from packaging.version import Version
from rich.console import Console

from megatron_patches.context import run_git
from parakit.artifacts.run import MegatronEntry
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, relative_to_root
from parakit.experiments.matrix.cell import MatrixCell
from parakit.experiments.matrix.cells import choose_cells, draw_cells
from parakit.experiments.matrix.curves import compare_curves
from parakit.experiments.matrix.definition import Family, Level, Matrix, load_matrix
from parakit.experiments.matrix.outcome import (
    STORED,
    CellRecord,
    FuzzResult,
    read_json_files,
    store_cells,
    store_json,
)
from parakit.experiments.matrix.page import format_counts, write_pages
from parakit.experiments.matrix.running import CellVerifier, MatrixRun
from parakit.experiments.matrix.touched import (
    ExecutedFiles,
    add_executed_files,
    list_changed_files,
    record_executed_files,
    select_touched_cells,
)
from parakit.experiments.verify.verifier import ForkedRanks, Verifier
from parakit.formatting.terminal import say
from parakit.launch import SMALL_SAMPLE, Options, find_entry, make_sample
from parakit.verify import Finding, FindingStatus, list_findings

FOLDER = "matrix"
"""Folder in the runs folder; it holds a folder per version of Megatron."""
FUZZ_MINUTES = 30
TAG_PREFIX = "core_v"
"""Prefix of release tags in Megatron's repository."""
SHOWN_DRAWS = 20
"""Number of draws that DRY_RUN=1 prints."""


def select_families(
    matrix: Matrix, megatron: Version, features: Sequence[str] = (), layouts: Sequence[str] = ()
) -> tuple[Family, ...]:
    """Return the requested families, each with only its requested levels and layouts.

    The first level of every feature stays, because it is the feature's default. A family without a requested
    layout is left out. A family without a requested level is left out, too, if `features` names levels.

    Args:
        matrix: The matrix of all families.
        megatron: Version of Megatron; levels whose flags it lacks are left out.
        features: FEATURES=, names or patterns of families, features and levels; empty means all. A name that
            matches a family selects families, and every other name selects levels.
        layouts: STRATEGIES=, names or patterns of layouts; empty means all.

    Raises:
        LaunchError: A name matches nothing in the matrix.
    """
    family_names = {family.name for family in matrix.families}
    _refuse_unknown_names(matrix, family_names, features, layouts)
    requested_families: list[str] = []
    requested_levels: list[str] = []
    for name in features:
        if _matches_any(family_names, (name,)):
            requested_families.append(name)
        else:
            requested_levels.append(name)
    families = []
    for family in matrix.families:
        if requested_families and not _matches_any((family.name,), requested_families):
            continue
        factors = _select_levels(family, megatron, requested_levels)
        chosen_layouts = family.layouts
        if layouts:
            chosen_layouts = tuple(
                layout for layout in family.layouts if _matches_any((layout.name,), layouts)
            )
        has_defaults_only = all(len(levels) == 1 for levels in factors.values())
        lacks_levels = bool(requested_levels) and has_defaults_only
        if chosen_layouts and not lacks_levels:
            chosen = msgspec.structs.replace(family, factors=factors, layouts=chosen_layouts)
            families.append(chosen)
    return tuple(families)


def _select_levels(
    family: Family, megatron: Version, requested: Sequence[str]
) -> dict[str, tuple[Level, ...]]:
    """Return a family's levels by feature: each default, and the requested levels whose flags this Megatron has.

    Without requested names, all levels are requested.
    """
    factors = {}
    for factor, (default, *other_levels) in family.factors.items():
        selected = [default]
        for level in other_levels:
            is_requested = not requested or _matches_any(_list_level_names(level), requested)
            if is_requested and level.is_in(megatron):
                selected.append(level)
        factors[factor] = tuple(selected)
    return factors


def _refuse_unknown_names(
    matrix: Matrix, family_names: set[str], features: Sequence[str], layouts: Sequence[str]
) -> None:
    """Raise LaunchError for the first name that matches no family, feature, level or layout."""
    names = set(family_names)
    layout_names: set[str] = set()
    for family in matrix.families:
        layout_names.update(layout.name for layout in family.layouts)
        for levels in family.factors.values():
            for level in levels:
                names.update(_list_level_names(level))
    _refuse_unmatched("FEATURES", features, names)
    _refuse_unmatched("STRATEGIES", layouts, layout_names)


def _refuse_unmatched(variable: str, patterns: Iterable[str], known: set[str]) -> None:
    """Raise LaunchError for the first pattern of a variable that matches no known name."""
    for pattern in patterns:
        if not _matches_any(known, (pattern,)):
            raise LaunchError(
                f"{variable}={pattern} is none of the matrix's; name some of "
                f"{', '.join(sorted(known))}."
            )


def _list_level_names(level: Level) -> tuple[str, str, str]:
    """Return the names by which FEATURES= may request a level."""
    return (level.factor, level.name, level.path)


def _matches_any(names: Iterable[str], patterns: Iterable[str]) -> bool:
    """Return True if one of the names matches one of the patterns."""
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


@dataclass(frozen=True)
class _MatrixCommand:
    """Shared parts of the three commands: arguments, the matrix of their Megatron, verifiers and pages."""

    arguments: Namespace
    options: Options
    console: Console

    @cached_property
    def entry(self) -> MegatronEntry:
        """The Megatron that trains."""
        return find_entry(self.options.megatron_lm)

    @property
    def name(self) -> str:
        """Name of the version, as in folders and files."""
        return name_version(self.entry)

    @cached_property
    def matrix(self) -> Matrix:
        """The matrix with the exclusions that hold in this version."""
        return load_matrix().select_release(Version(self.entry.megatron_version))

    @cached_property
    def known(self) -> tuple[Finding, ...]:
        """Known bugs of this version that CPU ranks can show."""
        return list_known_findings(self.name)

    @property
    def executed(self) -> ExecutedFiles:
        """Executed files that were recorded with this version; empty if nothing was recorded."""
        folder = (self.arguments.page or ROOT / "docs") / STORED
        name = f"{self.name}.executed.json"
        return next(iter(read_json_files(folder, name, dict[str, frozenset[str]])), {})

    @property
    def pages(self) -> Path:
        """Folder of the pages: PAGE=, or the matrix' folder in the runs folder."""
        page: Path | None = self.arguments.page
        return page or self.options.runs / FOLDER

    def select_families(self, features: tuple[str, ...] | None = None) -> tuple[Family, ...]:
        """Return the families that FEATURES= (or `features`) and STRATEGIES= request."""
        requested = self.arguments.features if features is None else features
        version = Version(self.entry.megatron_version)
        return select_families(self.matrix, version, requested, self.arguments.strategies)

    def print_commands(self, cells: Iterable[MatrixCell]) -> None:
        """Print the make command of each cell."""
        for cell in cells:
            say(self.console, cell.format_command())

    @contextmanager
    def open_verifier(self) -> Iterator[Verifier]:
        """Open a verifier on forked ranks, with a temporary folder that is removed at the end."""
        folder = self.options.runs / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        make_sample(SMALL_SAMPLE, self.console)
        with (
            tempfile.TemporaryDirectory(dir=folder, prefix=".work-") as work,
            closing(ForkedRanks(self.options)) as ranks,
        ):
            yield Verifier(Path(work), ranks)

    @contextmanager
    def open_run(self, suffix: str = "", minutes: float | None = None) -> Iterator[MatrixRun]:
        """Open the run that stores records in this version's folder and ends after MINUTES= (or `minutes`)."""
        minutes = self.arguments.minutes or minutes
        folder = self.options.runs / FOLDER / f"{self.name}{suffix}"
        with self.open_verifier() as verifier:
            deadline = time.monotonic() + 60 * minutes if minutes else None
            verify = CellVerifier(verifier, self.options, self.known)
            yield MatrixRun(folder, verify, self.console, deadline)

    def publish(self) -> None:
        """Write the pages of all stored results, and print the pages' paths."""
        for path in write_pages(self.pages, self.matrix):
            self.console.print(f"→ {relative_to_root(path)}", highlight=False)


def verify_matrix(variables: Namespace, options: Options, console: Console) -> int:
    """Verify the requested cells and write the pages; return 1 if a cell differs that no finding explains.

    With EXECUTED=1 the files that layouts and levels execute are recorded, and nothing is verified.

    Raises:
        LaunchError: A name matches nothing in the matrix, or there is no such Megatron.
    """
    command = _MatrixCommand(variables, options, console)
    cells: list[MatrixCell] = []
    for family in command.select_families():
        cells += choose_cells(command.matrix, family, command.known, options.seed)
    if variables.executed:
        _record_executed_files(command)
        return 0
    if variables.changed:
        changed = list_changed_files(variables.changed, options.megatron_lm)
        cells = select_touched_cells(cells, changed, command.executed)
        console.print(f"{len(cells)} cells can execute {', '.join(changed)}.", highlight=False)
    if options.dry_run:
        command.print_commands(cells)
        console.print(f"{len(cells)} cells", highlight=False)
        return 0
    with command.open_run() as run:
        is_complete = run.run(cells)
    records = [run.records[cell.id] for cell in cells if cell.id in run.records]
    console.print(describe_counts(records, len(cells)), highlight=False)
    if not is_complete:
        console.print("The time is over; the same command continues.", highlight=False)
    store_cells(command.pages, command.name, run.records.values())
    command.publish()
    has_new_error = any(record.is_wrong and not record.finding for record in records)
    return 1 if has_new_error else 0


def _record_executed_files(command: _MatrixCommand) -> None:
    """Record the files that the requested layouts and levels execute; store them after each one."""
    executed = command.executed
    with command.open_verifier() as verifier:
        recorded = record_executed_files(
            command.matrix,
            command.select_families(),
            options=command.options,
            ranks=verifier.ranks,
            folder=verifier.folder,
        )
        for name, files in recorded:
            command.console.print(f"{name}: {len(files)} files", highlight=False)
            executed = add_executed_files(executed, name, files)
            in_order = {name: sorted(executed[name]) for name in sorted(executed)}
            store_json(command.pages, f"{command.name}.executed.json", in_order)


def run_fuzz(variables: Namespace, options: Options, console: Console) -> int:
    """Verify random cells for MINUTES= and shrink those that differ; return 1 if no finding explains one.

    Raises:
        LaunchError: A name matches nothing in the matrix, or there is no such Megatron.
    """
    command, seed = _MatrixCommand(variables, options, console), options.seed
    cells = draw_cells(command.matrix, command.select_families(), command.known, seed)
    if options.dry_run:
        command.print_commands(islice(cells, SHOWN_DRAWS))
        return 0
    differing: list[CellRecord] = []
    with command.open_run(f"-fuzz-{seed}", FUZZ_MINUTES) as run:
        for record in run.verify_draws(cells):
            differing.append(record)
            console.print(f"differs: {record.sentence}", style="red", highlight=False)
            console.print(f"  {record.smallest}", markup=False, soft_wrap=True)
    records = tuple(run.records.values())
    console.print(f"SEED={seed}: {describe_counts(records, len(records))}", highlight=False)
    if differing:
        console.print(
            "The same command continues a search for a smaller cell that the time cut off."
        )
    result = FuzzResult(seed, records, tuple(differing))
    store_json(command.pages, f"{command.name}.fuzz-{seed}.json", result)
    command.publish()
    return int(bool(differing))


def run_bf16_bench(variables: Namespace, options: Options, console: Console) -> int:
    """Train the dense model in fp32 and bf16 in each requested layout, write the page, and return 0.

    Raises:
        LaunchError: A run failed, or a name matches nothing in the matrix.
    """
    command = _MatrixCommand(variables, options, console)
    (family,) = command.select_families(("dense",))
    all_distances = []
    with command.open_verifier() as verifier:
        for distances in compare_curves(family, options, verifier.ranks, verifier.folder):
            all_distances.append(distances)
            largest_fp32, _ = distances.fp32
            largest_bf16, _ = distances.bf16
            largest_cost, mean_cost = distances.cost
            console.print(
                f"{distances.layout}: from one rank {largest_fp32:.2g} in fp32, {largest_bf16:.2g} in bf16; "
                f"bf16 from fp32 {largest_cost:.2g}, mean {mean_cost:.2g}",
                highlight=False,
            )
    store_json(command.pages, f"{command.name}.bf16.json", all_distances)
    command.publish()
    return 0


def name_version(entry: MegatronEntry) -> str:
    """Return the name of a version of Megatron.

    It is the version of an installed package. For a checkout it is the release that the commit is tagged as, else
    the first eight digits of the commit. The version in a checkout's files is not used: the files of the release
    0.19.0 say 0.19.1.
    """
    if entry.megatron_commit is None:
        return entry.megatron_version
    checkout = Path(entry.path).parent
    tags = run_git(checkout, "tag", "--points-at", "HEAD", "--list", f"{TAG_PREFIX}*").split()
    return tags[0].removeprefix(TAG_PREFIX) if tags else entry.megatron_commit[:8]


def list_known_findings(name: str) -> tuple[Finding, ...]:
    """Return the findings that a version has and that a CPU rank can show; empty for a version nobody judged."""
    known = []
    for finding in list_findings():
        is_reachable = finding.verdict is not FindingStatus.UNREACHABLE
        if is_reachable and name in finding.present and finding.patch.is_file():
            known.append(finding)
    return tuple(known)


def describe_counts(records: Sequence[CellRecord], cells: int) -> str:
    """Return the number of records per status, such as `4 of 9 cells: 3 held, 1 differs`."""
    return f"{len(records)} of {cells} cells: {format_counts(records) or 'none yet'}"
