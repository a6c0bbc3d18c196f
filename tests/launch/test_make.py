import re
from pathlib import Path

import pytest

from tools.launch.errors import LaunchError
from tools.launch.make import COMMANDS, TOOLS, ToolCall, calls_of, given_names
from tools.spec.files import ROOT


@pytest.fixture(autouse=True)
def _no_runs_of_ones_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tools.launch.make.OWN_READINGS", tmp_path / "mine.csv")


def test_names_are_read_from_makes_own_flags() -> None:
    assert given_names(r"ks -- ITERS=5 EXTRA=--lr\ 1\ B=2 Q=a\"b") == ["ITERS", "EXTRA", "Q"]
    assert given_names("") == given_names("k -j4") == []


def test_a_target_is_a_command_with_its_variables_as_options() -> None:
    plan = calls_of("plan", {"MODEL": "gpt2-large", "GPUS": "2", "CALIBRATION": "c.json"})
    words = ("--model", "gpt2-large", "--gpus", "2", "--calibration", "c.json")
    assert plan == [ToolCall("tools.plan", words)]
    assert calls_of("demo", {}) == [ToolCall("tools.launch", ("demo",))]
    train = "train-tp2-gpt2-tiny-2cpu"
    assert calls_of(train, {}) == [ToolCall("tools.launch", ("target", train))]


@pytest.mark.parametrize("target", ["compare-zero", "compare-moe", "resume"])
def test_what_a_tool_reads_from_the_environment_does_not_become_an_option(target: str) -> None:
    variables = {"RUNS": "elsewhere", "MICRO_BATCH": "2", "MODEL": "gpt3-64m", "RUN": "runs/x"}
    (call,) = calls_of(target, variables)
    assert call.words[-2:] == (
        ("resume", "runs/x") if target == "resume" else ("--model", "gpt3-64m")
    )


def test_tracing_trains_few_iterations_and_then_draws_them() -> None:
    train, trace = calls_of("trace-tp2-gpt2-tiny-2cpu", {"RUNS": "elsewhere"})
    assert train.words == ("target", "train-tp2-gpt2-tiny-2cpu")
    assert train.defaults == (("ITERS", "6"),)
    assert trace.words == ("trace", "tp2-gpt2-tiny-2cpu", "--runs", "elsewhere")
    assert len(calls_of("trace-tp2-gpt2-tiny-2cpu", {"DRY_RUN": "1"})) == 1


@pytest.mark.parametrize(
    ("target", "environment", "sentence"),
    [
        ("plan", {}, "Say what: make plan MODEL="),
        ("advise", {}, "Say what: make advise MODEL="),
        ("resume", {}, "Say which run: make resume RUN="),
        ("prepare-ds", {"INPUT": "a.jsonl"}, "Say its name: make prepare-ds INPUT="),
        ("demo", {"MAKEFLAGS": "-- ITER=5"}, "There is no variable ITER; did you mean ITERS="),
        ("schedules", {"PP": "two"}, "PP=two is not a whole number"),
        ("parity", {"VERIFY": "-1"}, "VERIFY=-1 is not 0 or 1"),
    ],
)
def test_what_is_missing_or_not_used_is_refused(
    target: str, environment: dict[str, str], sentence: str
) -> None:
    with pytest.raises(LaunchError, match=sentence):
        calls_of(target, environment)


def test_the_makefile_and_the_table_know_the_same_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    calls = re.search(r"^CALLS := ((?:.*\\\n)*.*)", makefile, re.MULTILINE)
    assert calls is not None
    assert set(calls[1].replace("\\", " ").split()) == COMMANDS | set(TOOLS)


def test_a_report_first_asks_slurm_about_jobs_where_the_runs_are(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    assert len(calls_of("report", {"RUNS": str(tmp_path)})) == 1
    (tmp_path / "one" / "job.json").touch()
    status, build = calls_of("report", {"RUNS": str(tmp_path)})
    assert status.words == ("status", "--quiet")
    assert build.words[-2:] == ("--runs", str(tmp_path))


@pytest.mark.parametrize("target", ["report", "explain", "trace-tp2-gpt2-tiny-2cpu"])
def test_runs_is_the_folder_of_run_folders_for_every_target(target: str, tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "run.json").touch()
    assert calls_of(target, {"RUNS": str(tmp_path)})[-1].words[-2:] == ("--runs", str(tmp_path))


def test_a_report_adds_to_ones_own_readings_and_a_plan_takes_them(tmp_path: Path) -> None:
    own = tmp_path / "mine.csv"
    asked = {"MODEL": "gpt2-large", "CALIBRATION": "c.json"}
    assert calls_of("report", {})[-1].words == ("build", "--readings", str(own))
    assert "--readings" not in calls_of("report", {"RUNS": str(tmp_path)})[-1].words
    assert "--readings" not in calls_of("plan", asked)[0].words
    own.touch()
    assert calls_of("plan", asked)[0].words[-2:] == ("--readings", str(own))
    assert calls_of("plan", asked | {"READINGS": "x.csv"})[0].words.count("--readings") == 1


def test_single_runs_to_explain_are_named_by_run_or_as_before_by_runs(tmp_path: Path) -> None:
    runs = [tmp_path / name for name in ("one", "two")]
    for folder in runs:
        folder.mkdir()
        (folder / "run.json").touch()
    named = " ".join(map(str, runs))
    words = ("explain", *map(str, runs))
    assert calls_of("explain", {"RUN": named}) == [ToolCall("tools.report", words)]
    assert calls_of("explain", {"RUNS": named}) == [ToolCall("tools.report", words)]
