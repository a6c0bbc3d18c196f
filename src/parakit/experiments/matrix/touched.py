"""Which cells a change of Megatron can have touched: those that execute a file of it.

What a strategy and a level execute is recorded once for all (`make verify-matrix ARGS=--executed`) and kept
beside the cells of its version; a cell executes what its strategy and its levels do.
"""

from __future__ import annotations

import itertools
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
"""Files from the folder that holds `megatron`, by `family/strategy` and `family/factor/level`; what all
of a family execute, by `family`."""
RECORDER = Path(__file__).with_name("executed.py")


def list_component_names(cell: MatrixCell) -> list[str]:
    """By which it is known what a cell executes."""
    parts = (cell.layout.name, *(level.path for level in cell.levels))
    return [cell.family.name, *(f"{cell.family.name}/{part}" for part in parts)]


def add_executed_files(
    executed: ExecutedFiles, name: str, files: frozenset[str]
) -> dict[str, frozenset[str]]:
    """The same with one name more, and what all of its family execute once."""
    family = name.partition("/")[0]
    own = [one for one in executed if one.startswith(f"{family}/")]
    whole = {one: executed[one] | executed[family] for one in own} | {name: files}
    common = frozenset.intersection(*whole.values())
    return {**executed, family: common, **{one: each - common for one, each in whole.items()}}


def select_touched_cells(
    cells: Sequence[MatrixCell], changed: Sequence[str], executed: ExecutedFiles
) -> list[MatrixCell]:
    """Cells that execute one of the files: those that execute most of them first, the unknown last.

    Args:
        cells: In their order.
        changed: Files, folders or patterns, from the folder that holds `megatron`.
        executed: A cell of which a part was never recorded may execute anything.
    """

    def is_changed(file: str) -> bool:
        return any(
            fnmatchcase(file, one) or file.startswith(f"{one.rstrip('/')}/") for one in changed
        )

    known = [cell for cell in cells if executed.keys() >= {*list_component_names(cell)}]
    hit = frozenset(filter(is_changed, frozenset().union(*executed.values())))

    def count(cell: MatrixCell) -> int:
        return len(
            hit.intersection(
                itertools.chain(*(executed[name] for name in list_component_names(cell)))
            )
        )

    sure = sorted(filter(count, known), key=count, reverse=True)
    return [*sure, *(cell for cell in cells if cell not in known)]


def list_changed_files(words: Sequence[str], checkout: Path | None) -> list[str]:
    """CHANGED=: names as they are, and in the place of a range of commits the files that it changes.

    Raises:
        LaunchError: There is no such range, or no checkout to ask.
    """
    files: list[str] = []
    for word in words:
        if ".." not in word:
            files.append(word)
            continue
        command = ("git", "-C", str(checkout or "."), "diff", "--name-only", word)
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if checkout is None or ended.returncode:
            raise LaunchError(
                f"CHANGED={word} is no range of commits of MEGATRON_LM={checkout or ''}; name files, or "
                "a checkout that has both commits."
            )
        files += ended.stdout.split()
    return files


def record_executed_files(
    matrix: Matrix, families: Iterable[Family], options: Options, ranks: ForkedRanks, folder: Path
) -> Iterator[tuple[str, frozenset[str]]]:
    """Train each strategy and each level once, for one iteration; what it executes, by its name.

    What does not train here is left out: its cells are then taken for touched.
    """
    recorder = read_patch_file(relative_to_root(RECORDER))
    for family in families:
        wanted = [(layout.name, MatrixCell(family, layout)) for layout in family.layouts]
        for level in family.levels:
            fitting = ((one, matrix.fitting(family, one, [level])) for one in family.layouts)
            if found := next((each for each in fitting if level in each[1]), None):
                wanted.append((level.path, MatrixCell(family, *found)))
        for name, cell in wanted:
            scratch = folder / f"{cell.id}-executed"
            scratch.mkdir()
            pair = cell.pair(replace(options, runs=folder))
            asked = replace(pair.job.options, iterations=1, patch_file=recorder)
            verified = compose_pair(replace(pair, job=pair.job.with_options(asked)))
            try:
                ranks.ensure_start(verified.reference)
            except LaunchError:
                continue
            also = {variables.EXECUTED: str(scratch)}
            if not ranks.run(verified.strategy, folder / "executed.txt", also):
                lines = (line for one in scratch.iterdir() for line in one.read_text().split())
                yield f"{family.name}/{name}", frozenset(lines)
