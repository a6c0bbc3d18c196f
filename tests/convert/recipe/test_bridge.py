"""With Megatron-Bridge, Megatron and nemo-run themselves; without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from parakit.config.files import ROOT, read_yaml
from parakit.convert.recipe import bridge
from parakit.convert.recipe.fields import Recipe
from parakit.convert.recipe.table import (
    BRIDGE_DEFAULTS,
    RecipeError,
    Symbol,
    Value,
    parse_container,
)
from parakit.convert.recipe.written import render_recipe
from parakit.launch import recipe as command
from parakit.launch.options import options_from_texts
from parakit.launch.recipe import export_recipe, import_recipe
from tests.convert.recipe.documents import recipe_of, source

MEGATRONS = Path(__file__).with_name("megatrons_configs.py")
NEEDS_BRIDGE = pytest.mark.skipif(
    not bridge.is_bridge_installed(), reason="make setup-bridge installs Megatron-Bridge"
)
TARGETS = (
    *(f"train-{strategy}-gpt2-large-2gpu" for strategy in ("tp2", "sp2", "cp2", "vpp2", "zero2")),
    *("train-tp2-llama3-8b-2gpu", "train-tp2-llama3-8b-fp8-2gpu", "train-ep2-mixtral-8x7b-2gpu"),
    *("train-zero1-gpt3-1.3b-2gpu", "train-fsdp2-gpt3-1.3b-2gpu", "train-baseline-moe-tiny-1gpu"),
    "train-tp2pp2dp2-gpt2-tiny-8gpu",
)
SAYS_NOTHING = {
    "checkpoint.strict_fsdp_dtensor_load": "loading a checkpoint of Megatron-FSDP",
    "checkpoint.use_persistent_ckpt_worker": "asynchronous saving",
    "dataset.context_parallel_size": "hybrid context parallelism",
    "dataset.data_parallel_size": "hybrid context parallelism",
    "dataset.full_validation": "None is False",
    "dataset.multiple_validation_sets": "None is False",
    "dataset.trust_remote_code": "data of the hub",
    "ddp.align_param_gather": "overlapped gathers",
    "ddp.use_custom_fsdp": "the older name of use_megatron_fsdp",
    "dist.high_priority_stream_groups": "None is empty",
    "logger.logging_level": "what is printed",
    "logger.tensorboard_dir": "where a recipe writes",
    "model.add_qkv_bias": "add_bias_linear adds it too",
    "model.cuda_graph_scope": "CUDA graphs",
    "model.cuda_graph_use_single_mempool": "CUDA graphs",
    "model.inference_sampling_seed": "inference",
    "model.moe_deepep_num_sms": "DeepEP",
    "model.moe_hybridep_num_sms": "HybridEP",
    "model.use_cpu_initialization": "None is False",
    "optimizer.barrier_with_L1_time": "timers above level 0",
    "optimizer.muon_momentum": "Muon",
    "optimizer.optimizer_offload_fraction": "offloading",
    "train.exit_signal": "a handler that is not installed",
}
"""Fields of other defaults in Megatron and Bridge, and what these runs do not use that reads them."""


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What Megatron's own parser makes of the targets' flags."""
    folder = tmp_path_factory.mktemp("megatron")
    sources = [source(target) for target in TARGETS]
    recipes = [
        (source.name, source.spec.parallelism.world_size, source.megatron_arguments)
        for source in sources
    ]
    (folder / "words.json").write_text(json.dumps(recipes))
    command = [sys.executable, str(MEGATRONS), "words.json", "configs.json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)
    return dict(json.loads((folder / "configs.json").read_text()))


@pytest.mark.slow
@NEEDS_BRIDGE
def test_defaults_of_bridge_are_the_packages(tmp_path: Path) -> None:
    out = tmp_path / "defaults.yaml"
    recipe = f"{Path(__file__).with_name('empty_container.py')}:empty"
    subprocess.run(
        [bridge.ENVIRONMENT / "bin/python", bridge._EVALUATE, recipe, out],
        check=True,
        capture_output=True,
    )
    assert parse_container(read_yaml(out)) == BRIDGE_DEFAULTS


@pytest.mark.slow
@NEEDS_BRIDGE
@pytest.mark.parametrize("target", TARGETS)
def test_bridges_configuration_of_a_recipe_equals_megatrons_configuration_of_the_flags(
    target: str, configs: Mapping[str, Any], tmp_path: Path
) -> None:
    asked = source(target)
    recipe = recipe_of(asked)
    ranks = asked.spec.parallelism.world_size
    (tmp_path / "recipe.py").write_text(render_recipe(recipe, asked.spec, "", ""))
    out = tmp_path / "validated.yaml"
    subprocess.run(
        [
            *(bridge.ENVIRONMENT / "bin/python", bridge._EVALUATE, "recipe.py", "raw.yaml"),
            *("--ranks", str(ranks), "--validated", out),
        ],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    fields = parse_container(read_yaml(out))
    compared, apart = 0, []
    for dotted_name, megatron in places(configs[target], fields):
        compared += 1
        if not same(megatron, fields[dotted_name]) and not unused(dotted_name, fields):
            apart.append(f"{dotted_name}: Megatron {megatron}, Bridge {fields[dotted_name]}")
    assert apart == []
    assert compared > 400


def places(configs: Mapping[str, Any], fields: Mapping[str, Value]) -> list[tuple[str, Any]]:
    """Fields of the same name in both, with Megatron's value."""
    sections = ("train", "scheduler", "checkpoint", "dist", "logger", "rng", "dataset")
    holders = [*((name, configs[name]) for name in ("model", "ddp", "optimizer"))]
    holders += [(name, configs["args"]) for name in (*sections, "rerun_state_machine")]
    return [
        (f"{section}.{name}", value)
        for section, held in holders
        for name, value in held.items()
        if f"{section}.{name}" in fields
    ]


def same(megatron: object, built: Value) -> bool:
    if isinstance(built, Symbol):
        return built.path.rpartition(".")[2] in str(megatron)
    return megatron == built


def unused(dotted_name: str, fields: Mapping[str, Value]) -> bool:
    """Whether nothing in the run reads the field."""
    one_rank = {"model.cp_comm_type": "context", "model.pipeline_dtype": "pipeline_model"}
    if dotted_name in one_rank:
        return fields[f"model.{one_rank[dotted_name]}_parallel_size"] == 1
    if "fp8" in dotted_name or "in_bf16" in dotted_name:
        kept = "in_bf16" in dotted_name and not fields["model.first_last_layers_bf16"]
        return fields["model.fp8"] is None or kept
    if dotted_name.startswith("ddp.") and fields["dist.use_torch_fsdp2"]:
        return True  # Megatron has other settings for it.
    if dotted_name == "ddp.data_parallel_sharding_strategy":
        return not fields["ddp.use_megatron_fsdp"]
    if dotted_name == "model.gradient_accumulation_fusion":
        return bool(fields["ddp.use_megatron_fsdp"])  # Bridge switches it off there.
    return dotted_name in SAYS_NOTHING


@pytest.mark.slow
@NEEDS_BRIDGE
def test_an_exported_target_is_checked_and_imported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples/gpt3/models").mkdir(parents=True)
    monkeypatch.setattr(command, "RECIPES", tmp_path / "recipes")
    monkeypatch.setattr(command, "ROOT", tmp_path)
    options, console = options_from_texts({}), Console(width=500)
    export_recipe("train-tp2-gpt2-large-2gpu", "nemo", options, console)
    printed = capsys.readouterr().out
    assert "Megatron-Bridge 0.3.1 reads it as the run" in printed
    assert "nemo-run, which starts 2 ranks with torchrun" in printed
    recipe = tmp_path / "recipes/train-tp2-gpt2-large-2gpu/bridge_recipe.py"
    import_recipe(f"{recipe}:pretrain_config", "again", 2, console)
    assert "make train-tp2-again-2gpu MICRO_BATCH=64" in capsys.readouterr().out


def test_differences_between_container_and_run_are_named() -> None:
    asked = source("train-tp2-gpt2-tiny-2gpu")
    recipe = recipe_of(asked)
    built = {**BRIDGE_DEFAULTS, **recipe.fields, "optimizer.lr": 1.0, "model.qk_layernorm": True}
    learning_rate, norm, run = bridge.recipe_differences(recipe, built, asked.spec)
    assert learning_rate == "optimizer.lr is 1.0 in the container and 0.001 in the run."
    assert norm == "model.qk_layernorm is True in the container, which the run does not ask for."
    assert run.startswith("The container reads as another run"), "the norms have weights"
    without = Recipe(recipe.fields, (*recipe.flags, "--seed", "7"), ())
    (other,) = bridge.recipe_differences(without, {**BRIDGE_DEFAULTS, **recipe.fields}, asked.spec)
    assert other.startswith("The container reads as another run")


@pytest.mark.ranks
def test_a_recipe_is_built_in_an_environment_that_does_not_have_the_kit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    # Without its folders of packages, a Python has neither the kit nor Megatron.
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(bridge, "ENVIRONMENT", tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    file = tmp_path / "r.py"
    file.write_text("x = 1")
    with pytest.raises(RecipeError, match=r"makes no container: .*No module named 'megatron'"):
        bridge.build_recipe(str(file))


@pytest.mark.slow
@NEEDS_BRIDGE
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1", r"has 0 functions that return a ConfigContainer \(none\)"),
        ("def f() -> 'ConfigContainer':\n    return 1", "returns a int, not a ConfigContainer"),
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
    ],
)
def test_a_python_file_that_makes_no_container_is_refused(
    text: str, sentence: str, tmp_path: Path
) -> None:
    file = tmp_path / "r.py"
    file.write_text(text)
    with pytest.raises(RecipeError, match=sentence):
        bridge.read_recipe(str(file))
