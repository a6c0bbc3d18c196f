"""From an experiment to launches: every cell composed and checked before the first one starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from rich.console import Console

from tools.dataset.indexed import open_dataset
from tools.launch.compose import Launch
from tools.launch.data import SAMPLE, make_samples
from tools.launch.preflight import check, check_composition
from tools.launch.runtime import ON_HOST, Runtime, choose_runtime
from tools.launch.train import compose_job
from tools.spec.errors import LaunchError
from tools.spec.files import ROOT
from tools.spec.run import DeviceKind
from tools.study.definition import Cell, Experiment
from tools.text.units import plural


@dataclass(frozen=True)
class Planned:
    """What will be trained, in this order, and the rule by which a cell will not."""

    launches: Mapping[Cell, Launch]
    skipped: Mapping[Cell, str]


def compose_cells(experiment: Experiment, console: Console) -> Planned:
    """Compose every cell; make missing data.

    Raises:
        LaunchError: A cell does not fit its devices, unless the experiment skips such cells.
    """
    runtimes: dict[DeviceKind, Runtime] = {}

    def compose(cell: Cell) -> Launch:
        launch = compose_cell(cell, runtimes)
        return replace(launch, environment={**launch.environment, **experiment.environment})

    launches, problems = _tried(compose, experiment.cells)
    if problems and not experiment.skips_illegal:
        raise next(iter(problems.values()))
    if not experiment.options.dry_run:
        make_samples(tuple(launches.values()), console)
        if SAMPLE in {launch.data for launch in launches.values()}:
            data = open_dataset(ROOT / SAMPLE)
            sentence = f"Data: {data.tokens:,} GPT-2 tokens in {data.documents} documents."
            console.print(sentence, highlight=False)
    return Planned(launches, {cell: _rule(error) for cell, error in problems.items()})


def check_cells(planned: Planned, experiment: Experiment) -> Planned:
    """What of it can work here; of several nodes (`LAUNCHER=slurm`) each looks at itself.

    Raises:
        LaunchError: A cell cannot, unless the experiment skips such cells: what is missing, each
            thing once.
    """
    options = experiment.options
    look = check if options.slurm is None else check_composition

    def checked(cell: Cell) -> Launch:
        look(planned.launches[cell], data_is_to_come=options.dry_run)
        return planned.launches[cell]

    launches, problems = _tried(checked, planned.launches)
    if problems and not experiment.skips_illegal:
        # Cells lack the same thing in other words: the number of GPUs, the target instead.
        said: dict[str, str] = {}
        for line in "\n".join(map(str, problems.values())).splitlines():
            said.setdefault(line.partition(";")[0].lstrip("0123456789"), line)
        raise LaunchError("\n".join(filter(None, (*said.values(), experiment.instead))))
    rules = {**planned.skipped, **{cell: _rule(error) for cell, error in problems.items()}}
    return Planned(launches, {cell: rules[cell] for cell in experiment.cells if cell in rules})


def skipped_sentences(skipped: Mapping[Cell, str]) -> list[str]:
    """Skipped cells by the rule that they break, a line for each."""
    cells: dict[str, list[str]] = {}
    for cell, rule in skipped.items():
        cells.setdefault(rule, []).append(cell.name)
    return [
        f"{plural(len(names), 'cell')} skipped ({', '.join(names)}): {rule}"
        for rule, names in cells.items()
    ]


def compose_cell(cell: Cell, runtimes: dict[DeviceKind, Runtime] | None = None) -> Launch:
    """A cell's launch; `runtimes` keeps what was found of each kind of device.

    Raises:
        LaunchError: Strategy, backend and devices do not fit each other.
    """
    job, found = cell.job, {} if runtimes is None else runtimes
    if job.device not in found:
        on_host = job.options.slurm is not None
        found[job.device] = ON_HOST if on_host else choose_runtime(job.options, job.device)
    return compose_job(job, found[job.device])


def _tried(
    make: Callable[[Cell], Launch], cells: Iterable[Cell]
) -> tuple[dict[Cell, Launch], dict[Cell, ValueError]]:
    """What came of each cell, and why nothing did of the others."""
    launches: dict[Cell, Launch] = {}
    problems: dict[Cell, ValueError] = {}
    for cell in cells:
        try:
            launches[cell] = make(cell)
        except ValueError as error:  # LaunchError is one.
            problems[cell] = error
    return launches, problems


def _rule(error: ValueError) -> str:
    return " ".join(str(error).split())
