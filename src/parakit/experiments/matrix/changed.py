"""Find out which cells of the parity matrix behave differently in two versions of Megatron (`make changed`).

Each cell is trained in both versions from the same weights on the same batches. `cell_change.py` compares what the two
runs print, send and hold, and the tensors of one iteration. A compared cell is stored, so a repeated command continues.
"""

from __future__ import annotations

import re
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.version import Version
from rich.console import Console

from parakit.artifacts.io import write_atomically, write_record
from parakit.artifacts.run import MegatronEntry
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, relative_to_root
from parakit.experiments.matrix.cell import MatrixCell, affects_cell
from parakit.experiments.matrix.cell_change import (
    Aspect,
    CellChange,
    CellComparer,
    ChangeStatus,
    VersionRunner,
)
from parakit.experiments.matrix.commands import (
    FOLDER,
    TAG_PREFIX,
    list_known_findings,
    name_version,
    select_families,
)
from parakit.experiments.matrix.definition import Matrix, load_matrix
from parakit.experiments.matrix.outcome import read_json_files
from parakit.experiments.matrix.touched import list_component_cells
from parakit.experiments.verify.commits import find_commit, make_worktree
from parakit.experiments.verify.verifier import ForkedRanks
from parakit.formatting.html import environment
from parakit.formatting.table import markdown_rows
from parakit.formatting.terminal import say
from parakit.formatting.units import plural
from parakit.launch import SMALL_SAMPLE, Options, find_entry, make_sample

_RELEASE = re.compile(r"\d+\.\d+\.\d+\w*")
_TEMPLATES = Path(__file__).parent / "templates"
_COLORS = {
    ChangeStatus.SAME: "green",
    ChangeStatus.CHANGED: "red",
    ChangeStatus.RUNS_IN_NEITHER: "yellow",
}


@dataclass(frozen=True)
class ComparedVersion:
    """One of the two versions of Megatron."""

    name: str
    """Version of a release, else the first digits of the commit."""
    entry: MegatronEntry
    checkout: Path | None
    """Worktree of the commit; None for the installed package."""

    @property
    def release(self) -> Version:
        """Version that the files of this Megatron state."""
        return Version(self.entry.megatron_version)

    @property
    def text(self) -> str:
        """Name, and the commit of a checkout."""
        commit = self.entry.megatron_commit
        return f"{self.name} ({commit})" if commit else self.name

    def set_megatron(self, options: Options) -> Options:
        """Return the options of a run in this Megatron, which nobody needs to have tried before."""
        return replace(options, megatron_lm=self.checkout, allow_unknown_megatron=True)


@contextmanager
def open_version(
    variable: str, name: str, megatron_lm: Path | None, folder: Path
) -> Iterator[ComparedVersion]:
    """Yield a version of Megatron that can be trained; its worktree is removed at the end of the `with` block.

    Args:
        variable: `A` or `B`, for messages.
        name: A release such as `0.18.2`, or a commit, a branch or a tag of the clone.
        megatron_lm: A clone of Megatron-LM; None if the name is the installed release.
        folder: Folder for the worktree.

    Raises:
        LaunchError: The name is neither the installed release nor in the clone.
    """
    installed = find_entry(None)
    if name == installed.megatron_version:
        yield ComparedVersion(name, installed, checkout=None)
        return
    if megatron_lm is None:
        raise LaunchError(
            f"{variable}={name} is not the installed Megatron, which is {installed.megatron_version}; "
            "set MEGATRON_LM= to a clone of Megatron-LM that has it."
        )
    revision = f"{TAG_PREFIX}{name}" if _RELEASE.fullmatch(name) else name
    commit = find_commit(megatron_lm, revision)
    if not commit:
        raise LaunchError(
            f"{variable}={name}: MEGATRON_LM={megatron_lm} has no commit '{revision}'; "
            "fetch it there, or name another one."
        )
    with make_worktree(megatron_lm.resolve(), commit, folder / variable) as checkout:
        entry = find_entry(checkout)
        yield ComparedVersion(name_version(entry), entry, checkout)


def list_compared_cells(
    matrix: Matrix,
    releases: Sequence[Version],
    features: Sequence[str] = (),
    layouts: Sequence[str] = (),
) -> list[MatrixCell]:
    """Return the cells to compare: each layout as it is, and each level in the first layout that can have it.

    Each cell has at most one level, with the levels that it needs, so that a change shows its feature.

    Args:
        matrix: The matrix of all families.
        releases: Versions of Megatron; levels whose flags one of them lacks are left out.
        features: FEATURES=, names or patterns of families, features and levels; empty means all.
        layouts: STRATEGIES=, names or patterns of layouts; empty means all.

    Raises:
        LaunchError: A name matches nothing in the matrix.
    """
    for index, release in enumerate(releases):
        # Names are checked against the full matrix, which the first selection has.
        names = (features, layouts) if index == 0 else ((), ())
        matrix = replace(matrix, families=select_families(matrix, release, *names))
    release_names = {f"{release.major}.{release.minor}" for release in releases}
    exclusions = []
    for exclusion in matrix.exclusions:
        # An exclusion without a release holds in all releases.
        if not exclusion.release or exclusion.release in release_names:
            exclusions.append(exclusion)
    matrix = replace(matrix, exclusions=tuple(exclusions))
    cells: dict[str, MatrixCell] = {}
    for family in matrix.families:
        if family.is_resumed:
            continue  # Both versions are trained without a checkpoint.
        for _, cell in list_component_cells(matrix, family):
            cells.setdefault(cell.id, cell)
    return list(cells.values())


def list_findings_in_one(old: str, new: str, cell: MatrixCell) -> tuple[str, ...]:
    """Return sentences on the known findings that a cell shows in one version and not in the other.

    Args:
        old: Name of the older version.
        new: Name of the newer version.
        cell: The cell.
    """
    old_findings = {finding.id: finding for finding in list_known_findings(old)}
    new_findings = {finding.id: finding for finding in list_known_findings(new)}
    in_old_alone = old_findings.keys() - new_findings.keys()
    in_new_alone = new_findings.keys() - old_findings.keys()
    sentences = []
    for name, finding in (old_findings | new_findings).items():
        if not affects_cell(finding, cell):
            continue
        if name in in_old_alone:
            sentences.append(f"{name} is a known finding in {old} alone")
        elif name in in_new_alone:
            sentences.append(f"{name} is a known finding in {new} alone")
    return tuple(sentences)


def compare_versions(variables: Namespace, options: Options, console: Console) -> int:
    """Run `make changed`: compare the requested cells in A= and B=, write the page, and return 1 if any changed.

    Args:
        variables: A=, B=, FEATURES=, STRATEGIES=, MINUTES= and PAGE=.
        options: Make variables of all runs; `megatron_lm` is a clone that has both versions.
        console: Shows a line per cell.

    Raises:
        LaunchError: A version or a name is unknown.
    """
    pages = options.runs / FOLDER
    pages.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(dir=pages, prefix=".work-")
        work = ROOT / stack.enter_context(temporary)
        old = stack.enter_context(open_version("A", variables.a, options.megatron_lm, work))
        new = stack.enter_context(open_version("B", variables.b, options.megatron_lm, work))
        cells = list_compared_cells(
            load_matrix(),
            (old.release, new.release),
            features=variables.features,
            layouts=variables.strategies,
        )
        if options.dry_run:
            for cell in cells:
                say(console, cell.format_command())
            say(console, plural(len(cells), "cell"))
            return 0
        make_sample(SMALL_SAMPLE, console)
        comparer = CellComparer(
            old=stack.enter_context(open_runner(old, options)),
            new=stack.enter_context(open_runner(new, options)),
            folder=work,
        )
        comparison = VersionComparison(old, new, comparer, pages, console)
        deadline = time.monotonic() + 60 * variables.minutes if variables.minutes else None
        changes = comparison.compare_cells(cells, deadline)
    page = write_changes_page(variables.page or pages, old, new, changes, len(cells))
    say(console, f"{len(changes)} of {plural(len(cells), 'cell')}: {count_statuses(changes)}")
    if len(changes) < len(cells):
        say(console, "The time is over; the same command continues.")
    say(console, f"→ {relative_to_root(page)}")
    has_changes = any(change.status is ChangeStatus.CHANGED for change in changes)
    return 1 if has_changes else 0


@contextmanager
def open_runner(version: ComparedVersion, options: Options) -> Iterator[VersionRunner]:
    """Yield a runner on ranks that are forked from a version of Megatron; they end with the `with` block."""
    version_options = version.set_megatron(options)
    with closing(ForkedRanks(version_options)) as ranks:
        yield VersionRunner(ranks, version_options)


@dataclass(frozen=True)
class VersionComparison:
    """Comparison of cells in two versions of Megatron, which stores each compared cell in a folder."""

    old: ComparedVersion
    new: ComparedVersion
    comparer: CellComparer
    pages: Path
    """Folder of the matrix, in which the folder of stored cells is made."""
    console: Console

    def compare_cells(
        self, cells: Sequence[MatrixCell], deadline: float | None = None
    ) -> list[CellChange]:
        """Return the changes of cells: stored ones are read, and the others are compared, stored and printed.

        Args:
            cells: Cells to compare.
            deadline: Value of `time.monotonic` after which no cell is begun; None is no limit.
        """
        folder = self.pages / f"changed-{self.old.name}-{self.new.name}"
        folder.mkdir(parents=True, exist_ok=True)
        stored = {change.id: change for change in read_json_files(folder, "*.json", CellChange)}
        changes = []
        for cell in cells:
            change = stored.get(cell.id)
            if change is None:
                if deadline is not None and time.monotonic() >= deadline:
                    break
                findings = list_findings_in_one(self.old.name, self.new.name, cell)
                change = self.comparer.compare_cell(cell, findings)
                write_record(folder / f"{cell.id}.json", change)
                say(self.console, change.line, _COLORS[change.status])
            changes.append(change)
        return changes


def count_statuses(changes: Iterable[CellChange]) -> str:
    """Return the number of cells per status, such as `40 same, 3 changed`; empty without cells."""
    statuses = [change.status for change in changes]
    counts = ((status, statuses.count(status)) for status in ChangeStatus)
    return ", ".join(f"{count} {status}" for status, count in counts if count)


def group_equal_changes(changes: Iterable[CellChange]) -> list[tuple[str, str, str]]:
    """Return a row per distinct change: what changed, the sentence, and the cells in which it is the same.

    Rows are in the order of `Aspect`, and those with most cells come first.
    """
    cells_by_sentence: dict[tuple[Aspect, str], list[str]] = {}
    for change in changes:
        for aspect, sentence in change.sentences.items():
            cells_by_sentence.setdefault((aspect, sentence), []).append(change.name)
    order = list(Aspect)
    rows = sorted(cells_by_sentence.items(), key=lambda row: (order.index(row[0][0]), -len(row[1])))
    return [(str(aspect), sentence, "; ".join(cells)) for (aspect, sentence), cells in rows]


def write_changes_page(
    folder: Path,
    old: ComparedVersion,
    new: ComparedVersion,
    changes: Sequence[CellChange],
    num_cells: int,
) -> Path:
    """Write the page of two versions, `changed-<A>-<B>.md`, and return its path.

    Args:
        folder: Folder of the page.
        old: The first version (A=).
        new: The second version (B=).
        changes: The compared cells.
        num_cells: Number of requested cells, compared or not.
    """
    runs_in_neither: list[tuple[str, str]] = []
    not_compared: list[tuple[str, str]] = []
    for change in changes:
        if change.status is ChangeStatus.RUNS_IN_NEITHER:
            runs_in_neither.append((change.name, change.reason))
        elif change.reason:
            not_compared.append((change.name, change.reason))
    template = environment(_TEMPLATES).overlay(autoescape=False).get_template("changed.md.j2")
    text = template.render(
        old=old,
        new=new,
        changes=changes,
        num_changed=sum(change.status is ChangeStatus.CHANGED for change in changes),
        num_cells=num_cells,
        counts=count_statuses(changes),
        lines=group_equal_changes(changes),
        findings=_list_cells_by_finding(changes),
        neither=runs_in_neither,
        not_compared=not_compared,
        rows=markdown_rows,
    )
    path = folder / f"changed-{old.name}-{new.name}.md"
    write_atomically(path, text.encode())
    return path


def _list_cells_by_finding(changes: Iterable[CellChange]) -> list[tuple[str, str]]:
    """Return each sentence on a known finding with the names of the changed cells that show the finding."""
    cells_by_finding: dict[str, list[str]] = {}
    for change in changes:
        if not change.sentences:
            continue
        for finding in change.findings:
            cells_by_finding.setdefault(finding, []).append(change.name)
    return [(finding, "; ".join(cells)) for finding, cells in cells_by_finding.items()]
