"""Fixtures that give the shared runs by name; `runs.py` trains them from the session's start on."""

import pytest

from tests.examples.runs import FIXTURES, Run, SharedRuns, Trainer


@pytest.fixture(scope="session")
def train(shared_runs: SharedRuns) -> Trainer:
    return shared_runs.trainer


@pytest.fixture(scope="session")
def all_runs(shared_runs: SharedRuns) -> dict[str, Run]:
    """All runs that the collected tests look at, each trained once."""
    return shared_runs.runs


@pytest.fixture(scope="session")
def baseline(all_runs: dict[str, Run]) -> Run:
    """One rank; a test that looks at it alone does not wait for the other five of `six`."""
    return all_runs["baseline"]


@pytest.fixture(scope="session")
def dp2(all_runs: dict[str, Run]) -> Run:
    return all_runs["dp2"]


@pytest.fixture(scope="session")
def tp2(all_runs: dict[str, Run]) -> Run:
    return all_runs["tp2"]


@pytest.fixture(scope="session")
def zero1(all_runs: dict[str, Run]) -> Run:
    return all_runs["zero1"]


@pytest.fixture(scope="session")
def six(all_runs: dict[str, Run]) -> dict[str, Run]:
    return {name: all_runs[name] for name in FIXTURES["six"]}


@pytest.fixture(scope="session")
def eight(all_runs: dict[str, Run]) -> dict[str, Run]:
    """The six, interleaved PP2 and the distributed optimizer."""
    return {name: all_runs[name] for name in FIXTURES["eight"]}


@pytest.fixture(scope="session")
def zero3(all_runs: dict[str, Run]) -> Run:
    return all_runs["zero3"]


@pytest.fixture(scope="session")
def refused(all_runs: dict[str, Run]) -> Run:
    """Megatron under an option that the kit's entry does not cover."""
    return all_runs["refused"]


@pytest.fixture(scope="session")
def native(all_runs: dict[str, Run]) -> Run:
    """Plain PyTorch under TP 2."""
    return all_runs["native tp2"]


@pytest.fixture(scope="session")
def experts(all_runs: dict[str, Run]) -> Run:
    """A mixture of experts on one rank, validated after the last iteration."""
    return all_runs["experts"]


@pytest.fixture(scope="session")
def ep2(all_runs: dict[str, Run]) -> Run:
    return all_runs["ep2"]


@pytest.fixture(scope="session")
def native_experts(all_runs: dict[str, Run]) -> Run:
    return all_runs["native experts"]


@pytest.fixture(scope="session")
def spread_experts(all_runs: dict[str, Run]) -> Run:
    """Plain PyTorch with the experts over two ranks."""
    return all_runs["spread experts"]


@pytest.fixture(scope="session")
def by_torchrun(all_runs: dict[str, Run]) -> Run:
    """TP 2 as a user trains it; the other dense runs fork ranks from a process with Megatron."""
    return all_runs["tp2 by torchrun"]
