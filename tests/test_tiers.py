"""Each test has one tier, and a unit test that starts a process fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

from parakit.config.files import ROOT
from tests.tiers import TIERS, guarded, starts_process


def _ask() -> str:
    return subprocess.run(("true",), check=True, capture_output=True, text=True).stdout


def _ask_by_helper() -> str:
    def inner() -> str:
        return _ask()

    return inner()


def _answer() -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess(("true",), 0, "", "")


class Asker:
    """Class that starts a process in a method."""

    def ask(self) -> str:
        return _ask()


def _ask_by_class() -> str:
    return Asker().ask()


def test_a_test_is_of_ranks_if_its_code_or_a_helper_starts_a_process() -> None:
    assert starts_process(_ask)
    assert starts_process(_ask_by_helper)
    assert starts_process(_ask_by_class)
    assert not starts_process(_answer)


def _tiers_of(request: pytest.FixtureRequest) -> list[str]:
    return [tier for tier in TIERS if request.node.get_closest_marker(tier)]


def test_a_test_that_starts_nothing_is_marked_unit(request: pytest.FixtureRequest) -> None:
    assert _tiers_of(request) == ["unit"]


def test_a_test_that_starts_a_process_is_marked_ranks(request: pytest.FixtureRequest) -> None:
    assert _ask() == ""
    assert _tiers_of(request) == ["ranks"]


def test_unit_test_that_starts_a_process_fails_with_the_tier_it_needs() -> None:
    with (
        guarded("tests/test_x.py::test_x"),
        pytest.raises(pytest.fail.Exception, match=r"test_x starts a process \(.*true\).*ranks"),
    ):
        subprocess.run(("true",), check=True)
    subprocess.run(("true",), check=True)


def test_library_may_search_for_its_files_during_an_import_in_a_unit_test() -> None:
    with guarded("tests/test_x.py::test_x"), pytest.raises(FileNotFoundError):
        subprocess.run(("/sbin/ldconfig", "-p"), cwd="/no/such/folder", check=True)


def _make(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ("make", "--dry-run", "test", *arguments)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "tiers"),
    [((), "--tier unit --tier ranks"), (("TIER=unit",), "--tier unit")],
)
def test_make_test_runs_unit_and_ranks_or_the_requested_tier(
    arguments: tuple[str, ...], tiers: str
) -> None:
    answer = _make(*arguments)
    assert answer.stdout.rstrip().endswith(f"-m pytest -q {tiers}"), answer.stderr


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("TIER=fast", "TIER=fast is no tier of the tests; choose one of unit ranks engine"),
        ("ITERS=5", "'make test' takes TIER= alone; leave ITERS=5 out"),
    ],
)
def test_make_test_refuses_another_tier_and_other_variables(argument: str, sentence: str) -> None:
    answer = _make(argument)
    assert answer.returncode == 2
    assert sentence in answer.stderr


def test_pytest_refuses_a_tier_that_does_not_exist() -> None:
    command = (sys.executable, "-m", "pytest", "--tier", "fast", "--collect-only", __file__)
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert answer.returncode == 4
    assert "invalid choice: 'fast'" in answer.stderr
