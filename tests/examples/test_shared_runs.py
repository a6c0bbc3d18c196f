"""Only the runs that the collected tests need are trained."""

import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from tests.examples.runs import SIX, SharedRuns, runs_for


def test_only_the_requested_runs_are_trained() -> None:
    assert runs_for({"zero3", "baseline", "train", "tmp_path"}) == ["baseline", "zero3"]
    assert runs_for({"six", "baseline"}) == list(SIX)
    assert runs_for({"eight", "six"}) == [*SIX, "vpp2", "zero1"]


def test_no_process_is_started_for_tests_that_train_by_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        pytest.fail("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    SharedRuns({"train"}, tmp_path, tmp_path / "data", others_run=False).stop()
