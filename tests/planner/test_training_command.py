"""A planned run as the command or file of a trainer means the run that was planned."""

import shlex
import subprocess
import tomllib
from dataclasses import replace

import pytest

from parakit.config.model import model_names
from parakit.config.run import DeviceKind, RunSpec, spec_from_flags
from parakit.convert.recipe.table import BRIDGE_DEFAULTS
from parakit.planner.one_strategy import time_strategy
from parakit.planner.options import PlanOptions
from parakit.planner.readings.models import published_model_names
from parakit.planner.search import Request
from parakit.planner.training_command import (
    _load_trainer_names,
    bridge_overrides,
    format_bridge_command,
    format_training_command,
    list_megatron_flags,
    torchtitan_sections,
)

RUNS = (
    PlanOptions("llama3-8b", "h100", strategy="sp2pp2dp4-zero1", micro_batch=2, global_batch=64),
    PlanOptions("gpt3-175b", "a100-80g", strategy="sp8vpp8x3dp16-zero1", global_batch=512),
    PlanOptions("mixtral-8x7b", "h100", strategy="sp2pp2ep8dp2-zero1", global_batch=512),
    PlanOptions(
        "deepseek-v3",
        "h800",
        strategy="pp16ep64dp2-zero1",
        global_batch=2048,
        extra="--decoder-last-pipeline-num-layers 1",
    ),
    PlanOptions("llama3-70b", "h200", strategy="cp2dp32-zero3", global_batch=128),
    PlanOptions("llama3-8b", "gb200", strategy="dp72-zero2", global_batch=72, seq=4096),
)
TORCHTITAN_FIELDS: dict[str, dict[str, type]] = {
    "training": {"local_batch_size": int, "global_batch_size": int, "seq_len": int},
    "parallelism": {
        "data_parallel_replicate_degree": int,
        "data_parallel_shard_degree": int,
        "fsdp_reshard_after_forward": str,
        "tensor_parallel_degree": int,
        "context_parallel_degree": int,
        "pipeline_parallel_degree": int,
        "pipeline_parallel_schedule": str,
        "pipeline_parallel_layers_per_stage": int,
        "pipeline_parallel_first_stage_less_layers": int,
        "pipeline_parallel_last_stage_less_layers": int,
        "pipeline_parallel_microbatch_size": int,
        "expert_parallel_degree": int,
        "expert_tensor_parallel_degree": int,
    },
    "activation_checkpoint": {"mode": str, "selective_ac_option": str},
}
"""Fields of `JobConfig` of torchtitan 0.2.2 (torchtitan/config/job_config.py) that plans set, with their types."""


def plan_run(options: PlanOptions) -> tuple[Request, RunSpec]:
    timed = time_strategy(options)
    return timed.request, timed.candidate.spec


@pytest.mark.parametrize("options", RUNS, ids=lambda options: f"{options.model}-{options.strategy}")
def test_megatrons_flags_mean_the_planned_run(options: PlanOptions) -> None:
    request, spec = plan_run(options)
    flags = list_megatron_flags(request, spec)
    parsed = spec_from_flags(flags, spec.parallelism.world_size, DeviceKind.GPU, spec.model)
    # The flags leave the vocabulary's padding and the dropout to the model's file.
    assert parsed == replace(spec, dropout=parsed.dropout)
    assert "--mock-data" in flags


@pytest.mark.parametrize(("seq", "is_avoided"), [(8_192, False), (131_072, True)])
def test_command_avoids_a_large_attention_mask_of_the_loader(seq: int, is_avoided: bool) -> None:
    # Megatron's loader would create 131,072² bytes, 17 GB, per sample, which causal attention does not read.
    run = PlanOptions("llama3-8b", "h100", strategy="sp2cp4-zero1", global_batch=8, seq=seq)
    flags = list_megatron_flags(*plan_run(replace(run, micro_batch=1)))
    assert ("--no-create-attention-mask-in-dataloader" in flags) is is_avoided


@pytest.mark.parametrize("options", RUNS, ids=lambda options: f"{options.model}-{options.strategy}")
def test_overrides_are_fields_of_megatron_bridge(options: PlanOptions) -> None:
    request, spec = plan_run(options)
    overrides = bridge_overrides(request, spec)
    assert set(overrides) <= set(BRIDGE_DEFAULTS)
    split = spec.parallelism
    assert overrides["model.tensor_model_parallel_size"] == str(split.tensor)
    assert overrides["model.pipeline_model_parallel_size"] == str(split.pipeline)
    assert overrides["train.global_batch_size"] == str(spec.batch.global_batch_size)
    virtual = str(split.virtual_stages) if split.virtual_stages > 1 else "null"
    assert overrides["model.virtual_pipeline_model_parallel_size"] == virtual


def test_bridge_command_names_the_recipe_or_asks_for_one() -> None:
    command = format_bridge_command(*plan_run(RUNS[0]))
    assert "run_recipe.py --model llama3_8b --mode pretrain --dataset mock" in command
    assert "--recipe YOUR_RECIPE" in format_bridge_command(*plan_run(RUNS[2]))


@pytest.mark.parametrize("options", RUNS, ids=lambda options: f"{options.model}-{options.strategy}")
def test_torchtitan_file_has_known_fields_and_the_planned_degrees(options: PlanOptions) -> None:
    request, spec = plan_run(options)
    text = format_training_command(request, spec, "torchtitan")
    config = tomllib.loads(text)
    config.pop("model", None)
    for section, fields in config.items():
        for field, value in fields.items():
            assert type(value) is TORCHTITAN_FIELDS[section][field]
    degrees = config["parallelism"]
    product = degrees["tensor_parallel_degree"] * degrees["pipeline_parallel_degree"]
    product *= degrees["context_parallel_degree"] * degrees["data_parallel_replicate_degree"]
    assert product * degrees["data_parallel_shard_degree"] == spec.parallelism.world_size
    samples = config["training"]["local_batch_size"] * spec.parallelism.data
    assert config["training"]["global_batch_size"] % samples == 0
    has_comment = "shards the weights too" in text
    assert has_comment == (spec.parallelism.sharding in ("zero1", "zero2"))


def test_torchtitan_cuts_a_pipeline_into_as_many_stages_as_planned() -> None:
    spec = plan_run(RUNS[1])[1]
    fields = torchtitan_sections(spec)["parallelism"]
    layers_per_stage = fields["pipeline_parallel_layers_per_stage"]
    assert isinstance(layers_per_stage, int)
    assert spec.shape.layers / layers_per_stage == 8 * 3
    assert fields["pipeline_parallel_schedule"] == "Interleaved1F1B"


def test_batch_script_is_a_shell_script_with_one_torchrun_per_host() -> None:
    script = format_training_command(*plan_run(RUNS[1]), launcher="slurm")
    checked = subprocess.run(
        ["bash", "-n"], input=script, text=True, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "#SBATCH --nodes=128\n" in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert "\nexport CUDA_DEVICE_MAX_CONNECTIONS=1\nsrun torchrun --nnodes 128 " in script


def test_a_rack_of_72_gpus_is_started_as_18_hosts_of_4() -> None:
    arguments = shlex.split(format_training_command(*plan_run(RUNS[5])))
    assert arguments[arguments.index("--nnodes") + 1] == "18"
    assert arguments[arguments.index("--nproc-per-node") + 1] == "4"
    assert arguments[0] == "torchrun", "FSDP refuses CUDA_DEVICE_MAX_CONNECTIONS=1"


def test_names_in_other_trainers_are_of_known_models() -> None:
    known = {*model_names(), *published_model_names()}
    for names in _load_trainer_names().values():
        assert set(names) <= known


@pytest.mark.parametrize("launcher", ["", "slurm"])
def test_command_of_a_model_known_by_name_alone_says_that_its_config_states_more(
    launcher: str,
) -> None:
    text = format_training_command(*plan_run(RUNS[3]), launcher=launcher)
    (comment,) = (line for line in text.splitlines() if line.startswith("# "))
    assert comment.startswith("# The flags state the shape of deepseek-v3, not its rotary base")
    assert not text.startswith("# ") or not launcher, "A batch script starts with its shebang."
    of_a_file = format_training_command(*plan_run(RUNS[1]), launcher=launcher)
    assert not any(line.startswith("# ") for line in of_a_file.splitlines())
