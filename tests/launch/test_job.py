from pathlib import Path

import pytest
from rich.console import Console

from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.config.model import load_model
from parakit.config.run import DeviceKind
from parakit.config.strategy import PUBLISHED_STRATEGIES, parse_strategy, strategy_flags
from parakit.launch.job import Job, parse_target
from parakit.launch.options import Options, options_from_texts
from parakit.launch.train import start_target
from tests.given import given


def test_a_target_names_strategy_model_and_devices() -> None:
    expected = Job("tp2", load_model("gpt2-large"), 2, DeviceKind.GPU)
    assert parse_target("train-tp2-gpt2-large-2gpu") == expected
    assert expected.target == "train-tp2-gpt2-large-2gpu"


def test_a_sharded_product_keeps_its_suffix() -> None:
    assert parse_target("train-tp2dp2-zero1-gpt2-tiny-4cpu").strategy == "tp2dp2-zero1"


def test_the_published_alias_is_the_baseline_of_the_345m_model() -> None:
    target = parse_target("train-gpt3-345m-1gpu-x-model-parallelism")
    assert target == Job("baseline", load_model("gpt3-345m"), 1, DeviceKind.GPU)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        (
            "train-gpt3-857m-2gpu-x-model-parallelism",
            Job("dp2", load_model("gpt3-857m"), 2, DeviceKind.GPU),
        ),
        ("train-tp2-sq-gpt2-large-2gpu", Job("sp2", load_model("gpt2-large"), 2, DeviceKind.GPU)),
    ],
)
def test_target_names_of_the_authors_makefile_are_aliases(name: str, target: Job) -> None:
    assert parse_target(name) == target


@pytest.mark.parametrize("strategy", ["dp2", "dp2-zero1"])
def test_the_label_of_the_write_up_means_the_model_of_its_true_size(strategy: str) -> None:
    target = parse_target(f"train-{strategy}-gpt3-512m-2gpu")
    assert target == Job(strategy, load_model("gpt3-355m"), 2, DeviceKind.GPU)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train-tp2-gpt2-larg-2gpu", "no model 'gpt2-larg'; did you mean gpt2-large"),
        ("train-tpp2-gpt2-tiny-2cpu", "Unknown strategy 'tpp2'; did you mean .*tp2"),
        ("train-tp2-gpt2-tiny", "the nearest are train-tp2-gpt2-tiny-2"),
        ("trian-dp2-gpt2-tiny-2cpu", "the nearest are train-dp2-gpt2-tiny-2cpu"),
        ("demoo", "is not train-<strategy>-<model>-<N>gpu"),
    ],
)
def test_a_wrong_name_gets_the_near_ones(name: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        parse_target(name)


def test_only_the_published_strategies_have_scripts() -> None:
    scripts = [parse_target(f"train-{s}-gpt2-tiny-2cpu").script for s in ("sp2", "tp2", "zero1")]
    assert scripts == ["examples/gpt3/train_sp2.sh", "examples/gpt3/train_tp2.sh", None]


@pytest.mark.parametrize("strategy", PUBLISHED_STRATEGIES)
def test_a_target_takes_the_flags_of_its_launch_script(strategy: str) -> None:
    devices = 1 if strategy == "baseline" else 2
    job = parse_target(f"train-{strategy}-gpt2-tiny-{devices}cpu")
    assert job.read_script_flags() == strategy_flags(parse_strategy(strategy, devices))


@pytest.mark.parametrize(
    ("old", "new", "flags"),
    [
        ("parallel-size 2", "parallel-size 4", ("--tensor-model-parallel-size", "4")),
        ("# Tensor", "export NCCL_DEBUG=INFO\n# Tensor", None),
        ("parallel-size 2", "parallel-size $TP", None),
        ("run tp2", "run sp2", None),
    ],
    ids=["flag", "another command", "shell variable", "another strategy"],
)
def test_only_a_shell_runs_an_edited_script_that_does_more_than_name_flags(
    old: str,
    new: str,
    flags: tuple[str, ...] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = parse_target("train-tp2-gpt2-tiny-2cpu")
    assert job.script is not None
    text = (ROOT / job.script).read_text()
    assert old in text
    edited = tmp_path / job.script
    edited.parent.mkdir(parents=True)
    edited.write_text(text.replace(old, new))
    monkeypatch.setattr("parakit.launch.job.ROOT", tmp_path)
    assert job.read_script_flags() == flags


def test_a_target_is_read_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.execve", lambda *_: pytest.fail("a script was started"))
    options = options_from_texts({"DRY_RUN": "1"})
    assert start_target("train-tp2-gpt2-tiny-2cpu", options, Console()) == 0
    assert "--tensor-model-parallel-size 2" in capsys.readouterr().out


def test_a_file_in_model_is_trained_under_its_own_name(
    tmp_path: Path,
) -> None:
    model_file = tmp_path / "mytiny.args"
    model_file.write_text((ROOT / "examples/gpt3/models/gpt2-tiny.args").read_text())
    options = Options(model=str(model_file))
    assert parse_target("train-tp2-mytiny-2cpu", options).model.name == "mytiny"
    with pytest.raises(LaunchError, match="is of gpt2-tiny, and MODEL= is a file of mytiny"):
        parse_target("train-tp2-gpt2-tiny-2cpu", options)
    given("train-tp2-mytiny-2cpu", {"MAKEFLAGS": "-- MODEL=x"})
    assert options_from_texts({"MODEL": str(model_file)}) == options


def test_a_model_s_file_that_is_not_there_is_named_whatever_it_ends_with() -> None:
    options = Options(model="gone/mine.arg")
    with pytest.raises(ValueError, match=r"There is no file gone/mine\.arg; give an \.args file"):
        parse_target("train-tp2-mine-2cpu", options)
