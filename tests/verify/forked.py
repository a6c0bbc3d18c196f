"""Ranks forked from a process that has imported Megatron: a run of a few iterations in seconds.

Importing takes most of a short run. `ForkedRanks` imports once; each run forks its ranks, which apply
what patches their environment asks for beyond the usual ones, plant, and run the entry with the launch's
own arguments. A process that has begun threads of its own (a backward pass, gloo) must not fork.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path

from megatron_patches.plant import execute_plant
from megatron_patches.warm import free_port
from tools.launch.compose import Launch
from tools.spec.files import ROOT

START = {"KIT_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
"""What must be set before torch is imported."""

POLL_SECONDS = 0.05


class ForkedRanks:
    """Runs launches on CPU ranks of the installed Megatron, one after another."""

    def __init__(self) -> None:
        os.environ.update(START | {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"})
        from megatron_patches.catalogue import PATCHES
        from megatron_patches.context import find_context
        from megatron_patches.registry import apply_patches

        self._entry = ROOT / "examples/gpt3/pretrain_gpt.py"
        self._context = find_context(self._entry, "cpu")
        self._applied = apply_patches(PATCHES, self._context)
        self._code = compile(self._entry.read_bytes(), str(self._entry), "exec")
        exec(self._code, {"__name__": "entry", "__file__": str(self._entry)})  # noqa: S102
        _read_help_once()

    def run(
        self,
        launch: Launch,
        folder: Path,
        also: Mapping[str, str] | None = None,
        watch: Callable[[int], None] = lambda _: None,
        timeout_seconds: float = 300.0,
    ) -> list[int]:
        """Train; return the ranks' exit codes (-9 of one that was killed when another had failed).

        Args:
            launch: Of CPU ranks; its arguments are used without those that name the run folder.
            folder: Takes `rank<N>.txt`, what each rank prints.
            also: Variables beside the launch's.
            watch: Called in each rank before the entry, with the rank's number.
            timeout_seconds: After it all are killed.
        """
        folder.mkdir(parents=True, exist_ok=True)
        port = free_port()
        children: dict[int, int] = {}
        for rank in range(launch.devices):
            place = {
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"},
                **{name: str(launch.devices) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")},
                "MASTER_PORT": str(port),
            }
            child = os.fork()
            if child == 0:
                environment = {**launch.environment, **place, **(also or {})}
                self._train(launch, folder / f"rank{rank}.txt", environment, watch, rank)
            children[child] = rank
        return _ended(children, timeout_seconds)

    def _train(
        self,
        launch: Launch,
        log: Path,
        environment: Mapping[str, str],
        watch: Callable[[int], None],
        rank: int,
    ) -> None:
        """In the child: never returns."""
        code = 1
        try:
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
            os.environ.update(environment)
            os.chdir(ROOT)
            sys.argv = [str(self._entry), *launch.flags]
            self._patch_further()
            execute_plant(os.environ)
            watch(rank)
            exec(self._code, {"__name__": "__main__", "__file__": str(self._entry)})  # noqa: S102
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(bool(end.code))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _patch_further(self) -> None:
        """Those patches that only this run's environment asks for, such as the ledger's."""
        from megatron_patches.catalogue import PATCHES
        from megatron_patches.registry import apply_patches

        apply_patches([p for p in PATCHES if p.name not in self._applied], self._context)


def _read_help_once() -> None:
    """The flags' help, which Megatron's parser finds in the source of 28 classes: not in every rank."""
    from megatron.training.arguments import add_megatron_arguments

    inspect.getsource = functools.cache(inspect.getsource)
    add_megatron_arguments(argparse.ArgumentParser())


def _ended(children: Mapping[int, int], timeout_seconds: float) -> list[int]:
    codes = dict.fromkeys(children.values(), -signal.SIGKILL)
    running = dict(children)
    end = time.monotonic() + timeout_seconds
    while running:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in running:
            codes[running.pop(child)] = os.waitstatus_to_exitcode(status)
        elif time.monotonic() > end or any(code > 0 for code in codes.values()):
            time.sleep(1)  # The others may print why they fail as well.
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            break
        else:
            time.sleep(POLL_SECONDS)
    return [codes[rank] for rank in sorted(codes)]
