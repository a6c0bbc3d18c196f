"""`make verify-matrix`, `verify-fuzz` and `verify-bf16`."""

from __future__ import annotations

import subprocess
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from packaging.version import Version
from rich.console import Console

from tools.launch.code import find_entry
from tools.launch.data import ensure_small_sample
from tools.launch.options import Options
from tools.records.run import MegatronEntry
from tools.spec.errors import LaunchError
from tools.spec.files import from_root
from tools.study.matrix.cells import cells_of
from tools.study.matrix.curves import curves
from tools.study.matrix.definition import Family, Level, Matrix, load_matrix
from tools.study.matrix.fuzz import Drawn, draws
from tools.study.matrix.fuzz import fuzz as fuzz_cells
from tools.study.matrix.outcome import STATUSES, CellRecord, CellStatus
from tools.study.matrix.page import write_pages
from tools.study.matrix.running import CellVerifier, MatrixRun
from tools.study.matrix.stored import store, store_curves, store_drawn
from tools.study.verify.verifier import ForkedRanks, Verifier
from tools.verify.findings import Finding, Judged, findings

FOLDER = "matrix"
"""In the runs folder; one of each version in it."""
FUZZ_MINUTES = 30
_TAG = "core_v"
"""Of releases, in the repository."""
SHOWN_DRAWS = 20
"""By DRY_RUN=1."""


@dataclass(frozen=True)
class Asked:
    """FEATURES= and LAYOUTS=: names or patterns of families, features, levels and layouts."""

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


def matrix(given: Namespace, options: Options, console: Console) -> int:
    """Verify the cells that are asked for and write the page; 1 if one differs that no finding explains.

    Raises:
        LaunchError: A name is of nothing in the matrix, or there is no such Megatron.
    """
    asked = _asked(given)
    whole, entry = _matrix_of(options)
    known = known_findings(label(entry))
    families = asked.families(whole, Version(entry.megatron_version))
    cells = [cell for one in families for cell in cells_of(whole, one, known, options.seed)]
    if options.dry_run:
        for cell in cells:
            console.print(cell.command(), highlight=False, markup=False, soft_wrap=True)
        console.print(f"{len(cells)} cells", highlight=False)
        return 0
    with verifying(options, known, console) as verify:
        run = MatrixRun(_folder(options, entry), verify, console, _deadline(given))
        over = not run.run(cells)
    records = [run.records[cell.id] for cell in cells if cell.id in run.records]
    console.print(summary(records, len(cells)), highlight=False)
    if over:
        console.print("The time is over; the same command continues.", highlight=False)
    _publish(run, label(entry), whole, given.page or options.runs / FOLDER, console)
    return int(any(is_new(record) for record in records))


def fuzz(given: Namespace, options: Options, console: Console) -> int:
    """Draw, verify and shrink for MINUTES=; 1 if something differs that no finding explains.

    Raises:
        LaunchError: A name is of nothing in the matrix, or there is no such Megatron.
    """
    whole, entry = _matrix_of(options)
    known = known_findings(label(entry))
    families = _asked(given).families(whole, Version(entry.megatron_version))
    seed = options.seed
    cells = draws(whole, families, known, seed)
    if options.dry_run:
        for cell in islice(cells, SHOWN_DRAWS):
            console.print(cell.command(), highlight=False, markup=False, soft_wrap=True)
        return 0
    found: list[CellRecord] = []
    with verifying(replace(options, seed=Options.seed), known, console) as verify:
        minutes = _deadline(given) or time.monotonic() + 60 * FUZZ_MINUTES
        run = MatrixRun(_folder(options, entry, f"-fuzz-{seed}"), verify, console, minutes)
        for one in fuzz_cells(run, cells):
            found.append(one.record)
            console.print(f"differs: {one.record.sentence}", style="red", highlight=False)
            console.print(f"  {one.smallest.command()}", markup=False, soft_wrap=True)
    said = summary(list(run.records.values()), len(run.records))
    console.print(f"SEED={seed}: {said}", highlight=False)
    if found:
        console.print("The same command continues a search for the least that the time cut off.")
    folder = given.page or options.runs / FOLDER
    store_drawn(folder, label(entry), Drawn(seed, tuple(run.records.values()), tuple(found)))
    _write(folder, whole, console)
    return int(bool(found))


def bf16(given: Namespace, options: Options, console: Console) -> int:
    """Train the dense model in fp32 and bf16 in each layout that is asked for; 0.

    Raises:
        LaunchError: A run failed, or a name is of nothing in the matrix.
    """
    whole, entry = _matrix_of(options)
    asked = replace(_asked(given), features=("dense",))
    (family,) = asked.families(whole, Version(entry.megatron_version))
    with verifying(options, (), console) as verify:
        found = []
        for one in curves(family, options, verify.verifier.ranks, verify.verifier.folder):
            found.append(one)
            console.print(
                f"{one.layout}: from one rank {one.fp32[0]:.2g} in fp32, {one.bf16[0]:.2g} in bf16; "
                f"bf16 from fp32 {one.cost[0]:.2g}, mean {one.cost[1]:.2g}",
                highlight=False,
            )
    folder = given.page or options.runs / FOLDER
    store_curves(folder, label(entry), found)
    _write(folder, whole, console)
    return 0


def _matrix_of(options: Options) -> tuple[Matrix, MegatronEntry]:
    """What is verified of the options' Megatron."""
    entry = find_entry(options.megatron_lm)
    return load_matrix().of(Version(entry.megatron_version)), entry


def _folder(options: Options, entry: MegatronEntry, suffix: str = "") -> Path:
    return options.runs / FOLDER / f"{label(entry)}{suffix}"


def _publish(run: MatrixRun, name: str, whole: Matrix, folder: Path, console: Console) -> None:
    """Write the pages of all that is there, in PAGE= or beside the cells."""
    store(folder, name, run.records.values())
    _write(folder, whole, console)


def _write(folder: Path, whole: Matrix, console: Console) -> None:
    for path in write_pages(folder, whole):
        console.print(f"→ {from_root(path)}", highlight=False)


@contextmanager
def verifying(
    options: Options, known: tuple[Finding, ...], console: Console
) -> Iterator[CellVerifier]:
    """A verifier of the options' Megatron; its tensors are removed at the end."""
    folder = options.runs / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    ensure_small_sample(console)
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=".work-") as work,
        closing(ForkedRanks(options)) as ranks,
    ):
        yield CellVerifier(Verifier(Path(work), ranks), options, known)


def is_new(record: CellRecord) -> bool:
    """Whether a cell differs that is no known finding by itself."""
    return record.status in (CellStatus.DIFFERS, CellStatus.FLAKY) and not record.finding


def label(entry: MegatronEntry) -> str:
    """What a version is called: the release that a checkout is tagged as, else its commit or version.

    The files of the release 0.19.0 call themselves 0.19.1.
    """
    if entry.megatron_commit is None:
        return entry.megatron_version
    tag = ("tag", "--points-at", "HEAD", "--list", f"{_TAG}*")
    command = ("git", "-C", str(Path(entry.path).parent), *tag)
    tagged = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    return tagged[0].removeprefix(_TAG) if tagged else entry.megatron_commit[:8]


def known_findings(name: str) -> tuple[Finding, ...]:
    """Those that a version has and that a CPU rank can show; none of a version that nobody judged."""
    return tuple(
        one
        for one in findings()
        if one.verdict is not Judged.UNREACHABLE and name in one.present and one.patch.is_file()
    )


def summary(records: Sequence[CellRecord], cells: int) -> str:
    """How many cells came to what."""
    counts = {status: sum(one.status is status for one in records) for status in STATUSES}
    said = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"{len(records)} of {cells} cells: {said or 'none yet'}"


def _asked(given: Namespace) -> Asked:
    return Asked(getattr(given, "features", ()), given.layouts)


def _deadline(given: Namespace) -> float | None:
    return time.monotonic() + 60 * given.minutes if given.minutes else None


def _any_matches(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _every(family: Family) -> Iterator[Level]:
    for levels in family.factors.values():
        yield from levels


def _names(level: Level) -> tuple[str, str, str]:
    return (level.factor, level.name, level.path)


def _is_named(level: Level, names: Sequence[str]) -> bool:
    return not names or any(fnmatchcase(one, name) for name in names for one in _names(level))
