"""Checks before GPUs train: enough of them, free and large enough; container, compilers and torch.

Also why `FUSED=` (patches for GPUs without Transformer Engine) or `SHARE_GPU=1` does not apply to a run.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from parakit.artifacts.run import MegatronEntry
from parakit.cluster import check_busy, check_container, refusal_sentences
from parakit.config import variables
from parakit.config.flag_table import parse_release
from parakit.config.hardware import find_device
from parakit.config.run import Backend, DeviceKind
from parakit.config.strategy import Batch
from parakit.costs import PredictedMemory, divisors, find_peak_rank
from parakit.formatting.units import gib
from parakit.launch.compose import Launch
from parakit.launch.devices import Gpu, all_gpus, gpu_use, visible_gpus
from parakit.planner import Fit, explain_close_fit, judge_fit

OLDEST_TORCH = (2, 9)
FIRST_NCCL_TO_SHARE = (2, 30)
"""Older ones refuse two ranks on a device (`NCCL_MULTI_RANK_GPU_ENABLE`)."""
CUDA_FOLDER = Path("/usr/local/cuda")
"""Where torch looks for the toolkit last."""


def gpu_problems(launch: Launch) -> Iterator[str]:
    """Why the GPUs here cannot run it, a sentence each."""
    gpus = visible_gpus()
    if len(gpus) < (1 if launch.spec.shares_gpu else launch.local_devices):
        tiny = "moe-tiny" if launch.model.shape.experts else "gpt2-tiny"
        yield (
            f"Needs {launch.local_devices} GPU{'s' * (launch.local_devices > 1)}, found "
            f"{len(gpus)}{_chosen()}; run "
            f"'make train-{launch.spec.name}-{tiny}-{launch.devices}cpu' to see the strategy on CPU "
            "ranks, or 'make plan' for what it would need."
        )
        return
    if launch.spec.fp8_recipe:
        device = find_device(gpus[0].name)
        if device is not None and device.peak_flops("fp8") is None:
            yield f"{device.name} computes no fp8; leave --fp8-format out, or use a newer GPU (H100)."
    machine = {gpu.index: gpu_use(gpu) for gpu in all_gpus()}
    used = [machine[gpu.index] for gpu in gpus[: launch.local_devices]]
    yield from refusal_sentences(check_busy(used, list(machine.values())))


def gpu_memory_problems(launch: Launch) -> Iterator[str]:
    """Whether the smallest GPU holds the fullest rank; a sentence with the batch that would fit.

    Undefined for a combination that Megatron refuses, so `preflight` checks that first.
    """
    gpu, ranks = _smallest_gpu(launch)
    room, batch = gpu.memory_bytes // ranks, launch.spec.batch
    needed = predict_peak_bytes(launch, batch)
    if _fit_here(launch, batch, room) is not Fit.DOES_NOT_FIT:
        return
    smaller = reversed(divisors(batch.micro_batch_size, batch.micro_batch_size - 1))
    batches = (replace(batch, micro_batch_size=micro) for micro in smaller)
    misfit = Fit.DOES_NOT_FIT
    fitting = next(
        (batch for batch in batches if _fit_here(launch, batch, room) is not misfit), None
    )
    fix = (
        f"MICRO_BATCH={fitting.micro_batch_size} fits, with the global batch of "
        f"{batch.global_batch_size} in more steps"
        if fitting
        else "not even a micro batch of 1 fits, so use more GPUs ('make plan') or a smaller model"
    )
    yield (
        f"{launch.model.name} with {launch.spec.name} and a micro batch of {batch.micro_batch_size} "
        f"needs about {gib(needed, 0)} GiB a {'rank' if ranks > 1 else 'GPU'}, and GPU {gpu.index} "
        f"({gpu.name}) has {gib(room, 0)}{' for each' if ranks > 1 else ''}; {fix}."
    )


def gpu_memory_warning(launch: Launch) -> str:
    """Return a sentence for a run that the smallest GPU holds only closely; empty for all others.

    Such a run is not refused, because its user named it. Where no GPU is visible nothing is said.
    """
    if launch.spec.device is not DeviceKind.GPU or not visible_gpus():
        return ""
    gpu, ranks = _smallest_gpu(launch)
    room, spec = gpu.memory_bytes // ranks, launch.spec
    if _fit_here(launch, spec.batch, room) is not Fit.CLOSE:
        return ""
    memory = _peak_memory(launch, spec.batch)
    return (
        f"Memory is close: {spec.name} is predicted to hold {gib(memory.total)} GiB, "
        f"{memory.total / room:.0%} of what a rank has of GPU {gpu.index} ({gpu.name}); "
        f"{explain_close_fit(spec, memory, room)}."
    )


def _smallest_gpu(launch: Launch) -> tuple[Gpu, int]:
    """Return the GPU of a launch with the least memory, and how many ranks share it."""
    gpu = min(visible_gpus()[: launch.local_devices], key=lambda gpu: gpu.memory_bytes)
    return gpu, launch.local_devices if launch.spec.shares_gpu else 1


def _fit_here(launch: Launch, batch: Batch, room: int) -> Fit:
    """Return the planner's verdict on a launch whose ranks have `room` bytes each."""
    return judge_fit(launch.spec, _peak_memory(launch, batch), room)


def runtime_problems(launch: Launch) -> Iterator[str]:
    """Why the runtime cannot start, a sentence."""
    pair = launch.runtime.pair
    if pair is not None:
        gpus = launch.spec.device is DeviceKind.GPU
        yield from refusal_sentences(check_container(pair.name, pair.ngc_tag, gpus))
    elif problem := nvcc_problem(launch.entry):
        yield problem


def predict_peak_bytes(launch: Launch, batch: Batch) -> int:
    """What the fullest rank of the run runs out of a GPU's memory without, with this batch.

    Raises:
        UnevenSplitError: A degree does not divide what it splits.
    """
    return _peak_memory(launch, batch).needed


def _peak_memory(launch: Launch, batch: Batch) -> PredictedMemory:
    # Attention is fused: Transformer Engine's, or the kit's on SDPA.
    spec = replace(launch.spec, batch=batch, fused_attention=True)
    return find_peak_rank(spec)[1]


def fused_problems(launch: Launch) -> Iterator[str]:
    """Why the patches that FUSED= names do not apply to the run, a sentence each."""
    asked = launch.environment.get(variables.FUSED)
    if not asked:
        return
    if launch.spec.backend is not Backend.MEGATRON:
        yield f"FUSED={asked} changes Megatron, and BACKEND={launch.spec.backend} trains without it."
    elif launch.runtime.transformer_engine:
        yield (
            f"FUSED={asked} replaces what Transformer Engine does, and this runtime has it; set "
            "RUNTIME=host with a torch that it is not installed for, or leave FUSED= out."
        )
    if "gradient_gemm" in asked.split(",") and launch.spec.parallelism.sharding.wraps_modules:
        yield (
            f"FUSED=gradient_gemm adds to gradient buffers that {launch.spec.name} does not have; "
            "leave it out."
        )
    if "attention_flash" in asked.split(",") and launch.spec.parallelism.context > 1:
        yield (
            f"FUSED=attention_flash takes no mask, and {launch.spec.name} masks by position; leave it "
            "out, or name attention_cudnn."
        )


def sharing_problems(launch: Launch) -> Iterator[str]:
    """Why the ranks cannot share a GPU, a sentence each."""
    if not launch.spec.shares_gpu:
        return
    if launch.spec.device is not DeviceKind.GPU:
        yield "SHARE_GPU=1 puts GPU ranks on one device; leave it out for CPU ranks."
    elif launch.devices == 1:
        yield "SHARE_GPU=1 is for several ranks on one GPU, and this run has one rank; leave it out."
    elif launch.nodes is not None:
        yield "SHARE_GPU=1 is for one machine; leave NNODES= and LAUNCHER= out."
    elif launch.runtime.container is not None:
        yield "SHARE_GPU=1 needs NCCL 2.30, and NVIDIA's image has an older one; set RUNTIME=host."
    elif len(visible_gpus()) != 1:
        yield (
            f"SHARE_GPU=1 needs one visible GPU, found {len(visible_gpus())}{_chosen()}; "
            "choose one with CUDA_VISIBLE_DEVICES=, or leave it out."
        )
    elif (version := _nccl()) and parse_release(version) < FIRST_NCCL_TO_SHARE:
        yield f"SHARE_GPU=1 needs NCCL 2.30, found {version}; install a newer torch, or leave it out."
    if launch.spec.backend is not Backend.MEGATRON:
        yield (
            f"SHARE_GPU=1 is for Megatron's ranks, and BACKEND={launch.spec.backend} gives each its own "
            "GPU."
        )


def _nccl() -> str | None:
    """The version of the NCCL that pip installed with torch; None where it came otherwise."""
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


def torch_problem() -> str | None:
    """Why the installed torch cannot be used by the GPU bench, a sentence; None if it can."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed; the bench uses the machine's own, 2.9 or newer, with CUDA."
    if parse_release(version) < OLDEST_TORCH:
        return f"torch {version} is too old; the bench needs 2.9 or newer."
    return None


def compiler_problem() -> str | None:
    """What torch.compile lacks on this machine, a sentence; None if nothing.

    Triton builds the launchers of its kernels with a C compiler.
    """
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs the package triton, which CUDA builds of torch bring along."
    named = os.environ.get("CC")
    if not any(shutil.which(name) for name in ([named] if named else ["gcc", "clang", "cc"])):
        return "torch.compile needs a C compiler and none is on PATH; install gcc, or set CC=."
    header = Path(sysconfig.get_paths(_scheme())["include"]) / "Python.h"
    if not header.is_file():
        return (
            f"torch.compile needs Python's headers and there is no {header}; install python3-dev."
        )
    return None


def nvcc_problem(entry: MegatronEntry) -> str | None:
    """Why a checkout whose fused kernels ask nvcc cannot start, a sentence; None if it can."""
    kernels = Path(entry.path).parent / "megatron/legacy/fused_kernels/__init__.py"
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if (
        not kernels.is_file()
        or named
        or shutil.which("nvcc")
        or (CUDA_FOLDER / "bin/nvcc").exists()
    ):
        return None
    return (
        f"Megatron {entry.megatron_version} asks nvcc for its version at start-up, and there is none; "
        "install the CUDA toolkit and set CUDA_HOME, or unset MEGATRON_LM for the wheel."
    )


def _scheme() -> str:
    """Where Triton looks: Debian's own Python names a folder for what is installed locally, too."""
    scheme = sysconfig.get_default_scheme()
    return "posix_prefix" if scheme == "posix_local" else scheme


def _chosen() -> str:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if chosen is None else f" (CUDA_VISIBLE_DEVICES={chosen})"
