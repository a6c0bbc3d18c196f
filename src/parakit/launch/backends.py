"""Compose a launch for a backend other than Megatron: plain PyTorch, DeepSpeed or Hugging Face transformers.

A launch is composed for Megatron first, so model, data, batch, seed and schedule are decided once. Then
the flags that only Megatron knows are removed, and the backend's flags are added.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from parakit.config import variables
from parakit.config.files import relative_to_root
from parakit.config.flag_table import parse_release
from parakit.config.flags import Flags, drop_flags, format_flags, merge_flags
from parakit.config.model import WEIGHT_LOADING_FLAGS, imported_weights_folder
from parakit.config.run import Backend, DeviceKind, OptimizerName
from parakit.config.strategy import UNTIED, Sharding, strategy_flags
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

FIRST_SHARDED_MUON_RELEASE = (0, 18)
"""First Megatron release that shards Muon's states by whole matrices (`--use-distributed-optimizer`)."""

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
    checkpoint = _find_backend_checkpoint(launch)
    # Only Megatron's patches read this variable; a backend gets the folder by a flag.
    environment = dict(launch.environment)
    environment.pop(variables.START_WEIGHTS, None)
    if options.backend is Backend.DEEPSPEED:
        environment["DS_ACCELERATOR"] = "cpu" if launch.spec.device is DeviceKind.CPU else "cuda"
    return replace(
        launch,
        spec=replace(launch.spec, backend=options.backend),
        entry=replace(launch.entry, path=f"examples/{launch.model.family}/pretrain_native.py"),
        initial_checkpoint=checkpoint,
        flags=_translate_flags(launch, checkpoint),
        environment=environment,
    )


def _find_backend_checkpoint(launch: Launch) -> Path | None:
    """Return the folder of the initial checkpoint that the launch's backend loads; None if it loads none."""
    options = launch.job.options
    if launch.initial_checkpoint is None or options.backend is Backend.BARE:
        return None
    # Only Megatron's torch FSDP2 needs an untied output layer, so the other backends keep it tied.
    is_untied = UNTIED in launch.flags and not launch.spec.parallelism.sharding
    return initial_checkpoint_path(launch.model, launch.entry, options, is_untied)


def _translate_flags(launch: Launch, checkpoint: Path | None) -> tuple[str, ...]:
    """Return the launch's flags without those that only Megatron knows, and with those of its job's backend.

    `checkpoint` is the folder of the initial checkpoint; None adds no flag for it.
    """
    options, parallelism, shape = launch.job.options, launch.spec.parallelism, launch.model.shape
    dropped = set(_ONLY_MEGATRON)
    # The backend takes the flags of a pipeline schedule. Megatron alone takes those of other strategies.
    if not parallelism.schedule:
        dropped |= {text for text in strategy_flags(parallelism) if text.startswith("--")}
    multiple = max(1, shape.vocabulary_multiple // parallelism.tensor)
    added = [
        *backend_flags(launch, options.backend),
        *("--vocab-size", str(shape.vocabulary)),
        *("--make-vocab-size-divisible-by", str(multiple)),
    ]
    if checkpoint is not None:
        added += ["--start-weights", relative_to_root(checkpoint)]
    if options.optimizer is OptimizerName.MEGATRON_MUON:
        added += [MUON_RULE_FLAG, "megatron"]
    return merge_flags(drop_flags(launch.flags, dropped), added)


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
    backend = launch.spec.backend
    if backend == Backend.MEGATRON:
        return
    if len(launch.data_parts) > 1:
        yield (
            f"BACKEND={backend} reads one data set, and DATA='{launch.data}' blends several; name "
            "one, or use BACKEND=megatron."
        )
    if launch.spec.patch_file is not None:
        yield (
            f"PATCH_FILE={launch.spec.patch_file.path} changes Megatron, which BACKEND={backend} does "
            "not run; leave PATCH_FILE= out, or use BACKEND=megatron."
        )
    if backend == Backend.TRANSFORMERS:
        yield from _transformers_problems(launch)
        return
    yield from _strategy_problems(launch)
    yield from _model_problems(launch)
    if backend == Backend.DEEPSPEED and importlib.util.find_spec("deepspeed") is None:
        yield NO_DEEPSPEED


def _model_problems(launch: Launch) -> Iterator[str]:
    """Yield the first reason why native, DeepSpeed or bare cannot build the launch's model; nothing if they can."""
    shape, backend = launch.model.shape, launch.spec.backend
    if shape.query_groups != shape.heads:
        yield (
            f"{launch.model.name} is not the GPT that BACKEND={backend} builds (a key and "
            "value for each head); use BACKEND=megatron."
        )
        return
    if shape.experts and backend == Backend.DEEPSPEED:
        yield "BACKEND=deepspeed trains dense models here; use BACKEND=native for experts."
        return
    unknown = unknown_flags(launch.flags)
    if unknown:
        yield f"BACKEND={backend} does not know {unknown[0]}; leave it out of EXTRA=."
        return
    refused = refused_value(launch.flags)
    if refused:
        yield f"BACKEND={backend} cannot take {refused}; use BACKEND=megatron."


def _strategy_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence if the backend does not have the strategy; the sentence lists those that it has."""
    if not _has_strategy(launch):
        yield (
            f"BACKEND={launch.spec.backend} has {_describe_strategies(launch)}, and no {launch.spec.name}; use "
            f"one of these, or BACKEND=megatron{_describe_alternative(launch)}."
        )


def _has_strategy(launch: Launch) -> bool:
    """Return True if native, DeepSpeed or bare, whichever the launch's backend is, has the launch's strategy."""
    parallelism, backend = launch.spec.parallelism, launch.spec.backend
    if backend == Backend.NATIVE:
        return _is_native_strategy(launch)
    if parallelism.data != launch.devices or parallelism.expert > 1:
        return False
    if backend == Backend.DEEPSPEED:
        return not parallelism.sharding.is_torch_fsdp
    return not parallelism.sharding


def _is_native_strategy(launch: Launch) -> bool:
    """Return True if the native backend has the launch's strategy.

    With experts it has replicas and expert parallelism alone.
    """
    parallelism = launch.spec.parallelism
    is_data_parallel = parallelism.data == launch.devices
    if is_data_parallel and not parallelism.sharding:
        return True
    if launch.model.shape.experts:
        return False
    if parallelism.schedule:
        return True
    if parallelism.tensor == launch.devices and not parallelism.sequence_parallel:
        return True
    return is_data_parallel and parallelism.sharding.is_torch_fsdp and parallelism.expert == 1


def _describe_strategies(launch: Launch) -> str:
    """Return the names of the strategies that the launch's backend has for its kind of model."""
    if launch.spec.backend == Backend.DEEPSPEED:
        return "baseline, dpN, zero1, zero2 and zero3"
    if launch.spec.backend != Backend.NATIVE:
        return "baseline and dpN"
    if launch.model.shape.experts:
        return "baseline, dpN, epN and epNdpM"
    return _NATIVE_STRATEGIES


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
    if sharding and not _shards_whole_matrices(launch):
        yield f"Muon needs whole matrices, which {sharding} shards; use dp2, or OPTIMIZER=adamw."
    if backend in (Backend.DEEPSPEED, Backend.BARE):
        yield f"BACKEND={backend} has AdamW alone; use BACKEND=native for Muon."
    is_megatron = backend == Backend.MEGATRON
    if is_megatron and parse_release(launch.entry.megatron_version) < FIRST_MUON_RELEASE:
        yield (
            f"Megatron {launch.entry.megatron_version} has no Muon with the published coefficients, "
            "0.17 has; use BACKEND=native, or OPTIMIZER=adamw."
        )
        return
    # The native backend can also update with Megatron's rule, for which it imports Megatron's package.
    uses_package = is_megatron or MUON_RULE_FLAG in launch.flags
    is_on_host = launch.runtime.container is None
    if uses_package and is_on_host and importlib.util.find_spec(MUON_PACKAGE) is None:
        yield (
            f"Megatron's Muon needs the package {MUON_PACKAGE}, which is not installed; 'make setup' "
            "installs it, or use OPTIMIZER=muon BACKEND=native."
        )


def _shards_whole_matrices(launch: Launch) -> bool:
    """Return True if each rank stores the optimizer states of whole matrices, as Muon needs them."""
    if launch.spec.backend is not Backend.MEGATRON:
        return False
    is_zero1 = launch.spec.parallelism.sharding is Sharding.ZERO1
    return is_zero1 and parse_release(launch.entry.megatron_version) >= FIRST_SHARDED_MUON_RELEASE
