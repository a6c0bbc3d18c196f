"""From an experiment to launches: every cell composed and checked before the first one starts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console

from tools.launch.compose import Launch
from tools.launch.data import ensure_data
from tools.launch.job import Job
from tools.launch.options import Options
from tools.launch.preflight import check, check_composition
from tools.launch.runtime import ON_HOST, Runtime, choose_runtime
from tools.launch.train import compose_job
from tools.spec.errors import LaunchError
from tools.spec.run import DeviceKind
from tools.study.definition import Experiment, ExperimentCell, option_fields


@dataclass(frozen=True)
class Skipped:
    """A cell that is not trained, and the rule that says so."""

    cell: ExperimentCell
    rule: str


@dataclass(frozen=True)
class PlannedCells:
    """What will be trained, in this order, and what will not."""

    launches: tuple[tuple[ExperimentCell, Launch], ...]
    skipped: tuple[Skipped, ...] = ()


def plan_cells(experiment: Experiment, options: Options, console: Console) -> PlannedCells:
    """Compose every cell under `options`, which have the experiment's settings; make missing data.

    Raises:
        LaunchError: A cell does not fit its devices, unless the experiment skips such cells.
    """
    runtimes: dict[DeviceKind, Runtime] = {}
    launches: list[tuple[ExperimentCell, Launch]] = []
    skipped: list[Skipped] = []
    for cell in experiment.cells:
        try:
            launch = compose_cell(cell, options, runtimes)
            environment = {**launch.environment, **experiment.environment}
            launches.append((cell, replace(launch, environment=environment)))
        except (LaunchError, ValueError) as error:
            if not experiment.skips_illegal:
                raise
            skipped.append(_skip(cell, error))
    if not options.dry_run:
        ensure_data([launch for _, launch in launches], console)
    return PlannedCells(tuple(launches), tuple(skipped))


def check_cells(planned: PlannedCells, experiment: Experiment, options: Options) -> PlannedCells:
    """What of it can work here; of several nodes (`LAUNCHER=slurm`) each looks at itself.

    Raises:
        LaunchError: A cell cannot, unless the experiment skips such cells: what is missing, each
            thing once.
    """
    look = check if options.slurm is None else check_composition
    launches: list[tuple[ExperimentCell, Launch]] = []
    skipped: list[Skipped] = list(planned.skipped)
    problems: dict[str, str] = {}
    for cell, launch in planned.launches:
        try:
            look(launch, data_is_to_come=options.dry_run)
        except LaunchError as error:
            skipped.append(_skip(cell, error))
            for line in str(error).splitlines():
                # Cells lack the same thing in other words: the number of GPUs, the target instead.
                problems.setdefault(line.partition(";")[0].lstrip("0123456789"), line)
        else:
            launches.append((cell, launch))
    if problems and not experiment.skips_illegal:
        raise LaunchError("\n".join(filter(None, (*problems.values(), experiment.instead))))
    order = {cell: place for place, cell in enumerate(experiment.cells)}
    return PlannedCells(tuple(launches), tuple(sorted(skipped, key=lambda one: order[one.cell])))


def compose_cell(
    cell: ExperimentCell, options: Options, runtimes: dict[DeviceKind, Runtime] | None = None
) -> Launch:
    """A cell's launch; `runtimes` keeps what was found of each kind of device.

    Raises:
        LaunchError: Strategy, backend and devices do not fit each other.
    """
    job = cell_job(cell, options)
    found = {} if runtimes is None else runtimes
    if cell.device not in found:
        found[cell.device] = (
            ON_HOST if job.options.slurm else choose_runtime(job.options, cell.device)
        )
    return compose_job(job, found[cell.device])


def cell_job(cell: ExperimentCell, options: Options) -> Job:
    """What this cell trains.

    Raises:
        LaunchError: One of its own variables is not known.
    """
    common = replace(
        options,
        backend=cell.backend or options.backend,
        optimizer=cell.optimizer or options.optimizer,
        seed=options.seed + cell.seed_offset,
        fused=options.fused if cell.fused else (),
    )
    own = option_fields(dict(cell.settings), cell.name)
    # A cell's flags come behind those of all cells, and the last one counts.
    extra = (*common.extra, *own.get("extra", ()))
    return cell.job.under(replace(common, **{**own, "extra": extra}))


def _skip(cell: ExperimentCell, error: Exception) -> Skipped:
    return Skipped(cell, " ".join(str(error).split()))
