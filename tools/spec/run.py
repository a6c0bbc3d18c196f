"""What a run is: the words that launch, records, plan and report share."""

from __future__ import annotations

from enum import StrEnum


class Backend(StrEnum):
    """What trains; `bare` is forward and backward of the native model alone, to measure against."""

    MEGATRON = "megatron"
    NATIVE = "native"
    DEEPSPEED = "deepspeed"
    BARE = "bare"


class DeviceKind(StrEnum):
    """What the ranks run on; also the suffix of a target's device count (`2cpu`)."""

    CPU = "cpu"
    GPU = "gpu"


class Recompute(StrEnum):
    """Which activations are computed again in backward instead of kept."""

    NONE = "none"
    SELECTIVE = "selective"
    """The attention scores alone; with fused attention it is what happens anyway."""
    FULL = "full"
    """Every layer keeps its input only (`--recompute-method uniform --recompute-num-layers 1`)."""


class Transport(StrEnum):
    """The library that moves the bytes: it decides what an operation puts on the wire."""

    NCCL = "nccl"
    GLOO = "gloo"
