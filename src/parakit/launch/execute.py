"""Run a composed launch to its end, and leave a complete run folder whatever happens."""

from __future__ import annotations

import csv
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from parakit.artifacts import run as records
from parakit.cluster import SINGLE_NODE, NodeGroup
from parakit.config import variables
from parakit.config.errors import LaunchError
from parakit.config.files import relative_to_root
from parakit.config.run import DeviceKind
from parakit.launch.background import BackgroundThread
from parakit.launch.checkpoints import CheckpointKeeper
from parakit.launch.compose import Launch
from parakit.launch.data import remove_stale_sample_indices
from parakit.launch.devices import DeviceSample, make_cpu_sampler, sample_gpus, visible_gpus
from parakit.launch.progress import LogFollower, RunProgress
from parakit.launch.run_folder import create_run_folder, record_launcher
from parakit.launch.supervise import exit_status
from parakit.launch.supervise.hang import (
    EndedRunError,
    HangWatch,
    collect_stacks,
    keep_filled_stacks,
)
from parakit.launch.supervise.interruption import (
    Interrupted,
    defer_stop_requests,
    raise_if_stop_requested,
)
from parakit.launch.supervise.ranks import RankProcesses

POLL_SECONDS = 0.2
SAMPLE_SECONDS = 1.0
ENDED_EARLY = 1
"""Exit code of a share that was ended before its torchrun did."""


class FolderRemovedError(LaunchError):
    """There is no run folder any more to write a status to."""


def execute_launch(
    launch: Launch,
    runs: Path,
    console: Console,
    title: str,
    group: NodeGroup = SINGLE_NODE,
) -> tuple[Path, records.StatusRecord]:
    """Train; return the run folder, in `runs` unless RUN_FOLDER= is another, and how it ended.

    Raises:
        LaunchError: The run folder could not be written, and nothing was started; or it was removed
            meanwhile, and the ranks were ended.
        Interrupted: After the ranks were ended and the status was written.
    """
    given = launch.job.options.run_folder
    folder = create_run_folder(launch, runs, given)
    record_launcher(folder)
    remove_stale_sample_indices(launch.job.options.runs)
    try:
        group.announce(folder)
    except LaunchError:
        if given is None:
            shutil.rmtree(folder)
        raise
    # A run that ended by itself gets the status of that, whatever is asked meanwhile.
    with defer_stop_requests():
        return folder, _train_in(folder, launch, console, title, group)


def run_ranks(
    launch: Launch,
    log: Path,
    progress: RunProgress,
    group: NodeGroup = SINGLE_NODE,
    folder: Path | None = None,
) -> int:
    """Start a launch's ranks, follow their log, return torchrun's exit code; none is left running.

    The log's folder is the run folder unless it is given. The end is reported to the other nodes once
    this one's processes are gone.

    Raises:
        EndedRunError: The log did not grow for the launch's timeout, or the launch's time was over.
        FolderRemovedError: Somebody removed the log.
        Interrupted: A request to stop came, and they were ended.
    """
    folder = folder or log.parent
    log.touch()
    stacks = folder / records.STACKS_FOLDER
    own = {**launch.environment, variables.STACKS: relative_to_root(stacks)}
    if launch.job.options.ledger:
        own[variables.LEDGER] = relative_to_root(folder / records.LEDGER_FOLDER)
    start = launch.warm_command if launch.warm else launch.command
    in_container = launch.runtime.container is not None
    with defer_stop_requests():
        try:
            with (
                keep_filled_stacks(stacks, clear_up=folder == log.parent),
                # Before there is anybody who might remove it.
                closing(LogFollower(log, log.stat().st_size)) as follower,
                RankProcesses(
                    start(relative_to_root(folder)), own, log, in_container, launch.warm
                ) as ranks,
                DeviceSampler(_readings(launch, ranks), log.with_name(records.SAMPLES_FILE)),
            ):
                exit_code = _follow(launch, log, folder, ranks, follower, progress, group)
        except BaseException as error:
            group.finish(ENDED_EARLY, error)
            raise
        return group.finish(exit_code)


def _follow(
    launch: Launch,
    log: Path,
    folder: Path,
    ranks: RankProcesses,
    follower: LogFollower,
    progress: RunProgress,
    group: NodeGroup,
) -> int:
    """Show iterations until the ranks have ended; as `run_ranks`."""
    watch = HangWatch(launch.job.options.hang_timeout_seconds)
    limit, began = launch.time_limit_seconds, time.monotonic()
    while True:
        exit_code = ranks.exit_code()
        if not log.exists():
            raise FolderRemovedError(
                f"{folder} was removed while its run was on; its ranks were ended, and what they had "
                "measured is gone."
            )
        for iteration in follower.new_iterations():
            progress.show(iteration)
        if exit_code:
            exit_status.raise_if_container_ended(log.parent, ranks, exit_code)
        if exit_code is not None:
            return exit_code
        raise_if_stop_requested()
        if group.find_failure():
            return ENDED_EARLY
        if group.is_hanging(watch.is_hanging(log)):
            stacks = folder / records.STACKS_FOLDER
            stopped = group.wait_for_stacks(collect_stacks(ranks.find_by_rank(), stacks))
            raise watch.error(stopped, stacks)
        if limit is not None and time.monotonic() - began > limit:
            reason = f"It was not done in {limit:.0f} s and was ended."
            raise EndedRunError(reason, records.Status.INTERRUPTED)
        time.sleep(POLL_SECONDS)


def _train_in(
    folder: Path, launch: Launch, console: Console, title: str, group: NodeGroup
) -> records.StatusRecord:
    """Train in a run folder that is there, and complete it whatever happens."""
    started = time.monotonic()
    kills_before = exit_status.count_memory_kills()
    exit_code: int | None = None
    interrupted = removed = False
    ended: EndedRunError | None = None
    disk = exit_status.DiskWatch(folder)
    try:
        with disk:
            exit_code = _train(launch, folder, console, title, group)
    except EndedRunError as error:
        ended = error
    except Interrupted:
        interrupted = True
        raise
    except FolderRemovedError:
        removed = True
        raise
    finally:
        if not removed:
            status = exit_status.classify_exit(
                folder, exit_code, interrupted, kills_before, disk.exhausted_resource
            )
            cause = group.cause
            if ended:
                cause = records.StatusRecord(ended.status, None, str(ended), ended.rank)
            if cause and not interrupted:
                status = replace(status, status=cause.status, reason=cause.reason, rank=cause.rank)
            try:
                status = exit_status.write_final_status(folder, status, time.monotonic() - started)
            except OSError as error:
                raise LaunchError(
                    f"{folder} could not be completed ({error.strerror}); the run ended "
                    f"'{status.status}'. Free some room before the next one."
                ) from error
            if interrupted:  # Else the caller says it.
                console.print(exit_status.format_outcome(folder, status), highlight=False)
    return status


def _train(launch: Launch, folder: Path, console: Console, title: str, group: NodeGroup) -> int:
    log = folder / records.LOG_FILE
    with ExitStack() as around:
        keeper = None
        if launch.saving is not None:
            log.touch()
            keeper = CheckpointKeeper(folder / records.CHECKPOINTS_FOLDER, launch.saving.keep, log)
            around.callback(_print_problems, keeper, console)
            around.enter_context(keeper)
        progress = around.enter_context(RunProgress(console, title, launch.iterations))
        exit_code = run_ranks(launch, log, progress, group)
        if keeper is not None and exit_code == 0:
            keeper.mark_ended_well()
        return exit_code


def _print_problems(keeper: CheckpointKeeper, console: Console) -> None:
    for problem in keeper.problems:
        console.print(problem, style="yellow", highlight=False)


class DeviceSampler(BackgroundThread):
    """Writes to a file, every second while the `with` block runs, what each rank's device reports."""

    def __init__(self, read: Callable[[], Iterator[tuple[int, DeviceSample]]], path: Path) -> None:
        self._read = read
        self._path = path
        super().__init__()

    def _watch(self) -> None:
        start = time.monotonic()
        # A full disk ends the samples, not the run.
        with suppress(OSError), self._path.open("w", newline="") as file:
            writer = csv.DictWriter(file, records.SAMPLE_COLUMNS)
            writer.writeheader()
            while not self.done.wait(SAMPLE_SECONDS):
                for rank, reading in self._read():
                    seconds = f"{time.monotonic() - start:.1f}"
                    writer.writerow({"seconds": seconds, "rank": rank, **reading})
                file.flush()


def _readings(
    launch: Launch, ranks: RankProcesses
) -> Callable[[], Iterator[tuple[int, DeviceSample]]]:
    """What reads the devices of this machine's ranks."""
    if launch.spec.device is not DeviceKind.GPU:
        return make_cpu_sampler(ranks.find_by_rank)
    nodes, local = launch.nodes, launch.local_devices
    gpus = visible_gpus()[:local]

    def read() -> Iterator[tuple[int, DeviceSample]]:
        # As its processes say, or as nodes are numbered where none is seen: torchrun decides it.
        first = min(ranks.find_by_rank(), default=nodes.rank * local) if nodes else 0
        return sample_gpus(gpus, first)

    return read
