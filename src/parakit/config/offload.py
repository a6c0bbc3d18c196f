"""Activations that are stored on the host until backward: full layers, or tensors of some modules."""

from __future__ import annotations

from dataclasses import dataclass, replace

from parakit.config.flags import Flags, format_fields_as_flags, format_flags, refuse_unknown

OFFLOAD_MODULES = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
    "fused_group_mlp",
)
"""Modules of `--offload-modules` in the order of the forward pass (core_v0.19.0,
`transformer_config.py`; 0.16 to 0.18 lack the last).
"""

_SMALLEST = 2**20
"""Default of Megatron, and of Transformer Engine for full layers, in elements."""


@dataclass(frozen=True)
class Offload:
    """Choice of the activations that are offloaded to the host. The default offloads nothing."""

    layers: int = 0
    """Number of full layers that are offloaded, from the first layer on
    (`--cpu-offloading-num-layers`).
    """
    modules: tuple[str, ...] = ()
    """Modules whose stored tensors are offloaded, in the order of `OFFLOAD_MODULES`
    (`--fine-grained-activation-offloading --offload-modules`).
    """
    min_elements: int = _SMALLEST
    """Elements of the smallest tensor that is offloaded (`--min-offloaded-tensor-size`)."""
    fraction: float = 1.0
    """Fraction of the groups that is offloaded, first groups first; a group is one module of one
    layer (`--activation-offload-fraction`).
    """
    kept_bytes_per_stage: int = 0
    """Bytes that each pipeline rank keeps on the device beyond the rank before it
    (`--delta-offload-bytes-across-pp-ranks`).
    """

    def __bool__(self) -> bool:
        return bool(self.layers or self.modules)


NO_OFFLOAD = Offload()
"""The setting that offloads nothing."""

_FINE, _MODULES = "--fine-grained-activation-offloading", "--offload-modules"
_LAYERS, _LEAST = "--cpu-offloading-num-layers", "--min-offloaded-tensor-size"
_FRACTION, _DELTA = "--activation-offload-fraction", "--delta-offload-bytes-across-pp-ranks"
_FUSED, _FUSER = "fused_group_mlp", "--use-transformer-engine-op-fuser"


def parse_offload(flags: Flags) -> Offload:
    """Return the offloading of activations that the flags choose.

    Raises:
        ValueError: Megatron does not accept a module, a number or a combination of flags.
    """
    offload = Offload(**flags.fields("offload"))
    if offload.layers < 0:
        raise ValueError(f"{_LAYERS} is {offload.layers}; use 0 or more.")
    if not flags.has(_FINE):
        return offload
    modules = flags.names(_MODULES)
    if not modules:
        raise ValueError(f"{_FINE} needs {_MODULES}; use some of {', '.join(OFFLOAD_MODULES)}.")
    refuse_unknown(_MODULES, modules, OFFLOAD_MODULES)
    if _FUSED in modules and not flags.has(_FUSER):
        raise ValueError(f"{_MODULES} {_FUSED} needs {_FUSER}; add it.")
    has_negative_size = min(offload.min_elements, offload.kept_bytes_per_stage) < 0
    if has_negative_size or not 0 <= offload.fraction <= 1:
        raise ValueError(
            f"The flags for offloading are out of range; use 0 or more for {_LEAST} and {_DELTA}, and 0 to "
            f"1 for {_FRACTION}."
        )
    return replace(offload, modules=tuple(name for name in OFFLOAD_MODULES if name in modules))


def offload_flags(offload: Offload) -> tuple[str, ...]:
    """Return Megatron's flags for this offload."""
    fine = format_flags({_FUSER: _FUSED in offload.modules, _FINE: bool(offload.modules)})
    return (*fine, *format_fields_as_flags(offload, "offload"))
