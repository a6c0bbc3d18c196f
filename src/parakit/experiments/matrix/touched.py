"""Select the cells that a change of Megatron can affect: those that execute a changed file.

`make verify-matrix ARGS=--executed` records once which files each layout and each level executes. The record is
stored with the cells of the version. A cell executes the files of its family, its layout and its levels.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from parakit.config import variables
from parakit.config.errors import LaunchError
from parakit.config.files import relative_to_root
from parakit.experiments.matrix.cell import MatrixCell
from parakit.experiments.matrix.definition import Family, Matrix
from parakit.experiments.verify.pairs import compose_pair
from parakit.experiments.verify.verifier import ForkedRanks
from parakit.launch import Options, read_patch_file

ExecutedFiles = Mapping[str, frozenset[str]]
"""Executed files, relative to the folder that holds `megatron`, by component.

Components are `family/layout` and `family/factor/level`. Files that all components of a family execute are stored
once, under `family`.
"""
RECORDER = Path(__file__).with_name("executed.py")


def list_component_names(cell: MatrixCell) -> list[str]:
    """Return the components of a cell, as named in `ExecutedFiles`: family, layout and levels."""
    parts = (cell.layout.name, *(level.path for level in cell.levels))
    return [cell.family.name, *(f"{cell.family.name}/{part}" for part in parts)]


def add_executed_files(
    executed: ExecutedFiles, name: str, files: frozenset[str]
) -> dict[str, frozenset[str]]:
    """Return `executed` with one more component, `name`, which executes `files`.

    Files that all components of its family execute are moved to the family's entry.
    """
    family = name.partition("/")[0]
    components = [component for component in executed if component.startswith(f"{family}/")]
    all_files = {component: executed[component] | executed[family] for component in components}
    all_files[name] = files
    common = frozenset.intersection(*all_files.values())
    remaining = {component: files - common for component, files in all_files.items()}
    return {**executed, family: common, **remaining}


def select_touched_cells(
    cells: Sequence[MatrixCell], changed: Sequence[str], executed: ExecutedFiles
) -> list[MatrixCell]:
    """Return the cells that may execute a changed file. Cells that execute most changed files come first.

    A cell with a component whose files were never recorded may execute anything. Such cells come last.

    Args:
        cells: Cells in their order, which decides between equals.
        changed: Files, folders or patterns, relative to the folder that holds `megatron`.
        executed: Recorded files by component.
    """
    recorded_files: frozenset[str] = frozenset().union(*executed.values())
    changed_files = frozenset(file for file in recorded_files if _matches_change(file, changed))

    def count_changed_files(cell: MatrixCell) -> int:
        cell_files = [executed[name] for name in list_component_names(cell)]
        return len(changed_files.intersection(frozenset().union(*cell_files)))

    recorded: list[MatrixCell] = []
    unrecorded: list[MatrixCell] = []
    for cell in cells:
        if all(name in executed for name in list_component_names(cell)):
            recorded.append(cell)
        else:
            unrecorded.append(cell)
    affected = [cell for cell in recorded if count_changed_files(cell)]
    affected.sort(key=count_changed_files, reverse=True)
    return [*affected, *unrecorded]


def _matches_change(file: str, changed: Iterable[str]) -> bool:
    """Return True if a file matches one of the changed files or patterns, or lies in a changed folder."""
    for pattern in changed:
        folder = f"{pattern.rstrip('/')}/"
        if fnmatchcase(file, pattern) or file.startswith(folder):
            return True
    return False


def list_changed_files(changes: Sequence[str], checkout: Path | None) -> list[str]:
    """Return the files of CHANGED=: names are returned as they are, a range of commits as its changed files.

    Raises:
        LaunchError: There is no such range, or no checkout of Megatron to ask for it.
    """
    files: list[str] = []
    for change in changes:
        if ".." not in change:
            files.append(change)
            continue
        command = ("git", "-C", str(checkout or "."), "diff", "--name-only", change)
        git = subprocess.run(command, capture_output=True, text=True, check=False)
        if checkout is None or git.returncode:
            raise LaunchError(
                f"CHANGED={change} is no range of commits of MEGATRON_LM={checkout or ''}; name files, or "
                "a checkout that has both commits."
            )
        files += git.stdout.split()
    return files


def record_executed_files(
    matrix: Matrix, families: Iterable[Family], options: Options, ranks: ForkedRanks, folder: Path
) -> Iterator[tuple[str, frozenset[str]]]:
    """Train each layout and each level for one iteration; yield components with the files they executed.

    A component that cannot be trained on CPU ranks is left out, so that its cells count as affected by any change.
    """
    for family in families:
        for name, cell in list_component_cells(matrix, family):
            files = _record_cell(cell, replace(options, runs=folder), ranks, folder)
            if files is not None:
                yield f"{family.name}/{name}", files


def _record_cell(
    cell: MatrixCell, options: Options, ranks: ForkedRanks, folder: Path
) -> frozenset[str] | None:
    """Train a cell for one iteration, and return the files that it executed; None if it cannot be trained."""
    scratch = folder / f"{cell.id}-executed"
    scratch.mkdir()
    pair = cell.make_pair(options)
    recorder = read_patch_file(relative_to_root(RECORDER))
    recording = replace(pair.job.options, iterations=1, patch_file=recorder)
    verification = compose_pair(replace(pair, job=pair.job.with_options(recording)))
    try:
        ranks.ensure_start(verification.reference)
    except LaunchError:
        return None
    variable = {variables.EXECUTED: str(scratch)}
    failure = ranks.run(verification.strategy, folder / "executed.txt", variable)
    if failure:
        return None
    files: set[str] = set()
    for rank_list in scratch.iterdir():
        files.update(rank_list.read_text().split())
    return frozenset(files)


def list_component_cells(matrix: Matrix, family: Family) -> list[tuple[str, MatrixCell]]:
    """Return a cell per layout, and one per level in the first layout where the level is legal."""
    cells = [(layout.name, MatrixCell(family, layout)) for layout in family.layouts]
    for level in family.levels:
        for layout in family.layouts:
            levels = matrix.select_legal_levels(family, layout, [level])
            if level in levels:
                cells.append((level.path, MatrixCell(family, layout, levels)))
                break
    return cells
