"""Read the known numerical bugs of Megatron from `docs/upstream/findings.yaml`, one entry per finding.

A finding is a bug that others have reported or that this project has found. It states the Megatron versions that have
the bug. If the bug can be reproduced on CPU ranks, it also has the command that shows it.
"""

from __future__ import annotations

import functools
import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from parakit.artifacts.capture import CaptureStage
from parakit.config.files import ROOT, read_yaml, relative_to_root

FOLDER = ROOT / "docs/upstream"
"""Folder of `findings.yaml`, of patches and of reports to upstream."""
VERSIONS = ("f4fa7d6b", "0.16.1", "0.17.1", "0.18.2", "0.19.0", "0.19.2")
"""Megatron versions and commits for which every finding is judged."""


class FindingStatus(StrEnum):
    """Result of trying to reproduce a finding on CPU ranks."""

    REPRODUCED = "reproduced"
    ABSENT = "not present"
    UNREACHABLE = "not reachable on CPU"


class Basis(StrEnum):
    """Basis of the claim that a version has a bug or does not: it was run, or its source was read."""

    RUN = "run"
    READ = "read"


@dataclass(frozen=True)
class Effect:
    """Relative differences from one rank after some iterations, with the bug and with its patch."""

    iterations: int
    loss: float
    """Relative difference of the loss with the bug."""
    weights: float
    """Difference of all weights as one vector with the bug: the norm of the difference over the norm of how
    far training has moved one rank's weights."""
    cured_loss: float
    """Relative difference of the loss with the patch."""
    cured_weights: float
    """Difference of the weights with the patch."""


@dataclass(frozen=True)
class Finding:
    """A numerical bug of Megatron, reported by others or found by this project."""

    id: str
    title: str
    verdict: FindingStatus
    present: dict[str, Basis]
    """Versions that have the bug, with the basis of the claim."""
    absent: dict[str, Basis]
    """Versions that do not have the bug, with the basis of the claim."""
    why: str
    """Cause of the bug; if the bug is not reproduced, the reason."""
    thread: str = ""
    """Upstream thread that describes the bug, such as `NVIDIA/Megatron-LM#7452 A8`; empty if none is known."""
    model: str = "gpt2-tiny"
    strategies: tuple[str, ...] = ()
    """Strategies that show the bug, the one with the fewest ranks first."""
    devices: int = 2
    """Number of ranks of the first strategy."""
    flags: tuple[str, ...] = ()
    """Megatron's flags of both runs (`EXTRA=`)."""
    own_flags: tuple[str, ...] = ()
    """Megatron's flags of the strategy's run alone (`EXTRA_B=`)."""
    reference: str = ""
    """Strategy of the reference; empty for one rank, or for the strategy itself if it resumes."""
    resumed: str = ""
    """Strategy that saves the checkpoint from which the strategy resumes; `1` is its own, empty is none."""
    stage: CaptureStage | None = None
    """Stage of the first wrong tensor."""
    module: str = ""
    """Module of the first wrong tensor."""
    kind: str = ""
    """Kind of the first wrong tensor's error."""
    fails: str = ""
    """Text of the error that ends the strategy's run, if the run ends before tensors can be compared."""
    checkout: bool = False
    """Whether the command needs `MEGATRON_LM=`, because the kit's own training entry refuses the flags."""
    behind: str = ""
    """Id of another finding that hides this one, and whose patch is applied to show it; empty if none."""
    witness: str = ""
    """File beside the patch that ends a run with an error which would otherwise hang; empty if none."""
    effect: Effect | None = None
    """Effect of the bug on training; None if it was not measured."""

    @property
    def patch(self) -> Path:
        """Path of the `PATCH_FILE=` that corrects this bug, and the bug that hides it."""
        return FOLDER / f"{self.id.replace('-', '_')}.py"

    @property
    def report(self) -> Path | None:
        """Path of the report to upstream; None if there is none."""
        path = FOLDER / f"{self.id}.md"
        return path if path.is_file() else None

    @property
    def shown_with(self) -> Path | None:
        """Path of the file with which the bug is shown: its witness, or the patch of what hides it."""
        if self.witness:
            return FOLDER / self.witness
        return FOLDER / f"{self.behind.replace('-', '_')}.py" if self.behind else None

    def command(self, patch: Path | None = None) -> str:
        """Return the `make` command that verifies the first strategy, with `patch` as its `PATCH_FILE=`."""
        variables = {
            "REFERENCE": self.reference,
            "RESUMED": self.resumed,
            "EXTRA": shlex.join(self.flags),
            "EXTRA_B": shlex.join(self.own_flags),
            "PATCH_FILE": relative_to_root(patch) if patch else "",
            "MEGATRON_LM": "<checkout>" if self.checkout else "",
        }
        arguments = [f"make verify-{self.strategies[0]}-{self.model}-{self.devices}cpu"]
        arguments += [f'{name}="{value}"' for name, value in variables.items() if value]
        return " ".join(arguments)


@functools.cache
def list_findings() -> tuple[Finding, ...]:
    """Read all findings, in the order of the file. A process reads the file once.

    Raises:
        msgspec.ValidationError: An entry lacks a field, or a field has a value of the wrong type.
    """
    entries: list[dict[str, Any]] = read_yaml(FOLDER / "findings.yaml")
    for entry in entries:
        for name in ("flags", "own_flags"):
            entry[name] = shlex.split(entry.get(name, ""))
    return msgspec.convert(entries, tuple[Finding, ...])
