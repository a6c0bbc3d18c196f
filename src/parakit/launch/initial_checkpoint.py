"""The shared starting checkpoint: the same weights for every strategy, so that losses can be compared.

Without it TP and PP initialise differently. One rank writes it in Megatron's distributed format, which
every strategy loads resharded. It is written under a temporary name, read back, and renamed when it is
whole. Every use re-verifies against the stored manifest: sha256, 1.4 GB/s on one core here, which
is 2.2 s for gpt2-large. One that has changed is kept under another name and written anew, with a
sentence: its weights follow from model, seed and Megatron, and `run.json` has their hash, so no run is
compared with one that started from others.
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
from parakit.logs import diagnose_log

_WITHOUT_LOSS = ("sinkhorn", "quantile_balancing")
"""Ways to balance a router that refuse a loss for it."""

RunLaunch = Callable[[Launch, Path], int]
"""Trains a launch on one rank, whose output goes to a log; its exit code."""


def ensure_initial_checkpoint(
    launch: Launch, console: Console, run: RunLaunch | None = None
) -> Path | None:
    """The checkpoint a launch starts from, written now if it is not there; None if it needs none.

    Args:
        launch: What starts from it.
        console: The terminal.
        run: What trains the rank that writes it; None starts one with a supervisor.

    Raises:
        LaunchError: Megatron did not write it; the message names its log.
    """
    path = launch.initial_checkpoint
    if path is None or launch.resume_point:  # Which loads what it saved.
        return None
    is_there = path.is_dir()
    if is_there:
        check_owner(path)
        flaw = _flaw(path)
        if flaw is None:
            return path
    if path == imported_weights_folder(launch.model):
        why = f"have changed since they were imported ({flaw})" if is_there else "are not there"
        raise LaunchError(
            f"The weights {relative_to_root(path)} {why}; remove the model's folder and run 'make import-hf' "
            "again."
        )
    if is_there:
        aside = rename_damaged(path)
        console.print(
            f"The starting checkpoint {relative_to_root(path)} has changed since it was written ({flaw}); it "
            f"is kept as {aside.name} and written anew.",
            style="yellow",
            highlight=False,
        )

    def supervised(writer: Launch, log: Path) -> int:
        with RunProgress(console, "starting checkpoint", 1) as progress:
            return run_ranks(writer, log, progress)

    _write(path, launch, run or supervised)
    return path


def _write(path: Path, launch: Launch, run: RunLaunch) -> None:
    try:
        with atomic_directory(path) as partial:
            log = partial / LOG_FILE
            exit_code = run(_writing_launch(launch, partial), log)
            if exit_code != 0:
                reason = diagnose_log(log, exit_code, interrupted=False).reason
                kept = path.with_name(f"{path.name}.log")
                with suppress(FileNotFoundError):
                    log.rename(kept)
                raise LaunchError(
                    f"The starting checkpoint was not written: {reason} The log is {kept}."
                )
            if flaw := _flaw(partial):
                raise LaunchError(
                    f"The starting checkpoint {path} cannot be read back after it was written: {flaw}; "
                    "see whether the disk is sound, or name another folder with RUNS=."
                )
    except OSError:
        # Another run wrote the same meanwhile, such as an element of the same Slurm array.
        if not path.is_dir():
            raise


def _flaw(folder: Path) -> str | None:
    """What is wrong with a starting checkpoint; None if it is what was written.

    One without a manifest, of before there was one, is read back against its own checksums.
    """
    stored = find_checkpoints(folder)
    if not stored or stored[0].iteration != read_finished_iteration(folder):
        return f"it holds no checkpoint, or {TRACKER_FILE} names another"
    flaw = find_flaw(stored[0])
    return f"{stored[0].path.name}: {flaw}" if flaw else None


def check_owner(folder: Path) -> None:
    """Refuse a checkpoint that another user could have written: its metadata is a pickle.

    torch reads `.metadata` of a distributed checkpoint with `pickle.load`, and Megatron up to 0.15 its
    `common.pt` too, which runs whatever is in them.

    Raises:
        LaunchError: It belongs to another user, or is world-writable.
    """
    for path in (folder, *folder.rglob("*")):
        found = path.lstat()
        writable = not path.is_symlink() and found.st_mode & stat.S_IWOTH
        if found.st_uid not in (os.geteuid(), 0) or writable:
            whose = f"user {found.st_uid}'s" if not writable else "writable by everybody"
            raise LaunchError(
                f"{path} is {whose}, and a checkpoint can run code when it is loaded; remove it, or "
                "name a folder of your own with RUNS=."
            )


def _writing_launch(launch: Launch, folder: Path) -> Launch:
    """One rank, one sample, learning rate 0: builds the model, changes nothing, saves the weights."""
    flags = Flags(launch.flags)
    router = Flags(launch.model.flags).text("--moe-router-load-balancing-type")
    save = format_flags(
        {
            "--lr": 0,
            "--min-lr": 0,
            "--exit-interval": 1,
            "--save": relative_to_root(folder),
            "--save-interval": 1,
            "--ckpt-format": "torch_dist",
            "--no-save-optim": True,
            "--no-save-rng": True,
            UNTIED: UNTIED in launch.flags,
            # EXTRA= is not taken over, and the model's own split may leave a part of the data empty.
            **{
                name: flags.text(name)
                for name in (SPLIT_FLAG, EVAL_ITERATIONS_FLAG)
                if flags.has(name)
            },
            # The model's file may have one, which these refuse, and EXTRA= is not all taken over.
            "--moe-aux-loss-coeff": 0 if router in _WITHOUT_LOSS else None,
        }
    )
    alone = replace(
        launch.job.options,
        shared_start=False,
        ledger=False,
        extra=save,
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
    job = Job("baseline", launch.model, 1, launch.spec.device, alone)
    composed = compose_launch(job, launch.runtime)
    assert composed.spec.batch == Batch(1, 1)
    noise = {variables.START_NOISE: str(alone.seed)} if alone.noisy_start else {}
    return replace(composed, warm=launch.warm, environment=composed.environment | noise)
