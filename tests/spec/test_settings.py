import argparse
import re
import subprocess
from pathlib import Path

import pytest

from tools.spec import settings
from tools.spec.files import ROOT
from tools.spec.setting import SettingError
from tools.spec.settings import add_options, check_given, make_help, options_of


def test_a_value_is_of_its_kind_or_the_refusal_names_variable_value_and_kind() -> None:
    assert settings.ITERS.value({"ITERS": "5"}) == 5
    assert settings.ITERS.value({"ITERS": ""}) is None
    with pytest.raises(SettingError, match="ITERS=0 is not a whole number above 0"):
        settings.ITERS.value({"ITERS": "0"})


@pytest.mark.parametrize(
    ("target", "name", "sentence"),
    [
        ("train-tp2-gpt2-tiny-2cpu", "ITER", "There is no variable ITER; did you mean ITERS="),
        ("plan", "ITERS", "'make plan' does not use ITERS=; did you mean INTER="),
        ("list", "MODELS", "'make list' does not use MODELS="),
        (
            "explain",
            "XYZZY",
            "There is no variable XYZZY; 'make help-all' names those that it takes",
        ),
    ],
)
def test_a_variable_that_a_target_would_ignore_is_refused(
    target: str, name: str, sentence: str
) -> None:
    with pytest.raises(SettingError, match=sentence):
        check_given([name], target)


def test_what_other_programs_read_is_let_through() -> None:
    check_given(["NCCL_DEBUG", "HF_TOKEN", "CUDA_VISIBLE_DEVICES", "ITERS"], "train-x")


def test_variables_become_the_options_of_the_targets_tool() -> None:
    given = {"MODEL": "gpt2-large", "GPUS": "2", "JSON": "1", "ITERS": "5", "SVG": ""}
    assert options_of("plan", given) == ["--model", "gpt2-large", "--gpus", "2", "--json"]
    assert options_of("report", {"LOGS": "'a b.log' c.log", "STRICT": "0"}) == ["a b.log", "c.log"]
    assert options_of("prepare-ds", {"NAME": "mine"}) == ["--output-prefix", "owt-ds/mine"]


def test_a_parser_takes_what_the_variables_become() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_options(parser, "schedules", PP=4)
    assert parser.parse_args([]).pipeline == 4
    found = parser.parse_args(options_of("schedules", {"PP": "2", "JSON": "1", "SVG": "a.svg"}))
    assert (found.pipeline, found.json, found.svg) == (2, True, Path("a.svg"))
    with pytest.raises(argparse.ArgumentError, match="two is not a whole number"):
        parser.parse_args(["--pipeline", "two"])


def test_make_help_shows_the_table_as_it_is() -> None:
    committed = Path(settings.__file__).with_name("settings.mk").read_text()
    assert committed == make_help(), "run: python -m tools.spec.settings > tools/spec/settings.mk"


def test_make_help_fits_a_screen_and_names_variables_that_its_targets_use() -> None:
    command = ("make", "--no-print-directory", "help")
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    lines = shown.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for line in lines[:-1]:
        target = line.split()[0].replace("%", "tp2-gpt2-tiny-2cpu")
        check_given(re.findall(r"\b([A-Z_]+)=", line), target)
