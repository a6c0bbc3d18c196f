"""`make bench-gpu`: ceilings, then each setting as a cell of the one runner, while time lasts."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from rich.console import Console

from tools.cluster.container.versions import installed_versions
from tools.dataset.indexed import idx_path
from tools.launch import microbenchmark
from tools.launch.code import kit_commit
from tools.launch.compose import DEFAULT_DATA, Launch
from tools.launch.devices import driver_version, visible_gpus
from tools.launch.job import parse_target
from tools.launch.options import Options
from tools.launch.preflight_gpu import compiler_problem, torch_problem
from tools.plan.time.flops import model_flops
from tools.records.gpu_bench import (
    FOLDER,
    BenchRun,
    Ceilings,
    GpuBench,
    SettingResult,
    read_bench,
    write_bench,
)
from tools.records.run import utc_now
from tools.report.explain.tables import bench_text
from tools.spec import variables
from tools.spec.errors import LaunchError
from tools.spec.files import ROOT
from tools.spec.run import DeviceKind, RuntimeName
from tools.study.bench_gpu.measured import MeasureError, measured
from tools.study.bench_gpu.plan import (
    BUDGET_SECONDS,
    CEILINGS,
    CEILINGS_SECONDS,
    KNOWN,
    TARGET,
    BenchSetting,
    cells_of,
    chosen,
    describe,
)
from tools.study.cells import check_cells, plan_cells
from tools.study.definition import Experiment, ExperimentCell
from tools.study.runner import Runner

FIXED = (
    "MICRO_BATCH",
    "GLOBAL_BATCH",
    "SEED",
    "DROPOUT",
    "EXTRA",
    "ITERS",
    "REPEATS",
    "FUSED",
    "BACKEND",
    "MEGATRON_LM",
    "SHARED_START",
    "SHARE_GPU",
    "SAVE_EVERY",
    "WANDB",
)
"""Variables of the train command that a setting decides by itself."""


@dataclass
class Bench:
    """A call: what there is by now, written to the disk as it comes."""

    runs: Path
    settings: Sequence[BenchSetting]
    console: Console
    result: GpuBench

    def train(self, options: Options, budget_seconds: float) -> bool:
        """Train what is not there, as far as time allows; whether all that was started ended well.

        Raises:
            Interrupted: A request to stop came; what had ended is kept.
        """
        cells = cells_of(self.settings, self.runs / FOLDER)
        experiment = Experiment(FOLDER, cells, skips_illegal=True, budget_seconds=budget_seconds)
        planned = check_cells(plan_cells(experiment, options, self.console), experiment, options)
        for skipped in planned.skipped:
            self.console.print(f"{skipped.cell.name}: {skipped.rule}", style="red", markup=False)
            self.judge(skipped.cell, None, skipped.rule)
        runner = Runner(
            planned.launches,
            options,
            self.console,
            takes_finished=True,
            finished=self.finished,
            judge=self.judge,
            budget_seconds=experiment.budget_seconds,
        )
        runner.train()
        return not planned.skipped and not any(result.failure for result in runner.results())

    def finished(self, cell: ExperimentCell, _: Launch) -> list[Path]:
        """Runs that are kept, newest first."""
        kept = self._kept(cell.label)
        names = [run.run for run in kept.runs] if kept else []
        return [self.runs / FOLDER / cell.label / name for name in reversed(names)]

    def judge(self, cell: ExperimentCell, folder: Path | None, problem: str) -> str:
        """Keep a run with its timed iterations, also of one that fell over after them; its problem."""
        setting = next(each for each in self.settings if each.name == cell.label)
        if folder is None:
            self._add(setting, None, problem)
            return problem
        try:
            found = measured(folder, setting)
        except MeasureError as error:
            self._add(setting, None, problem or str(error))
            return problem or str(error)
        note = "; ".join(filter(None, (problem, found.note)))
        self._add(setting, replace(found, note=note))
        middle = median(found.iteration_ms)
        self.console.print(f"{setting.name}: {middle:.1f} ms an iteration", highlight=False)
        return note

    def _kept(self, name: str) -> SettingResult | None:
        return next((one for one in self.result.settings if one.name == name), None)

    def _add(self, setting: BenchSetting, run: BenchRun | None, reason: str = "") -> None:
        """Keep a run, or why there is none, and write all that is known so far."""
        before = self._kept(setting.name)
        runs = (*(before.runs if before else ()), *((run,) if run else ()))
        new = SettingResult(setting.name, setting.dtype, setting.fused, setting.extra, runs, reason)
        others = [one for one in self.result.settings if one.name != setting.name]
        order = [one.name for one in KNOWN]
        settings = sorted((*others, new), key=lambda one: order.index(one.name))
        self.result = replace(self.result, settings=tuple(settings), created_utc=utc_now())
        write_bench(self.runs, self.result)


def bench_gpu(
    only: str | None, budget: float | None, given: Namespace, options: Options, console: Console
) -> int:
    """Measure; 0 if every run that was started ended well.

    Raises:
        LaunchError: It cannot run here; nothing was written.
    """
    if own := [name for name in FIXED if name in given.texts]:
        raise LaunchError(f"{own[0]}= is the settings' own in bench-gpu; leave it out.")
    if options.runtime not in (None, RuntimeName.HOST):
        raise LaunchError(f"bench-gpu measures RUNTIME=host, not {options.runtime}.")
    settings, seconds, runs = chosen(only or ""), budget or BUDGET_SECONDS, options.runs
    if options.dry_run:
        python = {variables.PYTHON: os.environ.get(variables.PYTHON, ""), "DATA": options.data}
        print(describe(settings, seconds, {name: text for name, text in python.items() if text}))
        return 0
    began = time.monotonic()
    _check()
    bench = Bench(runs, settings, console, _begin(runs))
    bench.result = replace(bench.result, ceilings=_ceilings(console))
    options = replace(options, data=options.data or _default_data())
    ended_well = bench.train(options, seconds - (time.monotonic() - began))
    console.print(bench_text(bench.result), markup=False, highlight=False)
    console.print(f"Results: {runs / FOLDER}; 'make report' shows them.", highlight=False)
    return int(not ended_well)


def _check() -> None:
    if len(visible_gpus()) == 0:
        raise LaunchError(
            "make bench-gpu measures an NVIDIA GPU, and none is visible here; DRY_RUN=1 shows what it "
            "would do."
        )
    if problem := torch_problem() or compiler_problem():
        raise LaunchError(problem)


def _begin(runs: Path) -> GpuBench:
    """Resume from what was measured under equal conditions; else begin anew."""
    model = parse_target(TARGET).model
    fresh = GpuBench(
        created_utc=utc_now(),
        device=visible_gpus()[0].name,
        driver=driver_version(),
        software=installed_versions(),
        kit_commit=kit_commit(),
        model_flops_per_iteration=model_flops(model.shape, model.batch.global_batch_size),
        ceilings=None,
        settings=(),
    )
    before = read_bench(runs)
    return before if before is not None and before.identity == fresh.identity else fresh


def _default_data() -> str:
    """The published data set where it was prepared, else the sample."""
    published = DEFAULT_DATA[DeviceKind.GPU]
    is_prepared = idx_path(ROOT / published).is_file()
    return published if is_prepared else DEFAULT_DATA[DeviceKind.CPU]


def _ceilings(console: Console) -> Ceilings | None:
    """What the device reaches at best; None where that could not be measured, and the runs follow."""
    try:
        figures = microbenchmark.measure(
            CEILINGS, DeviceKind.GPU, 1, timeout_seconds=3 * CEILINGS_SECONDS
        )
    except LaunchError as error:
        text = f"The device's ceilings are not known: {error}"
        console.print(text, style="red", markup=False)
        return None
    if figures is None or not (figures.matmul_flops and figures.copy_bytes_per_second):
        return None
    return Ceilings(figures.matmul_flops, figures.copy_bytes_per_second)
