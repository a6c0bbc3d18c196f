"""The commit with which a verification changes is found, and what cannot be verified is skipped."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from parakit.artifacts.capture import CaptureStage
from parakit.artifacts.verdict import VerifyOutcome, VerifyVerdict
from parakit.config.errors import LaunchError
from parakit.experiments.verify.bisect import (
    CommitVerifier,
    find_change,
    find_change_in_branches,
    format_repetition,
)
from parakit.experiments.verify.changes import list_nearest_changes
from parakit.experiments.verify.command import SharedReferences
from parakit.experiments.verify.commits import list_commits, make_worktree
from parakit.experiments.verify.pairs import LaunchPair
from parakit.launch import Options, parse_target
from parakit.verify import Judgement, refuse_comparison

HELD = VerifyVerdict(VerifyOutcome.HELD, worst_ratio=0.25)
LAYER = "megatron/core/layer.py"


def differs(module: str) -> VerifyVerdict:
    return VerifyVerdict(
        VerifyOutcome.DIFFERS, stage=CaptureStage.OUTPUTS, module=module, tensor="output"
    )


def fails(reason: str) -> VerifyVerdict:
    return VerifyVerdict(VerifyOutcome.NOT_COMPARABLE, reason=reason)


def judge_from(verdicts: dict[str, VerifyVerdict]) -> Callable[[str], VerifyVerdict]:
    return verdicts.__getitem__


def git(checkout: Path, *arguments: str) -> str:
    """Run git as a fixed author, so that it commits on a machine without a configured one."""
    author = ("-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
    process = subprocess.run(
        ("git", "-C", str(checkout), *author, *arguments),
        check=True,
        capture_output=True,
        text=True,
    )
    return process.stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Return a repository of 16 commits on main, `c0` to `c15`; the layer's factor is 2 from `c11` on.

    `c4` changes only documentation, and `side` is a branch that starts at `c3`.
    """
    folder = tmp_path / "clone"
    layer = folder / LAYER
    layer.parent.mkdir(parents=True)
    git(folder, "init", "--initial-branch=main")
    for number in range(16):
        factor = 2 if number >= 11 else 1
        if number == 4:
            (folder / "README.md").write_text("text\n")
        else:
            layer.write_text(f"FACTOR = {factor}\n\n\nNUMBER = {number}\n")
        git(folder, "add", ".")
        git(folder, "commit", "-m", f"c{number}")
        git(folder, "tag", f"c{number}")
        if number == 3:
            git(folder, "branch", "side")
    git(folder, "checkout", "side")
    layer.write_text("FACTOR = 3\n")
    git(folder, "commit", "-a", "-m", "on the side")
    git(folder, "checkout", "main")
    return folder


def merge_branch(clone: Path, layers: list[str], merged: str = "") -> None:
    """Start a branch at `c3`, commit each text of the layer there, and merge the branch into `c9` as `merge`.

    The layer of the merge is `merged`; empty for the last text of the branch.
    """
    git(clone, "checkout", "-b", "branch", "c3")
    for number, text in enumerate(layers):
        (clone / LAYER).write_text(text)
        git(clone, "commit", "-a", "-m", f"branch {number}")
    git(clone, "checkout", "--detach", "c9")
    git(clone, "merge", "--no-ff", "--strategy=ours", "--no-commit", "branch")
    (clone / LAYER).write_text(merged or layers[-1])
    git(clone, "commit", "-a", "-m", "merge")
    git(clone, "tag", "merge")
    git(clone, "checkout", "main")


def judge_files(clone: Path, unbuilt: tuple[str, ...] = ()) -> Callable[[str], VerifyVerdict]:
    """Return a judge that reads the layer's factor in a worktree, and cannot build the commits `unbuilt`."""
    unbuilt_hashes = {git(clone, "rev-parse", name).strip() for name in unbuilt}

    def judge(commit: str) -> VerifyVerdict:
        if commit in unbuilt_hashes:
            return fails("it does not build")
        with make_worktree(clone, commit, clone.parent / "work" / "checkout") as checkout:
            return differs("layer") if "FACTOR = 2" in (checkout / LAYER).read_text() else HELD

    return judge


@pytest.fixture(autouse=True)
def _without_installed_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "parakit.experiments.verify.commits.copy_dataset_helpers", lambda checkout: None
    )


@pytest.mark.ranks
@pytest.mark.parametrize(("good", "bad"), [("c0", "c15"), ("c15", "c0")])
def test_the_first_commit_that_differs_is_found_whichever_end_is_older(
    clone: Path, good: str, bad: str
) -> None:
    change = find_change(list_commits(clone, good, bad), judge_files(clone))
    assert change is not None
    assert change.candidates == (git(clone, "rev-parse", "c11").strip(),)
    assert (change.before, change.after, change.wrong) == (HELD, differs("layer"), differs("layer"))
    assert change.skipped == {}


@pytest.mark.ranks
def test_the_lines_of_the_commit_are_named_without_a_source_and_the_clone_stays_as_it_is(
    clone: Path,
) -> None:
    with make_worktree(clone, "c11", clone.parent / "work") as checkout:
        changes = list_nearest_changes(checkout, f"{LAYER}:4", base="c11^")
        assert list(map(str, changes)) == [f"{LAYER}:4", f"{LAYER}:1"]
        assert next(map(str, list_nearest_changes(checkout, None, base="c11^"))) == f"{LAYER}:1"
    assert not (clone.parent / "work").exists()
    assert git(clone, "status", "--porcelain") == ""
    assert len(git(clone, "worktree", "list").splitlines()) == 1


@pytest.mark.ranks
def test_commits_that_cannot_be_verified_are_skipped_and_listed(clone: Path) -> None:
    commits = list_commits(clone, "c0", "c15")
    change = find_change(commits, judge_files(clone, unbuilt=("c7", "c8")))
    assert change is not None
    assert change.candidates == (git(clone, "rev-parse", "c11").strip(),)
    assert set(change.skipped.values()) == {"it does not build"}


@pytest.mark.ranks
def test_skipped_commits_before_the_change_stay_candidates(clone: Path) -> None:
    commits = list_commits(clone, "c0", "c15")
    change = find_change(commits, judge_files(clone, unbuilt=("c9", "c10")))
    assert change is not None
    names = [git(clone, "log", "-1", "--format=%s", commit).strip() for commit in change.candidates]
    assert names == ["c9", "c10", "c11"]


@pytest.mark.ranks
def test_commits_of_documentation_alone_are_not_searched(clone: Path) -> None:
    commits = list_commits(clone, "c0", "c6")
    names = [git(clone, "log", "-1", "--format=%s", commit).strip() for commit in commits]
    assert names == ["c0", "c1", "c2", "c3", "c5", "c6"]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("good", "bad", "message"),
    [
        ("c0", "c99", "BAD=c99 is no commit"),
        ("c3", "c4", "changes what training executes"),
        ("side", "c9", "are on different branches"),
    ],
)
def test_ranges_without_a_line_of_commits_are_refused(
    clone: Path, good: str, bad: str, message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        list_commits(clone, good, bad)


@pytest.mark.ranks
def test_the_commit_of_a_merged_branch_is_found_and_not_its_merge(clone: Path) -> None:
    merge_branch(clone, ["FACTOR = 1\nA = 1\n", "FACTOR = 2\n", "FACTOR = 2\nA = 2\n"])
    change = find_change_in_branches(clone, list_commits(clone, "c0", "merge"), judge_files(clone))
    assert change is not None
    assert [git(clone, "log", "-1", "--format=%s", commit) for commit in change.candidates] == [
        "branch 1\n"
    ]
    assert (change.before, change.after) == (HELD, differs("layer"))


@pytest.mark.ranks
def test_a_merge_whose_branch_does_not_behave_so_is_the_result_itself(clone: Path) -> None:
    merge_branch(clone, ["FACTOR = 1\nA = 1\n"], merged="FACTOR = 2\n")
    change = find_change_in_branches(clone, list_commits(clone, "c0", "merge"), judge_files(clone))
    assert change is not None
    assert change.candidates == (git(clone, "rev-parse", "merge").strip(),)


@pytest.mark.ranks
def test_a_branch_that_changes_in_another_way_than_its_merge_leaves_the_merge(clone: Path) -> None:
    merge_branch(clone, ["FACTOR = 1\nA = 1\n", "FACTOR = 2\n"])
    start = git(clone, "rev-parse", "c3").strip()
    judge = judge_files(clone)

    def judge_without_start(commit: str) -> VerifyVerdict:
        return fails("the kit does not know it") if commit == start else judge(commit)

    commits = list_commits(clone, "c2", "merge")
    change = find_change_in_branches(clone, commits, judge_without_start)
    assert change is not None
    assert change.candidates == (git(clone, "rev-parse", "merge").strip(),)


@pytest.mark.ranks
def test_references_are_kept_per_commit_and_those_of_against_good_under_the_good_commit(
    clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, str, str]] = []

    def run(
        pair: LaunchPair, console: Console, results: Path, shared: SharedReferences
    ) -> Judgement:
        seen.append((shared.folder.parent.name, shared.megatron, pair.job.options.runs.name))
        return refuse_comparison("not run")

    monkeypatch.setattr("parakit.experiments.verify.bisect.compose_pair", lambda pair: pair)
    monkeypatch.setattr("parakit.experiments.verify.bisect.run_verification", run)
    commits = [git(clone, "rev-parse", name).strip() for name in ("c5", "c6")]
    verifier = CommitVerifier(
        *(clone, LaunchPair(parse_target("train-tp2-gpt2-tiny-2cpu")), clone.parent / "verdicts"),
        captures=clone.parent / "captures",
        console=Console(quiet=True),
    )
    for commit in commits:
        verifier.verify_commit(commit)
    assert seen == [(commit[:12], commit, commit[:12]) for commit in commits]
    seen.clear()
    good = git(clone, "rev-parse", "c1").strip()
    against = replace(verifier, reference_checkout=clone, reference_commit=good)
    for commit in commits:
        against.verify_commit(commit)
    assert seen == [(good[:12], good, good[:12])] * 2


def test_ends_that_behave_the_same_have_no_change() -> None:
    assert find_change("ab", judge_from({"a": HELD, "b": HELD})) is None
    wrong = differs("layer")
    assert find_change("ab", judge_from({"a": wrong, "b": wrong})) is None


def test_a_failure_of_another_reason_is_skipped_and_paths_and_numbers_are_no_reason() -> None:
    verdicts = {
        "a": fails("KeyError 17. The log is /tmp/a/log.txt"),
        "b": fails("KeyError 18. The log is /tmp/b/log.txt"),
        "c": fails("no memory"),
        "d": HELD,
        "e": HELD,
    }
    change = find_change("abcde", judge_from(verdicts))
    assert change is not None
    assert change.candidates == ("c", "d")
    assert change.wrong.reason == verdicts["b"].reason
    assert change.skipped == {"c": "no memory"}


def test_where_both_ends_differ_the_first_wrong_tensor_decides() -> None:
    verdicts = {
        "a": differs("mlp"),
        "b": differs("mlp"),
        "c": differs("norm"),
        "d": differs("norm"),
    }
    change = find_change("abcd", judge_from(verdicts))
    assert change is not None
    assert change.candidates == ("c",)


@pytest.mark.ranks
def test_files_that_an_interrupted_search_left_are_replaced(clone: Path) -> None:
    leftover = clone.parent / "work" / LAYER
    leftover.parent.mkdir(parents=True)
    leftover.write_text("FACTOR = 2\n")
    with make_worktree(clone, "c1", clone.parent / "work") as checkout:
        assert "FACTOR = 1" in (checkout / LAYER).read_text()


def test_the_repeating_command_has_the_flags_and_the_checkout_of_the_commit() -> None:
    job = parse_target("train-tp2-gpt2-tiny-2cpu", Options(extra=("--swiglu",)))
    command = format_repetition(LaunchPair(job), Path("/clones/my megatron"), "c" * 40, "")
    assert command == (
        "git -C '/clones/my megatron' worktree add --detach $PWD/../megatron-bisected cccccccccccc && "
        "make verify-tp2-gpt2-tiny-2cpu EXTRA=--swiglu MEGATRON_LM=../megatron-bisected "
        "ALLOW_UNKNOWN_MEGATRON=1"
    )


def test_the_repeating_command_against_good_has_both_checkouts() -> None:
    job = parse_target("train-tp2-gpt2-tiny-2cpu")
    command = format_repetition(LaunchPair(job, "tp2"), Path("/m"), "c" * 40, "a" * 40)
    assert "worktree add --detach $PWD/../megatron-good aaaaaaaaaaaa &&" in command
    assert "MEGATRON_LM=../megatron-good" in command
    assert "ARGS='--megatron-lm-b ../megatron-bisected'" in command
