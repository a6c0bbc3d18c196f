"""How a trainer runs what a spec says: switches that change an iteration's time and not its result."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Trainer(StrEnum):
    """The program that trains: what it fuses and how fast its host part is."""

    MEGATRON = "megatron"
    FSDP = "fsdp"
    """torch's fully sharded data parallelism under another trainer, blocks compiled or fused."""


class Quantised(StrEnum):
    """Products of linear layers in fewer bits (`--fp8-recipe`, `--fp4-format`); attention, norms, the
    output layer and the optimizer stay as they are."""

    NONE = ""
    TENSORWISE = "tensorwise"
    """One scale a tensor, delayed or current."""
    BLOCKWISE = "blockwise"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


@dataclass(frozen=True)
class Execution:
    """The defaults are Megatron's without further flags, as the published six ran."""

    trainer: Trainer = Trainer.MEGATRON
    overlap_gradients: bool = False
    """`--overlap-grad-reduce`: gradients are reduced beside backward."""
    overlap_parameters: bool = False
    """`--overlap-param-gather`: updated weights are gathered beside the next forward."""
    overlap_tensor: bool = False
    """`--tp-comm-overlap`: TP's calls run beside the products that they feed, through user buffers."""
    graphs: bool = False
    """Kernels are launched as CUDA graphs: the host costs nothing."""
    quantised: Quantised = Quantised.NONE
    frozen: bool = False
    """The weights are not trained (LoRA): backward computes no weight gradients, nothing is reduced."""
    deterministic: bool = False
    """`--deterministic-mode`."""
