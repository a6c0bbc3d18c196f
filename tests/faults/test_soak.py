"""`make bench NAME=soak` with real runs, and requests that are refused before a run starts."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from parakit.config.files import ROOT
from parakit.launch.options import Options
from tests.faults.runs import Kit
from tests.faults.soak import READINGS_FILE, TEXT_FILE, Soak, _Soaking, plan_soak
from tests.given import given
from tests.small import SMALL


def soaked(variables: dict[str, str]) -> Soak:
    asked = given("bench NAME=soak", variables)
    return plan_soak(asked.strategy, asked.hours, asked.model, Options())


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({}, 'make bench NAME=soak STRATEGY=dp2 ARGS="--hours 0.33"'),
        ({"STRATEGY": "dp2"}, "--hours is required, for example: make bench NAME=soak"),
        ({"STRATEGY": "dp2", "ARGS": "--hours=-1"}, "--hours: -1 is not a number above 0"),
        ({"STRATEGY": "xp2", "ARGS": "--hours=1"}, "Unknown strategy 'xp2'"),
        (
            {"STRATEGY": "zero3", "ARGS": "--hours=1"},
            "STRATEGY=zero3 of megatron cannot be resumed; use dp2",
        ),
    ],
)
def test_a_soak_that_cannot_be_composed_is_refused(
    variables: dict[str, str], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        soaked(variables)


def test_soak_of_expert_parallelism_uses_a_model_with_experts() -> None:
    ep2 = soaked({"STRATEGY": "ep2", "ARGS": "--hours=1"})
    dp4 = soaked({"STRATEGY": "dp4", "ARGS": "--hours=1"})
    assert [plan.job.target for plan in (ep2, dp4)] == [
        "train-ep2-moe-tiny-2cpu",
        "train-dp4-gpt2-tiny-4cpu",
    ]


def test_hours_of_a_soak_exclude_the_start_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, ends = [0.0], []
    watch = _Soaking(
        soaked({"STRATEGY": "dp2", "ARGS": "--hours=1"}), tmp_path, Console(quiet=True)
    )

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    @contextmanager
    def launched(*_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(folder=tmp_path, launcher=SimpleNamespace(poll=lambda: None))

    monkeypatch.setattr(
        "tests.faults.soak.time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep)
    )
    monkeypatch.setattr(
        "tests.faults.soak._last_iteration", lambda _: 1000 if clock[0] >= 40 else 0
    )
    monkeypatch.setattr(watch, "_launched", launched)
    monkeypatch.setattr(watch, "_watch", lambda _, end: ends.append(end))
    assert watch.train_undisturbed() == 1000
    assert ends == [40 + 0.4 * 3600]


@pytest.mark.slow
def test_soak_with_killed_processes_reaches_the_undisturbed_losses(
    kit: Kit, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    (runs / ".start").symlink_to(kit.runs / ".start")
    variables = {"NAME": "soak", "STRATEGY": "dp2", "ARGS": "--hours 0.04", "SAVE_EVERY": "4"}
    variables["RUNS"] = str(runs)
    variables["MAKEFLAGS"] = (
        r" -- NAME=soak ARGS=--hours\ 0.04"  # make exports the variables of its command line in this form.
    )
    ended = subprocess.run(
        (sys.executable, "-m", "parakit", "bench"),
        cwd=ROOT,
        env={**kit.environment, **variables, "ITERS": "", "EXTRA": " ".join(SMALL)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (folder,) = runs.glob("2*-soak-dp2-gpt2-tiny-2cpu")
    text = (folder / TEXT_FILE).read_text()
    assert "all equal to the last digit" in text, ended.stdout
    assert " killed " in " ".join(ended.stdout.split())
    assert "rank 1" in (folder / READINGS_FILE).read_text()
