"""What is known of Megatron's own numerical bugs: `docs/upstream/findings.yaml`, one entry a finding."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

from parakit.artifacts.capture import Stage
from parakit.config.files import ROOT, from_root, read_yaml

FOLDER = ROOT / "docs/upstream"
VERSIONS = ("f4fa7d6b", "0.16.1", "0.17.1", "0.18.2", "0.19.0")
"""The Megatrons for which every finding is judged."""


class FindingStatus(StrEnum):
    """What a finding comes to on CPU ranks."""

    REPRODUCED = "reproduced"
    ABSENT = "not present"
    UNREACHABLE = "not reachable on CPU"


class Basis(StrEnum):
    """How it is known of a version."""

    RUN = "run"
    READ = "read"


@dataclass(frozen=True)
class Effect:
    """Relative differences from one rank after some iterations, of the strategy with the bug and cured.

    Of the loss, and of all weights as one vector: the norm of the difference over the norm of how far
    training moved one rank's weights.
    """

    iterations: int
    loss: float
    weights: float
    cured_loss: float
    cured_weights: float


@dataclass(frozen=True)
class Finding:
    """One bug, reported by others or found here."""

    id: str
    title: str
    verdict: FindingStatus
    present: dict[str, Basis]
    """Versions that have it."""
    absent: dict[str, Basis]
    why: str
    """What is wrong; where it is not reproduced, why not."""
    thread: str = ""
    """Where it is described, such as `NVIDIA/Megatron-LM#7452 A8`; empty: in no thread that we know."""
    model: str = "gpt2-tiny"
    strategies: tuple[str, ...] = ()
    """Strategies that show it, the smallest first."""
    devices: int = 2
    flags: tuple[str, ...] = ()
    own_flags: tuple[str, ...] = ()
    """Of the strategy alone (`EXTRA_B=`)."""
    reference: str = ""
    """A strategy; empty is one rank."""
    stage: Stage | None = None
    """Of the first wrong tensor, as module and kind."""
    module: str = ""
    kind: str = ""
    fails: str = ""
    """Words of the error that ends the strategy's run, where there is no tensor to compare."""
    checkout: bool = False
    """Whether it takes `MEGATRON_LM=`: the kit's own entry refuses it."""
    behind: str = ""
    """Another finding that hides it; its patch is applied where this one is shown."""
    witness: str = ""
    """A file beside the patch that ends with an error what never ends by itself; applied likewise."""
    effect: Effect | None = None

    @property
    def patch(self) -> Path:
        """A `PATCH_FILE=` file that cures it, and what hides it."""
        return FOLDER / f"{self.id.replace('-', '_')}.py"

    @property
    def report(self) -> Path | None:
        """The report to upstream, where there is one."""
        path = FOLDER / f"{self.id}.md"
        return path if path.is_file() else None

    @property
    def shown_with(self) -> Path | None:
        """What it is shown with: its witness, or the patch of what hides it."""
        if self.witness:
            return FOLDER / self.witness
        return FOLDER / f"{self.behind.replace('-', '_')}.py" if self.behind else None

    def command(self, patch: Path | None = None) -> str:
        """What verifies its smallest strategy, with a patch or as it is."""
        words = [f"make verify-{self.strategies[0]}-{self.model}-{self.devices}cpu"]
        given = {
            "REFERENCE": self.reference,
            "EXTRA": shlex.join(self.flags),
            "EXTRA_B": shlex.join(self.own_flags),
            "PATCH_FILE": from_root(patch) if patch else "",
            "MEGATRON_LM": "<checkout>" if self.checkout else "",
        }
        words += [f'{name}="{value}"' for name, value in given.items() if value]
        return " ".join(words)


def list_findings() -> tuple[Finding, ...]:
    """All, in the order of the file.

    Raises:
        msgspec.ValidationError: An entry lacks a field, or has one of another kind.
    """
    entries: list[dict[str, Any]] = read_yaml(FOLDER / "findings.yaml")
    for entry in entries:
        entry |= {name: shlex.split(entry.get(name, "")) for name in ("flags", "own_flags")}
    return msgspec.convert(entries, tuple[Finding, ...])
