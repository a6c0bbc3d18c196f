"""OPTIMIZER=adamw or muon, on both sides: Megatron's own, and PyTorch's in the native backend."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from enum import StrEnum
from typing import TYPE_CHECKING

from tools.launch.megatron_entry import release
from tools.spec.flags import Flags
from tools.spec.strategy import Sharding

if TYPE_CHECKING:
    from tools.launch.compose import Launch

FIRST_RELEASE = (0, 17)
"""Of Megatron with Muon in the published coefficients, which it calls `simple`."""

PACKAGE = "emerging_optimizers"


class OptimizerName(StrEnum):
    """What updates the weights; Muon leaves embeddings and norms to AdamW."""

    ADAMW = "adamw"
    MUON = "muon"


def optimizer_flags(name: OptimizerName, megatron_version: str) -> tuple[str, ...]:
    """Muon as published with Blueberry: rate 0.01, and 0.001 for the AdamW beside it.

    Megatron calls its AdamW `adam`, which is its default.
    """
    if name is OptimizerName.ADAMW:
        return ()
    renamed = release(megatron_version) >= (0, 18)
    return (
        *("--optimizer", "muon", "--muon-momentum", "0.95"),
        "--muon-nesterov" if renamed else "--muon-use-nesterov",
        *("--muon-scale-mode", "shape_scaling", "--muon-coefficient-type", "simple"),
        *("--muon-num-ns-steps", "5", "--muon-no-split-qkv"),
        *("--lr", "0.01", "--min-lr", "0.001"),
        *("--decoupled-lr", "0.001", "--decoupled-min-lr", "0.0001"),
    )


def optimizer_problems(launch: Launch) -> Iterator[str]:
    """Why the optimizer cannot be had here, each in one sentence."""
    if Flags(launch.flags).text("--optimizer") != "muon":
        return
    sharding = launch.spec.parallelism.sharding
    if sharding is not Sharding.NONE:
        yield f"Muon needs whole matrices, which {sharding} shards; use dp2, or OPTIMIZER=adamw."
    if launch.spec.backend in ("deepspeed", "bare"):
        yield f"BACKEND={launch.spec.backend} has AdamW alone; use BACKEND=native for Muon."
    if launch.spec.backend != "megatron":
        return
    if release(launch.entry.megatron_version) < FIRST_RELEASE:
        yield (
            f"Megatron {launch.entry.megatron_version} has no Muon with the published coefficients, "
            "0.17 has; use BACKEND=native, or OPTIMIZER=adamw."
        )
    elif launch.runtime.container is None and importlib.util.find_spec(PACKAGE) is None:
        yield (
            f"Megatron's Muon needs the package {PACKAGE}, which is in no package index: install it "
            "from its sources (NVIDIA-NeMo/Emerging-Optimizers), or use BACKEND=native."
        )
