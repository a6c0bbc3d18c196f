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
from parakit.hang.verdict import HangVerdict, judge

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, repr=False)
class HangDiagnosis(Presented):
    """Verdict on a job that hangs, with its evidence: who stopped and who waits."""

    verdict: HangVerdict
    evidence: HangEvidence

    @property
    def culprits(self) -> tuple[int, ...]:
        """Ranks that stopped; empty if the evidence names none."""
        return self.verdict.culprits

    @property
    def refused(self) -> tuple[str, ...]:
        """A sentence for each file that could not be read."""
        return self.evidence.refused

    @property
    def text(self) -> str:
        """Lines for a terminal: the verdict, its kind, the chain of waits, the watchdog's first line."""
        verdict = self.verdict
        kind = [f"Kind: {verdict.kind}. {verdict.next_step}"] if verdict.kind else []
        chain = [f"  {wait}" for wait in verdict.chain]
        watchdog = [f"Watchdog: {line}" for line in self.evidence.timed_out[:1]]
        return "\n".join([verdict.sentence, *kind, *chain, *watchdog])

    def show(self, console: Console) -> None:
        """Print the verdict as `parakit why-hang` does, then a line for each file that was refused."""
        for line in (self.text, *self.refused):
            say(console, line)

    def to_dict(self) -> dict[str, Any]:
        """Return what `parakit why-hang --json` prints."""
        return {name: value for name, value in asdict(self.verdict).items() if name != "chain"}


def diagnose_hang(places: Sequence[Path]) -> HangDiagnosis:
    """Judge why a job hangs from files and folders of dumps, stacks and logs.

    Raises:
        UnreadableError: Nothing there says anything of a rank.
    """
    evidence = gather_evidence(places)
    return HangDiagnosis(judge(evidence), evidence)
