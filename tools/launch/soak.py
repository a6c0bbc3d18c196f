"""`make soak STRATEGY=dp2 HOURS=0.33`: a long run undisturbed, and with processes killed at random.

The undisturbed run shows what grows or becomes slower with time. The disturbed one is resumed after each
kill and must have the same losses, as far as it comes. Both have a launcher of their own, as `make
train-…` would; this process starts and reads them, and nothing else.
"""

from __future__ import annotations

import csv
import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console

from tools.launch.checkpoint.saving import KEEP, Saving
from tools.launch.checkpoint.stored import find_checkpoints
from tools.launch.compose import Launch
from tools.launch.data import make_missing_data
from tools.launch.errors import LaunchError, wrong_settings_refused, wrong_strategies_refused
from tools.launch.options import Options
from tools.launch.preflight import check
from tools.launch.progress import LogFollower
from tools.launch.soak_verdict import DISTURBED, UNDISTURBED, Fault, ProcessReading, judge
from tools.launch.start import ensure_start_checkpoint
from tools.launch.supervise.ranks import alive
from tools.launch.target import Target, parse_target
from tools.launch.train import compose_target, dry_run, flags_of_grammar
from tools.records import run as records
from tools.records.io import write_whole
from tools.records.run import utc_stamp
from tools.spec import settings
from tools.spec.files import from_root
from tools.spec.run import Backend
from tools.spec.strategy import devices_of, parse_strategy
from tools.text.terminal import say

SAVE_EVERY = 50
"""Iterations, as many as between two evaluations."""

READ_SECONDS = 5.0
END_SECONDS = 60.0
"""Within which a run is over whose process was killed, or that was asked to stop."""

UNDISTURBED_SHARE = 0.4
"""Of the time; the disturbed run, which starts again after each fault, has the rest to train as far."""

FAULTS, LONGEST_SECONDS = 6, 600.0
"""So many faults are expected in the disturbed run, and one at least so often."""

_FASTEST_SECONDS = 0.02
"""Of an iteration: Megatron's schedule must not end before the time does."""

_TAIL_BYTES = 20_000
"""Of a log, which hold its last iteration."""

READINGS_FILE, TEXT_FILE = "readings.csv", "soak.md"


@dataclass(frozen=True)
class Soak:
    """What is trained, and for how long."""

    target: Target
    options: Options
    hours: float
    launch: Launch

    @property
    def every(self) -> int:
        """Iterations between two checkpoints."""
        assert self.options.saving is not None
        return self.options.saving.every

    @property
    def undisturbed_seconds(self) -> float:
        """After which the undisturbed run is asked to stop."""
        return self.hours * 3600 * UNDISTURBED_SHARE

    @property
    def mean_gap_seconds(self) -> float:
        """Between the start of training and the next fault."""
        return min(LONGEST_SECONDS, self.undisturbed_seconds / FAULTS)


def soak_from_environment(options: Options, environment: Mapping[str, str] = os.environ) -> Soak:
    """The soak that STRATEGY=, HOURS= and MODEL= ask for.

    Raises:
        LaunchError: One is missing, not of its kind, or they do not fit each other.
    """
    with wrong_settings_refused():
        strategy = settings.SOAKED.value(environment)
        hours = settings.HOURS.value(environment)
    if strategy is None or hours is None:
        raise LaunchError("Say what, and how long: make soak STRATEGY=dp2 HOURS=0.33")
    return plan_soak(strategy, hours, settings.MODEL.value(environment), options)


def soak(what: Soak, console: Console) -> int:
    """Train both runs, judge them; 0 if nothing grew, nothing became slower and the losses agree.

    Raises:
        LaunchError: It cannot run here, and nothing was written; or a run ended by itself.
    """
    options = what.options
    if options.dry_run:
        return dry_run(what.launch, options)
    make_missing_data([what.launch], console)
    check(what.launch, options.runs)
    ensure_start_checkpoint(what.launch, options, console)
    stamp = utc_stamp()
    folder = options.runs / f"{stamp}-soak-{what.target.name.removeprefix('train-')}"
    folder.mkdir(parents=True)
    with _Soaking(what, folder, console) as watch:
        reached = watch.train_undisturbed()
        faults = watch.train_disturbed(reached)
    verdict = judge(folder, watch.readings, faults, what.every)
    text = verdict.render(f"{what.target.name}, {what.hours:g} h")
    write_whole(folder / TEXT_FILE, text + "\n")
    say(console, text)
    say(console, f"Soak: {from_root(folder / TEXT_FILE)}")
    return int(not verdict.held)


def plan_soak(strategy: str, hours: float, model: str | None, options: Options) -> Soak:
    """Compose what both runs train: a schedule that is longer than they are, and checkpoints.

    Raises:
        LaunchError: Strategy and model do not fit each other.
    """
    model = model or ("moe-tiny" if "ep" in strategy else "gpt2-tiny")
    with wrong_strategies_refused(f"STRATEGY={strategy}"):
        devices = devices_of(strategy, otherwise=2)
        sharding = parse_strategy(strategy, devices).sharding
    if sharding.wraps_modules or options.backend != Backend.MEGATRON:
        raise LaunchError(
            f"A soak resumes after each kill, and STRATEGY={strategy} of {options.backend} cannot be "
            "resumed; use dp2, pp2, zero1, ep2 or another layout of Megatron's that shards no more than "
            "the optimizer."
        )
    target = parse_target(f"train-{strategy}-{model}-{devices}cpu")
    iterations = round(hours * 3600 / _FASTEST_SECONDS)
    schedule = ("--train-iters", str(iterations), "--lr-decay-iters", str(iterations))
    options = replace(
        options,
        iterations=iterations,
        extra=(*schedule, *options.extra),
        saving=options.saving or Saving(SAVE_EVERY, KEEP),
    )
    launch = compose_target(target, flags_of_grammar(target), options)
    return Soak(target, options, hours, launch)


def processes_of(launcher: psutil.Process) -> dict[str, psutil.Process]:
    """The processes of a launcher's run that live: `launcher`, `supervisor`, `torchrun`, `rank 0`, …"""
    found = {"launcher": launcher}
    with suppress(psutil.NoSuchProcess):
        for process in launcher.children(recursive=True):
            with suppress(psutil.Error):
                name = _name_of(process) if alive(process) else None
                if name:  # A rank comes before what it starts.
                    found.setdefault(name, process)
    return found


def _name_of(process: psutil.Process) -> str | None:
    rank = process.environ().get("RANK")
    if rank is not None:
        return f"rank {rank}"
    # The supervisor's command line holds torchrun's; torchrun's module comes first in its own.
    modules = {
        "tools.launch.supervise.supervisor": "supervisor",
        "torch.distributed.run": "torchrun",
    }
    return modules.get(" ".join(process.cmdline()[2:3]))


@dataclass
class _Soaking:
    """Starts launchers in the soak's folder, reads their processes now and then, and kills some."""

    soak: Soak
    folder: Path
    console: Console
    readings: list[ProcessReading] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _attempts: dict[str, int] = field(default_factory=dict)
    _logged_before: int = 0
    """Bytes of the log when this attempt began."""

    def __enter__(self) -> _Soaking:
        self._file = (self.folder / READINGS_FILE).open("w", newline="")
        self._writer = csv.DictWriter(self._file, [each.name for each in fields(ProcessReading)])
        self._writer.writeheader()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def train_undisturbed(self) -> int:
        """Train until the time is over; the last iteration.

        Raises:
            LaunchError: The run ended early, or did not reach its second checkpoint.
        """
        with self._launched(UNDISTURBED, self.soak.options.iterations or 0) as launcher:
            end = time.monotonic() + self.soak.undisturbed_seconds
            while launcher.poll() is None and time.monotonic() < end:
                self._read(UNDISTURBED, launcher)
                time.sleep(min(READ_SECONDS, max(0.0, end - time.monotonic())))
            if launcher.poll() not in (None, 0):
                raise self._ended_by_itself(UNDISTURBED)
        reached, every = self._iteration(UNDISTURBED), self.soak.every
        if reached < 2 * every:
            raise LaunchError(
                f"HOURS={self.soak.hours:g} ended at iteration {reached}, before the second checkpoint; "
                f"set HOURS= higher, or SAVE_EVERY= below {every}."
            )
        self._say(f"undisturbed: {reached} iterations")
        return reached

    def train_disturbed(self, iterations: int) -> list[Fault]:
        """Train as far again or to the soak's end, killing a process now and then; the faults, in order.

        Raises:
            LaunchError: A run ended that nobody killed, or was not over in time after a kill.
        """
        choose, faults = random.Random(self.soak.options.seed), []
        end = self._began + self.soak.hours * 3600
        # The last one leaves time to see that the run trains on.
        last_fault = end - self.soak.mean_gap_seconds
        while self._iteration(DISTURBED) < iterations and time.monotonic() < end:
            gap = choose.expovariate(1 / self.soak.mean_gap_seconds)
            fault = self._attempt(iterations, gap, last_fault, end, choose)
            if fault is not None:
                faults.append(fault)
                self._say(f"{fault.killed} killed at iteration {fault.iteration}: {fault.status}")
        self._say(f"disturbed: {self._iteration(DISTURBED)} iterations, {len(faults)} faults")
        return faults

    def _attempt(
        self, iterations: int, gap: float, last_fault: float, end: float, choose: random.Random
    ) -> Fault | None:
        """Train until the end, or kill a process `gap` seconds after there is a checkpoint."""
        due = None
        with self._launched(DISTURBED, iterations) as launcher:
            while launcher.poll() is None and time.monotonic() < end:
                self._read(DISTURBED, launcher)
                if due is None and self._trains():
                    due = time.monotonic() + gap
                if due is not None and due <= min(last_fault, time.monotonic()):
                    return self._strike(launcher, choose)
                left = READ_SECONDS if due is None else due - time.monotonic()
                time.sleep(min(READ_SECONDS, max(0.1, left)))
            if launcher.poll() not in (None, 0):
                raise self._ended_by_itself(DISTURBED)
        return None

    def _strike(self, launcher: psutil.Popen, choose: random.Random) -> Fault:
        there = processes_of(launcher)
        killed = choose.choice(sorted(there))
        iteration, struck = self._iteration(DISTURBED), time.monotonic()
        there[killed].kill()
        run = self.folder / DISTURBED
        while launcher.poll() is None or records.is_running(run / records.LOG_FILE):
            if time.monotonic() - struck > END_SECONDS:
                raise LaunchError(
                    f"{from_root(run)} was not over {END_SECONDS:.0f} s after its {killed} was killed."
                )
            time.sleep(0.1)
        took = time.monotonic() - struck
        ended = records.read_status(run)
        return Fault(struck - self._began, iteration, killed, ended.status, ended.reason, took)

    @contextmanager
    def _launched(self, run: str, iterations: int) -> Iterator[psutil.Popen]:
        """A launcher that trains or resumes a run; it is asked to stop, and has ended, at the end."""
        self._attempts[run] = self._attempts.get(run, 0) + 1
        (self.folder / run).mkdir(exist_ok=True)
        log = self.folder / run / records.LOG_FILE
        self._logged_before = log.stat().st_size if log.is_file() else 0
        with (self.folder / f"{run}.txt").open("ab") as output:
            launcher = psutil.Popen(
                (sys.executable, "-m", "tools.launch", "target", self.soak.target.name),
                env={**os.environ, **self._variables(run, iterations)},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield launcher
        finally:
            if launcher.poll() is None:
                launcher.terminate()
            launcher.wait()

    def _variables(self, run: str, iterations: int) -> dict[str, str]:
        options = self.soak.options
        return {
            "REPEATS": "",
            "ITERS": str(iterations),
            "EXTRA": shlex.join(options.extra),
            "SAVE_EVERY": str(self.soak.every),
            "RUNS": str(options.runs.absolute()),
            "RUN_FOLDER": str((self.folder / run).absolute()),
        }

    def _trains(self) -> bool:
        """Whether this attempt has logged an iteration, and there is something to resume from."""
        stored = find_checkpoints(self.folder / DISTURBED / records.CHECKPOINTS_FOLDER)
        begun = self._iteration(DISTURBED, self._logged_before) > 0
        return begun and any(checkpoint.is_finished for checkpoint in stored)

    def _read(self, run: str, launcher: psutil.Popen) -> None:
        control, iteration = control_seconds(), self._iteration(run)
        seconds = time.monotonic() - self._began
        for name, process in processes_of(launcher).items():
            with suppress(psutil.Error), process.oneshot():
                times = process.cpu_times()
                reading = ProcessReading(
                    run,
                    self._attempts[run],
                    round(seconds, 2),
                    iteration,
                    name,
                    process.memory_info().rss,
                    process.num_fds(),
                    round(times.user + times.system, 2),
                    round(control, 6),
                    round(os.getloadavg()[0], 2),
                )
                self.readings.append(reading)
                self._writer.writerow(asdict(reading))
        self._file.flush()

    def _iteration(self, run: str, begin_bytes: int = 0) -> int:
        """The last iteration in a run's log, or in what it has from a byte on; 0 before the first."""
        log = self.folder / run / records.LOG_FILE
        if not log.is_file():
            return 0
        # From near the end: a long log is not read as a whole every few seconds.
        begin = max(begin_bytes, log.stat().st_size - _TAIL_BYTES)
        with closing(LogFollower(log, begin)) as follower:
            return max((found.iteration for found in follower.new_iterations()), default=0)

    def _ended_by_itself(self, run: str) -> LaunchError:
        said = (self.folder / f"{run}.txt").read_text(errors="replace").splitlines()[-3:]
        return LaunchError(f"The {run} run ended by itself: {' '.join(said) or 'it said nothing'}")

    def _say(self, text: str) -> None:
        seconds = time.monotonic() - self._began
        self.console.print(f"[{seconds:.0f} s] {text}", markup=False, highlight=False)


_CONTROL = np.random.default_rng(0).permutation(100_000)


def control_seconds() -> float:
    """Processor time of a piece of work that is always the same: what the machine's load makes of it."""
    began = time.thread_time()
    np.sort(_CONTROL)
    return time.thread_time() - began
