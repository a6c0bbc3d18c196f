from pathlib import Path

import pytest

from tests.given import given
from tools.launch.errors import LaunchError
from tools.launch.options import options_from_texts
from tools.launch.target import Target, parse_target, script_of
from tools.spec.files import ROOT
from tools.spec.run import DeviceKind


def test_a_target_names_strategy_model_and_devices() -> None:
    expected = Target("tp2", "gpt2-large", 2, DeviceKind.GPU)
    assert parse_target("train-tp2-gpt2-large-2gpu") == expected
    assert expected.name == "train-tp2-gpt2-large-2gpu"


def test_a_sharded_product_keeps_its_suffix() -> None:
    assert parse_target("train-tp2dp2-zero1-gpt2-tiny-4cpu").strategy == "tp2dp2-zero1"


def test_the_published_alias_is_the_baseline_of_the_345m_model() -> None:
    target = parse_target("train-gpt3-345m-1gpu-x-model-parallelism")
    assert target == Target("baseline", "gpt3-345m", 1, DeviceKind.GPU)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        (
            "train-gpt3-857m-2gpu-x-model-parallelism",
            Target("dp2", "gpt3-857m", 2, DeviceKind.GPU),
        ),
        ("train-tp2-sq-gpt2-large-2gpu", Target("sp2", "gpt2-large", 2, DeviceKind.GPU)),
    ],
)
def test_target_names_of_the_authors_makefile_are_aliases(name: str, target: Target) -> None:
    assert parse_target(name) == target


@pytest.mark.parametrize("strategy", ["dp2", "dp2-zero1"])
def test_the_label_of_the_write_up_means_the_model_of_its_true_size(strategy: str) -> None:
    target = parse_target(f"train-{strategy}-gpt3-512m-2gpu")
    assert target == Target(strategy, "gpt3-355m", 2, DeviceKind.GPU)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("train-tp2-gpt2-larg-2gpu", "no model 'gpt2-larg'; did you mean gpt2-large"),
        ("train-tpp2-gpt2-tiny-2cpu", "Unknown strategy 'tpp2'.*Did you mean .*tp2"),
        ("train-tp2-gpt2-tiny", "the nearest are train-tp2-gpt2-tiny-2"),
        ("trian-dp2-gpt2-tiny-2cpu", "the nearest are train-dp2-gpt2-tiny-2cpu"),
        ("demoo", "is not train-<strategy>-<model>-<N>gpu"),
    ],
)
def test_a_wrong_name_gets_the_near_ones(name: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        parse_target(name)


def test_only_the_published_strategies_have_scripts() -> None:
    scripts = [
        script_of(parse_target(f"train-{s}-gpt2-tiny-2cpu")) for s in ("sp2", "tp2", "zero1")
    ]
    assert scripts == ["examples/gpt3/train_sp2.sh", "examples/gpt3/train_tp2.sh", None]


def test_a_file_in_model_is_trained_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "mytiny.args"
    own.write_text((ROOT / "examples/gpt3/models/gpt2-tiny.args").read_text())
    monkeypatch.setenv("MODEL", str(own))
    assert parse_target("train-tp2-mytiny-2cpu").model == "mytiny"
    with pytest.raises(LaunchError, match="is of gpt2-tiny, and MODEL= is a file of mytiny"):
        parse_target("train-tp2-gpt2-tiny-2cpu")
    given("train-tp2-mytiny-2cpu", {"MAKEFLAGS": "-- MODEL=x"})
    assert ("MODEL", str(own)) in options_from_texts({"MODEL": str(own)}).given
