"""Which activations wait for backward on the host: whole layers, or what some modules save."""

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
"""Of `--offload-modules` (core_v0.19.0, `transformer_config.py`; 0.16 to 0.18 lack the last), in the
order in which forward comes to them."""

_SMALLEST = 2**20
"""Elements: Megatron's default, and Transformer Engine's for whole layers."""


@dataclass(frozen=True)
class Offload:
    """What goes there; the default is nothing."""

    layers: int = 0
    """Whole layers, from the first on (`--cpu-offloading-num-layers`)."""
    modules: tuple[str, ...] = ()
    """In `GROUPS`' order: tensors that are saved inside these
    (`--fine-grained-activation-offloading --offload-modules`)."""
    min_elements: int = _SMALLEST
    """Elements of the smallest tensor that goes (`--min-offloaded-tensor-size`)."""
    fraction: float = 1.0
    """Of the groups, one a module and layer, the first ones (`--activation-offload-fraction`)."""
    kept_bytes_per_stage: int = 0
    """Bytes that each pipeline rank keeps more than the one before it
    (`--delta-offload-bytes-across-pp-ranks`)."""

    def __bool__(self) -> bool:
        return bool(self.layers or self.modules)


NO_OFFLOAD = Offload()

_FINE, _MODULES = "--fine-grained-activation-offloading", "--offload-modules"
_LAYERS, _LEAST = "--cpu-offloading-num-layers", "--min-offloaded-tensor-size"
_FRACTION, _DELTA = "--activation-offload-fraction", "--delta-offload-bytes-across-pp-ranks"
_FUSED, _FUSER = "fused_group_mlp", "--use-transformer-engine-op-fuser"


def parse_offload(flags: Flags) -> Offload:
    """What the flags offload.

    Raises:
        ValueError: A module, a number or a combination that Megatron does not take.
    """
    found = Offload(**flags.fields("offload"))
    if found.layers < 0:
        raise ValueError(f"{_LAYERS} is {found.layers}; use 0 or more.")
    if not flags.has(_FINE):
        return found
    words = flags.names(_MODULES)
    if not words:
        raise ValueError(f"{_FINE} needs {_MODULES}; use some of {', '.join(OFFLOAD_MODULES)}.")
    refuse_unknown(_MODULES, words, OFFLOAD_MODULES)
    if _FUSED in words and not flags.has(_FUSER):
        raise ValueError(f"{_MODULES} {_FUSED} needs {_FUSER}; add it.")
    if min(found.min_elements, found.kept_bytes_per_stage) < 0 or not 0 <= found.fraction <= 1:
        raise ValueError(f"{_LEAST} and {_DELTA} are 0 or more, {_FRACTION} is 0 to 1.")
    return replace(found, modules=tuple(name for name in OFFLOAD_MODULES if name in words))


def offload_flags(offload: Offload) -> tuple[str, ...]:
    """Megatron's flags for it."""
    fine = format_flags({_FUSER: _FUSED in offload.modules, _FINE: bool(offload.modules)})
    return (*fine, *format_fields_as_flags(offload, "offload"))
