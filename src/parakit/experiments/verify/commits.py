"""List commits of a clone of Megatron-LM, and check one out into a worktree of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from megatron_patches.context import run_git
from parakit.config.errors import LaunchError

EXECUTED_FILES = ("megatron", ":(glob)*.py")
"""Paths of Megatron's repository that training executes: the package, and the scripts in the root folder."""
DATASETS = Path("megatron", "core", "datasets")
SHORT_HASH = 12
"""Number of digits of a commit in folders and messages."""


def find_commit(checkout: Path, name: str) -> str:
    """Return the full hash of a commit, a branch or a tag; empty if the clone has none of this name."""
    return run_git(checkout, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").strip()


def list_commits(checkout: Path, good: str, bad: str) -> list[str]:
    """Return the commits between two commits that change what training executes, the oldest first.

    The older of the two commits is the first one of the result. A commit that changes only tests or documentation
    is left out, because it behaves like its predecessor.

    Args:
        checkout: A clone of Megatron-LM.
        good: Name of a commit, a branch or a tag (GOOD=).
        bad: The same (BAD=). Either of the two may be the older one.

    Raises:
        LaunchError: The clone does not have a commit, or none of the two is an ancestor of the other. Or no commit
            between them changes what training executes.
    """
    good_commit = _require_commit(checkout, "GOOD", good)
    bad_commit = _require_commit(checkout, "BAD", bad)
    base = run_git(checkout, "merge-base", good_commit, bad_commit).strip()
    if base not in (good_commit, bad_commit):
        alternative = "of one branch"
        if base:
            alternative = f"for instance their common ancestor {base[:SHORT_HASH]}"
        raise LaunchError(
            f"GOOD={good} and BAD={bad} are on different branches; name two commits of which one is an ancestor "
            f"of the other, {alternative}."
        )
    newest = bad_commit if base == good_commit else good_commit
    commits = _list_executed_commits(checkout, base, newest)
    if not commits:
        raise LaunchError(
            f"No commit between GOOD={good} and BAD={bad} changes what training executes; name two other commits."
        )
    return [base, *commits]


def list_branch_commits(checkout: Path, commit: str) -> list[str]:
    """Return the commits of the branch that a merge brings in, the oldest first.

    The first one of the result is the commit at which the branch starts. The list is empty if the commit is no merge.
    Commits that change nothing that training executes are left out.
    """
    parents = run_git(checkout, "rev-parse", f"{commit}^@").split()
    if len(parents) < 2:
        return []
    base = run_git(checkout, "merge-base", *parents[:2]).strip()
    return [base, *_list_executed_commits(checkout, base, parents[1])] if base else []


def _list_executed_commits(checkout: Path, base: str, newest: str) -> list[str]:
    """Return the first parents of `newest` after `base` that change what training executes, the oldest first."""
    first_parents = ("rev-list", "--first-parent", "--reverse", f"{base}..{newest}")
    return run_git(checkout, *first_parents, "--", *EXECUTED_FILES).split()


def _require_commit(checkout: Path, variable: str, name: str) -> str:
    """Return the hash of the commit that a variable names.

    Raises:
        LaunchError: The clone has no such commit.
    """
    commit = find_commit(checkout, name)
    if not commit:
        raise LaunchError(
            f"{variable}={name} is no commit of MEGATRON_LM={checkout}; fetch it there, or name another one."
        )
    return commit


@contextmanager
def make_worktree(megatron_lm: Path, commit: str, folder: Path) -> Iterator[Path]:
    """Yield `folder` with the files of a commit, and remove it at the end of the `with` block.

    The compiled helpers of data sets are copied from the installed Megatron, because compiling them takes as long as a
    verification.

    Raises:
        LaunchError: git cannot check out the commit.
    """
    # An interrupted search may have left the files of another commit there.
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    # With --force git also takes a path whose worktree is gone.
    run_git(megatron_lm, "worktree", "add", "--detach", "--force", str(folder.resolve()), commit)
    try:
        if not (folder / "megatron").is_dir():
            raise LaunchError(
                f"git cannot check out {commit[:SHORT_HASH]} of MEGATRON_LM={megatron_lm}; "
                "see 'git worktree add' there."
            )
        copy_dataset_helpers(folder)
        yield folder
    finally:
        run_git(megatron_lm, "worktree", "remove", "--force", str(folder.resolve()))


def copy_dataset_helpers(checkout: Path) -> None:
    """Copy the compiled helpers of data sets from the installed Megatron into a checkout.

    Nothing is copied if no Megatron is installed, or if its helpers are not compiled.
    """
    try:
        installed = Path(str(distribution("megatron-core").locate_file(DATASETS)))
    except PackageNotFoundError:
        return
    for library in installed.glob("helpers_cpp*.so"):
        shutil.copy(library, checkout / DATASETS)
