"""Fixtures that give the shared runs by name; `runs.py` trains them from the session's start on."""

import pytest

from tests.examples.runs import FIXTURES, Run, SharedRuns, Trainer


@pytest.fixture(scope="session")
def train(shared_runs: SharedRuns) -> Trainer:
    return shared_runs.trainer


@pytest.fixture(scope="session")
def all_runs(shared_runs: SharedRuns) -> dict[str, Run]:
    """Return all runs that the collected tests need, each trained once."""
    return shared_runs.runs


@pytest.fixture(scope="session")
def baseline(all_runs: dict[str, Run]) -> Run:
    """Return the run on a single rank. A test that needs only this run does not wait for the other five of `six`."""
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
    """Return the runs of `six`, of interleaved PP2 and of the distributed optimizer."""
    return {name: all_runs[name] for name in FIXTURES["eight"]}


@pytest.fixture(scope="session")
def zero3(all_runs: dict[str, Run]) -> Run:
    return all_runs["zero3"]


@pytest.fixture(scope="session")
def refused(all_runs: dict[str, Run]) -> Run:
    """Return a run of Megatron with an option that the kit's entry does not support."""
    return all_runs["refused"]


@pytest.fixture(scope="session")
def native(all_runs: dict[str, Run]) -> Run:
    """Return the run of the native backend with TP 2."""
    return all_runs["native tp2"]


@pytest.fixture(scope="session")
def experts(all_runs: dict[str, Run]) -> Run:
    """Return the run of a mixture of experts on a single rank, validated after the last iteration."""
    return all_runs["experts"]


@pytest.fixture(scope="session")
def ep2(all_runs: dict[str, Run]) -> Run:
    return all_runs["ep2"]


@pytest.fixture(scope="session")
def native_experts(all_runs: dict[str, Run]) -> Run:
    return all_runs["native experts"]


@pytest.fixture(scope="session")
def spread_experts(all_runs: dict[str, Run]) -> Run:
    """Return the run of the native backend with experts on two ranks."""
    return all_runs["spread experts"]


@pytest.fixture(scope="session")
def by_torchrun(all_runs: dict[str, Run]) -> Run:
    """Return a TP 2 run started by torchrun. The other dense runs fork ranks from a process with Megatron."""
    return all_runs["tp2 by torchrun"]
