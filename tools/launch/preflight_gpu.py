"""What must be so before GPUs train: enough of them, free, large enough; and a container that starts."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tools.launch.checks.devices import GIB, check_busy
from tools.launch.checks.docker import check_container
from tools.launch.checks.finding import PASS
from tools.launch.compose import Launch
from tools.launch.devices import Gpu, all_gpus, gpu_use, visible_gpus
from tools.plan.legality import divisors
from tools.plan.memory import memory_of_rank
from tools.spec.run import spec_of_model
from tools.spec.strategy import Batch

CUDA_FOLDER = Path("/usr/local/cuda")
"""Where torch looks for the toolkit last."""


def gpu_problems(launch: Launch) -> Iterator[str]:
    """Why the GPUs here cannot do it, a sentence each."""
    gpus = visible_gpus()
    if len(gpus) < (1 if launch.spec.shares_gpu else launch.local_devices):
        chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
        tiny = "moe-tiny" if launch.model.shape.experts else "gpt2-tiny"
        shown = "" if chosen is None else f" (CUDA_VISIBLE_DEVICES={chosen})"
        yield (
            f"{launch.local_devices} GPU(s) are wanted and {len(gpus)} found{shown}; run "
            f"'make train-{launch.spec.name}-{tiny}-{launch.devices}cpu' to see the strategy on CPU "
            "ranks, or 'make plan' for what it would need."
        )
        return
    machine = {gpu.index: gpu_use(gpu) for gpu in all_gpus()}
    used = [machine[gpu.index] for gpu in gpus[: launch.local_devices]]
    yield from (finding.refusal for finding in check_busy(used, list(machine.values())))


def gpu_memory_problems(launch: Launch) -> Iterator[str]:
    """Whether the smallest GPU holds the fullest rank; a sentence with the batch that would fit.

    Of a combination that Megatron refuses there is nothing to say, so the others are asked first.
    """
    smallest = min(visible_gpus()[: launch.local_devices], key=lambda gpu: gpu.memory_bytes)
    yield from _too_small(launch, smallest)


def runtime_problems(launch: Launch) -> Iterator[str]:
    """Why the runtime cannot start, a sentence."""
    pair = launch.runtime.pair
    if pair is not None:
        findings = check_container(pair.name, pair.ngc_tag)
        yield from (finding.refusal for finding in findings if finding.status != PASS)
        return
    if _lacks_compiler(Path(launch.entry.path).parent):
        yield (
            f"Megatron {launch.entry.megatron_version} asks nvcc for its version at start-up, and there "
            "is none; install the CUDA toolkit and set CUDA_HOME, or unset MEGATRON_LM for the wheel."
        )


def peak_bytes(launch: Launch, batch: Batch) -> int:
    """What the fullest rank needs on a GPU.

    Without Transformer Engine Megatron's attention keeps its scores; the kit's own for context
    parallelism is fused.

    Raises:
        UnevenSplitError: A degree does not divide what it splits.
    """
    parallelism = launch.spec.parallelism
    configuration = replace(
        spec_of_model(launch.model, parallelism, batch),
        dtype=launch.spec.dtype,
        fused_attention=True,  # Transformer Engine's, or the kit's on SDPA
    )
    return max(memory_of_rank(configuration, rank).total for rank in range(parallelism.pipeline))


def _too_small(launch: Launch, gpu: Gpu) -> Iterator[str]:
    ranks = launch.local_devices if launch.spec.shares_gpu else 1
    room = gpu.memory_bytes // ranks
    needed = peak_bytes(launch, launch.spec.batch)
    if needed <= room:
        return
    batch = launch.spec.batch
    smaller = reversed(divisors(batch.micro_batch_size, batch.micro_batch_size - 1))
    fitting = next(
        (
            micro
            for micro in smaller
            if peak_bytes(launch, replace(batch, micro_batch_size=micro)) <= room
        ),
        None,
    )
    way = (
        f"MICRO_BATCH={fitting} fits, with the global batch of {batch.global_batch_size} in more steps"
        if fitting
        else "not even a micro batch of 1 fits, so use more GPUs ('make plan') or a smaller model"
    )
    yield (
        f"{launch.model.name} with {launch.spec.name} and a micro batch of {batch.micro_batch_size} "
        f"needs about {needed / GIB:.0f} GiB a {'rank' if ranks > 1 else 'GPU'}, and GPU {gpu.index} "
        f"({gpu.name}) has {room / GIB:.0f}{' for each' if ranks > 1 else ''}; {way}."
    )


def _lacks_compiler(checkout: Path) -> bool:
    """Whether this is a checkout whose fused kernels call nvcc, and torch would find none."""
    if not (checkout / "megatron/legacy/fused_kernels/__init__.py").is_file():
        return False
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return not (named or shutil.which("nvcc") or (CUDA_FOLDER / "bin/nvcc").exists())
