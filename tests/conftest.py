"""What several test folders need: the sample data set, made once, and runs that start early."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.examples.runs import SharedRuns

for _name in ("MAKELEVEL", "MAKEFLAGS", "MFLAGS"):
    # Tests start make and parakit as a user does, although `make test` has started pytest.
    os.environ.pop(_name, None)

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
"""Without bytecode every process of a test would compile torch and Megatron anew, 2,400 files in 9 seconds."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Before torch is imported: threads that wait for each other take most of the time of tiny tensors."""

# Hypothesis fails an example that takes 0.2 s, or a second to draw: no test asserts a time.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

importlib.metadata.version = functools.cache(importlib.metadata.version)
"""Thousands of tests compose a run, which records Megatron's version. Reading it takes 2 ms each time."""

pytest_plugins = ("tests.machines", "tests.tiers")

REAL_RUNS = {"all_runs", "killed", "stopped", "quick_injected", "pipelines", "fused_updates"}
"""Fixtures that wait for the shared runs."""


def asks_for(item: pytest.Item, fixtures: set[str]) -> bool:
    return not fixtures.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move tests of real runs to the end, because the runs train while other tests run."""
    items.sort(key=lambda item: asks_for(item, REAL_RUNS))


def pytest_collection_finish() -> None:
    """Let the garbage collector skip all objects that exist before the first test.

    The modules and the collected tests are a million objects that live until the end. The collector would walk
    through all of them every few seconds, half a second each time.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def within_a_minute() -> Iterator[None]:
    """Fail a test after a minute. A test that opens a pipe could otherwise wait forever."""

    def give_up(*_: object) -> NoReturn:
        raise TimeoutError("The test waited for a minute.")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def sample_prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return `…_text_document` of the sample data set, written by the kit's command."""
    from tools.preprocess.cli import main

    prefix = tmp_path_factory.mktemp("data") / "sample"
    assert main(["sample", "--output-prefix", str(prefix)]) == 0
    return prefix.with_name("sample_text_document")


@pytest.fixture(scope="session")
def small_prefix(sample_prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the sample data set in a small vocabulary, for tests that train."""
    from tests.small import folded

    return folded(sample_prefix, tmp_path_factory.mktemp("small"))


@pytest.fixture(scope="session")
def starting_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for the shared initial weights, written once. Runs folders link it as `.start`."""
    return tmp_path_factory.mktemp("start")


@pytest.fixture(scope="session", autouse=True)
def shared_runs(request: pytest.FixtureRequest) -> Iterator[SharedRuns | None]:
    """Return the real runs that several tests need. They start with the first test of the session."""
    items = request.session.items
    if not any(asks_for(item, {"train", *REAL_RUNS}) for item in items):
        yield None
        return
    from tests.examples.runs import SharedRuns

    runs = request.getfixturevalue("tmp_path_factory").mktemp("runs")
    (runs / ".start").symlink_to(request.getfixturevalue("starting_weights"))
    looking = [item for item in items if asks_for(item, REAL_RUNS)]
    asked = {name for item in looking for name in getattr(item, "fixturenames", ())}
    others_exist = len(looking) < len(items)
    shared = SharedRuns(asked, runs, request.getfixturevalue("small_prefix"), others_exist)
    yield shared
    shared.stop()
