"""Verifications one after another, on ranks forked from one process that has imported Megatron.

A reference is trained once for all strategies that are compared with the same one, so that a
verification of a tiny model takes seconds. Nothing but references and logs is kept.
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
"""What must be set before torch is imported."""


class ForkedRanks:
    """Runs launches on CPU ranks of one Megatron, without a run folder."""

    start_seconds, iteration_seconds = 300.0, 5.0
    """Longer than these a run hangs."""

    def __init__(self, options: Options | None = None) -> None:
        """Of the Megatron that the options name; the installed one's without."""
        options = options or Options()
        allowed = {variables.ALLOW_UNKNOWN_MEGATRON: "1"} if options.allow_unknown_megatron else {}
        self.warm = WarmMegatron(
            find_entry(options.megatron_lm).path, {**RANK_ENVIRONMENT, **allowed}
        )

    def run(self, launch: Launch, log: Path, also: Mapping[str, str] | None = None) -> str:
        """Train as `exit_code`; returns how it failed, empty if it did not."""
        if code := self.exit_code(launch, log, also):
            return f"ended with {code}: {diagnose_log(log, code, False).reason} The log is {log}"
        return ""

    def exit_code(self, launch: Launch, log: Path, also: Mapping[str, str] | None = None) -> int:
        """Train a launch without what names its run folder, with `also` beside its variables.

        What the ranks print is in the log.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, **RANK_ENVIRONMENT, **launch.environment, **(also or {})}
        seconds = self.start_seconds + self.iteration_seconds * launch.iterations
        with log.open("wb") as file:
            arguments = (self.warm.entry, *launch.flags_with_sample_indices)
            return self.warm.run(launch.devices, arguments, environment, file, seconds)

    def ensure_start(self, launch: Launch) -> None:
        """Write the weights that a launch starts from where they are not there yet.

        Raises:
            LaunchError: Megatron did not write them.
        """
        ensure_initial_checkpoint(launch, Console(quiet=True), self.exit_code)

    def close(self) -> None:
        """End the process that forks."""
        self.warm.close()


def read_losses(log: Path) -> list[float]:
    """Of each iteration of a log's run."""
    return [one.lm_loss for one in scrape_log(log).iterations if one.lm_loss is not None]


class Verifier:
    """Verifies strategies of one Megatron."""

    def __init__(self, folder: Path, ranks: ForkedRanks) -> None:
        """The folder takes starting weights, references and logs."""
        self.folder = folder
        self.ranks = ranks
        self._references = SharedReferences(folder / "references")

    def verify(self, pair: LaunchPair, both: bool = False) -> Judgement:
        """Verify a pair; a patch file is in the strategy alone, or with `both` in the reference as well.

        Raises:
            LaunchError: The two would do different work.
        """
        job = pair.job.with_options(replace(pair.job.options, runs=self.folder))
        verification = compose_pair(replace(pair, job=job))
        self.ranks.ensure_start(verification.reference)
        if not both:
            of_patch_files = (variables.PATCH_FILE, variables.PATCH_FILE_SHA256)
            reference = verification.reference
            kept = {k: v for k, v in reference.environment.items() if k not in of_patch_files}
            verification = replace(verification, reference=replace(reference, environment=kept))

        with tempfile.TemporaryDirectory(dir=self.folder) as scratch:

            def trained(part: str, launch: Launch) -> str:
                kind = "reference" if part.startswith("reference") else "strategy"
                log = self.folder / f"{kind}.txt"
                failure = self.ranks.run(launch, log)
                keep_log(log, Path(scratch, part))
                return failure

            train = self._references.around(trained, Path(scratch))
            return train_and_judge(verification, Path(scratch), train)

    def forget(self) -> None:
        """Remove the references: each is hundreds of megabytes."""
        self._references.forget()
