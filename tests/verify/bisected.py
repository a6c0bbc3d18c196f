"""Bisect a range of Megatron's commits around each fix of docs/upstream/history.yaml to the fix itself.

    python -m tests.verify.bisected CLONE [COMMIT …]

GOOD= is newer than the fix and BAD= older, so the commit that is found is the fix. A fix on a merged branch is searched
around its merge. Prints a line of a table per fix, with the processor minutes that its verifications took. Verdicts
stay in runs/bisected, so a repeated command continues.
"""

from __future__ import annotations

import resource
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from megatron_patches.context import run_git
from parakit.artifacts.capture import CaptureStage
from parakit.artifacts.verdict import VerifyOutcome
from parakit.config.files import ROOT
from parakit.experiments.verify.bisect import (
    CAPTURES_FOLDER,
    CommitVerifier,
    find_change_in_branches,
)
from parakit.experiments.verify.commits import list_commits
from parakit.experiments.verify.pairs import LaunchPair
from parakit.launch.data import SMALL_SAMPLE
from parakit.launch.job import parse_target
from parakit.launch.options import Options, read_patch_file
from tests.verify.bench import SMALL
from tests.verify.history import HISTORY, Fix, adapt_to_installed_torch, fixes

COMMITS_AFTER, COMMITS_BEFORE = 27, 37
"""Commits of the range after and before the fix: 64, and the fix is not in the middle."""
ITERATION = 1
"""Captured iteration of most fixes: their faults show in the first one, which is the cheapest."""
ITERATION_OF_UPDATES = 3
"""Captured iteration of faults of the update. The learning rate is 0 in the first iteration of a warm-up."""
_UPDATE_STAGES = (CaptureStage.OPTIMIZER_STATE, CaptureStage.WEIGHTS)
FURTHER = 16
"""Commits by which an end is moved away from the fix if it does not behave as the fix says."""
MOVES = 4
"""Most moves of an end."""
HEAD = "| fix | first commit | searched | verified | processor minutes |\n|---|---|---|---|---|"


def bisect_fix(fix: Fix, clone: Path, folder: Path) -> tuple[str, bool]:
    """Return the line of the table for a fix, and whether exactly the fix was found."""
    full_hash = run_git(clone, "rev-parse", fix.commit).strip()
    options = Options(
        data=SMALL_SAMPLE,
        iterations=ITERATION_OF_UPDATES if fix.stage in _UPDATE_STAGES else ITERATION,
        extra=(*shlex.split(fix.flags), *SMALL),
        patch_file=read_patch_file(str(HISTORY.parent / fix.patch)) if fix.patch else None,
    )
    job = parse_target(f"train-{fix.strategy}-{fix.model}-{fix.devices}cpu", options)
    pair = LaunchPair(job, fix.reference, tuple(shlex.split(fix.own_flags)), resumed=fix.resumed)
    verifier = CommitVerifier(
        clone,
        pair,
        folder / fix.commit,
        folder / fix.commit / CAPTURES_FOLDER,
        Console(markup=False),
        adapt=adapt_to_installed_torch,
    )

    before = processor_seconds()
    commits = list_range(fix, find_merge(clone, full_hash), verifier)
    change = find_change_in_branches(clone, commits, verifier.verify_commit)
    minutes = (processor_seconds() - before) / 60
    shutil.rmtree(verifier.captures, ignore_errors=True)
    candidates = change.candidates if change else ()
    verified = len(list((folder / fix.commit).glob("*/verify")))
    answer = " ".join(candidate[:10] for candidate in candidates) or "both ends behave the same"
    line = f"| {fix.commit} | {answer} | {len(commits) - 1} | {verified} | {minutes:.1f} |"
    return line, candidates == (full_hash,)


def list_range(fix: Fix, merge: str, verifier: CommitVerifier) -> list[str]:
    """Return the commits around a fix, the oldest of which shows the fault and the newest of which does not.

    An end that cannot be judged, for instance because it cannot be built, is moved away from the fix by `FURTHER`
    commits. An oldest end that holds is older than the fault, so it is moved to half its distance from the fix, and the
    newest end is moved away by as many commits. An end is moved `MOVES` times at most.

    Args:
        fix: The fix.
        merge: First parent of origin/HEAD that brings the fix in.
        verifier: Verifies the ends, and keeps their verdicts for the search.
    """
    clone = verifier.megatron_lm
    newer = run_git(
        clone, "rev-list", "--first-parent", "--reverse", f"{merge}..origin/HEAD"
    ).split()
    num_before, num_after = COMMITS_BEFORE, COMMITS_AFTER
    for _ in range(MOVES):
        commits = list_commits(clone, newer[num_after - 1], f"{merge}~{num_before}")
        oldest_verdict = verifier.verify_commit(commits[0])
        shows_fault = fix.is_seen(oldest_verdict)
        is_gone = fix.is_gone(verifier.verify_commit(commits[-1]))
        if shows_fault and is_gone:
            break
        if oldest_verdict.verdict is VerifyOutcome.HELD:
            num_after += num_before - num_before // 2
            num_before //= 2
        elif not shows_fault:
            num_before += FURTHER
        if not is_gone:
            num_after += FURTHER
    return commits


def find_merge(clone: Path, commit: str) -> str:
    """Return the first parent of origin/HEAD that brings a commit in: its merge, or the commit itself."""
    main_commits = set(run_git(clone, "rev-list", "--first-parent", "origin/HEAD").split())
    path = run_git(
        clone, "rev-list", "--ancestry-path", "--topo-order", "--reverse", f"{commit}..origin/HEAD"
    ).split()
    return next(candidate for candidate in (commit, *path) if candidate in main_commits)


def processor_seconds() -> float:
    """Return the processor seconds of this process and of all that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main(clone: Path, only: Sequence[str]) -> int:
    """Print the table; return 1 if another commit than the fix was found.

    Fixes that are applied to a release in reverse are left out.

    Args:
        clone: A clone of Megatron-LM with its history.
        only: Commits of fixes; all if it is empty.
    """
    print(HEAD)
    missed = 0
    for fix in fixes():
        if fix.not_run or fix.onto or (only and fix.commit not in only):
            continue
        line, is_right = bisect_fix(fix, clone.resolve(), ROOT / "runs" / "bisected")
        print(line, flush=True)
        missed += not is_right
    print(f"{missed} wrong")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
