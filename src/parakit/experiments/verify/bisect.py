"""Find the commit of Megatron with which a verification changes (`make bisect`).

The commits between GOOD= and BAD= are halved until two neighbours are left that behave differently. Each commit is
checked out into a worktree outside the user's checkout and verified there (`run_verification`). Verdicts are kept per
commit in the runs folder, so a command that is repeated continues where it ended. The reference's tensors are kept per
commit too, so another question about the same commits trains only the strategy. The search follows first parents, and
leaves out commits that change nothing that training executes. If it ends at a merge, it goes on in the merged branch.
"""

from __future__ import annotations

import hashlib
import shlex
import shutil
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from rich.console import Console

from megatron_patches.context import run_git
from parakit.artifacts.verdict import VerifyOutcome, VerifyVerdict, read_verdicts
from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, relative_to_root
from parakit.config.model import is_model_file, model_name_of_file
from parakit.config.strategy import count_devices
from parakit.experiments.verify.changes import ChangedLines, list_nearest_changes
from parakit.experiments.verify.command import SharedReferences, run_verification
from parakit.experiments.verify.commits import (
    SHORT_HASH,
    find_commit,
    list_branch_commits,
    list_commits,
    make_worktree,
)
from parakit.experiments.verify.pairs import PREFIX, LaunchPair, compose_pair, parse_pair
from parakit.experiments.verify.reasons import strip_paths_and_numbers
from parakit.formatting.terminal import say
from parakit.formatting.units import plural
from parakit.launch import Options, format_make_command

Judge = Callable[[str], VerifyVerdict]
"""Function that verifies the Megatron of a commit and returns the verdict."""

AGAINST_GOOD = "good"
"""Value of AGAINST= with which the reference is the same strategy in GOOD='s Megatron."""
DEFAULT_MODEL = "gpt2-tiny"
DEFAULT_DEVICES = 2
"""Number of ranks of a strategy whose name leaves it open, such as `zero1`."""
CAPTURES_FOLDER = "bisect-captures"
"""Folder in the runs folder with the initial weights and the reference's tensors of each commit."""
MAX_KEPT_BYTES = 2 << 30
"""Size of a reference's tensors above which they are not kept."""


@dataclass(frozen=True)
class CommitChange:
    """Result of a search: the commits among which the first one with the new behaviour is."""

    candidates: tuple[str, ...]
    """Commits, the oldest first. It is a single commit if no skipped commit lies before it."""
    before: VerifyVerdict
    """Verdict on the last commit with the old behaviour."""
    after: VerifyVerdict
    """Verdict on the last candidate, which has the new behaviour."""
    skipped: dict[str, str] = field(default_factory=dict)
    """Reasons by commit for commits that behave like neither end of the range."""

    @property
    def wrong(self) -> VerifyVerdict:
        """Verdict that names the fault: the one after the change, or the one before it if that one held."""
        return self.before if self.after.verdict is VerifyOutcome.HELD else self.after


def find_change(commits: Sequence[str], judge: Judge) -> CommitChange | None:
    """Return the first commit that behaves like the last one and not like the first one.

    A commit that behaves like neither is skipped, and the commit nearest to the middle that is not skipped is judged
    instead.

    Args:
        commits: At least two commits, the oldest first.
        judge: Function that verifies a commit.

    Returns:
        The change; None if both ends of the range behave the same.
    """
    old, new = judge(commits[0]), judge(commits[-1])
    if _behaves_like(new, old):
        return None
    last_old, first_new = 0, len(commits) - 1
    verdicts = {last_old: old, first_new: new}
    skipped: dict[int, str] = {}
    while True:
        untested = [index for index in range(last_old + 1, first_new) if index not in skipped]
        if not untested:
            break
        middle = (last_old + first_new) / 2
        tested = min(untested, key=lambda index: abs(index - middle))
        verdict = judge(commits[tested])
        verdicts[tested] = verdict
        # A verdict that names another wrong tensor than the new end is still unlike one that held.
        if _behaves_like(verdict, old, new):
            last_old = tested
        elif _behaves_like(verdict, new, old):
            first_new = tested
        else:
            skipped[tested] = verdict.reason or verdict.sentence
    return CommitChange(
        candidates=tuple(commits[last_old + 1 : first_new + 1]),
        before=verdicts[last_old],
        after=verdicts[first_new],
        skipped={commits[index]: reason for index, reason in sorted(skipped.items())},
    )


def find_change_in_branches(
    checkout: Path, commits: Sequence[str], judge: Judge
) -> CommitChange | None:
    """Return the change as `find_change` does, and follow it into merged branches.

    If the change is a single merge, its branch is searched too. The merge itself stays the result if its branch does
    not show the same two behaviours.

    Args:
        checkout: A clone of Megatron-LM.
        commits: At least two commits, the oldest first.
        judge: Function that verifies a commit.

    Returns:
        The change, with the skipped commits of all branches; None if both ends of the range behave the same.
    """
    change = find_change(commits, judge)
    while change is not None and len(change.candidates) == 1:
        branch = list_branch_commits(checkout, change.candidates[0])
        change_in_branch = find_change(branch, judge) if len(branch) > 1 else None
        if change_in_branch is None or not _is_same_change(change_in_branch, change):
            break
        skipped = {**change.skipped, **change_in_branch.skipped}
        change = replace(change_in_branch, skipped=skipped)
    return change


def _is_same_change(change: CommitChange, other: CommitChange) -> bool:
    """Return True if the verdicts before and after a change are those before and after the other change."""
    return _behaves_like(change.before, other.before, other.after) and _behaves_like(
        change.after, other.after, other.before
    )


def _behaves_like(
    verdict: VerifyVerdict, end: VerifyVerdict, other_end: VerifyVerdict | None = None
) -> bool:
    """Return True if a verdict shows the behaviour of one end of the range.

    A failed run behaves like another one that failed for the same reason. If both ends differ from the reference, a
    commit must also have the same first wrong tensor as the end.

    Args:
        verdict: Verdict on a commit.
        end: Verdict on the end of the range.
        other_end: Verdict on the other end; None compares `verdict` and `end` themselves as the two ends.
    """
    if verdict.verdict is not end.verdict:
        return False
    if end.verdict is VerifyOutcome.NOT_COMPARABLE:
        reason, end_reason = verdict.reason or "", end.reason or ""
        return strip_paths_and_numbers(reason) == strip_paths_and_numbers(end_reason)
    if other_end is not None and other_end.verdict is not end.verdict:
        return True
    return (verdict.stage, verdict.module, verdict.tensor) == (end.stage, end.module, end.tensor)


@dataclass(frozen=True)
class CommitVerifier:
    """Verifies one question with the Megatron of any commit, and keeps verdicts and the references' tensors."""

    megatron_lm: Path
    """The clone of Megatron-LM that has the commits. Its own files stay as they are."""
    pair: LaunchPair
    """Strategy and reference. The Megatron of its job is replaced by the one of a commit."""
    folder: Path
    """Folder of the kept verdicts, with a folder per commit."""
    captures: Path
    """Folder of the kept initial weights and references, with a folder per commit. Questions may share it."""
    console: Console
    reference_checkout: Path | None = None
    """Megatron of the reference; None trains the reference with the commit's Megatron, too."""
    reference_commit: str = ""
    """Commit of `reference_checkout`; empty without it."""
    adapt: Callable[[Path], None] | None = None
    """Function that changes a commit's worktree before it is verified; None leaves the worktree as it is."""

    def verify_commit(self, commit: str) -> VerifyVerdict:
        """Return the kept verdict on a commit, or verify the commit and keep its verdict.

        A commit that cannot be built or composed gives a verdict `not comparable` with the reason.
        """
        results = self.folder / commit[:SHORT_HASH]
        verdicts = _read_kept_verdicts(results)
        verdict = verdicts[0] if verdicts else self._verify_in_worktree(commit, results)
        kept = " (kept)" if verdicts else ""
        say(self.console, f"{commit[:SHORT_HASH]} {verdict.sentence}{kept}")
        return verdict

    def _verify_in_worktree(self, commit: str, results: Path) -> VerifyVerdict:
        """Verify a commit in a new worktree, which is removed at the end, and return the verdict."""
        # What an interrupted verification has left there would stand beside the new runs.
        shutil.rmtree(results, ignore_errors=True)
        scratch = self.folder / f".{commit[:SHORT_HASH]}"
        owner = self.reference_commit or commit
        # Initial weights of another commit may have other names, so each commit has its own.
        kept = self.captures / owner[:SHORT_HASH]
        shared = SharedReferences(kept / "references", owner, MAX_KEPT_BYTES)
        try:
            with make_worktree(self.megatron_lm, commit, scratch / "checkout") as checkout:
                if self.adapt is not None:
                    self.adapt(checkout)
                options = replace(
                    self.pair.job.options,
                    megatron_lm=self.reference_checkout or checkout,
                    allow_unknown_megatron=True,
                    runs=kept,
                )
                pair = replace(
                    self.pair,
                    job=self.pair.job.with_options(options),
                    megatron_lm=checkout if self.reference_checkout else None,
                )
                quiet = Console(quiet=True)
                return run_verification(compose_pair(pair), quiet, results, shared=shared).verdict
        except LaunchError as error:
            return VerifyVerdict(VerifyOutcome.NOT_COMPARABLE, reason=str(error))
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _read_kept_verdicts(results: Path) -> list[VerifyVerdict]:
    """Return the verdicts in a commit's folder; none if another version of the kit has written them."""
    try:
        return list(read_verdicts(results))
    except msgspec.ValidationError:
        return []


def bisect_megatron(
    megatron_lm: Path,
    good: str,
    bad: str,
    strategy: str,
    variables: Namespace,
    options: Options,
    console: Console,
    against: str = "",
) -> int:
    """Run `make bisect`: print the first commit whose verification differs, its first wrong tensor and its change.

    Args:
        megatron_lm: A clone of Megatron-LM with its history.
        good: A commit, a branch or a tag.
        bad: A commit, a branch or a tag that is verified differently. It may also be the older one.
        strategy: Strategy to verify.
        variables: Further arguments of a verification, such as REFERENCE=.
        options: Make variables of all runs.
        console: Shows progress and the result.
        against: `good` compares the strategy with the same strategy in GOOD='s Megatron; otherwise the strategy is
            compared with its reference in the same Megatron.

    Returns:
        The exit code: 0 if a single commit is left, 1 if skipped commits leave several.

    Raises:
        LaunchError: The range or the verification is refused, or both ends of the range behave the same.
    """
    megatron_lm = megatron_lm.resolve()
    commits = list_commits(megatron_lm, good, bad)
    pair = _make_pair(strategy, variables, options)
    good_commit = ""
    if against == AGAINST_GOOD:
        pair = replace(pair, reference=strategy)
        good_commit = find_commit(megatron_lm, good)
    folder = options.runs / f"bisect-{pair.job.name}-{_hash_question(pair, good_commit)}"
    num_commits = plural(len(commits) - 1, "commit")
    say(console, f"{num_commits} to search; verdicts: {relative_to_root(folder)}")
    captures = ROOT / options.runs / CAPTURES_FOLDER
    verifier = CommitVerifier(megatron_lm, pair, ROOT / folder, captures, console)
    if good_commit:
        with make_worktree(megatron_lm, good_commit, ROOT / folder / ".good") as checkout:
            verifier = replace(verifier, reference_checkout=checkout, reference_commit=good_commit)
            change = find_change_in_branches(megatron_lm, commits, verifier.verify_commit)
    else:
        change = find_change_in_branches(megatron_lm, commits, verifier.verify_commit)
    if change is None:
        raise LaunchError(
            f"GOOD={good} and BAD={bad} are verified with the same result; name two commits that differ, or other "
            "flags with EXTRA=."
        )
    _print_change(change, verifier, good_commit)
    return 0 if len(change.candidates) == 1 else 1


def _make_pair(strategy: str, variables: Namespace, options: Options) -> LaunchPair:
    """Return the verification of a strategy on as many CPU ranks as it needs, with MODEL= or the default model.

    Raises:
        LaunchError: The strategy or the model is unknown.
    """
    devices = count_devices(strategy, otherwise=DEFAULT_DEVICES)
    model = options.model or DEFAULT_MODEL
    if is_model_file(model):
        model = model_name_of_file(model)
    return parse_pair(f"{PREFIX}{strategy}-{model}-{devices}cpu", variables, options)


def _hash_question(pair: LaunchPair, good_commit: str) -> str:
    """Return a hash of everything but the commit that decides a verdict: the make variables, and AGAINST='s commit."""
    variables = {name: text for name, text in pair.variables.items() if name != "MEGATRON_LM"}
    return hashlib.sha256(repr((sorted(variables.items()), good_commit)).encode()).hexdigest()[:8]


def _print_change(change: CommitChange, verifier: CommitVerifier, good_commit: str) -> None:
    """Print the commit, the verdicts before and after it, its nearest lines, a command, and skipped commits."""
    console, megatron_lm = verifier.console, verifier.megatron_lm
    if len(change.candidates) == 1:
        say(console, "first commit that is verified differently:", "red")
    else:
        number = len(change.candidates)
        say(console, f"one of {number} commits; the others cannot be verified:", "yellow")
    for commit in change.candidates:
        subject = run_git(megatron_lm, "log", "-1", "--format=%as %s", commit).strip()
        say(console, f"  {commit[:SHORT_HASH]} {subject}")
    say(console, f"  before   {change.before.sentence}")
    say(console, f"  after    {change.after.sentence}")
    first = change.candidates[-1]
    for lines in list_commit_changes(verifier, first, change.wrong.source):
        say(console, f"  changed  {lines}")
    say(console, f"  repeat   {format_repetition(verifier.pair, megatron_lm, first, good_commit)}")
    for commit, reason in change.skipped.items():
        say(console, f"  skipped  {commit[:SHORT_HASH]}: {reason}")


def list_commit_changes(
    verifier: CommitVerifier, commit: str, source: str | None
) -> tuple[ChangedLines, ...]:
    """Return the lines that a commit changes nearest to the source of the wrong tensor, the nearest first.

    Args:
        verifier: The clone that has the commit, and the folder for a worktree.
        commit: The commit, which is compared with its first parent.
        source: File and line of the wrong tensor; None returns the first changed lines of the commit.
    """
    try:
        with make_worktree(verifier.megatron_lm, commit, verifier.folder / ".changes") as checkout:
            return list_nearest_changes(checkout, source, base=f"{commit}^")
    except LaunchError:
        return ()


def format_repetition(pair: LaunchPair, megatron_lm: Path, commit: str, good_commit: str) -> str:
    """Return the shell commands that check out a commit next to the kit's folder, and verify it.

    Args:
        pair: Strategy and reference.
        megatron_lm: The clone that has the commits.
        commit: The commit to verify.
        good_commit: Commit of the reference with AGAINST=good, which is checked out, too; empty without.
    """
    variables = {**pair.variables, "MEGATRON_LM": "../megatron-bisected"}
    checkouts = [("../megatron-bisected", commit)]
    if good_commit:
        variables["MEGATRON_LM"] = "../megatron-good"
        variables["MEGATRON_LM_B"] = ""
        variables["ARGS"] = "--megatron-lm-b ../megatron-bisected"
        checkouts.append(("../megatron-good", good_commit))
    variables["ALLOW_UNKNOWN_MEGATRON"] = "1"
    commands = [
        f"git -C {shlex.quote(str(megatron_lm))} worktree add --detach $PWD/{folder} {hash_[:SHORT_HASH]}"
        for folder, hash_ in checkouts
    ]
    return " && ".join((*commands, format_make_command(pair.target, variables)))
