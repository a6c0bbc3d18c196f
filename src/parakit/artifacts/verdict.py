"""The verdict of a verification, `verify/<name>/verdict.json` in a run folder. No torch."""

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


class VerifyOutcome(StrEnum):
    """What a comparison comes to."""

    HELD = "held"
    DIFFERS = "differs"
    NOT_COMPARABLE = "not comparable"


EXIT_CODES = {VerifyOutcome.HELD: 0, VerifyOutcome.DIFFERS: 1, VerifyOutcome.NOT_COMPARABLE: 2}


@dataclass(frozen=True, repr=False)
class VerifyVerdict(Presented):
    """What `verdict.json` holds."""

    verdict: VerifyOutcome
    stage: CaptureStage | None = None
    """Of the first tensor that is wrong, as all below; None if none is."""
    module: str | None = None
    tensor: str | None = None
    """Which of the module's: an input, an output, the gradient of one."""
    ranks: tuple[int, ...] = ()
    kind: str | None = None
    factor: float | None = None
    error: float | None = None
    tolerance: float | None = None
    source: str | None = None
    """File and line of the module's forward pass in the Megatron in use."""
    iteration: int | None = None
    """After or in which it is wrong: weights that an iteration begins with are of the one before."""
    confirmed: bool | None = None
    """Whether the module is wrong by itself, with the reference's own input or upstream gradient."""
    worst: str | None = None
    """The element that is farthest off: its index, what it is and what it should be."""
    also: tuple[str, ...] = ()
    """What else is wrong by itself: stage, module and source; of layers that are alike the first."""
    worst_ratio: float | None = None
    """Largest error over tolerance of all tensors: below 1 if all held."""
    compared: int = 0
    seen: int = 0
    """Tensors that the strategy's ranks had; `compared` of them were compared."""
    routing_flips: int = 0
    """Tokens for which a router chose other experts within rounding; the reference's were used."""
    constant: int | None = None
    """Parameters and buffers of one value each, of which it cannot be seen which part a rank uses."""
    initialised: int | None = None
    """Pieces of parameters whose initialisation by the strategy itself was looked at, too."""
    added_up: str | None = None
    """A tensor that is off by little more than its tolerance, where no module is wrong by itself."""
    logged: str | None = None
    """What the log prints: which values were compared and held, or which one is wrong."""
    not_aligned: tuple[str, ...] = ()
    reason: str | None = None
    """Why nothing could be compared."""
    reference: str | None = None
    layout: str | None = None
    mode: str | None = None
    """In what the two differ beside their strategies, such as the size of a micro batch."""
    command: str | None = None
    """The command that repeats it."""

    @property
    def exit_code(self) -> int:
        """0 held, 1 differs, 2 not comparable."""
        return EXIT_CODES[self.verdict]

    @property
    def sentence(self) -> str:
        """The verdict in a few words."""
        if self.verdict is VerifyOutcome.HELD:
            within = f", {self.routing_flips} routing choices within rounding differ"
            ratio = f"tensors held: no error above {self.worst_ratio or 0:.2f} of its tolerance"
            small = f", but {self.added_up}, where errors of several modules add up"
            return ratio + (within if self.routing_flips else "") + (small if self.added_up else "")
        if self.verdict is VerifyOutcome.NOT_COMPARABLE:
            return f"tensors not comparable: {self.reason}"
        if self.stage is CaptureStage.LOG:
            return f"wrong value in the log: {self.logged}"
        return f"first wrong tensor: {self.stage}, {self.module} {self.tensor} ({self.kind})"

    @property
    def line(self) -> str:
        """Of a strategy that differs, all that repeats and finds it: what, how, where, which element."""
        said = f"{self.stage}, {self.module} ({self.tensor}): {self.kind}"
        logged = self.logged if self.stage is CaptureStage.LOG else None
        where = "; ".join(filter(None, (self.source, self.worst, logged, self.command)))
        return f"{said}; {where}" if where else said

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
    """Verdicts in a run folder, by name.

    Raises:
        msgspec.ValidationError: One is not of this version of the kit.
    """
    for path in sorted((folder / VERIFY_FOLDER).glob(f"*/{VERDICT_FILE}")):
        yield msgspec.json.decode(path.read_bytes(), type=VerifyVerdict)
