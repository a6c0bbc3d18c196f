"""Changed lines of a Megatron checkout are named nearest to the wrong tensor's source first."""

import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from parakit.artifacts.capture import CaptureStage
from parakit.artifacts.verdict import VerifyOutcome, VerifyVerdict
from parakit.experiments.verify.changes import list_nearest_changes
from parakit.experiments.verify.command import _print_difference

ATTENTION = "megatron/core/transformer/attention.py"
ROPE = "megatron/core/models/rope_utils.py"
UNRELATED = "megatron/core/datasets/blended.py"


def git(checkout: Path, *arguments: str) -> None:
    """Run git as a fixed author, so that it commits on a machine without a configured one."""
    author = ("-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false")
    subprocess.run(
        ("git", "-C", str(checkout), *author, *arguments), check=True, capture_output=True
    )


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a repository with three files, in which `attention.py` imports `rope_utils.py`."""
    monkeypatch.delenv("GITHUB_BASE_REF", raising=False)
    files = {
        ATTENTION: "from ..models.rope_utils import rotate\n\n\ndef forward(query):\n    return rotate(query)\n",
        ROPE: "def rotate(values):\n    cosine = 1\n    return values * cosine\n",
        UNRELATED: "def blend():\n    return 1\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    git(tmp_path, "init", "--initial-branch=main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "upstream")
    return tmp_path


def replace_text(checkout: Path, name: str, old: str, new: str) -> None:
    path = checkout / name
    path.write_text(path.read_text().replace(old, new))


def nearest(checkout: Path, line: int = 4) -> list[str]:
    return [str(change) for change in list_nearest_changes(checkout, f"{ATTENTION}:{line}")]


def test_a_changed_line_of_an_imported_file_is_named(checkout: Path) -> None:
    replace_text(checkout, ROPE, "cosine = 1", "cosine = 2")
    assert nearest(checkout) == [f"{ROPE}:2"]


def test_changes_of_the_blamed_file_come_first_and_the_nearest_line_before_others(
    checkout: Path,
) -> None:
    replace_text(checkout, ROPE, "cosine = 1", "cosine = 2")
    replace_text(checkout, ATTENTION, "import rotate", "import rotate  # changed")
    replace_text(checkout, ATTENTION, "rotate(query)", "rotate(query) + 0")
    assert nearest(checkout) == [f"{ATTENTION}:5", f"{ATTENTION}:1", f"{ROPE}:2"]


def test_a_file_that_the_blamed_file_does_not_import_is_left_out(checkout: Path) -> None:
    replace_text(checkout, UNRELATED, "return 1", "return 2")
    assert nearest(checkout) == []


def test_a_deleted_line_is_named_by_the_line_above_it(checkout: Path) -> None:
    replace_text(checkout, ROPE, "    cosine = 1\n", "")
    assert nearest(checkout) == [f"{ROPE}:1"]


def test_commits_of_the_fork_count_as_changes(checkout: Path) -> None:
    git(checkout, "branch", "upstream/main")
    git(checkout, "checkout", "-b", "fork")
    replace_text(checkout, ROPE, "cosine = 1", "cosine = 2")
    git(checkout, "commit", "--all", "-m", "fork")
    assert nearest(checkout) == [f"{ROPE}:2"]


def test_commits_of_a_release_do_not_count_as_changes(checkout: Path) -> None:
    git(checkout, "branch", "upstream/main")
    git(checkout, "checkout", "-b", "release")
    replace_text(checkout, ATTENTION, "rotate(query)", "rotate(query) + 0")
    git(checkout, "commit", "--all", "-m", "release")
    git(checkout, "tag", "core_v0.19.0")
    replace_text(checkout, ROPE, "cosine = 1", "cosine = 2")
    git(checkout, "commit", "--all", "-m", "fork")
    assert nearest(checkout) == [f"{ROPE}:2"]


def test_a_checkout_without_changes_or_without_git_names_nothing(
    checkout: Path, tmp_path: Path
) -> None:
    assert nearest(checkout) == []
    plain_folder = tmp_path / "plain"
    plain_folder.mkdir()
    assert list_nearest_changes(plain_folder, f"{ATTENTION}:4") == ()


def test_a_source_outside_the_checkout_names_nothing(checkout: Path) -> None:
    replace_text(checkout, ROPE, "cosine = 1", "cosine = 2")
    assert list_nearest_changes(checkout, "torch/nn/modules/linear.py:12") == ()


def test_the_verdict_names_the_change_first_and_annotates_it_in_a_pull_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    verdict = VerifyVerdict(
        VerifyOutcome.DIFFERS,
        stage=CaptureStage.OUTPUTS,
        module="decoder.layers.0.self_attention",
        tensor="output",
        kind="factor 2",
        error=1.0,
        tolerance=1e-6,
        source=f"{ATTENTION}:4",
        changed=(f"{ROPE}:2", f"{ROPE}:9"),
    )
    assert f"factor 2; you changed {ROPE}:2; {ATTENTION}:4" in verdict.line
    console = Console(record=True, width=200)
    _print_difference(verdict, console)
    printed = console.export_text()
    assert printed.startswith(f"::error file={ROPE},line=2::")
    assert f"  changed    {ROPE}:9\n" in printed
