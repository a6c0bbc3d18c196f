"""Checks before GPUs train: enough of them, free, large enough; and a container that starts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from tools.launch.checks.devices import GIB, check_busy
from tools.launch.checks.docker import check_container
from tools.launch.checks.finding import refusals
from tools.launch.compose import Launch
from tools.launch.devices import all_gpus, gpu_use, visible_gpus
from tools.launch.toolchain import nvcc_problem
from tools.plan.constraints import divisors
from tools.plan.memory import memory_of_rank
from tools.spec.strategy import Batch


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
    yield from refusals(check_busy(used, list(machine.values())))


def gpu_memory_problems(launch: Launch) -> Iterator[str]:
    """Whether the smallest GPU holds the fullest rank; a sentence with the batch that would fit.

    Of a combination that Megatron refuses there is nothing to say, so the others are asked first.
    """
    gpu = min(visible_gpus()[: launch.local_devices], key=lambda gpu: gpu.memory_bytes)
    ranks = launch.local_devices if launch.spec.shares_gpu else 1
    room, batch = gpu.memory_bytes // ranks, launch.spec.batch
    needed = peak_bytes(launch, batch)
    if needed <= room:
        return
    smaller = reversed(divisors(batch.micro_batch_size, batch.micro_batch_size - 1))
    batches = (replace(batch, micro_batch_size=micro) for micro in smaller)
    fitting = next((batch for batch in batches if peak_bytes(launch, batch) <= room), None)
    fix = (
        f"MICRO_BATCH={fitting.micro_batch_size} fits, with the global batch of "
        f"{batch.global_batch_size} in more steps"
        if fitting
        else "not even a micro batch of 1 fits, so use more GPUs ('make plan') or a smaller model"
    )
    yield (
        f"{launch.model.name} with {launch.spec.name} and a micro batch of {batch.micro_batch_size} "
        f"needs about {needed / GIB:.0f} GiB a {'rank' if ranks > 1 else 'GPU'}, and GPU {gpu.index} "
        f"({gpu.name}) has {room / GIB:.0f}{' for each' if ranks > 1 else ''}; {fix}."
    )


def runtime_problems(launch: Launch) -> Iterator[str]:
    """Why the runtime cannot start, a sentence."""
    pair = launch.runtime.pair
    if pair is not None:
        yield from refusals(check_container(pair.name, pair.ngc_tag))
        return
    if problem := nvcc_problem(launch.entry):
        yield problem


def peak_bytes(launch: Launch, batch: Batch) -> int:
    """What the fullest rank of the run needs on a GPU with this batch.

    Raises:
        UnevenSplitError: A degree does not divide what it splits.
    """
    # Attention is fused: Transformer Engine's, or the kit's on SDPA.
    spec = replace(launch.spec, batch=batch, fused_attention=True)
    return max(memory_of_rank(spec, rank).total for rank in range(spec.parallelism.pipeline))
