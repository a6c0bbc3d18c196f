"""The three tiers of tests, and the check that a unit test starts no process.

- *unit*: no process is started.
- *ranks*: real torchrun or forked ranks, and every other test that starts a process.
- *engine*: containers and Slurm.

Nobody marks 5,000 tests by hand. A test is `ranks` if its code, or the code of a fixture or helper of the tests that it
uses, names something that starts a process (`starts_process`), and `unit` otherwise. If the tested code starts a
process, which this check cannot see, the module or the test states `pytestmark = pytest.mark.ranks`. With
`--tier unit` a unit test that starts a process fails, and the failure names the tier that it needs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from types import CodeType, FunctionType
from typing import Any

import pytest

from parakit.config.files import ROOT

TIERS = ("unit", "ranks", "engine")

STARTING_NAMES = {"Popen", "check_call", "check_output", "fork", "execv", "execve", "execvp"} | {
    *("create_subprocess_exec", "posix_spawn", "system", "get_context", "ProcessPoolExecutor"),
    *("ForkedRanks", "WarmMegatron", "DryRunner", "SharedRuns", "RankProcesses", "chmod"),
}
"""Functions and classes that start a process wherever they are named, and `chmod`, which makes a stand-in program."""

STARTING_EVENTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.exec", "os.posix_spawn"} | {
    "os.system"
}
"""Audit events of Python. Processes that `multiprocessing` spawns raise none of them."""

COMMANDS_OF_LIBRARIES = (
    *("/sbin/ldconfig ", "uname ", "gcc ", "ld ", "objdump "),
    "git rev-parse --short HEAD ",
)
"""Beginnings of commands by which a library finds its own files or, as Megatron, its commit when it is imported."""

FIXED_COMMIT = "0123456789ab"
"""The kit's commit as unit tests see it: they do not ask git."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        action="append",
        choices=TIERS,
        default=[],
        help="run the tests of this tier alone; may be repeated",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with its tier, and leave out the tiers that were not asked for."""
    tiers = config.getoption("--tier")
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        tier = tier_of(item)
        if item.get_closest_marker(tier) is None:
            item.add_marker(tier)
        (kept if not tiers or tier in tiers else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def tier_of(item: pytest.Item) -> str:
    """Return the tier that a test is marked with, or else the tier that its code shows.

    Raises:
        pytest.UsageError: The test is marked with two tiers.
    """
    marked = [tier for tier in TIERS if item.get_closest_marker(tier)]
    if len(marked) > 1:
        raise pytest.UsageError(f"{item.nodeid} is marked as {' and as '.join(marked)}; keep one.")
    if marked:
        return marked[0]
    return "ranks" if _starts_process(item) else "unit"


def _starts_process(item: pytest.Item) -> bool:
    if not isinstance(item, pytest.Function):
        return False
    # Fixtures that every test has start processes only for other tests of the session.
    fixtures = [
        definitions[-1]
        for name, definitions in item._fixtureinfo.name2fixturedefs.items()
        if name != "shared_runs" and not name.startswith("_early_")
    ]
    return starts_process(item.function) or any(
        "shared_runs" in fixture.argnames or starts_process(fixture.func) for fixture in fixtures
    )


_known: dict[object, bool] = {}


def starts_process(function: Callable[..., object]) -> bool:
    """Return True if a function of the tests, or a function or class of the tests that it names, starts a process."""
    if function not in _known:
        _known[function] = False  # Two functions may call each other.
        _known[function] = _names_start(function)
    return _known[function]


def _names_start(function: Callable[..., object]) -> bool:
    if isinstance(function, type):
        methods = [value for value in vars(function).values() if isinstance(value, FunctionType)]
        return any(starts_process(method) for method in methods)
    function = getattr(function, "__wrapped__", function)
    if not isinstance(function, FunctionType):
        return False
    names = set(_names_of(function.__code__))
    if STARTING_NAMES & names or {"subprocess", "run"} <= names or "multiprocessing" in names:
        return True
    named = (function.__globals__.get(name) for name in names)
    return any(
        starts_process(value)
        for value in named
        if isinstance(value, (FunctionType, type)) and value.__module__.startswith("tests.")
    )


def _names_of(code: CodeType) -> Iterator[str]:
    """Yield the global names and attributes that a function and the functions inside it use."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_of(constant)


_watched: list[str] = []
"""Name of the watched unit test; empty otherwise."""


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched or event not in STARTING_EVENTS:
        return
    parts = arguments[1] if event == "subprocess.Popen" else arguments[:1]
    command = str(parts) if isinstance(parts, (str, bytes)) else " ".join(map(str, parts))
    if f"{command} ".startswith(COMMANDS_OF_LIBRARIES):
        return
    pytest.fail(
        f"{_watched[0]} starts a process ({event}: {command[:120]}). A unit test starts none: "
        "move this one to the ranks tier with `pytest.mark.ranks`, or its module with `pytestmark`."
    )


@functools.cache
def _add_audit_hook() -> None:
    sys.addaudithook(_audit)  # Python has no way to remove a hook.


@contextmanager
def guarded(test: str) -> Iterator[None]:
    """Fail the test of this name when a process is started."""
    _add_audit_hook()
    _watched.append(test)
    try:
        yield
    finally:
        _watched.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Watch each test and its fixtures if `--tier unit` is the only tier."""
    watches = item.config.getoption("--tier") == ["unit"]
    with guarded(item.nodeid) if watches else nullcontext():
        return (yield)


@pytest.fixture(autouse=True)
def _commit_without_git(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let unit tests record a fixed commit of the kit instead of asking git."""
    if request.node.get_closest_marker("unit"):
        commit_of = {
            ROOT: FIXED_COMMIT
        }.get  # None, as of a folder outside a repository, for every other.
        monkeypatch.setattr("parakit.launch.code.read_commit", commit_of)
