"""Fixtures that give the shared runs by name; `runs.py` trains them from the session's start on."""

import pytest

from tests.examples.runs import FIXTURES, Run, SharedRuns, Trainer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of this folder come last: their runs train while the others run."""
    items.sort(key=lambda item: "tests/examples/" in item.nodeid)


@pytest.fixture(scope="session")
def train(shared_runs: SharedRuns) -> Trainer:
    return shared_runs.trainer


@pytest.fixture(scope="session")
def trained(shared_runs: SharedRuns) -> dict[str, Run]:
    """All runs that the collected tests look at, each trained once."""
    return shared_runs.result()


@pytest.fixture(scope="session")
def six(trained: dict[str, Run]) -> dict[str, Run]:
    return {name: trained[name] for name in FIXTURES["six"]}


@pytest.fixture(scope="session")
def eight(trained: dict[str, Run]) -> dict[str, Run]:
    """The six, interleaved PP2 and the distributed optimizer."""
    return {name: trained[name] for name in FIXTURES["eight"]}


@pytest.fixture(scope="session")
def zero3(trained: dict[str, Run]) -> Run:
    return trained["zero3"]


@pytest.fixture(scope="session")
def refused(trained: dict[str, Run]) -> Run:
    """Megatron under an option that the kit's entry does not cover."""
    return trained["refused"]


@pytest.fixture(scope="session")
def native(trained: dict[str, Run]) -> dict[str, Run]:
    """Plain PyTorch on one rank and under TP 2."""
    return {name: trained[f"native {name}"] for name in ("baseline", "tp2")}


@pytest.fixture(scope="session")
def experts(trained: dict[str, Run]) -> Run:
    """A mixture of experts on one rank, validated after the last iteration."""
    return trained["experts"]


@pytest.fixture(scope="session")
def ep2(trained: dict[str, Run]) -> Run:
    return trained["ep2"]


@pytest.fixture(scope="session")
def native_experts(trained: dict[str, Run]) -> Run:
    return trained["native experts"]


@pytest.fixture(scope="session")
def spread_experts(trained: dict[str, Run]) -> Run:
    """Plain PyTorch with the experts over two ranks."""
    return trained["spread experts"]
