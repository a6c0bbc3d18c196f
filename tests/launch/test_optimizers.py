import importlib.util
from dataclasses import replace

import pytest

from parakit.config.flags import Flags
from parakit.config.run import Backend, OptimizerName
from parakit.launch.backends import optimizer_problems
from parakit.launch.compose import Launch
from parakit.launch.flags import optimizer_flags
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.train import compose_job
from parakit.native.settings import parse_settings


def launch(
    backend: Backend = Backend.NATIVE,
    optimizer: OptimizerName = OptimizerName.MUON,
    name: str = "train-ep2-moe-tiny-2cpu",
) -> Launch:
    target = parse_target(name)
    options = Options(backend=backend, optimizer=optimizer, dropout=0.0)
    return compose_job(target.with_options(options))


def test_adamw_changes_nothing() -> None:
    assert optimizer_flags(OptimizerName.ADAMW, "0.19.0") == ()
    assert "--optimizer" not in launch(optimizer=OptimizerName.ADAMW).flags


def test_muon_has_the_published_rates_on_both_sides() -> None:
    for backend in (Backend.NATIVE, Backend.MEGATRON):
        flags = Flags(launch(backend).flags)
        assert (flags.number("--lr", 0), flags.number("--decoupled-lr", 0)) == (0.01, 0.001)
        assert flags.number("--muon-momentum", 0) == 0.95
        assert flags.text("--muon-coefficient-type") == "simple"
    settings = parse_settings(launch().arguments("run"))
    assert (settings.optimizer, settings.lr, settings.decoupled_lr) == ("muon", 0.01, 0.001)
    assert settings.muon_momentum == 0.95


def test_nesterovs_flag_is_the_versions_own() -> None:
    names = [optimizer_flags(OptimizerName.MUON, version) for version in ("0.17.1", "0.18.2")]
    assert "--muon-use-nesterov" in names[0]
    assert "--muon-nesterov" in names[1]


def test_another_muon_than_pytorchs_is_refused_by_the_native_backend() -> None:
    arguments = list(launch().arguments("run"))
    arguments[arguments.index("--muon-scale-mode") + 1] = "spectral"
    with pytest.raises(SystemExit):
        parse_settings(arguments)


def test_megatrons_muon_without_its_package_is_refused_with_the_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (problem,) = optimizer_problems(launch(Backend.MEGATRON))
    assert "'make setup' installs it" in problem
    assert "BACKEND=native" in problem
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert list(optimizer_problems(launch(Backend.MEGATRON))) == []


def test_the_native_backend_needs_the_package_for_megatrons_rule_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    pytorch_rule, megatron_rule = (
        launch(optimizer=name) for name in (OptimizerName.MUON, OptimizerName.MEGATRON_MUON)
    )
    assert list(optimizer_problems(pytorch_rule)) == []
    assert parse_settings(pytorch_rule.arguments("run")).muon_rule == "pytorch"
    assert len(list(optimizer_problems(megatron_rule))) == 1
    assert parse_settings(megatron_rule.arguments("run")).muon_rule == "megatron"


def test_megatrons_without_muon_are_refused() -> None:
    new = launch(Backend.MEGATRON)
    old = replace(new, entry=replace(new.entry, megatron_version="0.16.1"))
    (problem,) = optimizer_problems(old)
    assert problem.startswith("Megatron 0.16.1 has no Muon with the published coefficients")


def test_muon_is_refused_where_matrices_are_sharded_or_the_backend_has_it_not() -> None:
    (problem,) = optimizer_problems(launch(name="train-fsdp2-gpt2-tiny-2cpu"))
    assert problem.startswith("Muon needs whole matrices, which fsdp2 shards")
    (problem,) = optimizer_problems(launch(Backend.DEEPSPEED, name="train-dp2-gpt2-tiny-2cpu"))
    assert problem.startswith("BACKEND=deepspeed has AdamW alone")


@pytest.mark.parametrize(("version", "is_refused"), [("0.17.1", True), ("0.18.2", False)])
def test_megatron_shards_muon_by_whole_matrices_from_0_18_on(
    version: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    sharded = launch(Backend.MEGATRON, name="train-zero1-gpt2-tiny-2cpu")
    sharded = replace(sharded, entry=replace(sharded.entry, megatron_version=version))
    problems = list(optimizer_problems(sharded))
    assert (
        problems
        == ["Muon needs whole matrices, which zero1 shards; use dp2, or OPTIMIZER=adamw."]
        * is_refused
    )
