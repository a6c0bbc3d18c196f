"""Check GPUs, container, compilers and torch before GPUs train.

The checks also refuse `FUSED=` (patches for GPUs without Transformer Engine) and `SHARE_GPU=1` for runs to
which they do not apply.
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
from parakit.cluster import check_busy, refusal_sentences
from parakit.config import variables
from parakit.config.flag_table import parse_release
from parakit.config.hardware import find_device
from parakit.config.run import Backend, DeviceKind
from parakit.config.strategy import Batch
from parakit.costs import PredictedMemory, divisors, find_peak_rank
from parakit.formatting.units import gib, plural
from parakit.launch.compose import Launch
from parakit.launch.devices import Gpu, all_gpus, gpu_use, visible_gpus
from parakit.planner import Fit, explain_close_fit, judge_fit

OLDEST_TORCH = (2, 9)
FIRST_NCCL_TO_SHARE = (2, 30)
"""First NCCL version that allows two ranks on a GPU (`NCCL_MULTI_RANK_GPU_ENABLE`)."""
CUDA_FOLDER = Path("/usr/local/cuda")
"""Folder of the CUDA toolkit that torch tries last."""


def gpu_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence per reason why this machine's GPUs cannot run the launch: too few, no fp8, or in use."""
    gpus = visible_gpus()
    needed_gpus = 1 if launch.spec.shares_gpu else launch.local_devices
    if len(gpus) < needed_gpus:
        tiny = "moe-tiny" if launch.model.shape.experts else "gpt2-tiny"
        yield (
            f"Needs {plural(launch.local_devices, 'GPU')}, found {len(gpus)}{_describe_selection()}; run "
            f"'make train-{launch.spec.name}-{tiny}-{launch.devices}cpu' to see the strategy on CPU "
            "ranks, or 'make plan' for what it would need."
        )
        return
    if launch.spec.fp8_recipe:
        device = find_device(gpus[0].name)
        if device is not None and device.peak_flops("fp8") is None:
            yield f"{device.name} computes no fp8; leave --fp8-format out, or use a newer GPU (H100)."
    use_by_index = {gpu.index: gpu_use(gpu) for gpu in all_gpus()}
    used_gpus = [use_by_index[gpu.index] for gpu in gpus[: launch.local_devices]]
    yield from refusal_sentences(check_busy(used_gpus, list(use_by_index.values())))


def gpu_memory_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence if the peak rank does not fit on the smallest GPU, with the micro batch that would fit.

    The result is undefined for a combination that Megatron refuses, so `check_launch` checks that first.
    """
    gpu, ranks_per_gpu = _smallest_gpu(launch)
    bytes_per_rank, batch = gpu.memory_bytes // ranks_per_gpu, launch.spec.batch
    if _judge_fit(launch, batch, bytes_per_rank) is not Fit.DOES_NOT_FIT:
        return
    needed_bytes = predict_peak_bytes(launch, batch)
    fitting_size = _find_fitting_micro_batch(launch, bytes_per_rank)
    if fitting_size is None:
        remedy = (
            "not even a micro batch of 1 fits, so use more GPUs ('make plan') or a smaller model"
        )
    else:
        remedy = (
            f"MICRO_BATCH={fitting_size} fits, with the global batch of "
            f"{batch.global_batch_size} in more steps"
        )
    holder, per_rank = ("rank", " per rank") if ranks_per_gpu > 1 else ("GPU", "")
    yield (
        f"{launch.model.name} with {launch.spec.name} and a micro batch of {batch.micro_batch_size} "
        f"needs about {gib(needed_bytes, 0)} GiB per {holder}, and GPU {gpu.index} ({gpu.name}) has "
        f"{gib(bytes_per_rank, 0)}{per_rank}; {remedy}."
    )


def _find_fitting_micro_batch(launch: Launch, bytes_per_rank: int) -> int | None:
    """Return the largest micro batch size below the launch's own with which the peak rank fits; None if none fits.

    Only divisors of the launch's own size are tried, because they keep the global batch.
    """
    batch = launch.spec.batch
    smaller_sizes = divisors(batch.micro_batch_size, batch.micro_batch_size - 1)
    for micro_batch_size in reversed(smaller_sizes):
        candidate = replace(batch, micro_batch_size=micro_batch_size)
        if _judge_fit(launch, candidate, bytes_per_rank) is not Fit.DOES_NOT_FIT:
            return micro_batch_size
    return None


def gpu_memory_warning(launch: Launch) -> str:
    """Return a sentence for a run that only just fits on the smallest GPU; empty for all others.

    The user named the run, so it is not refused. Without a visible GPU the text is empty too.
    """
    if launch.spec.device is not DeviceKind.GPU or not visible_gpus():
        return ""
    gpu, ranks_per_gpu = _smallest_gpu(launch)
    bytes_per_rank, spec = gpu.memory_bytes // ranks_per_gpu, launch.spec
    if _judge_fit(launch, spec.batch, bytes_per_rank) is not Fit.CLOSE:
        return ""
    memory = _peak_memory(launch, spec.batch)
    return (
        f"Memory is close: {spec.name} is predicted to hold {gib(memory.total)} GiB, "
        f"{memory.total / bytes_per_rank:.0%} of what a rank has of GPU {gpu.index} ({gpu.name}); "
        f"{explain_close_fit(spec, memory, bytes_per_rank)}."
    )


def _smallest_gpu(launch: Launch) -> tuple[Gpu, int]:
    """Return the launch's GPU with the least memory, and how many ranks share it."""
    gpu = min(visible_gpus()[: launch.local_devices], key=lambda gpu: gpu.memory_bytes)
    return gpu, launch.local_devices if launch.spec.shares_gpu else 1


def _judge_fit(launch: Launch, batch: Batch, room: int) -> Fit:
    """Return the planner's verdict on a launch with this batch if each rank has `room` bytes."""
    return judge_fit(launch.spec, _peak_memory(launch, batch), room)


def runtime_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence for each reason why the runtime cannot start: a container problem, or a missing nvcc."""
    pair, container = launch.runtime.pair, launch.runtime.container
    if pair is not None and container is not None:
        yield from refusal_sentences(container.check(pair.ngc_tag))
        return
    problem = nvcc_problem(launch.entry)
    if problem:
        yield problem


def predict_peak_bytes(launch: Launch, batch: Batch) -> int:
    """Return the bytes of GPU memory below which the peak rank runs out of memory with this batch.

    Raises:
        UnevenSplitError: A parallel size does not divide what it splits.
    """
    return _peak_memory(launch, batch).needed


def _peak_memory(launch: Launch, batch: Batch) -> PredictedMemory:
    """Return the predicted memory of the peak rank with this batch."""
    # GPU ranks have fused attention, from Transformer Engine or from the kit's patch on SDPA.
    spec = replace(launch.spec, batch=batch, fused_attention=True)
    _, memory = find_peak_rank(spec)
    return memory


def fused_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence per reason why the patches that FUSED= names do not apply to the run."""
    names = launch.environment.get(variables.FUSED)
    if not names:
        return
    patches, parallelism = names.split(","), launch.spec.parallelism
    if launch.spec.backend is not Backend.MEGATRON:
        yield f"FUSED={names} changes Megatron, and BACKEND={launch.spec.backend} trains without it."
    elif launch.runtime.transformer_engine:
        yield (
            f"FUSED={names} replaces Transformer Engine, which this runtime has; set RUNTIME=host with "
            "a torch for which Transformer Engine is not installed, or leave FUSED= out."
        )
    if "gradient_gemm" in patches and parallelism.sharding.wraps_modules:
        yield (
            f"FUSED=gradient_gemm adds to gradient buffers that {launch.spec.name} does not have; "
            "leave it out."
        )
    if "attention_flash" in patches and parallelism.context > 1:
        yield (
            f"FUSED=attention_flash takes no mask, and {launch.spec.name} masks by position; leave it "
            "out, or name attention_cudnn."
        )


def sharing_problems(launch: Launch) -> Iterator[str]:
    """Yield a sentence per reason why the ranks cannot share a GPU (`SHARE_GPU=1`)."""
    if not launch.spec.shares_gpu:
        return
    yield from _sharing_machine_problems(launch)
    if launch.spec.backend is not Backend.MEGATRON:
        yield (
            f"SHARE_GPU=1 is for Megatron's ranks, and BACKEND={launch.spec.backend} uses one GPU per "
            "rank; leave SHARE_GPU= out."
        )


def _sharing_machine_problems(launch: Launch) -> Iterator[str]:
    """Yield the first reason why the launch's devices, nodes, runtime or NCCL do not let ranks share a GPU."""
    if launch.spec.device is not DeviceKind.GPU:
        yield "SHARE_GPU=1 puts GPU ranks on one device; leave it out for CPU ranks."
        return
    if launch.devices == 1:
        yield "SHARE_GPU=1 is for several ranks on one GPU, and this run has one rank; leave it out."
        return
    if launch.nodes is not None:
        yield "SHARE_GPU=1 is for one machine; leave NNODES= and LAUNCHER= out."
        return
    if launch.runtime.container is not None:
        yield "SHARE_GPU=1 needs NCCL 2.30, and NVIDIA's image has an older one; set RUNTIME=host."
        return
    num_gpus = len(visible_gpus())
    if num_gpus != 1:
        yield (
            f"SHARE_GPU=1 needs one visible GPU, found {num_gpus}{_describe_selection()}; "
            "choose one with CUDA_VISIBLE_DEVICES=, or leave it out."
        )
        return
    version = _find_nccl_version()
    if version and parse_release(version) < FIRST_NCCL_TO_SHARE:
        yield f"SHARE_GPU=1 needs NCCL 2.30, found {version}; install a newer torch, or leave it out."


def _find_nccl_version() -> str | None:
    """Return the version of the NCCL that pip installed with torch; None if NCCL came otherwise."""
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(package)
    return None


def torch_problem() -> str | None:
    """Return a sentence on why the GPU bench cannot use the installed torch; None if it can."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch is not installed; the bench uses the machine's own, 2.9 or newer, with CUDA."
    if parse_release(version) < OLDEST_TORCH:
        return f"torch {version} is too old; the bench needs 2.9 or newer."
    return None


def compiler_problem() -> str | None:
    """Return a sentence on what torch.compile lacks on this machine; None if nothing is missing.

    Triton builds the launchers of its kernels with a C compiler.
    """
    if importlib.util.find_spec("triton") is None:
        return "torch.compile needs the package triton, which CUDA builds of torch bring along."
    named_compiler = os.environ.get("CC")
    compilers = [named_compiler] if named_compiler else ["gcc", "clang", "cc"]
    if not any(shutil.which(name) for name in compilers):
        return "torch.compile needs a C compiler and none is on PATH; install gcc, or set CC=."
    header = Path(sysconfig.get_paths(_triton_scheme())["include"]) / "Python.h"
    if not header.is_file():
        return (
            f"torch.compile needs Python's headers and there is no {header}; install python3-dev."
        )
    return None


def nvcc_problem(entry: MegatronEntry) -> str | None:
    """Return a sentence on why a checkout that asks nvcc for its version cannot start; None if it can."""
    kernels = Path(entry.path).parent / "megatron/legacy/fused_kernels/__init__.py"
    asks_nvcc = kernels.is_file()
    names_cuda = bool(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"))
    has_nvcc = shutil.which("nvcc") is not None or (CUDA_FOLDER / "bin/nvcc").exists()
    if not asks_nvcc or names_cuda or has_nvcc:
        return None
    return (
        f"Megatron {entry.megatron_version} asks nvcc for its version at start-up, and there is none; "
        "install the CUDA toolkit and set CUDA_HOME, or unset MEGATRON_LM for the wheel."
    )


def _triton_scheme() -> str:
    """Return the sysconfig scheme whose headers Triton uses.

    Debian's Python has a second scheme for local installations, which Triton does not use.
    """
    scheme = sysconfig.get_default_scheme()
    return "posix_prefix" if scheme == "posix_local" else scheme


def _describe_selection() -> str:
    """Return how CUDA_VISIBLE_DEVICES restricts the GPUs, as a part of a sentence; empty if it is not set."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if chosen is None else f" (CUDA_VISIBLE_DEVICES={chosen})"
