"""`make verify-history MEGATRON_LM=<a clone>`: its own merged fixes, each before and after.

    python -m tests.verify.history CLONE [COMMIT …]

The parent of each fix of docs/upstream/history.yaml must be called wrong where it was, and the fix hold.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from tests.verify.bench import Bench
from tools.launch.compose import SMALL_SAMPLE
from tools.launch.data import make_sample
from tools.launch.options import Options
from tools.records.verdict import Outcome, Verdict
from tools.spec.errors import LaunchError
from tools.spec.files import ROOT, read_yaml
from tools.spec.setting import SettingError
from tools.study.verify.verifier import ForkedRanks, Verifier

HISTORY = ROOT / "docs" / "upstream" / "history.yaml"
HEAD = "| fix | what was wrong | before | after |\n|---|---|---|---|"


@dataclass(frozen=True)
class Fix:
    """An entry of `history.yaml`."""

    commit: str
    pull: int
    says: str
    not_run: str = ""
    strategy: str = ""
    model: str = "gpt2-tiny"
    devices: int = 2
    flags: str = ""
    own_flags: str = ""
    patch: str = ""
    stage: str = ""
    module: str = ""
    """Empty where the first wrong tensor changes from run to run."""
    fails: str = ""

    def is_seen(self, verdict: Verdict) -> bool:
        """Whether it is in the Megatron of the verdict, and named where it is."""
        if self.fails and self.fails in str(verdict.reason):
            return True
        there = not self.stage or (verdict.stage, verdict.module) == (self.stage, self.module)
        return verdict.verdict is Outcome.DIFFERS and there


def fixes() -> tuple[Fix, ...]:
    """All, as they stand in the file."""
    return tuple(Fix(**entry) for entry in read_yaml(HISTORY))


def verified(clone: Path, only: Sequence[str], folder: Path) -> Iterator[tuple[str, bool]]:
    """A line of the table for each fix that can run, and whether it is as stated."""
    for fix in fixes():
        if fix.not_run or (only and fix.commit not in only):
            continue
        before, after = (_verdict(fix, clone, at, folder) for at in (f"{fix.commit}~1", fix.commit))
        said = (str(one.reason or one.sentence).replace("|", "/") for one in (before, after))
        right = fix.is_seen(before) and after.verdict is Outcome.HELD
        yield f"| #{fix.pull} | {fix.says} | {' | '.join(said)} |", right


def _verdict(fix: Fix, clone: Path, commit: str, folder: Path) -> Verdict:
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        checkout = Path(scratch) / "checkout"
        checkout.mkdir()
        archive = ("git", "-C", str(clone), "archive", commit)
        packed = subprocess.run(archive, check=True, capture_output=True).stdout
        subprocess.run(("tar", "x", "-C", str(checkout)), check=True, input=packed)
        options = Options(megatron_lm=checkout, allow_unknown_megatron=True)
        with closing(ForkedRanks(options)) as ranks:
            bench = Bench(SMALL_SAMPLE, Verifier(Path(scratch), ranks), checkout, small=True)
            try:
                return bench.verify(
                    *(fix.strategy, fix.model, fix.devices, shlex.split(fix.flags)),
                    iteration=None,
                    own=shlex.split(fix.own_flags),
                    bug=HISTORY.parent / fix.patch if fix.patch else None,
                    both=True,
                ).verdict
            except LaunchError as error:
                return Verdict(Outcome.NOT_COMPARABLE, reason=str(error))


def verify_history(megatron_lm: Path | None, only: Sequence[str] = ()) -> int:
    """Print the table; 1 if a fix is not as stated.

    Args:
        megatron_lm: A clone with its history.
        only: Commits of fixes; all that can run without.

    Raises:
        SettingError: There is no clone.
    """
    if megatron_lm is None:
        raise SettingError(
            "'make verify-history' reads commits; set MEGATRON_LM= to a whole clone."
        )
    make_sample(SMALL_SAMPLE, Console())
    missed = 0
    print(HEAD)
    (ROOT / "runs").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=ROOT / "runs", prefix=".verify-history-") as folder:
        for line, right in verified(megatron_lm, only, Path(folder)):
            print(line, flush=True)
            missed += not right
    print(f"{missed} wrong")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(verify_history(Path(sys.argv[1]), sys.argv[2:]))
