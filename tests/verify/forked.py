"""Ranks of one verification after another, forked from one warm process (`megatron_patches.warm`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tools.launch.compose import Launch
from tools.launch.supervise.warm import WarmMegatron
from tools.spec.files import ROOT

START = {
    **{"KIT_DEVICE": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"},
    **{"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
}
"""What must be set before torch is imported."""
SECONDS = 300.0
"""After which a run of a few iterations hangs."""


class ForkedRanks:
    """Runs launches on CPU ranks of the installed Megatron, without a run folder."""

    def __init__(self) -> None:
        self.warm = WarmMegatron(str(ROOT / "examples/gpt3/pretrain_gpt.py"), START)

    def run(self, launch: Launch, log: Path, also: Mapping[str, str] | None = None) -> str:
        """Train; returns how it failed, empty if it did not.

        Args:
            launch: Of CPU ranks; its arguments are used without those that name the run folder.
            log: Takes what the ranks print.
            also: Variables beside the launch's.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **START, **launch.environment, **(also or {})}
        with log.open("wb") as file:
            arguments = (self.warm.entry, *launch.flags)
            status = self.warm.run(launch.devices, arguments, environment, file, SECONDS)
        return f"ended with {status}, see {log}" if status else ""

    def close(self) -> None:
        """End the process that forks."""
        self.warm.close()
