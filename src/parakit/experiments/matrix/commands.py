"""`make verify-matrix`, `make verify-fuzz` and `make bench NAME=bf16`."""

from __future__ import annotations

import subprocess
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
"""In the runs folder; one of each version in it."""
FUZZ_MINUTES = 30
_TAG_PREFIX = "core_v"
"""Of releases, in the repository."""
SHOWN_DRAWS = 20
"""By DRY_RUN=1."""


def select_families(
    matrix: Matrix, megatron: Version, features: Sequence[str] = (), layouts: Sequence[str] = ()
) -> tuple[Family, ...]:
    """Families with the features, levels and strategies that are asked for and that a version has.

    Args:
        matrix: All of them.
        megatron: The version.
        features: FEATURES=, names or patterns of families, features and levels; empty is all.
        layouts: STRATEGIES=, likewise of strategies.

    Raises:
        LaunchError: A name is of nothing in the matrix.
    """
    every = [
        level for family in matrix.families for each in family.factors.values() for level in each
    ]
    families = {family.name for family in matrix.families}
    names = families.union(*map(_list_level_names, every))
    laid = {layout.name for family in matrix.families for layout in family.layouts}
    for variable, given, known in (("FEATURES", features, names), ("STRATEGIES", layouts, laid)):
        for name in given:
            if not _matches_any(known, (name,)):
                raise LaunchError(
                    f"{variable}={name} is none of the matrix's; name some of "
                    f"{', '.join(sorted(known))}."
                )
    rest = [name for name in features if not _matches_any(families, (name,))]
    named = [name for name in features if name not in rest]

    def is_asked(level: Level) -> bool:
        return level.is_in(megatron) and (not rest or _matches_any(_list_level_names(level), rest))

    found = []
    for family in matrix.families:
        factors = {
            factor: (levels[0], *filter(is_asked, levels[1:]))
            for factor, levels in family.factors.items()
        }
        chosen = [
            one for one in family.layouts if not layouts or _matches_any((one.name,), layouts)
        ]
        is_named = not named or _matches_any((family.name,), named)
        if is_named and chosen and (not rest or any(len(one) > 1 for one in factors.values())):
            own = msgspec.structs.replace(family, factors=factors, layouts=tuple(chosen))
            found.append(own)
    return tuple(found)


def _list_level_names(level: Level) -> tuple[str, str, str]:
    return (level.factor, level.name, level.path)


def _matches_any(names: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


@dataclass(frozen=True)
class _MatrixCommand:
    """What the three commands share: the matrix of the options' Megatron, and where its pages are."""

    given: Namespace
    options: Options
    console: Console

    @cached_property
    def entry(self) -> MegatronEntry:
        return find_entry(self.options.megatron_lm)

    @property
    def name(self) -> str:
        return name_version(self.entry)

    @cached_property
    def matrix(self) -> Matrix:
        return load_matrix().of(Version(self.entry.megatron_version))

    @cached_property
    def known(self) -> tuple[Finding, ...]:
        return list_known_findings(self.name)

    @property
    def executed(self) -> ExecutedFiles:
        """What was recorded of this version."""
        folder = (self.given.page or ROOT / "docs") / STORED
        name = f"{self.name}.executed.json"
        return next(iter(read_json_files(folder, name, dict[str, frozenset[str]])), {})

    @property
    def pages(self) -> Path:
        page: Path | None = self.given.page
        return page or self.options.runs / FOLDER

    def families(self, features: tuple[str, ...] | None = None) -> tuple[Family, ...]:
        asked = self.given.features if features is None else features
        version = Version(self.entry.megatron_version)
        return select_families(self.matrix, version, asked, self.given.strategies)

    def show(self, cells: Iterable[MatrixCell]) -> None:
        """Print their commands."""
        for cell in cells:
            say(self.console, cell.command())

    @contextmanager
    def verifier(self) -> Iterator[Verifier]:
        """On forked ranks; its tensors are removed at the end."""
        folder = self.options.runs / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        make_sample(SMALL_SAMPLE, self.console)
        with (
            tempfile.TemporaryDirectory(dir=folder, prefix=".work-") as work,
            closing(ForkedRanks(self.options)) as ranks,
        ):
            yield Verifier(Path(work), ranks)

    @contextmanager
    def run(self, suffix: str = "", minutes: float | None = None) -> Iterator[MatrixRun]:
        """Cells that are kept in a folder of this version, begun within MINUTES=."""
        minutes = self.given.minutes or minutes
        folder = self.options.runs / FOLDER / f"{self.name}{suffix}"
        with self.verifier() as verifier:
            deadline = time.monotonic() + 60 * minutes if minutes else None
            verify = CellVerifier(verifier, self.options, self.known)
            yield MatrixRun(folder, verify, self.console, deadline)

    def publish(self) -> None:
        """Write the pages of all that is kept beside them."""
        for path in write_pages(self.pages, self.matrix):
            self.console.print(f"→ {relative_to_root(path)}", highlight=False)


def verify_matrix(given: Namespace, options: Options, console: Console) -> int:
    """Verify the cells that are asked for and write the page; 1 if one differs that no finding explains.

    Raises:
        LaunchError: A name is of nothing in the matrix, or there is no such Megatron.
    """
    command = _MatrixCommand(given, options, console)
    cells = [
        cell
        for family in command.families()
        for cell in choose_cells(command.matrix, family, command.known, options.seed)
    ]
    if given.executed:
        return _record_executed_files(command)
    if given.changed:
        changed = list_changed_files(given.changed, options.megatron_lm)
        cells = select_touched_cells(cells, changed, command.executed)
        console.print(f"{len(cells)} cells can execute {', '.join(changed)}.", highlight=False)
    if options.dry_run:
        command.show(cells)
        console.print(f"{len(cells)} cells", highlight=False)
        return 0
    with command.run() as run:
        over = not run.run(cells)
    records = [run.records[cell.id] for cell in cells if cell.id in run.records]
    console.print(describe_counts(records, len(cells)), highlight=False)
    if over:
        console.print("The time is over; the same command continues.", highlight=False)
    store_cells(command.pages, command.name, run.records.values())
    command.publish()
    return int(any(record.is_wrong and not record.finding for record in records))


def _record_executed_files(command: _MatrixCommand) -> int:
    found = command.executed
    with command.verifier() as verifier:
        families, ranks = command.families(), verifier.ranks
        for name, files in record_executed_files(
            command.matrix, families, command.options, ranks, verifier.folder
        ):
            command.console.print(f"{name}: {len(files)} files", highlight=False)
            found = add_executed_files(found, name, files)
            in_order = {name: sorted(found[name]) for name in sorted(found)}
            store_json(command.pages, f"{command.name}.executed.json", in_order)
    return 0


def run_fuzz(given: Namespace, options: Options, console: Console) -> int:
    """Draw, verify and shrink for MINUTES=; 1 if something differs that no finding explains.

    Raises:
        LaunchError: A name is of nothing in the matrix, or there is no such Megatron.
    """
    command, seed = _MatrixCommand(given, options, console), options.seed
    cells = draw_cells(command.matrix, command.families(), command.known, seed)
    if options.dry_run:
        command.show(islice(cells, SHOWN_DRAWS))
        return 0
    found: list[CellRecord] = []
    with command.run(f"-fuzz-{seed}", FUZZ_MINUTES) as run:
        for one in run.draw(cells):
            found.append(one)
            console.print(f"differs: {one.sentence}", style="red", highlight=False)
            console.print(f"  {one.smallest}", markup=False, soft_wrap=True)
    records = tuple(run.records.values())
    console.print(f"SEED={seed}: {describe_counts(records, len(records))}", highlight=False)
    if found:
        console.print("The same command continues a search for the least that the time cut off.")
    drawn = FuzzResult(seed, records, tuple(found))
    store_json(command.pages, f"{command.name}.fuzz-{seed}.json", drawn)
    command.publish()
    return int(bool(found))


def run_bf16_bench(given: Namespace, options: Options, console: Console) -> int:
    """Train the dense model in fp32 and bf16 in each strategy that is asked for; 0.

    Raises:
        LaunchError: A run failed, or a name is of nothing in the matrix.
    """
    command = _MatrixCommand(given, options, console)
    (family,) = command.families(("dense",))
    found = []
    with command.verifier() as verifier:
        for one in compare_curves(family, options, verifier.ranks, verifier.folder):
            found.append(one)
            console.print(
                f"{one.layout}: from one rank {one.fp32[0]:.2g} in fp32, {one.bf16[0]:.2g} in bf16; "
                f"bf16 from fp32 {one.cost[0]:.2g}, mean {one.cost[1]:.2g}",
                highlight=False,
            )
    store_json(command.pages, f"{command.name}.bf16.json", found)
    command.publish()
    return 0


def name_version(entry: MegatronEntry) -> str:
    """What a version is called: the release that a checkout is tagged as, else its commit or version.

    The files of the release 0.19.0 call themselves 0.19.1.
    """
    if entry.megatron_commit is None:
        return entry.megatron_version
    tag = ("tag", "--points-at", "HEAD", "--list", f"{_TAG_PREFIX}*")
    command = ("git", "-C", str(Path(entry.path).parent), *tag)
    tagged = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return tagged[0].removeprefix(_TAG_PREFIX) if tagged else entry.megatron_commit[:8]


def list_known_findings(name: str) -> tuple[Finding, ...]:
    """Those that a version has and that a CPU rank can show; none of a version that nobody judged."""
    return tuple(
        one
        for one in list_findings()
        if one.verdict is not FindingStatus.UNREACHABLE
        and name in one.present
        and one.patch.is_file()
    )


def describe_counts(records: Sequence[CellRecord], cells: int) -> str:
    """How many cells came to what."""
    return f"{len(records)} of {cells} cells: {format_counts(records) or 'none yet'}"
