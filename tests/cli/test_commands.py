"""The table of commands, called through make and through `parakit`."""

import inspect
import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from parakit.cli import program
from parakit.cli.commands import BENCHES, COMMANDS, REMOVED, SECTIONS, Command
from parakit.cli.dispatch import call_handler, run_command, run_target
from parakit.cli.options import (
    build_parser,
    find_bench,
    find_command,
    import_function,
    parse_arguments,
    parse_make_variables,
    parse_makeflags,
    refuse_unused_variables,
    rewrite_as_variables,
)
from parakit.config.files import PYTHON_PATH, ROOT
from parakit.config.setting import SettingError
from parakit.config.settings import ARGS, OPTIONS, RENAMED, REPLACED, SETTINGS
from tests.given import command_named, given, run

HANDLED = [command for command in (*COMMANDS, *BENCHES) if command.handler]
NAMED = [
    command for command in HANDLED if "NAME" in {setting.name for setting in command.variables}
]
EVERYWHERE = {"variables", "target", "options", "console", "arguments", "program"}


@pytest.fixture(autouse=True)
def _empty_runs_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("parakit.cli.clone.USER_MEASUREMENTS_FILE", tmp_path / "mine.csv")


@pytest.mark.parametrize("command", HANDLED, ids=lambda handled: handled.name)
def test_handlers_get_every_required_parameter(command: Command) -> None:
    handler = import_function(command.handler)
    named = {setting.name.lower() for setting in command.variables}
    known = EVERYWHERE | named | {name for name, _ in command.fixed}
    if command.name in ("run", "module", "validate", "guide"):
        known |= {
            "module_arguments",
            "fit",
            "write",
        }  # These options are arguments of the handlers themselves.
    needed = {
        parameter.name
        for parameter in inspect.signature(handler).parameters.values()
        if parameter.default is inspect.Parameter.empty
    }
    assert needed <= known
    required = {name for names in command.required for name in names.split("|")}
    assert required <= {setting.name for setting in command.variables}


@pytest.mark.parametrize("command", HANDLED, ids=lambda handled: handled.name)
def test_every_command_has_a_command_line_with_an_option_for_each_variable(
    command: Command,
) -> None:
    parser = build_parser(command, "x")
    known = {action.dest for action in parser._actions}
    names = {setting.name.lower() for setting in command.variables if setting.name != ARGS.name}
    assert command.name in ("bench NAME=preprocess",) or names <= known


def test_no_command_lists_a_variable_twice() -> None:
    for command in (*COMMANDS, *BENCHES):
        names = [setting.name for setting in command.variables]
        assert len(names) == len(set(names)), command.name


def test_exact_name_has_precedence_over_a_matching_pattern() -> None:
    names = ("verify-matrix", "verify-tp2-x-2cpu", "train-auto-x-2cpu", "train-x-2cpu", "nothing")
    commands = [find_command(name) for name in names]
    assert [command and command.name for command in commands] == [
        *("verify-matrix", "verify-*", "train-auto-*", "train-*", None)
    ]


def test_variable_names_are_read_from_makeflags() -> None:
    assert parse_makeflags(r"ks -- ITERS=5 EXTRA=--lr\ 1\ B=2 Q=a\"b") == ["ITERS", "EXTRA", "Q"]
    assert parse_makeflags("") == parse_makeflags("k -j4") == []


def test_variables_and_options_give_equal_arguments() -> None:
    command = find_command("plan")
    assert command is not None
    by_make = given("plan", {"MODEL": "gpt2-large", "GPUS": "2", "JSON": "1", "SVG": ""})
    options = ["--model", "gpt2-large", "--gpus", "2", "--json"]
    by_words = parse_arguments(command, options, "parakit plan")
    texts = {"MODEL": "gpt2-large", "GPUS": "2", "JSON": "1"}
    assert vars(by_make) == {**vars(by_words), "texts": texts}
    assert (by_words.gpus, by_words.gpu, by_words.json, by_words.svg) == ((2,), "h200", True, None)


@pytest.mark.parametrize(
    ("option", "known_option"),
    [("--gbs", "--global-batch"), ("--mbs=2", "--micro-batch"), ("--modell", "--model")],
)
def test_unknown_option_is_refused_with_the_option_of_that_meaning(
    option: str, known_option: str
) -> None:
    command = find_command("plan")
    assert command is not None
    name = option.partition("=")[0]
    sentence = rf"^There is no option {name}; did you mean {known_option}\?$"
    with pytest.raises(SettingError, match=sentence):
        parse_arguments(command, [option, "256"], "parakit plan")


@pytest.mark.parametrize(
    ("target", "name", "sentence"),
    [
        ("train-tp2-gpt2-tiny-2cpu", "ITER", "There is no variable ITER; did you mean ITERS="),
        ("train-tp2-gpt2-tiny-2cpu", "iters", "There is no variable iters; did you mean ITERS="),
        ("plan", "ITERS", "'make plan' does not use ITERS=; did you mean INTER="),
        ("list", "MODELS", "'make list' does not use MODELS="),
        (
            "explain",
            "XYZZY",
            "no variable XYZZY; 'make help-all' lists the variables of each target",
        ),
    ],
)
def test_a_variable_that_a_target_would_ignore_is_refused(
    target: str, name: str, sentence: str
) -> None:
    with pytest.raises(SettingError, match=sentence):
        given(target, {"MAKEFLAGS": f"-- {name}=1"})


def test_variables_of_other_programs_are_not_refused() -> None:
    command = find_command("train-x")
    assert command is not None
    refuse_unused_variables(
        ["NCCL_DEBUG", "HF_TOKEN", "CUDA_VISIBLE_DEVICES", "ITERS"], "train-x", command
    )


@pytest.mark.parametrize(
    ("target", "environment", "sentence"),
    [
        ("plan", {}, "MODEL= is required, for example: make plan MODEL="),
        (
            "bench NAME=soak",
            {},
            "STRATEGY= is required, for example: make bench NAME=soak STRATEGY=",
        ),
        ("bench NAME=soak", {"STRATEGY": "dp2"}, "--hours is required, for example: make bench"),
        ("resume", {}, "RUN= is required, for example: make resume RUN="),
        ("prepare-ds", {"INPUT": "a"}, "NAME= is required, for example: make prepare-ds INPUT="),
        ("schedules", {"ARGS": "--pipeline two"}, "--pipeline: two is not a whole number"),
        ("parity", {"VERIFY": "-1"}, "VERIFY=-1 is not 0 or 1"),
        ("demo", {"NNODES": "2"}, "'demo' runs on this machine alone; leave NNODES= out"),
    ],
)
def test_missing_and_invalid_values_are_refused(
    target: str, environment: dict[str, str], sentence: str
) -> None:
    with pytest.raises(SettingError, match=sentence):
        given(target, environment)


def test_refusal_is_a_single_sentence_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("plan", ["--modle", "x"], "parakit plan") == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert run_target("demoo") == 2
    assert "did you mean 'demo'?" in capsys.readouterr().err
    assert run_target("verfy-tp2-gpt2-tiny-2cpu") == 2
    assert "did you mean 'verify-tp2-gpt2-tiny-2cpu'?" in capsys.readouterr().err
    assert run_target("trian-tp2-gpt2-tiny-2cpu") == 2
    assert "is not train-<strategy>-<model>-<N>gpu" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name",
    [
        "train-dp2-gpt2-tiny-2cpu;touch hit",
        "train-dp2-gpt2-tiny-2cpu\ntouch hit",
        "train-dp2-gpt2-tiny-2cpu(touch hit)",
        "list' ; touch hit ; '",
        'list" ; touch hit ; "',
        "list`touch hit`",
        "list$(touch hit).",
        "list$(shell touch hit).",
        "list$$(shell touch hit).",
        "list hit",
    ],
)
def test_make_executes_no_part_of_a_target_name(name: str, tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    ended = subprocess.run(
        ("make", "--no-print-directory", name),
        cwd=tmp_path,
        # With KIT_IMAGE no setup is needed.
        env={**os.environ, "KIT_IMAGE": "x", "KIT_PYTHON": sys.executable, "DRY_RUN": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    refusal, made = ended.stderr.split("\n", 1)
    assert refusal.startswith("There is no target ")
    assert made.startswith("make: *** ")  # This line of make repeats the name.
    assert (ended.returncode, ended.stdout) == (2, "")
    assert not (tmp_path / "hit").exists()


def test_target_name_with_shell_syntax_is_refused_by_make_and_parakit(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("os.execvp", lambda *_: pytest.fail("make was started"))
    for name, sentence in (("x:=$(shell ls)", "no ':';"), ("-j", "is an option and no target;")):
        assert run_target(name) == program.main([name]) == 2
        refusals = capsys.readouterr().err.splitlines()
        assert len(refusals) == 2
        assert all(sentence in refusal for refusal in refusals)


def test_list_of_commands_with_a_name_is_complete() -> None:
    assert {command.name for command in NAMED} == {
        *("bench", "experiment", "import-hf", "import-recipe", "prepare-ds", "report", "sweep"),
        "reproduce",
    }


@pytest.mark.parametrize(
    "name", ["../../x", "/x", "..", "a/b", "-x", ".x", "a\nb", "a b", 102 * "a"]
)
@pytest.mark.parametrize("command", NAMED, ids=lambda command: command.name)
def test_a_name_that_leads_to_another_folder_is_refused_by_every_command(
    command: Command, name: str
) -> None:
    refusal = f"NAME={name} is not a plain name of letters, digits, '.', '_' and '-'."
    with pytest.raises(SettingError, match=re.escape(refusal)):
        given(command.name, {"NAME": name, "INPUT": "x.jsonl", "HF": "x"})
    options = ["--", name] if command.name in ("bench", "experiment") else [f"--name={name}"]
    with pytest.raises(SettingError, match="is not a plain name of letters"):
        parse_arguments(command, options, "parakit")


def test_plain_name_is_used_unchanged() -> None:
    for name in ("x", "owt-10k", "gpt2_1.5B", "2026"):
        assert given("prepare-ds", {"NAME": name, "INPUT": "x.jsonl"}).name == name


def test_report_first_records_the_end_of_slurm_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Path] = []
    monkeypatch.setattr("parakit.launch.status.read_run_statuses", seen.append)
    given("report", {"RUNS": str(tmp_path)})
    assert seen == []
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "job.json").touch()
    assert given("report", {"RUNS": str(tmp_path)}).runs == tmp_path
    assert seen == [tmp_path]


def test_report_adds_own_measurements_and_plan_uses_them(tmp_path: Path) -> None:
    measurements = tmp_path / "mine.csv"
    asked = {"MODEL": "gpt2-large"}
    assert given("report").readings == measurements
    assert given("report", {"RUNS": str(tmp_path)}).readings is None
    assert given("plan", asked).readings is None
    measurements.touch()
    assert given("plan", asked).readings == measurements
    assert given("plan", asked | {"READINGS": "x.csv"}).readings == Path("x.csv")


def test_runs_to_explain_are_named_by_run_or_by_runs(tmp_path: Path) -> None:
    runs = [str(tmp_path / name) for name in ("one", "two")]
    for folder in map(Path, runs):
        folder.mkdir()
        (folder / "run.json").touch()
    assert given("explain", {"RUN": " ".join(runs)}).run == tuple(runs)
    assert given("explain", {"RUNS": " ".join(runs)}).run == tuple(runs)
    assert given("explain", {"RUNS": str(tmp_path)}).runs == tmp_path


def test_trace_command_trains_few_iterations_and_draws_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from parakit.cli import clone

    done: list[object] = []

    def trained(command: tuple[str, ...], env: dict[str, str], cwd: Path) -> int:
        done.append((command[-1], env["ITERS"]))
        return 0

    monkeypatch.setattr(clone.subprocess, "call", trained)
    monkeypatch.setattr(
        "parakit.reporting.command.trace", lambda run, runs: done.append((run, runs))
    )
    clone.train_and_trace(
        "trace-tp2-gpt2-tiny-2cpu", given("trace-tp2-gpt2-tiny-2cpu", {"RUNS": "x"})
    )
    assert done == [("train-tp2-gpt2-tiny-2cpu", "6"), ("tp2-gpt2-tiny-2cpu", Path("x"))]
    done.clear()
    clone.train_and_trace("trace-x", Namespace(texts={"ITERS": "9"}, dry_run=True))
    assert done == [("train-x", "9")]


def test_make_help_fits_a_screen_and_names_variables_that_its_targets_use() -> None:
    shown = subprocess.run(
        ("make", "--no-print-directory", "help"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    lines = shown.splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for line in lines[:-1]:
        target = line.split()[0].replace("%", "tp2-gpt2-tiny-2cpu")
        if command := find_command(target):
            refuse_unused_variables(re.findall(r"\b([A-Z_]+)=", line), target, command)


def test_makefile_recipes_are_exactly_the_commands_without_a_handler() -> None:
    rules = re.findall(r"^([a-z][a-z -]*):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    made = {name for names in rules for name in names.split()} - {"help", "help-all"}
    assert made == {command.name for command in COMMANDS if not command.handler}


def test_host_only_commands_are_refused_in_the_image(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KIT_IMAGE", "25.06-py3")
    sentence = (
        "'make {}' is for the host; the kit's image has what training and reports need alone."
    )
    for target in ("test", "test-slow", "lint", "docs", "setup-hf", "setup-bridge"):
        dry = ("make", "--dry-run", target)
        answer = subprocess.run(dry, cwd=ROOT, capture_output=True, text=True, check=False)
        assert sentence.format(target) in answer.stderr
    for command in (host_command for host_command in (*COMMANDS, *BENCHES) if host_command.on_host):
        with pytest.raises(SettingError) as refusal:
            call_handler(command, command.name, Namespace())
        assert str(refusal.value) == sentence.format(command.name)


def test_help_needs_no_package_of_the_kit() -> None:
    command = (sys.executable, "-S", "-m", "parakit.cli.help", "all")
    paths = {"PYTHONPATH": PYTHON_PATH}
    shown = subprocess.run(
        command, cwd=ROOT, env=paths, capture_output=True, text=True, check=True
    ).stdout
    assert "  ITERS " in shown
    assert "train-%" in shown


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_old_variable_name_is_refused_with_its_current_name(old: str, new: str) -> None:
    assert new in {setting.name for setting in SETTINGS}
    assert old not in {setting.name for setting in SETTINGS}
    command = next(
        handled for handled in HANDLED if new in {variable.name for variable in handled.variables}
    )
    for environment in ({"MAKEFLAGS": f"-- {old}=x"}, {old: "x"}):
        with pytest.raises(SettingError, match=f"^{old}= is {new}= now"):
            parse_make_variables(command.name, command, environment)
    with pytest.raises(SettingError, match=f"^{old}= is {new}= now"):
        parse_arguments(find_named("plan"), [f"--{old.lower()}", "x"], "plan")


def test_old_variable_name_is_ignored_by_commands_without_the_variable() -> None:
    assert parse_make_variables("list", find_named("list"), {"LAYOUT": "x"}).texts == {}


def find_named(name: str) -> Command:
    command = find_command(name)
    assert command is not None
    return command


def test_numbers_of_commands_and_variables_are_limited() -> None:
    commands = [command for section in SECTIONS.values() for command in section]
    assert sum(command.is_usual for command in commands) <= 16
    # Besides these there are the runs of the tutorial by their ids, two commands on Megatron's history, and serve.
    assert len(commands) <= 55 + 4
    of_history = {"GOOD", "BAD", "AGAINST", "A", "B"}
    named_by_issues = {
        "GRACE",
        "SLURM_GRES",
        "BASE_IMAGE",
        "CHAPTER",
        "TRAIN",
        "SERVE",
        "ALL",
        "FOR",
        "PEFT",
        "MTBF",
    } | of_history
    assert len({setting.name for setting in SETTINGS} - named_by_issues) <= 85


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_command_is_refused_with_its_replacement(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert name not in {command.name for command in COMMANDS}
    replacement = REMOVED[name]
    arguments = shlex.split(replacement)
    environment = {"MAKEFLAGS": f"-- {' '.join(arguments[1:])}"}
    refuse_unused_variables(
        parse_makeflags(environment["MAKEFLAGS"]), arguments[0], command_named(replacement)
    )
    monkeypatch.delenv("MAKELEVEL", raising=False)
    assert run_target(name) == program.REFUSED
    assert capsys.readouterr().err == f"'make {name}' was removed; use 'make {replacement}'.\n"
    assert program.main([name, "--help"]) == program.REFUSED
    refusal = capsys.readouterr().err
    assert refusal.startswith(f"'parakit {name}' was removed; use 'parakit {arguments[0]}")
    assert "=" not in refusal
    monkeypatch.setenv("MAKELEVEL", "1")
    assert program.main([name]) == program.REFUSED
    assert f"use 'make {replacement}'" in capsys.readouterr().err


def test_advise_target_after_plan_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["plan", "advise", "--model", "gpt2-large"]) == program.REFUSED
    assert "was removed; use" in capsys.readouterr().err


@pytest.mark.parametrize("name", REPLACED)
def test_a_removed_variable_is_refused_with_its_replacement(name: str) -> None:
    assert name not in {setting.name for setting in SETTINGS}
    sentence = re.escape(f"{name}= is {REPLACED[name]} now.")
    with pytest.raises(SettingError, match=sentence):
        given("plan", {"MODEL": "gpt2-large", "MAKEFLAGS": f"-- {name}=1"})
    takers = [
        command for command in HANDLED if name in {setting.name for setting in command.variables}
    ]
    assert takers or name not in {setting.name for setting in OPTIONS}
    for (
        command
    ) in takers:  # This is the environment of a command that read the variable in earlier versions.
        with pytest.raises(SettingError, match=sentence):
            parse_make_variables(command.name, command, {name: "1"})


def test_args_variable_passes_options_without_a_variable() -> None:
    asked = given("plan", {"MODEL": "gpt2-large", "ARGS": "--tokens 3e9 --intra nvlink4"})
    assert (asked.tokens, asked.intra, asked.model) == (3e9, "nvlink4", "gpt2-large")
    assert given("report", {"ARGS": "--all"}).all
    with pytest.raises(SettingError, match="ARGS=--a 'b is not flags with closed quotes"):
        given("plan", {"MODEL": "gpt2-large", "ARGS": "--a 'b"})


def test_programs_that_a_command_starts_do_not_get_its_args(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ARGS", "--pipeline 4 --microbatches 8")
    assert run_target("schedules") == 0
    assert "1F1B" in capsys.readouterr().out
    assert "ARGS" not in os.environ


def test_options_without_a_variable_are_passed_to_commands_of_a_clone() -> None:
    soak = find_bench("soak")
    arguments = rewrite_as_variables(["soak", "--strategy", "dp2", "--hours", "0.3"], soak)
    assert arguments == ["NAME=soak", "STRATEGY=dp2", "ARGS=--hours=0.3"]
    matrix = find_named("verify-matrix")
    assert rewrite_as_variables(["--executed", "--page=docs"], matrix) == [
        "ARGS=--executed --page=docs"
    ]


def test_further_options_of_prepare_ds_are_passed_on() -> None:
    command = find_named("prepare-ds")
    arguments = [
        "--input",
        "a b.jsonl",
        "--json-keys",
        "text",
        "body",
        "--name",
        "n",
        "--workers=2",
    ]
    assert rewrite_as_variables(arguments, command) == [
        *("INPUT=a b.jsonl", "NAME=n", "ARGS=--json-keys text body --workers=2")
    ]
    asked = given("prepare-ds", {"INPUT": "x", "NAME": "n", "ARGS": "--workers 2"})
    assert asked.args == ("--workers", "2")


def test_bench_needs_a_name_and_accepts_only_its_variables(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAME", "sok")
    assert run_target("bench") == program.REFUSED
    assert "There is no bench 'sok'; did you mean soak? There are scrape, plan," in (
        capsys.readouterr().err
    )
    monkeypatch.setenv("NAME", "scrape")
    monkeypatch.setenv("MAKEFLAGS", "-- NAME=scrape ITERS=5")
    assert run_target("bench") == program.REFUSED
    assert "'make bench NAME=scrape' does not use ITERS=" in capsys.readouterr().err


def test_bench_without_a_name_runs_the_short_benches_until_a_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []

    def start(command: tuple[str, ...], env: dict[str, str], cwd: Path) -> int:
        assert command[-1] == "bench"
        assert env["MAKEFLAGS"] == ""
        ran.append(env["NAME"])
        return 3 if len(ran) == 4 else 0

    monkeypatch.delenv("NAME", raising=False)
    monkeypatch.setattr("subprocess.call", start)
    assert run_target("bench") == 3
    assert ran == ["scrape", "plan", "preprocess", "ledger"]


def test_an_experiment_without_a_prediction_refuses_a_device() -> None:
    with pytest.raises(
        ValueError, match="GPU= predicts the experiments zero and tutorial, not demo"
    ):
        run("experiment", {"NAME": "demo", "GPU": "h100"})


def test_usual_abbreviations_of_make_variables_are_named() -> None:
    plan = command_named("plan")
    assert plan is not None
    with pytest.raises(SettingError, match=r"no variable GBS; did you mean GLOBAL_BATCH=\?"):
        refuse_unused_variables(["GBS"], "plan", plan)
    with pytest.raises(
        SettingError, match=r"GPUS=eight is not a whole number or several with commas; write 8\."
    ):
        given("plan", {"MODEL": "gpt2-large", "GPUS": "eight"})
