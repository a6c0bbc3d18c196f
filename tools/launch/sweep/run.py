"""`make sweep`: train what is not there yet, cell by cell; whatever happens, show what there is."""

from __future__ import annotations

from pathlib import Path

import msgspec
from rich.console import Console

from tools.launch.compose import Launch
from tools.launch.errors import LaunchError
from tools.launch.execute import execute
from tools.launch.experiment.data import ensure_sample
from tools.launch.experiment.finished import finished_runs
from tools.launch.options import Options
from tools.launch.start import ensure_start_checkpoint
from tools.launch.sweep.cells import Cell, Plan, as_data, plan_cells
from tools.launch.sweep.in_slurm import finished_in_slurm, submit_cells
from tools.launch.sweep.request import Request
from tools.launch.sweep.results import Measured, measure
from tools.launch.sweep.write import CELLS_FILE, write_results
from tools.launch.train import outcome
from tools.records.run import Status
from tools.spec.files import ROOT
from tools.spec.run import DeviceKind

REPORTS = ROOT / "reports"


def sweep(request: Request, options: Options, console: Console, reports: Path = REPORTS) -> int:
    """Train every legal cell `REPEATS` times; 0 if all of them ended well.

    Raises:
        LaunchError: No cell is legal here; nothing was trained.
    """
    if options.data is None and any(kind is DeviceKind.CPU for _, kind in request.devices):
        ensure_sample(console)
    plan = plan_cells(request, options)
    if options.dry_run:
        print(msgspec.json.format(msgspec.json.encode(as_data(plan, options)), indent=2).decode())
        return 0
    for skipped in plan.skipped:
        _say(console, f"skipped: {skipped.cell.name}: {skipped.rule}")
    if not plan.launches:
        raise LaunchError("No cell of this sweep can run here; the rules stand above.")
    folder = reports / request.name
    folder.mkdir(parents=True, exist_ok=True)
    cells = msgspec.json.format(msgspec.json.encode(as_data(plan, options)), indent=2)
    (folder / CELLS_FILE).write_bytes(cells + b"\n")
    series = Series(plan, options, console)
    if options.slurm is not None:
        submit_cells(plan.launches, options, console)
    try:
        if options.slurm is None:
            series.train()
    finally:  # Also after Ctrl-C: what is there is shown, and the next time goes on from it.
        results = series.results()
        _say(console, write_results(folder, results, plan.skipped))
    return int(any(not result.complete for result in results))


class Series:
    """The trained cells, and why others failed."""

    def __init__(self, plan: Plan, options: Options, console: Console) -> None:
        self._plan, self._options, self._console = plan, options, console
        self._failed: dict[Cell, str] = {}

    def train(self) -> None:
        """Repeats lie apart, so that a machine's slow drift falls on all cells alike."""
        total = len(self._plan.launches)
        for repeat in range(1, self._options.repeats + 1):
            for number, (cell, launch) in enumerate(self._plan.launches, start=1):
                if cell in self._failed:
                    continue
                which = f" repeat {repeat}" if self._options.repeats > 1 else ""
                title = f"[{number}/{total}]{which} {cell.name}"
                if len(made := finished_runs(launch, self._options.runs)) >= repeat:
                    _say(self._console, f"{title}: made before → {made[-repeat].name}")
                    continue
                self._train(cell, launch, title)

    def results(self) -> list[Measured]:
        """What every cell has by now."""
        return [
            measure(
                cell,
                launch,
                self._finished(launch)[: self._options.repeats],
                self._options.repeats,
                self._failed.get(cell, ""),
            )
            for cell, launch in self._plan.launches
        ]

    def _finished(self, launch: Launch) -> list[Path]:
        if self._options.slurm is None:
            return finished_runs(launch, self._options.runs)
        return finished_in_slurm(launch, self._options)

    def _train(self, cell: Cell, launch: Launch, title: str) -> None:
        try:
            ensure_start_checkpoint(launch, self._options, self._console)
            folder, status = execute(launch, self._options.runs, self._console, title)
        except LaunchError as error:
            self._failed[cell] = str(error)
            _say(self._console, f"{title}: {error}", "red")
            return
        _say(self._console, f"{title}: {outcome(folder, status)}")
        if status.status is not Status.OK:
            self._failed[cell] = f"{status.status}: {status.reason}"


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)
