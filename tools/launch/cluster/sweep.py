"""`LAUNCHER=slurm make sweep`: the cells that are not there yet, as job arrays, one for each size."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tools.launch.cluster.follow import Seen, follow
from tools.launch.cluster.submit import Waiting, over_nodes, submit_array, words_of
from tools.launch.compose import Launch
from tools.launch.finished import runs_anywhere
from tools.launch.options import Options
from tools.launch.sweep.cells import Cell, variables
from tools.launch.train import flags_of_grammar
from tools.records import Status

COUNT = ("queued", "running", Status.OK.value)
"""States of runs that need not be submitted again."""


def submit_cells(cells: Iterable[tuple[Cell, Launch]], options: Options, console: Console) -> None:
    """Submit what is neither made nor on its way.

    Raises:
        LaunchError: Slurm is not here or refuses a job.
    """
    seen = {one.run: one for one in follow(options.runs)}
    groups: dict[tuple[int, str], list[Waiting]] = {}
    for cell, launch in cells:
        wanted = options.repeats - len(_that_count(launch, options.runs, seen))
        words = words_of(cell.target, flags_of_grammar(cell.target))
        waiting = Waiting(_spread(launch, options), words, variables(cell, options))
        groups.setdefault((launch.devices, launch.device.value), []).extend([waiting] * wanted)
    for (devices, device), each in groups.items():
        if each:
            submit_array(f"sweep-{devices}{device}", each, _of(each[0], options), console)


def finished_in_slurm(launch: Launch, runs: Path) -> list[Path]:
    """Runs of this cell that a job made and that ended well, newest first."""
    seen = {one.run: one for one in follow(runs)}
    return [
        folder
        for folder in runs_anywhere(launch, runs)
        if seen[folder.name].state == Status.OK.value
    ]


def _that_count(launch: Launch, runs: Path, seen: dict[str, Seen]) -> list[Path]:
    return [folder for folder in runs_anywhere(launch, runs) if seen[folder.name].state in COUNT]


def _spread(launch: Launch, options: Options) -> Launch:
    """Over NODES= where they share its ranks evenly, else on one node."""
    assert options.slurm is not None
    nodes = options.slurm.nodes if launch.devices % options.slurm.nodes == 0 else 1
    return over_nodes(launch, replace(options.slurm, nodes=nodes))


def _of(one: Waiting, options: Options) -> Options:
    assert options.slurm is not None
    assert one.launch.nodes is not None
    return replace(options, slurm=replace(options.slurm, nodes=one.launch.nodes.count))
