"""Write and check the initial checkpoint: the same weights for every strategy, so that losses can be compared.

Without an initial checkpoint TP and PP initialize weights differently. One rank writes it in Megatron's
distributed format, and every strategy loads it resharded. It is written under a temporary name, read back,
and renamed when it is complete. Every use checks it against its stored manifest (sha256, 1.4 GB/s on one
core here, which is 2.2 s for gpt2-large).

A checkpoint that has changed is renamed, and written again after a sentence to the user. Model, seed and
Megatron version determine its weights, and `run.json` stores their hash, so that runs from other weights
are not compared.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from parakit.artifacts.checkpoints import find_checkpoints, find_flaw, rename_damaged
from parakit.artifacts.io import atomic_directory
from parakit.artifacts.run import LOG_FILE
from parakit.artifacts.torch_dist import TRACKER_FILE, read_finished_iteration
from parakit.config import variables
from parakit.config.errors import LaunchError
from parakit.config.files import relative_to_root
from parakit.config.flags import Flags, format_flags
from parakit.config.model import imported_weights_folder
from parakit.config.run import Backend, OptimizerName
from parakit.config.strategy import UNTIED, Batch
from parakit.data import EVAL_ITERATIONS_FLAG, SPLIT_FLAG
from parakit.launch.compose import Launch, compose_launch
from parakit.launch.execute import run_ranks
from parakit.launch.job import Job
from parakit.launch.progress import RunProgress
from parakit.launch.supervise.exit_status import name_memory_limit
from parakit.logs import diagnose_log

_WITHOUT_LOSS = ("sinkhorn", "quantile_balancing")
"""Ways to balance a router for which Megatron refuses an auxiliary loss."""

_ROOT_USER = 0

RunLaunch = Callable[[Launch, Path], int]
"""A function that trains a launch on one rank, writes the output to a log, and returns the exit code."""


def ensure_initial_checkpoint(
    launch: Launch, console: Console, run: RunLaunch | None = None
) -> Path | None:
    """Return the path of a launch's initial checkpoint, which is written first if it is missing or damaged.

    None means that the launch needs none.

    Args:
        launch: The launch that starts from the checkpoint.
        console: The terminal.
        run: Trains the rank that writes the checkpoint; None starts a rank under a supervisor.

    Raises:
        LaunchError: Megatron did not write the checkpoint, and the message names its log; or imported
            weights are missing or damaged.
    """
    path = launch.initial_checkpoint
    # A resumed run loads its own checkpoint instead.
    if path is None or launch.resume_point:
        return None
    flaw = None
    if path.is_dir():
        check_owner(path)
        flaw = _find_initial_flaw(path)
        if flaw is None:
            return path
    if path == imported_weights_folder(launch.model):
        problem = f"have changed since they were imported ({flaw})" if flaw else "are not there"
        raise LaunchError(
            f"The weights {relative_to_root(path)} {problem}; remove the model's folder and run 'make import-hf' "
            "again."
        )
    if flaw is not None:
        renamed = rename_damaged(path)
        console.print(
            f"The starting checkpoint {relative_to_root(path)} has changed since it was written ({flaw}); it "
            f"is kept as {renamed.name} and written anew.",
            style="yellow",
            highlight=False,
        )

    def run_supervised(writer: Launch, log: Path) -> int:
        with RunProgress(console, "starting checkpoint", 1) as progress:
            return run_ranks(writer, log, progress)

    _write_checkpoint(path, launch, run or run_supervised)
    return path


def _write_checkpoint(path: Path, launch: Launch, run: RunLaunch) -> None:
    """Train one rank with `run` so that it writes the checkpoint to `path`; nothing is left there if it fails.

    Raises:
        LaunchError: The rank failed, and its log was moved beside `path`; or the checkpoint cannot be read
            back.
    """
    try:
        with atomic_directory(path) as partial:
            log = partial / LOG_FILE
            exit_code = run(_compose_writer(launch, partial), log)
            if exit_code != 0:
                kept_log = path.with_name(f"{path.name}.log")
                raise _explain_failed_writer(log, exit_code, kept_log)
            flaw = _find_initial_flaw(partial)
            if flaw is not None:
                raise LaunchError(
                    f"The starting checkpoint {path} cannot be read back after it was written: {flaw}; "
                    "see whether the disk is sound, or name another folder with RUNS=."
                )
    except OSError:
        # Another run may have written the same checkpoint meanwhile, such as a task of the same Slurm array.
        if not path.is_dir():
            raise


def _explain_failed_writer(log: Path, exit_code: int, kept_log: Path) -> LaunchError:
    """Return the error of a rank that did not write the checkpoint, and move its log to `kept_log`."""
    status = name_memory_limit(diagnose_log(log, exit_code, interrupted=False))
    with suppress(FileNotFoundError):
        log.rename(kept_log)
    return LaunchError(
        f"The starting checkpoint was not written: {status.reason.rstrip('.')}. The log is {kept_log}."
    )


def _find_initial_flaw(folder: Path) -> str | None:
    """Return a sentence with the flaw of an initial checkpoint; None if the checkpoint is as it was written.

    A checkpoint of an older kit, without a manifest, is read back against its own checksums.
    """
    stored = find_checkpoints(folder)
    if not stored or stored[0].iteration != read_finished_iteration(folder):
        return f"it holds no checkpoint, or {TRACKER_FILE} names another"
    checkpoint = stored[0]
    flaw = find_flaw(checkpoint)
    return f"{checkpoint.path.name}: {flaw}" if flaw else None


def check_owner(folder: Path) -> None:
    """Raise if another user could have written a checkpoint, because reading its metadata runs code.

    torch reads `.metadata` of a distributed checkpoint with `pickle.load`. Megatron up to 0.15 reads
    `common.pt` with pickle too.

    Raises:
        LaunchError: A file belongs to another user, or everybody may write it.
    """
    for path in (folder, *folder.rglob("*")):
        file_status = path.lstat()
        # The permissions of a symbolic link itself mean nothing.
        if not path.is_symlink() and file_status.st_mode & stat.S_IWOTH:
            owner = "writable by everybody"
        elif file_status.st_uid not in (os.geteuid(), _ROOT_USER):
            owner = f"user {file_status.st_uid}'s"
        else:
            continue
        raise LaunchError(
            f"{path} is {owner}, and a checkpoint can run code when it is loaded; remove it, or "
            "name a folder of your own with RUNS=."
        )


def _compose_writer(launch: Launch, folder: Path) -> Launch:
    """Return the launch of one rank that builds the model, trains one sample with learning rate 0, and saves.

    With learning rate 0 the saved weights are the initial ones.
    """
    single_rank_options = replace(
        launch.job.options,
        shared_start=False,
        ledger=False,
        extra=_flags_to_save(launch, folder),
        micro_batch_size=1,
        global_batch_size=1,
        dropout=None,
        backend=Backend.MEGATRON,
        optimizer=OptimizerName.ADAMW,
        link_bits_per_second=None,
        nodes=None,
        saving=None,
        wandb=None,
        patch_file=None,
    )
    job = Job("baseline", launch.model, 1, launch.spec.device, single_rank_options)
    composed = compose_launch(job, launch.runtime)
    assert composed.spec.batch == Batch(1, 1)
    environment = dict(composed.environment)
    if single_rank_options.noisy_start:
        environment[variables.START_NOISE] = str(single_rank_options.seed)
    return replace(composed, warm=launch.warm, environment=environment)


def _flags_to_save(launch: Launch, folder: Path) -> tuple[str, ...]:
    """Return the flags with which one rank saves the initial weights of a launch's model to `folder`, and ends."""
    values: dict[str, object] = {
        "--lr": 0,
        "--min-lr": 0,
        "--exit-interval": 1,
        "--save": relative_to_root(folder),
        "--save-interval": 1,
        "--ckpt-format": "torch_dist",
        "--no-save-optim": True,
        "--no-save-rng": True,
        UNTIED: UNTIED in launch.flags,
    }
    # The rank does not get the run's EXTRA=, but the split that the kit chose for a small data set.
    # The model's own split might leave a part of the data set empty.
    run_flags = Flags(launch.flags)
    for name in (SPLIT_FLAG, EVAL_ITERATIONS_FLAG):
        if run_flags.has(name):
            values[name] = run_flags.text(name)
    # The model's file may have an auxiliary loss that the run's EXTRA= switches off.
    router = Flags(launch.model.flags).text("--moe-router-load-balancing-type")
    if router in _WITHOUT_LOSS:
        values["--moe-aux-loss-coeff"] = 0
    return format_flags(values)
