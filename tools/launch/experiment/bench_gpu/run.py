"""`make bench-gpu`: ceilings, then each setting by the kit's own train command, while time lasts."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console

from tools.launch import microbenchmark
from tools.launch.compose import DEFAULT_DATA
from tools.launch.container.versions import installed_versions
from tools.launch.devices import driver_version, visible_gpus
from tools.launch.errors import LaunchError
from tools.launch.experiment.bench_gpu.measured import MeasureError, UnfinishedError, measured
from tools.launch.experiment.bench_gpu.plan import (
    BUDGET_SECONDS,
    CEILINGS,
    CEILINGS_SECONDS,
    KNOWN,
    TARGET,
    BenchSetting,
    PlannedRun,
    chosen,
    describe,
    steps,
    variables,
)
from tools.launch.experiment.data import ensure_sample
from tools.launch.megatron_entry import kit_commit
from tools.launch.preflight_gpu import compiler_problem, torch_problem
from tools.launch.run_folder import utc_now
from tools.launch.supervise.interruption import Interrupted
from tools.launch.target import parse_target
from tools.plan.time.flops import model_flops
from tools.preprocess.dataset import idx_path
from tools.records.gpu_bench import (
    FOLDER,
    BenchRun,
    Ceilings,
    GpuBench,
    SettingResult,
    read_bench,
    write_bench,
)
from tools.report.explain.tables import bench_text
from tools.spec.files import ROOT
from tools.spec.model import load_model
from tools.spec.run import DeviceKind

END_SECONDS = 20.0
"""A run that does not end in its time is sent SIGTERM; its launcher ends the ranks within 10 s."""
FIXED = (
    *("MICRO_BATCH", "GLOBAL_BATCH", "SEED", "DROPOUT", "EXTRA", "ITERS", "REPEATS", "FUSED"),
    *("BACKEND", "MEGATRON_LM", "SHARED_START", "SHARE_GPU", "SAVE_EVERY", "WANDB"),
)
"""Variables of the train command that a setting decides by itself."""
SHOWN = ("KIT_PYTHON", "DATA")
"""Variables that the commands of a plan need, too."""


@dataclass
class Bench:
    """A call: what there is, and how to measure more."""

    runs: Path
    budget_seconds: float
    console: Console
    result: GpuBench
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        """Of the budget."""
        return self.budget_seconds - (time.monotonic() - self.started)

    def add(self, setting: BenchSetting, run: BenchRun | None, reason: str = "") -> None:
        """Keep a run, or why there is none, and write all that is known so far."""
        kept = [s for s in self.result.settings if s.name != setting.name]
        before = next((s for s in self.result.settings if s.name == setting.name), None)
        runs = (*(before.runs if before else ()), *((run,) if run else ()))
        new = SettingResult(setting.name, setting.dtype, setting.fused, setting.extra, runs, reason)
        order = [s.name for s in KNOWN]
        settings = sorted((*kept, new), key=lambda s: order.index(s.name))
        self.result = replace(self.result, settings=tuple(settings), created_utc=utc_now())
        write_bench(self.runs, self.result)


def bench_gpu(
    runs: Path, dry_run: bool, console: Console, environment: Mapping[str, str] = os.environ
) -> int:
    """Measure; 0 if every run that was started ended well.

    Raises:
        LaunchError: It cannot run here; nothing was written.
    """
    settings, budget = _asked(environment)
    if dry_run:
        given = {name: environment[name] for name in SHOWN if environment.get(name)}
        print(describe(steps(settings), budget, given))
        return 0
    _check(environment)
    bench = Bench(runs, budget, console, _begin(runs))
    data = _data(environment, console)
    bench.result = replace(bench.result, ceilings=_ceilings(console))
    failed = _run_all(bench, steps(settings, bench.result), data, _train)
    console.print(bench_text(bench.result), markup=False, highlight=False)
    console.print(f"Results: {runs / FOLDER}; 'make report' shows them.", highlight=False)
    return int(failed)


def _asked(environment: Mapping[str, str]) -> tuple[tuple[BenchSetting, ...], float]:
    if given := [name for name in FIXED if environment.get(name)]:
        raise LaunchError(f"{given[0]}= is the settings' own in bench-gpu; leave it out.")
    if environment.get("RUNTIME", "host") not in ("", "host"):
        raise LaunchError(f"bench-gpu measures RUNTIME=host, not {environment['RUNTIME']}.")
    try:
        settings = chosen(environment.get("ONLY", ""))
    except ValueError as error:
        raise LaunchError(str(error)) from None
    try:
        budget = float(environment.get("BUDGET") or BUDGET_SECONDS)
    except ValueError:
        raise LaunchError(f"BUDGET={environment['BUDGET']} is no number of seconds.") from None
    return settings, budget


def _check(environment: Mapping[str, str]) -> None:
    if len(visible_gpus(environment)) == 0:
        raise LaunchError(
            "make bench-gpu measures an NVIDIA GPU, and none is visible here; DRY_RUN=1 shows what it "
            "would do."
        )
    if problem := torch_problem() or compiler_problem():
        raise LaunchError(problem)


def _begin(runs: Path) -> GpuBench:
    """Resume from what was measured under equal conditions; else begin anew."""
    model = load_model(parse_target(TARGET).model)
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


def _data(environment: Mapping[str, str], console: Console) -> dict[str, str]:
    """The data set that is named, else the published one where it was prepared, else the sample."""
    if environment.get("DATA"):
        return {"DATA": environment["DATA"]}
    if idx_path(ROOT / DEFAULT_DATA[DeviceKind.GPU]).is_file():
        return {}
    ensure_sample(console)
    return {"DATA": DEFAULT_DATA[DeviceKind.CPU]}


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


Train = Callable[[PlannedRun, Path, Mapping[str, str], float], Path]


def _run_all(
    bench: Bench, planned: Sequence[PlannedRun], data: Mapping[str, str], train: Train
) -> bool:
    """Run what fits; whether any run failed. The longest run so far decides what still fits."""
    failed: set[str] = set()
    longest: dict[int, float] = {}
    for step in planned:
        iterations = step.setting.iterations
        if step.setting.name in failed:
            bench.console.print(f"{step.title}: left out, because it failed before.")
            continue
        if longest.get(iterations, step.expected_seconds) > bench.seconds_left:
            bench.console.print(f"{step.title}: left out, no time for it; repeat the command.")
            if step.repeat == 1:
                bench.add(step.setting, None, "no time was left for it")
            continue
        began = time.monotonic()
        problem = _run_one(bench, step, data, train)
        if problem:
            failed.add(step.setting.name)
            bench.console.print(f"{step.title}: {problem}", style="red", markup=False)
        longest[iterations] = max(longest.get(iterations, 0.0), time.monotonic() - began)
    return bool(failed)


def _run_one(bench: Bench, step: PlannedRun, data: Mapping[str, str], train: Train) -> str:
    """Run and keep; what went wrong, also where its timed iterations were there by then."""
    began, problem = time.monotonic(), ""
    try:
        try:
            folder = train(step, bench.runs / FOLDER / step.setting.name, data, bench.seconds_left)
        except UnfinishedError as error:
            folder, problem = error.folder, str(error)
        found = measured(folder, step.setting, time.monotonic() - began)
    except MeasureError as error:
        bench.add(step.setting, None, problem or str(error))
        return problem or str(error)
    note = "; ".join(filter(None, (problem, found.note)))
    bench.add(step.setting, replace(found, note=note))
    bench.console.print(_result_line(step, found), highlight=False)
    return note


def _result_line(step: PlannedRun, found: BenchRun) -> str:
    middle = sorted(found.iteration_ms)[len(found.iteration_ms) // 2]
    return f"{step.title}: {middle:.1f} ms an iteration, {found.wall_seconds:.0f} s"


def _train(step: PlannedRun, runs: Path, data: Mapping[str, str], seconds: float) -> Path:
    """The kit's own train command; the run folder it made.

    Raises:
        MeasureError: It failed or was not done in time; an UnfinishedError if it had begun.
    """
    # Wide, or the last line would be the end of a sentence that says why it failed.
    environment = {**os.environ, "COLUMNS": "1000", **variables(step.setting, str(runs)), **data}
    before = set(runs.glob("*/run.json"))
    command = (sys.executable, "-m", "tools.launch", "target", TARGET)
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    problem = ""
    try:
        output, _ = process.communicate(timeout=seconds)
        if process.returncode != 0:
            last = (output.decode(errors="replace").strip().splitlines() or ["it printed nothing"])[
                -1
            ]
            problem = f"'{shlex.join(command)}' failed: {last}"
    except subprocess.TimeoutExpired:
        _end(process)
        problem = f"it was not done in {seconds:.0f} s and was ended"
    except Interrupted:
        _end(process)
        raise
    made = sorted(set(runs.glob("*/run.json")) - before)
    if problem and made:
        raise UnfinishedError(made[-1].parent, problem)
    if problem or not made:
        raise MeasureError(problem or "it left no run folder")
    return made[-1].parent


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
