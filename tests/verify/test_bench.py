"""Injected bugs are found, and healthy strategies are not called wrong, by the whole: ranks, capture,
verdict."""

import re
from pathlib import Path

import pytest

from parakit.config.files import ROOT
from tests.examples.runs import SharedRuns
from tests.verify.benched import QUICK, QUICK_LOGGED, QUICK_RESUMED, bench
from tests.verify.injected_bugs.check import injected_bugs


@pytest.fixture
def quick_injected(shared_runs: SharedRuns) -> str:
    """What the benchmark prints of the injected bugs of the default suite."""
    printed: str = shared_runs.scenario("quick_injected")
    return printed


def test_injected_bugs_are_found_at_their_stage_and_module(quick_injected: str) -> None:
    bugs = (*QUICK, *QUICK_LOGGED, *QUICK_RESUMED)
    assert quick_injected.count("| yes |") == len(bugs), quick_injected


def test_a_run_that_resumes_with_the_distributed_optimizer_holds(quick_injected: str) -> None:
    assert "resumed: tensors held" in quick_injected, quick_injected


def test_grpo_on_packed_sequences_holds_under_context_parallelism(quick_injected: str) -> None:
    assert "fine-tuned: tensors held" in quick_injected, quick_injected


def test_the_page_counts_the_injected_bugs_of_its_table_and_those_without_a_row() -> None:
    page = (ROOT / "src" / "parakit" / "verify" / "README.md").read_text()
    table = re.split(r"\n\n\w+ bugs show only", page)[0]
    rows = re.findall(r"^\| ([a-z0-9-]+) \|.*\| yes \|.*$", table, re.MULTILINE)
    unexplained = re.findall(r"^\| [a-z0-9-]+ \|.*\| yes \|.*\| other \|.*$", table, re.MULTILINE)
    ids = {bug.id for bug in injected_bugs()}
    assert set(rows) <= ids
    assert len(rows) == len(set(rows))
    text = " ".join(page.split())
    assert f"All {len(rows)} bugs of the table were named" in text
    assert f"{len(unexplained)} of them have the kind *other*" in text
    num_missing = len(ids) - len(rows)
    assert num_missing == 0 or f"The {num_missing} latest bugs have no row yet" in text


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_every_injected_bug_is_found_at_its_stage_and_module(
    sample_prefix: Path, tmp_path: Path
) -> None:
    bench(sample_prefix, tmp_path, "injected")


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_every_injected_bug_of_what_is_printed_is_found(
    sample_prefix: Path, tmp_path: Path
) -> None:
    bench(sample_prefix, tmp_path, "logged")


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_every_injected_bug_of_a_resumed_run_is_found(sample_prefix: Path, tmp_path: Path) -> None:
    bench(sample_prefix, tmp_path, "resumed")


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_no_healthy_layout_is_called_wrong(sample_prefix: Path, tmp_path: Path) -> None:
    assert "differs" not in bench(sample_prefix, tmp_path, "healthy")
