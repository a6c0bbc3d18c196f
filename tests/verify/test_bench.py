"""Plants are found, and healthy layouts are not called wrong, by the whole: ranks, capture, verdict."""

from pathlib import Path

import pytest

from tests.examples.runs import SharedRuns
from tests.verify.benched import QUICK, bench


@pytest.fixture
def quick_plants(shared_runs: SharedRuns) -> str:
    """What the benchmark prints of the plants of the default suite."""
    printed: str = shared_runs.scenario("quick_plants")
    return printed


def test_eight_plants_of_all_kinds_are_found_at_their_stage_and_module(quick_plants: str) -> None:
    assert quick_plants.count("| yes |") == len(QUICK)


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_every_plant_is_found_at_its_stage_and_module(sample_prefix: Path, tmp_path: Path) -> None:
    bench(sample_prefix, tmp_path, "plants")


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_every_plant_of_a_resumed_run_is_found(sample_prefix: Path, tmp_path: Path) -> None:
    bench(sample_prefix, tmp_path, "resumed")


@pytest.mark.slow
@pytest.mark.timeout(36000)
def test_no_healthy_layout_is_called_wrong(sample_prefix: Path, tmp_path: Path) -> None:
    assert "differs" not in bench(sample_prefix, tmp_path, "healthy")
