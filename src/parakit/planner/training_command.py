"""A planned run as a command or file: torchrun with Megatron's flags, sbatch, Megatron-Bridge or torchtitan."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from parakit.config.files import read_yaml
from parakit.config.flag_table import FLAGS
from parakit.config.flags import drop_flags, merge_flags, null_tokenizer_flags, values_by_flag
from parakit.config.model import merge_training_flags
from parakit.config.peft import Lora
from parakit.config.run import RunSpec, flags_from_spec
from parakit.config.strategy import Sharding
from parakit.planner.options import RequestError
from parakit.planner.readings.models import has_no_file
from parakit.planner.search import Candidate, Request
from parakit.planner.time.offload import attention_mask_bytes

MEGATRON, BRIDGE, TORCHTITAN = "megatron", "bridge", "torchtitan"
SLURM = "slurm"
"""Value of LAUNCHER= with which a batch script takes the place of the torchrun line."""
MODEL_FLAGS = "$MODEL_FLAGS"
"""Placeholder of the flags that describe the model in a short torchrun line."""
_NEWEST_MEGATRON = "0.19"
"""Release for which the flags of the tokenizer are written."""
_GPUS_PER_HOST_OF_A_RACK = 4
"""GPUs of a host of GB200 NVL72 and GB300 NVL72. One NVLink domain spans many of these hosts, and torchrun runs once
per host."""
_PORT = 29500
_LARGE_MASK_BYTES = 1 << 28
"""Bytes of a micro batch's attention mask from which a command states that the loader creates none. Megatron's loader
creates a mask of one byte per pair of tokens, 17 GB for a sample of 131,072 tokens, which fused causal attention does
not read."""
_HYBRID_LAYERS = ("--spec", "megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec")


def state_chosen_flags(request: Request, candidate: Candidate) -> Request:
    """Return the request with the options for experts that the search chose for a candidate among its flags."""
    return replace(request, extra=(*request.extra, *candidate.expert_options.flags))


def refuse_trainer_without_adapters(lora: Lora | None, trainer: str, launcher: str) -> None:
    """Raise an error if a trainer or a launcher is named that cannot train a plan with LoRA.

    Args:
        lora: Adapters of the plan; None accepts every trainer.
        trainer: Value of FOR=, or an empty text.
        launcher: Value of LAUNCHER=, or an empty text.

    Raises:
        RequestError: The run would train all weights. The message names what trains the plan.
    """
    if lora is None or (not trainer and launcher != SLURM):
        return
    if lora.has_nf4_weights:
        raise RequestError(f"{_NF4_TRAINERS} Leave FOR= and LAUNCHER= out, or use weights=bf16.")
    if trainer != BRIDGE:
        names = {TORCHTITAN: "torchtitan 0.2.2"}
        raise RequestError(
            f"{names.get(trainer, 'Megatron-LM')} has no LoRA and would train all weights; use FOR=bridge."
        )


_NF4_TRAINERS = (
    "Neither Megatron-LM nor Megatron-Bridge trains with weights in NF4; Hugging Face's peft with bitsandbytes "
    "(load_in_4bit) and NeMo Automodel do."
)


def describe_adapter_run(request: Request, spec: RunSpec) -> str:
    """Return the lines that say how a plan with LoRA is run: what trains it, and the command of Megatron-Bridge.

    There is no command for weights in NF4, which Megatron-Bridge does not have.
    """
    assert spec.lora is not None
    if spec.lora.has_nf4_weights:
        return _NF4_TRAINERS
    return (
        "Megatron-LM's pretrain_gpt.py and this kit have no LoRA. Megatron-Bridge has it:\n"
        f"  {format_bridge_command(request, spec)}"
    )


def format_training_command(
    request: Request, spec: RunSpec, trainer: str = MEGATRON, launcher: str = ""
) -> str:
    """Return the text that starts a planned run in a trainer.

    Args:
        request: The request of the plan.
        spec: The planned run.
        trainer: `megatron` (also an empty text), `bridge` or `torchtitan`.
        launcher: `slurm` gives a batch script for sbatch in place of a torchrun line. It applies to Megatron only.
    """
    if trainer == BRIDGE:
        return format_bridge_command(request, spec)
    if trainer == TORCHTITAN:
        return format_torchtitan_config(request, spec)
    flags = list_megatron_flags(request, spec)
    if launcher == SLURM:
        return _format_batch_script(request, spec, flags)
    return "\n".join([*_list_comments(request), _format_torchrun_line(request, spec, flags)])


def _list_comments(request: Request) -> list[str]:
    """Return a shell comment on what the flags of a model that is known by name alone leave out; else nothing."""
    if not has_no_file(request.model):
        return []
    return [
        f"# The flags state the shape of {request.model.name}, not its rotary base, its norm's epsilon and how its "
        "router scores. MODEL=<its config.json> states them as well."
    ]


def format_short_torchrun_line(request: Request, spec: RunSpec) -> str:
    """Return a torchrun line that states the planned flags and has a placeholder for the flags of the model."""
    line = _format_torchrun_line(request, spec, list_planned_flags(request, spec))
    program = _entry_program(spec)
    return line.replace(program, f"{program} {MODEL_FLAGS}", 1)


def list_planned_flags(request: Request, spec: RunSpec) -> tuple[str, ...]:
    """Return Megatron's flags for everything that the plan decides: strategy, batch, recomputation and EXTRA=."""
    dropouts = ("--attention-dropout", "--hidden-dropout")
    flags = merge_flags(drop_flags(flags_from_spec(spec), dropouts), request.extra)
    if spec.shape.seq_length != request.model.shape.seq_length:
        flags = (*flags, "--seq-length", str(spec.shape.seq_length))
    if spec.shape.positions != request.model.shape.positions:
        flags = (*flags, "--max-position-embeddings", str(spec.shape.positions))
    if spec.fused_attention and attention_mask_bytes(spec) >= _LARGE_MASK_BYTES:
        flags = merge_flags(flags, ("--no-create-attention-mask-in-dataloader",))
    if spec.shape.experts and spec.dtype == "bf16" and "--moe-grouped-gemm" not in flags:
        # Plans assume that the products of a rank's experts are one call.
        flags = (*flags, "--moe-grouped-gemm")
    return flags


def list_megatron_flags(request: Request, spec: RunSpec) -> tuple[str, ...]:
    """Return all of Megatron's flags for a planned run, with mock data and a tokenizer without files.

    With these flags the run starts as it is. To train on a data set, replace the last flags by `--data-path` and the
    flags of its tokenizer.
    """
    model = request.model
    model_flags = drop_flags(
        merge_training_flags(model),
        ("--micro-batch-size", "--global-batch-size", "--fp16", "--bf16"),
    )
    layers = _HYBRID_LAYERS if spec.shape.blocks else ()
    tokenizer = null_tokenizer_flags(spec.shape.vocabulary, _NEWEST_MEGATRON)
    return merge_flags(
        model_flags, layers, list_planned_flags(request, spec), tokenizer, ("--mock-data",)
    )


def _entry_program(spec: RunSpec) -> str:
    """Return Megatron's script that trains a model of this kind."""
    return "pretrain_mamba.py" if spec.shape.blocks else "pretrain_gpt.py"


def _count_hosts(request: Request) -> tuple[int, int]:
    """Return the number of hosts, and the number of ranks that torchrun starts on each."""
    cluster = request.cluster
    per_host = cluster.per_node
    if per_host > 8 and per_host % _GPUS_PER_HOST_OF_A_RACK == 0:
        per_host = _GPUS_PER_HOST_OF_A_RACK
    return cluster.devices // per_host, per_host


def _format_torchrun_line(
    request: Request, spec: RunSpec, flags: Sequence[str], rendezvous: str = ""
) -> str:
    """Return the line that starts the ranks of one host.

    Args:
        request: The request of the plan.
        spec: The planned run.
        flags: Megatron's flags.
        rendezvous: Options of torchrun by which the hosts find each other. Empty names the first host by
            `$HEAD_NODE`.
    """
    hosts, per_host = _count_hosts(request)
    parallelism = spec.parallelism
    parts = []
    needs_order = parallelism.tensor > 1 or parallelism.context > 1
    if needs_order and not parallelism.sharding.wraps_modules:
        # Megatron launches communication before the kernels that it overlaps with, and relies on one queue.
        parts.append("CUDA_DEVICE_MAX_CONNECTIONS=1")
    parts.append("torchrun")
    if hosts == 1:
        parts.append("--standalone")
    else:
        default = f"--rdzv-backend c10d --rdzv-endpoint $HEAD_NODE:{_PORT}"
        parts.append(f"--nnodes {hosts} {rendezvous or default}")
    parts.append(f"--nproc-per-node {per_host} {_entry_program(spec)} {shlex.join(flags)}")
    return " ".join(parts)


def _format_batch_script(request: Request, spec: RunSpec, flags: Sequence[str]) -> str:
    """Return a batch script for sbatch that starts one torchrun per host."""
    hosts, per_host = _count_hosts(request)
    rendezvous = (
        f'--rdzv-id "$SLURM_JOB_ID" --rdzv-backend c10d --rdzv-endpoint "$head_node:{_PORT}"'
    )
    line = _format_torchrun_line(request, spec, flags, rendezvous)
    lines = [
        "#!/bin/bash",
        *_list_comments(request),
        f"#SBATCH --job-name={request.model.name}",
        f"#SBATCH --nodes={hosts}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH --gpus-per-node={per_host}",
        'head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
    ]
    variable, _, command = line.partition(" ")
    if "=" in variable:
        lines.append(f"export {variable}")
        line = command
    return "\n".join([*lines, f"srun {line}"])


def format_bridge_command(request: Request, spec: RunSpec) -> str:
    """Return the command of Megatron-Bridge's `run_recipe.py`, with the plan as overrides of a recipe's fields.

    If Megatron-Bridge has no recipe for the model, the command has `--recipe YOUR_RECIPE`. With LoRA the recipe is the
    model's recipe for adapters. Its data set and its checkpoint are left to the user.
    """
    name = _load_trainer_names()[BRIDGE].get(request.model.name)
    seq_length = spec.shape.seq_length
    program = "scripts/training/run_recipe.py"
    if spec.lora:
        recipe = f"{name}_peft_config" if name else "YOUR_PEFT_RECIPE"
        data = "--dataset YOUR_DATASET --pretrained_checkpoint YOUR_CHECKPOINT"
        options = f"--recipe {recipe} --mode lora {data} --seq_length {seq_length}"
    else:
        recipe = f"--model {name}" if name else "--recipe YOUR_RECIPE"
        options = f"{recipe} --mode pretrain --dataset mock --seq_length {seq_length}"
    line = _format_torchrun_line(request, spec, ())
    head = line.partition(_entry_program(spec))[0]
    overrides = [f"{field}={value}" for field, value in bridge_overrides(request, spec).items()]
    return f"{head}{program} {options} {shlex.join(overrides)}"


def bridge_overrides(request: Request, spec: RunSpec) -> dict[str, str]:
    """Return the plan as values of the fields of Megatron-Bridge's `ConfigContainer`.

    Degrees of 1 are included, because the recipe that they override may have larger ones.
    """
    parallelism = spec.parallelism
    overrides = {
        "model.tensor_model_parallel_size": str(parallelism.tensor),
        "model.pipeline_model_parallel_size": str(parallelism.pipeline),
        "model.virtual_pipeline_model_parallel_size": "null",
        "model.context_parallel_size": str(parallelism.context),
        "model.sequence_parallel": "false",
        "model.recompute_granularity": "null",
    }
    if spec.shape.experts:
        overrides["model.expert_model_parallel_size"] = str(parallelism.expert)
        overrides["model.expert_tensor_parallel_size"] = str(parallelism.effective_expert_tensor)
    if spec.lora:
        overrides["peft.dim"] = str(spec.lora.rank)
        overrides["peft.target_modules"] = f"[{','.join(spec.lora.targets)}]"
    flags = drop_flags(list_planned_flags(request, spec), ("--seq-length", "--bf16"))
    for name, values in values_by_flag(flags).items():
        flag = FLAGS.get(name)
        if flag is None:
            continue
        for field in flag.recipe:
            if "." in field:
                overrides[field.removeprefix("!")] = _format_override(flag.kind, values, field)
    return overrides


def _format_override(kind: str, values: Sequence[str], field: str) -> str:
    """Return the value of a field for a flag of this kind; a field that begins with `!` has the opposite value."""
    if kind in ("on", "off"):
        is_true = (kind == "on") != field.startswith("!")
        return str(is_true).lower()
    return f"[{','.join(values)}]" if kind == "texts" else values[0]


def format_torchtitan_config(request: Request, spec: RunSpec) -> str:
    """Return the plan as a TOML file of torchtitan 0.2.2.

    torchtitan has no optimizer that is sharded alone: it shards the weights too. If the plan has ZeRO-1 or ZeRO-2, a
    comment says so.
    """
    name = _load_trainer_names()[TORCHTITAN].get(request.model.name)
    sections = torchtitan_sections(spec)
    if name:
        model, flavor = name
        sections = {"model": {"name": model, "flavor": flavor}, **sections}
    lines = ["# torchtitan 0.2.2: CONFIG_FILE=plan.toml ./run_train.sh"]
    if not name:
        lines.append(f"# torchtitan has no {request.model.name}: state [model] yourself.")
    if spec.parallelism.sharding in (Sharding.ZERO1, Sharding.ZERO2):
        lines.append(
            "# torchtitan shards the weights too (FSDP2), which the plan does not, so its time may differ."
        )
    for section, fields in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{field} = {_format_toml(value)}" for field, value in fields.items()]
    return "\n".join(lines)


def torchtitan_sections(spec: RunSpec) -> dict[str, dict[str, int | str]]:
    """Return the plan as sections and fields of torchtitan's `JobConfig`."""
    split, batch = spec.parallelism, spec.batch
    # The pipeline takes all micro batches of an iteration in one call, which divides them again.
    local_batch = batch.micro_batch_size
    if split.pipeline > 1:
        local_batch = batch.global_batch_size // split.data
    is_replicated = not split.sharding and split.expert == 1
    parallelism: dict[str, int | str] = {
        "data_parallel_replicate_degree": split.data if is_replicated else 1,
        "data_parallel_shard_degree": 1 if is_replicated else split.data,
        "fsdp_reshard_after_forward": "always" if split.sharding.shards_weights else "never",
        "tensor_parallel_degree": split.tensor,
        "context_parallel_degree": split.context,
        "pipeline_parallel_degree": split.pipeline,
    }
    if split.pipeline > 1:
        stages = split.pipeline * split.virtual_stages
        parallelism |= {
            "pipeline_parallel_schedule": "Interleaved1F1B" if split.virtual_stages > 1 else "1F1B",
            "pipeline_parallel_layers_per_stage": -(-spec.shape.layers // stages),
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
            "pipeline_parallel_microbatch_size": batch.micro_batch_size,
        }
    if spec.shape.experts:
        parallelism["expert_parallel_degree"] = split.expert
        parallelism["expert_tensor_parallel_degree"] = split.effective_expert_tensor
    mode = {"": "none", "selective": "selective", "full": "full"}[spec.recompute.granularity]
    recompute: dict[str, int | str] = {"mode": mode}
    if mode == "selective":
        recompute["selective_ac_option"] = "op"
    return {
        "training": {
            "local_batch_size": local_batch,
            "global_batch_size": batch.global_batch_size,
            "seq_len": spec.shape.seq_length,
        },
        "parallelism": parallelism,
        "activation_checkpoint": recompute,
    }


def _format_toml(value: int | str) -> str:
    """Return a value as TOML."""
    return f'"{value}"' if isinstance(value, str) else str(value)


@cache
def _load_trainer_names() -> Mapping[str, Mapping[str, Any]]:
    """Return the names of models in other trainers, by trainer and by the kit's name."""
    names: Mapping[str, Mapping[str, Any]] = read_yaml(Path(__file__).with_name("trainers.yaml"))
    return names
