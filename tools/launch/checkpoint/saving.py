"""How often a run is saved, and Megatron's flags for it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tools.records.run import CHECKPOINTS_FOLDER, MegatronEntry
from tools.spec.flags import flags_in
from tools.spec.run import DeviceKind
from tools.spec.strategy import Parallelism

KEEP = 2
"""Verified checkpoints that stay unless KEEP= says otherwise: the newest, and one to fall back on."""

_BYTES_A_PARAMETER = {"fp32": 12, "fp16": 14, "bf16": 14}
"""Weights, fp32 main weights beside 16-bit ones, and Adam's two moments."""


@dataclass(frozen=True)
class Saving:
    """What SAVE_EVERY=, KEEP= and ASYNC_SAVE= ask for."""

    every: int
    """Iterations."""
    keep: int = KEEP
    asynchronous: bool = False
    """Written by a process of its own, while training continues."""


def saving_flags(saving: Saving, parallelism: Parallelism, entry: MegatronEntry) -> tuple[str, ...]:
    """Megatron's flags but for the folder: its distributed format, which loads into any layout."""
    flags = ["--save-interval", str(saving.every), "--ckpt-format", "torch_dist"]
    sharding = parallelism.sharding
    if sharding and not sharding.wraps_modules:
        # Without it the optimizer's shards go back only into the layout that saved them.
        flags.append("--dist-ckpt-optim-fully-reshardable")
    if saving.asynchronous:
        # Megatron's own writer; its default needs a package that its wheel does not bring.
        flags += ["--async-save", "--use-persistent-ckpt-worker", "--async-strategy", "mcore"]
    return flags_in(flags, entry.megatron_version)


def saving_folder(run_folder: str) -> str:
    """Where a run's checkpoints are."""
    return f"{run_folder}/{CHECKPOINTS_FOLDER}"


def saving_problems(
    saving: Saving, strategy: str, parallelism: Parallelism, backend: str, device: DeviceKind
) -> Iterator[str]:
    """Why a run cannot be saved so that it can be resumed."""
    if backend != "megatron":
        yield (
            f"BACKEND={backend} saves no checkpoints; leave SAVE_EVERY= out, or use BACKEND=megatron."
        )
    if parallelism.sharding.wraps_modules:
        yield (
            f"{strategy} cannot be resumed yet: its {parallelism.sharding} shards are saved in a "
            "format of their own; leave SAVE_EVERY= out, or use zero1."
        )
    if saving.asynchronous and device is DeviceKind.CPU:
        # Megatron's persistent worker divides its rank by torch.cuda.device_count().
        yield (
            "ASYNC_SAVE=1 needs GPUs: Megatron's writer process chooses one by number and fails "
            "without any; leave it out on CPU ranks."
        )


def checkpoint_bytes(parameters: int, dtype: str) -> int:
    """Size of one checkpoint on the disk, about."""
    return parameters * _BYTES_A_PARAMETER.get(dtype, max(_BYTES_A_PARAMETER.values()))
