"""The value that `why-hang` prints and that `parakit.why_hang` returns: a verdict and its evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parakit.formatting.presented import Presented
from parakit.formatting.terminal import say
from parakit.hang.evidence import HangEvidence
from parakit.hang.gather import gather_evidence
from parakit.hang.verdict import HangVerdict, judge_hang

if TYPE_CHECKING:
    from rich.console import Console


_UNPRINTED_FIELDS = ("chain", "next_step")
"""Fields of a verdict that `JSON=1` does not print."""


@dataclass(frozen=True, repr=False)
class HangDiagnosis(Presented):
    """The verdict on a job that hangs, and the evidence behind the verdict."""

    verdict: HangVerdict
    evidence: HangEvidence

    @property
    def culprits(self) -> tuple[int, ...]:
        """Ranks that stopped; empty if the evidence names none."""
        return self.verdict.culprits

    @property
    def refused(self) -> tuple[str, ...]:
        """Sentences on files that could not be read, one per file."""
        return self.evidence.refused

    @property
    def text(self) -> str:
        """Lines for a terminal: the verdict, the kind of hang, the next step, the waits, and the watchdog's line."""
        verdict = self.verdict
        lines = [verdict.sentence]
        kind = f"Kind: {verdict.kind}." if verdict.kind else ""
        kind_and_step = " ".join(part for part in (kind, verdict.next_step) if part)
        if kind_and_step:
            lines.append(kind_and_step)
        lines += [f"  {wait}" for wait in verdict.chain]
        lines += [f"Watchdog: {line}" for line in self.evidence.timed_out[:1]]
        return "\n".join(lines)

    def show(self, console: Console) -> None:
        """Print the verdict as `parakit why-hang` does, then a line per file that could not be read."""
        for line in (self.text, *self.refused):
            say(console, line)

    def to_dict(self) -> dict[str, Any]:
        """Return what `parakit why-hang --json` prints."""
        fields = asdict(self.verdict)
        return {name: value for name, value in fields.items() if name not in _UNPRINTED_FIELDS}


def diagnose_hang(paths: Sequence[Path]) -> HangDiagnosis:
    """Return the verdict on a job from files and folders with dumps, stacks and logs.

    Raises:
        UnreadableDumpError: The files hold no evidence of any rank.
    """
    evidence = gather_evidence(paths)
    return HangDiagnosis(judge_hang(evidence), evidence)
