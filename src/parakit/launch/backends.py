"""Compose a launch for a backend other than Megatron: plain PyTorch, DeepSpeed or Hugging Face transformers.

A launch is composed for Megatron first, so model, data, batch, seed and schedule are decided once. Then
the flags that only Megatron knows are removed, and the backend's flags are added.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace

from parakit.config import variables
from parakit.config.files import relative_to_root
from parakit.config.flag_table import parse_release
from parakit.config.flags import Flags, drop_flags, format_flags, merge_flags
from parakit.config.model import WEIGHT_LOADING_FLAGS, imported_weights_folder
from parakit.config.run import Backend, DeviceKind, OptimizerName
from parakit.config.strategy import UNTIED, strategy_flags
from parakit.launch.compose import DATA_CACHE, Launch, initial_checkpoint_path
from parakit.native import (
    FROM_CONFIG,
    IMPORTED,
    MUON_RULE_FLAG,
    PADDED,
    refused_value,
    unknown_flags,
)

NO_DEEPSPEED = (
    "BACKEND=deepspeed needs the package deepspeed, which is optional; "
    "'make setup-deepspeed' installs it."
)

NO_TRANSFORMERS = (
    "The reference hf (BACKEND=transformers) needs the package transformers, which is optional; "
    "'make setup-hf' installs it."
)

FIRST_MUON_RELEASE = (0, 17)
"""First Megatron release whose Muon has the published coefficients; Megatron calls them `simple`."""

MUON_PACKAGE = "emerging_optimizers"

_ONLY_MEGATRON = WEIGHT_LOADING_FLAGS | {
    "--no-gradient-reduce-div-fusion",
    "--tokenizer-type",
    "--vocab-size",
    DATA_CACHE,
}
_NATIVE_STRATEGIES = (
    "baseline, dpN, tpN, fsdp2, gpipeN, 1f1bN, interleavedN, pipedreamN, pipedreamNbw and "
    "pipedream-flushN"
)


def adapt_to_backend(launch: Launch) -> Launch:
    """Return the launch with entry script, flags and environment of the backend that its job names."""
    options = launch.job.options
    if options.backend is Backend.MEGATRON:
        return launch
    if options.backend is Backend.TRANSFORMERS:
        return _adapt_to_transformers(launch)
    has_checkpoint = launch.initial_checkpoint is not None and options.backend is not Backend.BARE
    parallelism = launch.spec.parallelism
    # Only Megatron's torch FSDP2 needs an untied output layer, so the other backends keep it tied.
    is_untied = UNTIED in launch.flags and not parallelism.sharding
    checkpoint = (
        initial_checkpoint_path(launch.model, launch.entry, options, is_untied)
        if has_checkpoint
        else None
    )
    parallel_flags = () if parallelism.schedule else strategy_flags(parallelism)
    dropped = (*_ONLY_MEGATRON, *(text for text in parallel_flags if text.startswith("--")))
    multiple = launch.model.shape.vocabulary_multiple // parallelism.tensor
    is_megatron_muon = options.optimizer is OptimizerName.MEGATRON_MUON
    flags = merge_flags(
        drop_flags(launch.flags, dropped),
        backend_flags(launch, options.backend),
        ("--vocab-size", str(launch.model.shape.vocabulary)),
        ("--make-vocab-size-divisible-by", str(max(1, multiple))),
        ("--start-weights", relative_to_root(checkpoint)) if checkpoint else (),
        (MUON_RULE_FLAG, "megatron") if is_megatron_muon else (),
    )
    environment = {
        name: value for name, value in launch.environment.items() if name != variables.START_WEIGHTS
    }
    if options.backend is Backend.DEEPSPEED:
        environment["DS_ACCELERATOR"] = "cpu" if launch.spec.device is DeviceKind.CPU else "cuda"
    return replace(
        launch,
        spec=replace(launch.spec, backend=options.backend),
        entry=replace(launch.entry, path=f"examples/{launch.model.family}/pretrain_native.py"),
        initial_checkpoint=checkpoint,
        flags=flags,
        environment=environment,
    )


def _adapt_to_transformers(launch: Launch) -> Launch:
    """Return the launch of an imported model with Hugging Face's own code.

    A model that was not imported has no such code; `backend_problems` refuses it.
    """
    weights = imported_weights_folder(launch.model)
    flags = merge_flags(
        drop_flags(launch.flags, (*_ONLY_MEGATRON, *FROM_CONFIG)),
        ("--vocab-size", str(launch.model.shape.vocabulary)),
        (IMPORTED, relative_to_root(weights.parent)) if weights else (),
    )
    return replace(
        launch,
        spec=replace(launch.spec, backend=Backend.TRANSFORMERS),
        entry=replace(launch.entry, path="src/parakit/convert/hf/reference.py"),
        flags=flags,
    )


def _transformers_problems(launch: Launch) -> Iterator[str]:
    """Yield the first reason why Hugging Face's code cannot train this launch; nothing if it can."""
    unknown = unknown_flags(launch.flags)
    not_supported = set(unknown) - {IMPORTED, PADDED}
    is_one_cpu_rank = launch.devices == 1 and launch.spec.device is DeviceKind.CPU
    half_precision = {"--bf16", "--fp16"}
    if imported_weights_folder(launch.model) is None:
        yield (
            f"BACKEND=transformers trains what was imported, and {launch.model.name} was not; import a "
            "model with 'make import-hf', or use BACKEND=native."
        )
    elif importlib.util.find_spec("transformers") is None:
        yield NO_TRANSFORMERS
    elif not is_one_cpu_rank:
        yield (
            f"BACKEND=transformers has baseline on one CPU rank, and no {launch.spec.name} on "
            f"{launch.devices} {launch.spec.device.upper()}(s); use train-baseline-…-1cpu."
        )
    elif half_precision & {*unknown, *launch.flags}:
        yield "BACKEND=transformers computes in fp32; leave --bf16 and --fp16 out of EXTRA=."
    elif not_supported:
        yield f"BACKEND=transformers does not know {min(not_supported)}; leave it out of EXTRA=."
    elif Flags(launch.flags).text("--optimizer") != "adam":
        yield "BACKEND=transformers has AdamW alone; leave OPTIMIZER= out."


def backend_flags(launch: Launch, backend: Backend) -> tuple[str, ...]:
    """Return the flags that give a backend its parallel sizes; data parallelism takes the remaining ranks.

    The flags of a pipeline schedule are part of the strategy's own flags and are not repeated here.
    """
    parallelism = launch.spec.parallelism
    if backend is Backend.DEEPSPEED:
        return ("--engine", "deepspeed", "--zero-stage", str(parallelism.sharding.stage))
    if backend is Backend.BARE:
        return ("--engine", "bare")
    if parallelism.sharding.is_torch_fsdp:
        return ("--use-torch-fsdp2",)
    degrees = {"tensor": parallelism.tensor, "expert": parallelism.expert}
    return format_flags(
        {
            f"--{dimension}-model-parallel-size": degree
            for dimension, degree in degrees.items()
            if degree > 1
        }
    )


def backend_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence per reason why the launch's backend cannot run it; nothing if it can."""
    if launch.spec.backend == Backend.MEGATRON:
        return
    if len(launch.data_parts) > 1:
        yield (
            f"BACKEND={launch.spec.backend} reads one data set, and DATA='{launch.data}' blends several; name "
            "one, or use BACKEND=megatron."
        )
    if launch.spec.patch_file is not None:
        yield (
            f"PATCH_FILE={launch.spec.patch_file.path} changes Megatron, which "
            f"BACKEND={launch.spec.backend} does "
            "not run; leave PATCH_FILE= out, or use BACKEND=megatron."
        )
    if launch.spec.backend == Backend.TRANSFORMERS:
        yield from _transformers_problems(launch)
        return
    yield from _strategy_problems(launch)
    shape = launch.model.shape
    if shape.query_groups != shape.heads:
        yield (
            f"{launch.model.name} is not the GPT that BACKEND={launch.spec.backend} builds (a key and "
            "value for each head); use BACKEND=megatron."
        )
    elif shape.experts and launch.spec.backend == Backend.DEEPSPEED:
        yield "BACKEND=deepspeed trains dense models here; use BACKEND=native for experts."
    elif unknown := unknown_flags(launch.flags):
        yield f"BACKEND={launch.spec.backend} does not know {unknown[0]}; leave it out of EXTRA=."
    elif refused := refused_value(launch.flags):
        yield f"BACKEND={launch.spec.backend} cannot take {refused}; use BACKEND=megatron."
    if launch.spec.backend == Backend.DEEPSPEED and importlib.util.find_spec("deepspeed") is None:
        yield NO_DEEPSPEED


def _strategy_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence if the backend does not have the strategy; the sentence lists those that it has."""
    parallelism, ranks = launch.spec.parallelism, launch.devices
    is_data_parallel = parallelism.data == ranks
    is_dense = not launch.model.shape.experts
    is_tensor_parallel = (
        parallelism.tensor == ranks and not parallelism.sequence_parallel and is_dense
    )
    has_whole_experts = parallelism.expert == 1
    if launch.spec.backend == Backend.NATIVE:
        strategies = _NATIVE_STRATEGIES if is_dense else "baseline, dpN, epN and epNdpM"
        is_fsdp = parallelism.sharding.is_torch_fsdp and is_dense and has_whole_experts
        is_plain = is_data_parallel and (is_fsdp or not parallelism.sharding)
        has_strategy = is_plain or is_tensor_parallel or (bool(parallelism.schedule) and is_dense)
    elif launch.spec.backend == Backend.DEEPSPEED:
        strategies = "baseline, dpN, zero1, zero2 and zero3"
        has_strategy = (
            is_data_parallel and has_whole_experts and not parallelism.sharding.is_torch_fsdp
        )
    else:
        strategies = "baseline and dpN"
        has_strategy = is_data_parallel and has_whole_experts and not parallelism.sharding
    if not has_strategy:
        yield (
            f"BACKEND={launch.spec.backend} has {strategies}, and no {launch.spec.name}; use one of these, "
            f"or BACKEND=megatron{_describe_alternative(launch)}."
        )


def _describe_alternative(launch: Launch) -> str:
    """Return the end of a refusal of ZeRO within DeepSpeed replicas of several ranks; empty for other refusals."""
    parallelism = launch.spec.parallelism
    if launch.spec.backend is not Backend.DEEPSPEED or not parallelism.sharding:
        return ""
    if parallelism.pipeline > 1:
        return " with zero1 (neither DeepSpeed's pipelines nor Megatron-FSDP take ZeRO-2 or ZeRO-3)"
    return " (DeepSpeed splits no matrix itself: TP would be the model's)"


def optimizer_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence per reason why the optimizer cannot be used in this launch; nothing if it can."""
    if Flags(launch.flags).text("--optimizer") != "muon":
        return
    sharding, backend = launch.spec.parallelism.sharding, launch.spec.backend
    if sharding:
        yield f"Muon needs whole matrices, which {sharding} shards; use dp2, or OPTIMIZER=adamw."
    if backend in (Backend.DEEPSPEED, Backend.BARE):
        yield f"BACKEND={backend} has AdamW alone; use BACKEND=native for Muon."
    uses_package = backend == Backend.MEGATRON or MUON_RULE_FLAG in launch.flags
    if (
        backend == Backend.MEGATRON
        and parse_release(launch.entry.megatron_version) < FIRST_MUON_RELEASE
    ):
        yield (
            f"Megatron {launch.entry.megatron_version} has no Muon with the published coefficients, "
            "0.17 has; use BACKEND=native, or OPTIMIZER=adamw."
        )
    elif (
        uses_package
        and launch.runtime.container is None
        and importlib.util.find_spec(MUON_PACKAGE) is None
    ):
        yield (
            f"Megatron's Muon needs the package {MUON_PACKAGE}, which is not installed; 'make setup' "
            "installs it, or use OPTIMIZER=muon BACKEND=native."
        )
