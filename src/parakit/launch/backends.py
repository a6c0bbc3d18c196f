"""Backends other than Megatron: the same run, composed for plain PyTorch or DeepSpeed.

A launch is composed for Megatron first, so model, data, batch, seed and schedule are decided once. What
only Megatron's strategies need is then removed from its flags, and the backend's own flags are added.
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
"""First Megatron whose Muon has the published coefficients, which it calls `simple`."""

MUON_PACKAGE = "emerging_optimizers"

_ONLY_MEGATRON = WEIGHT_LOADING_FLAGS | {
    "--no-gradient-reduce-div-fusion",
    "--tokenizer-type",
    "--vocab-size",
    DATA_CACHE,
}
_NATIVE = (
    "baseline, dpN, tpN, fsdp2, gpipeN, 1f1bN, interleavedN, pipedreamN, pipedreamNbw and "
    "pipedream-flushN"
)


def adapt_to_backend(launch: Launch) -> Launch:
    """The same launch for the backend that its job names."""
    options = launch.job.options
    if options.backend is Backend.MEGATRON:
        return launch
    if options.backend is Backend.TRANSFORMERS:
        return _transformers(launch)
    started = launch.initial_checkpoint is not None and options.backend is not Backend.BARE
    parallelism = launch.spec.parallelism
    # Torch FSDP2 needs an untied output layer under Megatron alone.
    untied = UNTIED in launch.flags and not parallelism.sharding
    start = (
        initial_checkpoint_path(launch.model, launch.entry, options, untied) if started else None
    )
    layout = () if parallelism.schedule else strategy_flags(parallelism)
    dropped = (*_ONLY_MEGATRON, *(word for word in layout if word.startswith("--")))
    multiple = launch.model.shape.vocabulary_multiple // parallelism.tensor
    megatrons = options.optimizer is OptimizerName.MEGATRON_MUON
    flags = merge_flags(
        drop_flags(launch.flags, dropped),
        backend_flags(launch, options.backend),
        ("--vocab-size", str(launch.model.shape.vocabulary)),
        ("--make-vocab-size-divisible-by", str(max(1, multiple))),
        ("--start-weights", relative_to_root(start)) if start else (),
        (MUON_RULE_FLAG, "megatron") if megatrons else (),
    )
    environment = {k: v for k, v in launch.environment.items() if k != variables.START_WEIGHTS}
    if options.backend is Backend.DEEPSPEED:
        environment["DS_ACCELERATOR"] = "cpu" if launch.spec.device is DeviceKind.CPU else "cuda"
    return replace(
        launch,
        spec=replace(launch.spec, backend=options.backend),
        entry=replace(launch.entry, path=f"examples/{launch.model.family}/pretrain_native.py"),
        initial_checkpoint=start,
        flags=flags,
        environment=environment,
    )


def _transformers(launch: Launch) -> Launch:
    """An imported model by Hugging Face's own code; a model of the kit has none (`backend_problems`)."""
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
    own = (*unknown_flags(launch.flags), *launch.flags)
    if imported_weights_folder(launch.model) is None:
        yield (
            f"BACKEND=transformers trains what was imported, and {launch.model.name} was not; import a "
            "model with 'make import-hf', or use BACKEND=native."
        )
    elif importlib.util.find_spec("transformers") is None:
        yield NO_TRANSFORMERS
    elif launch.devices > 1 or launch.spec.device is not DeviceKind.CPU:
        yield (
            f"BACKEND=transformers has baseline on one CPU rank, and no {launch.spec.name} on "
            f"{launch.devices} {launch.spec.device.upper()}(s); use train-baseline-…-1cpu."
        )
    elif "--bf16" in own or "--fp16" in own:
        yield "BACKEND=transformers computes in fp32; leave --bf16 and --fp16 out of EXTRA=."
    elif unknown := set(unknown_flags(launch.flags)) - {IMPORTED, PADDED}:
        yield f"BACKEND=transformers does not know {min(unknown)}; leave it out of EXTRA=."
    elif Flags(launch.flags).text("--optimizer") != "adam":
        yield "BACKEND=transformers has AdamW alone; leave OPTIMIZER= out."


def backend_flags(launch: Launch, backend: Backend) -> tuple[str, ...]:
    """The backend's flags for its parallelism; data parallelism takes the remaining ranks.

    Those of a pipeline's schedule are the strategy's own.
    """
    parallelism = launch.spec.parallelism
    if backend is Backend.DEEPSPEED:
        return ("--engine", "deepspeed", "--zero-stage", str(parallelism.sharding.stage))
    if backend is Backend.BARE:
        return ("--engine", "bare")
    if parallelism.sharding.is_torch_fsdp:
        return ("--use-torch-fsdp2",)
    degrees = {"tensor": parallelism.tensor, "expert": parallelism.expert}
    return format_flags({f"--{n}-model-parallel-size": of for n, of in degrees.items() if of > 1})


def backend_problems(launch: Launch) -> Iterator[str]:
    """Why a backend cannot run this launch, each in one sentence."""
    if launch.spec.backend == Backend.MEGATRON:
        return
    if launch.spec.patch_file is not None:
        yield (
            f"PATCH_FILE={launch.spec.patch_file.path} changes Megatron, which "
            f"BACKEND={launch.spec.backend} does "
            "not run; leave PATCH_FILE= out, or use BACKEND=megatron."
        )
    if launch.spec.backend == Backend.TRANSFORMERS:
        yield from _transformers_problems(launch)
        return
    yield from _layout_problems(launch)
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


def _layout_problems(launch: Launch) -> Iterator[str]:
    parallelism, ranks = launch.spec.parallelism, launch.devices
    only_data = parallelism.data == ranks
    dense = not launch.model.shape.experts
    only_tensor = parallelism.tensor == ranks and not parallelism.sequence_parallel and dense
    whole = parallelism.expert == 1
    if launch.spec.backend == Backend.NATIVE:
        known = _NATIVE if dense else "baseline, dpN, epN and epNdpM"
        sharded = parallelism.sharding.is_torch_fsdp and dense and whole
        plain = only_data and (sharded or not parallelism.sharding)
        fits = plain or only_tensor or (bool(parallelism.schedule) and dense)
    elif launch.spec.backend == Backend.DEEPSPEED:
        known = "baseline, dpN, zero1, zero2 and zero3"
        fits = only_data and whole and not parallelism.sharding.is_torch_fsdp
    else:
        known = "baseline and dpN"
        fits = only_data and whole and not parallelism.sharding
    if not fits:
        yield (
            f"BACKEND={launch.spec.backend} has {known}, and no {launch.spec.name}; use one of these, "
            f"or BACKEND=megatron{_instead(launch)}."
        )


def _instead(launch: Launch) -> str:
    """Why DeepSpeed has no ZeRO within a replica of several ranks, and what Megatron has."""
    parallelism = launch.spec.parallelism
    if launch.spec.backend is not Backend.DEEPSPEED or not parallelism.sharding:
        return ""
    if parallelism.pipeline > 1:
        return " with zero1 (neither DeepSpeed's pipelines nor Megatron-FSDP take ZeRO-2 or ZeRO-3)"
    return " (DeepSpeed splits no matrix itself: TP would be the model's)"


def optimizer_problems(launch: Launch) -> Iterator[str]:
    """Why the optimizer cannot be used here, each in one sentence."""
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
