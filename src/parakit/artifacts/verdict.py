"""The verdict of a verification: `verify/<name>/verdict.json` in a run folder.

A verification compares the tensors of a strategy with those of a reference. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from parakit.artifacts.capture import CaptureStage
from parakit.formatting.presented import Presented
from parakit.formatting.terminal import say

if TYPE_CHECKING:
    from rich.console import Console

VERIFY_FOLDER, VERDICT_FILE = "verify", "verdict.json"
SHOWN_NOT_ALIGNED = 5
"""Most reasons why tensors were not compared that are printed."""


class VerifyOutcome(StrEnum):
    """Outcome of a comparison of tensors."""

    HELD = "held"
    DIFFERS = "differs"
    NOT_COMPARABLE = "not comparable"


EXIT_CODES = {VerifyOutcome.HELD: 0, VerifyOutcome.DIFFERS: 1, VerifyOutcome.NOT_COMPARABLE: 2}


@dataclass(frozen=True, repr=False)
class VerifyVerdict(Presented):
    """Verdict on a strategy, as in `verdict.json`.

    All fields from `stage` to `iteration` describe the first wrong tensor. They are empty if no tensor is
    wrong.
    """

    verdict: VerifyOutcome
    stage: CaptureStage | None = None
    """Stage of the first wrong tensor; None if no tensor is wrong."""
    module: str | None = None
    tensor: str | None = None
    """Name of the tensor within its module: an input, an output, or the gradient of one."""
    ranks: tuple[int, ...] = ()
    kind: str | None = None
    factor: float | None = None
    error: float | None = None
    tolerance: float | None = None
    source: str | None = None
    """File and line of the module's forward pass in the Megatron in use."""
    changed: tuple[str, ...] = ()
    """Changed files and lines of the Megatron checkout that are nearest to `source`, the nearest first."""
    iteration: int | None = None
    """Iteration in which the tensor is wrong. Weights before an iteration count as the iteration before."""
    confirmed: bool | None = None
    """True if the module is also wrong with the reference's input or upstream gradient; None if untested."""
    worst: str | None = None
    """Element with the largest error: its index, its value and the correct value."""
    also: tuple[str, ...] = ()
    """Stage, module and source of further modules that are wrong by themselves; of equal layers the first."""
    worst_ratio: float | None = None
    """Largest ratio of error to tolerance over all tensors; below 1 if all held."""
    compared: int = 0
    seen: int = 0
    """Number of tensors of the strategy's ranks; `compared` of them were compared."""
    routing_flips: int = 0
    """Tokens for which a router chose other experts within rounding. The reference's choice was used."""
    constant: int | None = None
    """Number of parameters and buffers with equal elements, which do not show which part a rank uses."""
    initialised: int | None = None
    """Number of pieces of parameters whose initialisation by the strategy was compared, too."""
    added_up: str | None = None
    """Tensor with an error slightly above its tolerance, while no module is wrong by itself."""
    logged: str | None = None
    """Sentence on the log's values: which ones were compared and held, or which one is wrong."""
    in_fp32: str | None = None
    """Sentence on the repetition of a bf16 verification in fp32; None if it was not repeated."""
    not_aligned: tuple[str, ...] = ()
    reason: str | None = None
    """Reason why nothing could be compared; None otherwise."""
    reference: str | None = None
    layout: str | None = None
    mode: str | None = None
    """Differences between both runs besides their strategies, such as the micro batch size."""
    command: str | None = None
    """Command that repeats the verification."""

    @property
    def exit_code(self) -> int:
        """Exit code: 0 if held, 1 if it differs, 2 if not comparable."""
        return EXIT_CODES[self.verdict]

    @property
    def sentence(self) -> str:
        """Verdict as one short sentence."""
        if self.verdict is VerifyOutcome.HELD:
            sentence = f"tensors held: no error above {self.worst_ratio or 0:.2f} of its tolerance"
            if self.routing_flips:
                sentence += f", {self.routing_flips} routing choices within rounding differ"
            if self.added_up:
                sentence += f", but {self.added_up}, where errors of several modules add up"
            return sentence
        if self.verdict is VerifyOutcome.NOT_COMPARABLE:
            return f"tensors not comparable: {self.reason}"
        if self.stage is CaptureStage.LOG:
            return f"wrong value in the log: {self.logged}"
        return f"first wrong tensor: {self.stage}, {self.module} {self.tensor} ({self.kind})"

    @property
    def line(self) -> str:
        """Line on a strategy that differs: stage, module, tensor, kind, change, source, element and command."""
        tensor = f"{self.stage}, {self.module} ({self.tensor}): {self.kind}"
        change = f"you changed {self.changed[0]}" if self.changed else None
        logged = self.logged if self.stage is CaptureStage.LOG else None
        details = "; ".join(filter(None, (change, self.source, self.worst, logged, self.command)))
        return f"{tensor}; {details}" if details else tensor

    def show(self, console: Console) -> None:
        """Print the outcome, how many tensors were compared, and up to five reasons why others were not."""
        self.show_outcome(console)
        say(console, f"compared {self.compared:,} of {self.seen:,} tensors")
        for line in self.not_aligned[:SHOWN_NOT_ALIGNED]:
            say(console, f"not compared: {line}")

    def show_outcome(self, console: Console) -> None:
        """Print the outcome as one line in its colour."""
        if self.verdict is VerifyOutcome.NOT_COMPARABLE:
            say(console, f"not comparable: {self.reason}", "red")
        elif self.verdict is VerifyOutcome.HELD:
            ratio = self.worst_ratio or 0.0
            say(console, f"held: no error is above {ratio:.2f} of its tolerance", "green")
        else:
            say(console, f"differs at: {self.line}", "red")

    def to_dict(self) -> dict[str, Any]:
        """Return what `parakit inspect --compare … --json` prints of two captures."""
        data: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return data


def read_verdicts(folder: Path) -> Iterator[VerifyVerdict]:
    """Yield the verdicts in a run folder, in the order of their names.

    Raises:
        msgspec.ValidationError: A verdict was written by another version of the kit.
    """
    for path in sorted((folder / VERIFY_FOLDER).glob(f"*/{VERDICT_FILE}")):
        yield msgspec.json.decode(path.read_bytes(), type=VerifyVerdict)
