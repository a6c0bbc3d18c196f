"""Run a composed launch to its end, and complete its run folder even if the run fails."""

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
from parakit.launch.checkpoints import CheckpointKeeper, choose_grace_seconds
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
"""Exit code of a node's ranks that were ended before torchrun ended by itself."""


class FolderRemovedError(LaunchError):
    """Error of a run whose folder was removed, so that no status can be written."""


def execute_launch(
    launch: Launch,
    runs: Path,
    console: Console,
    title: str,
    group: NodeGroup = SINGLE_NODE,
) -> tuple[Path, records.StatusRecord]:
    """Train a launch; return its run folder and how the run ended.

    The folder is made in `runs` unless RUN_FOLDER= names another one.

    Raises:
        LaunchError: The run folder cannot be written and nothing was started; or the folder was removed
            during the run and the ranks were ended.
        Interrupted: The user asked to stop; the ranks were ended and the status is written.
    """
    named_folder = launch.job.options.run_folder
    folder = create_run_folder(launch, runs, named_folder)
    record_launcher(folder)
    remove_stale_sample_indices(launch.job.options.runs)
    try:
        group.announce(folder)
    except LaunchError:
        if named_folder is None:
            shutil.rmtree(folder)
        raise
    # A request to stop waits until the status of a run that has just ended by itself is written.
    with defer_stop_requests():
        return folder, _train_and_complete(folder, launch, console, title, group)


def run_ranks(
    launch: Launch,
    log: Path,
    progress: RunProgress,
    group: NodeGroup = SINGLE_NODE,
    folder: Path | None = None,
    disk: exit_status.DiskWatch | None = None,
) -> int:
    """Start a launch's ranks, show their progress, and return torchrun's exit code once all have ended.

    `folder` is the run folder, by default the log's folder. `disk` is the watch of its disk, if there is one. The
    exit code is reported to the other nodes after this node's processes have ended.

    Raises:
        EndedRunError: The log did not grow for the launch's timeout, or the launch's time limit was reached.
        FolderRemovedError: Somebody removed the log.
        Interrupted: The user asked to stop; the ranks were ended.
    """
    folder = folder or log.parent
    log.touch()
    stacks = folder / records.STACKS_FOLDER
    environment = {**launch.environment, variables.STACKS: relative_to_root(stacks)}
    if launch.job.options.ledger:
        environment[variables.LEDGER] = relative_to_root(folder / records.LEDGER_FOLDER)
    make_command = launch.warm_command if launch.warm else launch.command
    command = make_command(relative_to_root(folder))
    container = launch.runtime.container
    engine = container.program if container is not None and container.has_engine else None
    samples = log.with_name(records.SAMPLES_FILE)
    with defer_stop_requests():
        try:
            with (
                keep_filled_stacks(stacks, clear_up=folder == log.parent),
                # The log is opened before the ranks start: somebody may remove the folder later.
                closing(LogFollower(log, log.stat().st_size)) as follower,
                RankProcesses(command, environment, log, engine, launch.warm) as ranks,
                DeviceSampler(_make_device_sampler(launch, ranks), samples),
            ):
                exit_code = _follow_ranks(
                    launch, log, folder, ranks, follower, progress, group, disk
                )
        except BaseException as error:
            group.finish(ENDED_EARLY, error)
            raise
        return group.finish(exit_code)


def _follow_ranks(
    launch: Launch,
    log: Path,
    folder: Path,
    ranks: RankProcesses,
    follower: LogFollower,
    progress: RunProgress,
    group: NodeGroup,
    disk: exit_status.DiskWatch | None,
) -> int:
    """Show iterations until the ranks have ended and return torchrun's exit code.

    Returns ENDED_EARLY if another node has failed. Raises what `run_ranks` raises.
    """
    watch = HangWatch(launch.job.options.hang_timeout_seconds)
    limit_seconds, start = launch.time_limit_seconds, time.monotonic()
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
            exit_status.raise_if_container_ended(log.parent, ranks, exit_code, disk)
        if exit_code is not None:
            return exit_code
        _raise_if_asked_to_stop(launch, log, ranks, progress)
        if group.find_failure():
            return ENDED_EARLY
        if group.is_hanging(watch.is_hanging(log)):
            stacks = folder / records.STACKS_FOLDER
            stopped = group.wait_for_stacks(collect_stacks(ranks.find_by_rank(), stacks))
            raise watch.error(stopped, stacks)
        if limit_seconds is not None and time.monotonic() - start > limit_seconds:
            reason = f"It was not done in {limit_seconds:.0f} s and was ended."
            raise EndedRunError(reason, records.Status.INTERRUPTED)
        time.sleep(POLL_SECONDS)


def _raise_if_asked_to_stop(
    launch: Launch, log: Path, ranks: RankProcesses, progress: RunProgress
) -> None:
    """Raise if a request to stop has come, after the ranks had time to save a last checkpoint if they save any.

    Raises:
        Interrupted: A request has come.
    """
    try:
        raise_if_stop_requested()
    except Interrupted:
        if launch.saves_at_stop:
            grace_seconds = choose_grace_seconds(launch.job.options.grace_seconds, log)
            progress.say(
                f"asked to stop; its ranks get {grace_seconds:.0f} s for a last checkpoint"
            )
            ranks.let_save(grace_seconds)
        raise


def _train_and_complete(
    folder: Path, launch: Launch, console: Console, title: str, group: NodeGroup
) -> records.StatusRecord:
    """Train in an existing run folder and write the final status, whether training succeeds or fails.

    No status is written if somebody has removed the folder.
    """
    started = time.monotonic()
    kills_before = exit_status.count_memory_kills()
    disk = exit_status.DiskWatch(folder)

    def complete(
        exit_code: int | None, cause: records.StatusRecord | None, *, interrupted: bool = False
    ) -> records.StatusRecord:
        status = exit_status.classify_exit(
            folder, exit_code, interrupted, kills_before, disk.exhausted_resource
        )
        if cause is not None:
            status = replace(status, status=cause.status, reason=cause.reason, rank=cause.rank)
        return _write_final_status(folder, status, time.monotonic() - started)

    try:
        with disk:
            exit_code = _train_with_checkpoints(launch, folder, console, title, group, disk)
    except FolderRemovedError:
        # There is no folder to which a status could be written.
        raise
    except EndedRunError as error:
        return complete(None, records.StatusRecord(error.status, None, str(error), error.rank))
    except Interrupted:
        status = complete(None, None, interrupted=True)
        # In all other cases the caller prints the outcome.
        console.print(exit_status.format_outcome(folder, status), highlight=False)
        raise
    except BaseException:
        complete(None, group.cause)
        raise
    return complete(exit_code, group.cause)


def _write_final_status(
    folder: Path, status: records.StatusRecord, wall_seconds: float
) -> records.StatusRecord:
    """Write the final status of a run, and return the status as it was written.

    Raises:
        LaunchError: The disk is full in spite of the room that was held.
    """
    try:
        return exit_status.write_final_status(folder, status, wall_seconds)
    except OSError as error:
        raise LaunchError(
            f"{folder} could not be completed ({error.strerror}); the run ended "
            f"'{status.status}'. Free some room before the next one."
        ) from error


def _train_with_checkpoints(
    launch: Launch,
    folder: Path,
    console: Console,
    title: str,
    group: NodeGroup,
    disk: exit_status.DiskWatch,
) -> int:
    """Run the ranks with progress shown, and checkpoints looked after if the run saves any; return the exit code."""
    log = folder / records.LOG_FILE
    with ExitStack() as stack:
        keeper = None
        if launch.saving is not None:
            log.touch()
            checkpoints = folder / records.CHECKPOINTS_FOLDER
            keeper = CheckpointKeeper(checkpoints, launch.saving.keep, log, disk.look)
            stack.callback(_print_problems, keeper, console)
            stack.enter_context(keeper)
        progress = stack.enter_context(RunProgress(console, title, launch.iterations))
        exit_code = run_ranks(launch, log, progress, group, disk=disk)
        if keeper is not None and exit_code == 0:
            keeper.mark_ended_well()
        return exit_code


def _print_problems(keeper: CheckpointKeeper, console: Console) -> None:
    """Print the checkpoint problems that `keeper` has collected."""
    for problem in keeper.problems:
        console.print(problem, style="yellow", highlight=False)


class DeviceSampler(BackgroundThread):
    """A thread that writes a sample of each rank's device to a CSV file every second during a `with` block."""

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
                for rank, sample in self._read():
                    seconds = f"{time.monotonic() - start:.1f}"
                    writer.writerow({"seconds": seconds, "rank": rank, **sample})
                file.flush()


def _make_device_sampler(
    launch: Launch, ranks: RankProcesses
) -> Callable[[], Iterator[tuple[int, DeviceSample]]]:
    """Return a function that samples the device of each rank on this machine.

    Each call of the function yields pairs of a rank and its sample.
    """
    if launch.spec.device is not DeviceKind.GPU:
        return make_cpu_sampler(ranks.find_by_rank)
    nodes, num_local_ranks = launch.nodes, launch.local_devices
    gpus = visible_gpus()[:num_local_ranks]

    def sample_ranks() -> Iterator[tuple[int, DeviceSample]]:
        if nodes is None:
            return sample_gpus(gpus)
        # torchrun numbers the ranks. The processes show their ranks; if no process is visible, ranks are
        # assumed to follow the nodes' order.
        first_rank_by_node_order = nodes.rank * num_local_ranks
        return sample_gpus(gpus, min(ranks.find_by_rank(), default=first_rank_by_node_order))

    return sample_ranks
