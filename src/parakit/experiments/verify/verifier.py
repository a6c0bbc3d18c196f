"""Verify many pairs one after another, on ranks forked from one process that has imported Megatron.

A reference is trained once for all strategies that are compared with it, so a verification of a tiny model takes
seconds. Only references and logs are stored.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from parakit.config import variables
from parakit.experiments.verify.command import SharedReferences, keep_log, train_and_judge
from parakit.experiments.verify.pairs import LaunchPair, compose_pair
from parakit.launch import (
    CPU_RANK_ENVIRONMENT,
    Launch,
    Options,
    WarmMegatron,
    ensure_initial_checkpoint,
    find_entry,
)
from parakit.logs import diagnose_log, scrape_log
from parakit.verify import Judgement

RANK_ENVIRONMENT = {variables.DEVICE: "cpu", "HF_HUB_OFFLINE": "1", **CPU_RANK_ENVIRONMENT}
"""Environment that must be set before torch is imported."""


class ForkedRanks:
    """Runs launches on CPU ranks that are forked from one imported Megatron, without run folders."""

    start_seconds, iteration_seconds = 300.0, 5.0
    """Time limit of a run: seconds for its start, and seconds per iteration."""

    def __init__(self, options: Options | None = None) -> None:
        """Import the Megatron that the options name, or the installed one."""
        options = options or Options()
        allowed = {variables.ALLOW_UNKNOWN_MEGATRON: "1"} if options.allow_unknown_megatron else {}
        self.warm = WarmMegatron(
            find_entry(options.megatron_lm).path, {**RANK_ENVIRONMENT, **allowed}
        )

    def run(self, launch: Launch, log: Path, also: Mapping[str, str] | None = None) -> str:
        """Train a launch; return how it failed, with the diagnosis of its log; empty if it ended well.

        Args:
            launch: The run.
            log: File for what the ranks print.
            also: Further environment variables.
        """
        code = self.exit_code(launch, log, also)
        if not code:
            return ""
        return f"ended with {code}: {diagnose_log(log, code, False).reason} The log is {log}"

    def capture(self, launch: Launch, log: Path, tensors: Path) -> str:
        """Train a launch as `run` does, and keep its log next to the tensors that it captures in `tensors`."""
        failure = self.run(launch, log)
        keep_log(log, tensors)
        return failure

    def exit_code(self, launch: Launch, log: Path, also: Mapping[str, str] | None = None) -> int:
        """Train a launch and return its exit code; arguments are those of `run`.

        Flags that name the run folder are left out, because there is none.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **RANK_ENVIRONMENT, **launch.environment, **(also or {})}
        seconds = self.start_seconds + self.iteration_seconds * launch.iterations
        with log.open("wb") as file:
            arguments = (self.warm.entry, *launch.flags_with_sample_indices)
            return self.warm.run(launch.devices, arguments, environment, file, seconds)

    def ensure_start(self, launch: Launch) -> None:
        """Write the initial checkpoint of a launch if it does not exist.

        Raises:
            LaunchError: Megatron did not write it.
        """
        ensure_initial_checkpoint(launch, Console(quiet=True), self.exit_code)

    def close(self) -> None:
        """End the process from which ranks are forked."""
        self.warm.close()


def read_losses(log: Path) -> list[float]:
    """Return the loss of each iteration in a run's log; iterations without a loss are left out."""
    iterations = scrape_log(log).iterations
    return [iteration.lm_loss for iteration in iterations if iteration.lm_loss is not None]


class Verifier:
    """Verifies pairs with one version of Megatron."""

    def __init__(self, folder: Path, ranks: ForkedRanks) -> None:
        """Use a folder for initial checkpoints, references and logs."""
        self.folder = folder
        self.ranks = ranks
        self._references = SharedReferences(folder / "references")

    def verify(self, pair: LaunchPair, both: bool = False) -> Judgement:
        """Verify a pair and return the judgement.

        Args:
            pair: Strategy and reference.
            both: Whether a patch file applies to the reference, too, and not to the strategy alone.

        Raises:
            LaunchError: The two would do different work.
        """
        job = pair.job.with_options(replace(pair.job.options, runs=self.folder))
        verification = compose_pair(replace(pair, job=job))
        self.ranks.ensure_start(verification.reference)
        if not both:
            reference = _remove_patch_file(verification.reference)
            verification = replace(verification, reference=reference)

        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:

            def train(part: str, launch: Launch) -> str:
                kind = "reference" if part.startswith("reference") else "strategy"
                return self.ranks.capture(launch, self.folder / f"{kind}.txt", Path(scratch, part))

            train_part = self._references.wrap(train, Path(scratch))
            return train_and_judge(verification, Path(scratch), train_part)

    def remove_references(self) -> None:
        """Remove the stored references, hundreds of megabytes each."""
        self._references.remove()


def _remove_patch_file(launch: Launch) -> Launch:
    """Return the launch without its patch file."""
    names = (variables.PATCH_FILE, variables.PATCH_FILE_SHA256)
    environment = {name: value for name, value in launch.environment.items() if name not in names}
    return replace(launch, environment=environment)
