"""`make bench NAME=soak STRATEGY=dp2 ARGS="--hours 0.33"`: a long run undisturbed, and with processes killed at random.

The undisturbed run shows what grows or becomes slower with time. The disturbed run is resumed after each kill and
must have the same losses up to its last iteration. Each run has its own launcher, as with `make train-…`. This
process only starts and samples them.
"""

from __future__ import annotations

import csv
import os
import random
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from math import inf
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console

from parakit.artifacts import run as records
from parakit.artifacts.checkpoints import find_checkpoints
from parakit.artifacts.io import write_atomically
from parakit.artifacts.run import utc_stamp
from parakit.config.errors import LaunchError
from parakit.config.files import relative_to_root
from parakit.config.run import Backend
from parakit.config.strategy import count_devices, parse_strategy
from parakit.formatting.terminal import say
from parakit.launch.compose import Launch
from parakit.launch.data import make_sample
from parakit.launch.initial_checkpoint import ensure_initial_checkpoint
from parakit.launch.job import Job, parse_target
from parakit.launch.options import DEFAULT_KEEP, Options, Saving, format_variables
from parakit.launch.preflight import check_launch
from parakit.launch.progress import LogFollower
from parakit.launch.train import compose_job, print_dry_run
from tests.faults.runs import Victim, kill, launch, processes_of
from tests.faults.soak_verdict import DISTURBED, UNDISTURBED, Fault, ProcessReading, judge
from tests.patience import OF_A_RUN

SAVE_EVERY = 50
"""Iterations between two checkpoints, equal to those between two evaluations."""

READ_SECONDS = 5.0

UNDISTURBED_SHARE = 0.4
"""Fraction of the time for the undisturbed run. The disturbed run restarts after each fault and gets more time."""

FAULTS, LONGEST_SECONDS = 6, 600.0
"""Expected number of faults in the disturbed run, and longest time between two faults in seconds."""

_FASTEST_SECONDS = 0.02
"""Lower bound on seconds per iteration, by which Megatron's schedule is longer than the time of the soak."""

_TAIL_BYTES = 20_000
"""Bytes at the end of a log that contain its last iteration."""

READINGS_FILE, TEXT_FILE = "readings.csv", "soak.md"


@dataclass(frozen=True)
class Soak:
    """The trained job with the duration and intervals of a soak."""

    hours: float
    launch: Launch

    @property
    def job(self) -> Job:
        """The job that both runs train."""
        return self.launch.job

    @property
    def every(self) -> int:
        """Number of iterations between two checkpoints."""
        assert self.job.options.saving is not None
        return self.job.options.saving.every

    @property
    def undisturbed_seconds(self) -> float:
        """Seconds of training after which the undisturbed run is asked to stop."""
        return self.hours * 3600 * UNDISTURBED_SHARE

    @property
    def mean_gap_seconds(self) -> float:
        """Seconds between the start of training and the next fault."""
        return min(LONGEST_SECONDS, self.undisturbed_seconds / FAULTS)


def soak_strategy(
    strategy: str, hours: float, model: str | None, options: Options, console: Console
) -> int:
    """Run the soak of STRATEGY=, --hours and MODEL=. Return the same as `soak`."""
    return soak(plan_soak(strategy, hours, model, options), console)


def soak(plan: Soak, console: Console) -> int:
    """Train and judge both runs. Return 0 if nothing grew, nothing became slower and the losses agree.

    Raises:
        LaunchError: The soak cannot run here, and nothing was written; or a run ended by itself.
    """
    options = plan.job.options
    if options.dry_run:
        return print_dry_run(plan.launch)
    make_sample(plan.launch.data, console)
    check_launch(plan.launch)
    ensure_initial_checkpoint(plan.launch, console)
    folder = options.runs / f"{utc_stamp()}-soak-{plan.job.name}"
    folder.mkdir(parents=True)
    with _Soaking(plan, folder, console) as watch:
        reached = watch.train_undisturbed()
        faults = watch.train_disturbed(reached)
    verdict = judge(folder, watch.readings, faults, plan.every)
    text = verdict.render(f"{plan.job.target}, {plan.hours:g} h")
    write_atomically(folder / TEXT_FILE, text + "\n")
    say(console, text)
    say(console, f"Soak: {relative_to_root(folder / TEXT_FILE)}")
    return int(not verdict.held)


def plan_soak(strategy: str, hours: float, model: str | None, options: Options) -> Soak:
    """Compose the launch of both runs, with checkpoints and a schedule that is longer than the runs.

    Raises:
        LaunchError: Strategy and model do not fit each other.
    """
    model = model or ("moe-tiny" if "ep" in strategy else "gpt2-tiny")
    devices = count_devices(strategy, otherwise=2)
    sharding = parse_strategy(strategy, devices).sharding
    if sharding.wraps_modules or options.backend != Backend.MEGATRON:
        raise LaunchError(
            f"A soak resumes after each kill, and STRATEGY={strategy} of {options.backend} cannot be "
            "resumed; use dp2, pp2, zero1, ep2 or another strategy of Megatron's that shards no more "
            "than "
            "the optimizer."
        )
    iterations = round(hours * 3600 / _FASTEST_SECONDS)
    schedule = ("--train-iters", str(iterations), "--lr-decay-iters", str(iterations))
    options = replace(
        options,
        iterations=iterations,
        extra=(*schedule, *options.extra),
        saving=options.saving or Saving(SAVE_EVERY, DEFAULT_KEEP),
    )
    job = parse_target(f"train-{strategy}-{model}-{devices}cpu", options)
    return Soak(hours, compose_job(job))


@dataclass
class _Soaking:
    """Runner that starts launchers in the soak's folder, samples their processes, and kills some."""

    soak: Soak
    folder: Path
    console: Console
    readings: list[ProcessReading] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)
    _start_seconds: float = 0.0
    """Seconds of a run before its first iteration."""
    _attempts: Counter[str] = field(default_factory=Counter)
    _logged_before: int = 0
    """Bytes of the log when this attempt began."""

    def __enter__(self) -> _Soaking:
        self._file = (self.folder / READINGS_FILE).open("w", newline="")
        self._writer = csv.DictWriter(self._file, [field.name for field in fields(ProcessReading)])
        self._writer.writeheader()
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def train_undisturbed(self) -> int:
        """Train until the time after the first iteration is over. Return the last iteration.

        Raises:
            LaunchError: The run ended early, or did not reach its second checkpoint.
        """
        with self._launched(UNDISTURBED, self.soak.job.options.iterations or 0) as run:
            launched = time.monotonic()
            while run.launcher.poll() is None and not _last_iteration(run.folder):
                if time.monotonic() - launched > OF_A_RUN:
                    break
                time.sleep(READ_SECONDS / 10)
            self._start_seconds = time.monotonic() - launched
            self._watch(run, time.monotonic() + self.soak.undisturbed_seconds)
        reached, every = _last_iteration(run.folder), self.soak.every
        if reached < 2 * every:
            raise LaunchError(
                f"--hours {self.soak.hours:g} ended at iteration {reached}, before the second checkpoint; "
                f"set --hours higher, or SAVE_EVERY= below {every}."
            )
        self._say(f"undisturbed: {reached} iterations")
        return reached

    def train_disturbed(self, iterations: int) -> list[Fault]:
        """Train to the same iteration or to the soak's end while killing processes. Return the faults in order.

        Raises:
            LaunchError: A run ended without a kill, or did not end after a kill.
        """
        choose, faults = random.Random(self.soak.job.options.seed), []
        folder, beyond = self.folder / DISTURBED, 0
        # Both runs have a start-up, while --hours counts training only.
        end = self._began + 2 * self._start_seconds + self.soak.hours * 3600
        while _last_iteration(folder) < iterations and _lasts(folder, end, beyond):
            gap = choose.expovariate(1 / self.soak.mean_gap_seconds)
            with self._launched(DISTURBED, iterations) as run:
                if self._watch(run, end, gap, beyond, inf if faults else iterations / 2):
                    faults.append(fault := self._strike(run, choose))
                    beyond = fault.iteration + 1  # The line of this iteration is an average.
                    self._say(
                        f"{fault.killed} killed at iteration {fault.iteration}: {fault.status}"
                    )
        self._say(f"disturbed: {_last_iteration(folder)} iterations, {len(faults)} faults")
        return faults

    @contextmanager
    def _launched(self, run: str, iterations: int) -> Iterator[Victim]:
        """Yield a launcher that trains or resumes a run. On exit the launcher is asked to stop and has ended."""
        options, folder = self.soak.job.options, self.folder / run
        self._attempts[run] += 1
        folder.mkdir(exist_ok=True)
        log = folder / records.LOG_FILE
        self._logged_before = log.stat().st_size if log.is_file() else 0
        asked = replace(options, iterations=iterations, run_folder=folder.absolute())
        # Variables on the command line of make are for the soak, not for its runs.
        variables = {**format_variables(asked), "REPEATS": "", "MAKEFLAGS": ""}
        with (self.folder / f"{run}.txt").open("ab") as output:
            launcher = launch((self.soak.job.target,), {**os.environ, **variables}, output)
        try:
            yield Victim(launcher, folder)
        finally:
            if launcher.poll() is None:
                launcher.terminate()
            launcher.wait()

    def _watch(
        self, run: Victim, end: float, gap: float = inf, beyond: int = -1, latest: float = inf
    ) -> bool:
        """Read processes until the run or the time is over; True where one is to be killed before that:
        `gap` seconds after there is something to resume from, and by an iteration at the latest."""
        due = None
        # After the last fault there must be time to see that the run continues training.
        last_due = end - self.soak.mean_gap_seconds
        while run.launcher.poll() is None and _lasts(run.folder, end, beyond):
            self._read(run)
            if due is None and self._trains(run):
                due = time.monotonic() + gap
                due = due if due <= last_due else inf
            if due and (due <= time.monotonic() or _last_iteration(run.folder) >= latest):
                return True
            seconds_left = min(due or inf, end) - time.monotonic()
            time.sleep(min(READ_SECONDS, max(0.1, seconds_left)))
        if run.launcher.poll() not in (None, 0):
            printed = (self.folder / f"{run.folder.name}.txt").read_text(errors="replace")
            last = " ".join(printed.splitlines()[-3:]) or "it said nothing"
            raise LaunchError(f"The {run.folder.name} run ended by itself: {last}")
        return False

    def _strike(self, run: Victim, choose: random.Random) -> Fault:
        run.look()
        killed = choose.choice(sorted(run.processes))
        iteration, struck = _last_iteration(run.folder), time.monotonic()
        kill(run.processes[killed])
        try:
            status = run.end().status
        except (AssertionError, subprocess.TimeoutExpired):
            raise LaunchError(
                f"{relative_to_root(run.folder)} was not over {OF_A_RUN:.0f} s after its {killed} was killed."
            ) from None
        took = time.monotonic() - struck
        return Fault(struck - self._began, iteration, killed, status.status, status.reason, took)

    def _trains(self, run: Victim) -> bool:
        """Return True if this attempt has logged an iteration and a checkpoint exists."""
        stored = find_checkpoints(run.folder / records.CHECKPOINTS_FOLDER)
        begun = _last_iteration(run.folder, self._logged_before) > 0
        return begun and any(checkpoint.is_finished for checkpoint in stored)

    def _read(self, run: Victim) -> None:
        control, iteration = control_seconds(), _last_iteration(run.folder)
        seconds = time.monotonic() - self._began
        for name, process in processes_of(run.launcher).items():
            with suppress(psutil.Error), process.oneshot():
                times = process.cpu_times()
                reading = ProcessReading(
                    run.folder.name,
                    self._attempts[run.folder.name],
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

    def _say(self, text: str) -> None:
        seconds = time.monotonic() - self._began
        self.console.print(f"[{seconds:.0f} s] {text}", markup=False, highlight=False)


def _lasts(run: Path, end: float, beyond: int) -> bool:
    """Return True until the time is over, and on a slow machine until the run has passed its last fault."""
    late = time.monotonic() - end
    return late < 0 or (_last_iteration(run) <= beyond and late < OF_A_RUN)


def _last_iteration(run: Path, begin_bytes: int = 0) -> int:
    """Return the last iteration in a run's log from `begin_bytes` on; 0 if there is none."""
    log = run / records.LOG_FILE
    if not log.is_file():
        return 0
    # Only the end is read, because a long log would otherwise be read in full every few seconds.
    begin = max(begin_bytes, log.stat().st_size - _TAIL_BYTES)
    with closing(LogFollower(log, begin)) as follower:
        return max((iteration.iteration for iteration in follower.new_iterations()), default=0)


_CONTROL = np.random.default_rng(0).permutation(100_000)


def control_seconds() -> float:
    """Return the processor time of a fixed piece of work, which depends only on the machine's load."""
    began = time.thread_time()
    np.sort(_CONTROL)
    return time.thread_time() - began
