"""Activation recomputation: the modules or layers that backward recomputes instead of storing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from parakit.config.flags import Flags, format_fields_as_flags, refuse_unknown

_SCORES = "core_attn"
RECOMPUTED_MODULES = frozenset(
    {
        _SCORES,
        "gdn_norm_out",
        "layernorm",
        "mla_up_proj",
        "mlp",
        "moe",
        "moe_act",
        "shared_experts",
    }
)
"""Modules of `--recompute-modules` (core_v0.19.0, `transformer_config.py`). `layernorm`,
`mla_up_proj`, `moe_act` and `gdn_norm_out` drop their output, which the next module would store;
the other modules drop the tensors inside them.
"""
_METHODS = ("uniform", "block")


@dataclass(frozen=True)
class Recompute:
    """Choice of what backward recomputes: some modules of each layer, or full layers.

    The default recomputes nothing.
    """

    modules: frozenset[str] = frozenset()
    """Recomputed modules of `RECOMPUTED_MODULES` (granularity `selective`)."""
    method: str = ""
    """Method for full layers (granularity `full`). `uniform` stores one input per group of `layers`
    layers; `block` recomputes the first `layers` layers of each virtual stage. Empty for other
    granularities.
    """
    layers: int = 0
    """Number of layers that `method` refers to."""

    NONE: ClassVar[Recompute]
    SELECTIVE: ClassVar[Recompute]
    """Recomputation of `core_attn` alone: scores, softmax and their product with V."""
    FULL: ClassVar[Recompute]
    """Recomputation of every layer; a layer stores only its input."""

    @classmethod
    def parse(cls, text: str) -> Recompute:
        """Parse `none`, `selective`, `full`, `full uniform 2`, `full block 1`, or modules such as
        `mlp layernorm`.

        Raises:
            ValueError: The text has none of these forms.
        """
        parts = text.split()
        known = _NAMED.get(" ".join(parts))
        if known is not None:
            return known
        if parts and RECOMPUTED_MODULES.issuperset(parts):
            return cls(frozenset(parts))
        if len(parts) == 3 and parts[0] == "full":
            _, method, layers = parts
            if method in _METHODS and layers.isdecimal() and int(layers) > 0:
                return cls(method=method, layers=int(layers))
        raise ValueError(f"'{text}' is no way to recompute")

    def __str__(self) -> str:
        for name, known in _NAMED.items():
            if known == self:
                return name
        if self.method:
            return f"full {self.method} {self.layers}"
        return " ".join(sorted(self.modules))

    @property
    def granularity(self) -> str:
        """Value of `--recompute-granularity`; empty if nothing is recomputed."""
        if self.method:
            return "full"
        return "selective" if self.modules else ""

    @property
    def is_full(self) -> bool:
        """True if full layers are recomputed: all layers, or the first of each virtual stage."""
        return bool(self.method)

    @property
    def is_block_method(self) -> bool:
        """True if only the first layers of each virtual stage are recomputed (method `block`)."""
        return self.method == "block"

    def recomputes(self, *modules: str) -> bool:
        """Return True if backward recomputes the tensors of any of these modules.

        Without modules, the result is True only for full recomputation.
        """
        return bool(self.method) or not self.modules.isdisjoint(modules)

    def layers_per_checkpoint(self, layers: int) -> tuple[int, ...]:
        """Return the number of layers in each checkpoint of a virtual stage with `layers` layers, in
        order.

        Backward recomputes the layers of one checkpoint together. Layers after the last checkpoint store their
        activations. Without full recomputation there is no checkpoint, and the result is empty. Megatron groups
        layers in the same way (`checkpointed_forward` in `megatron/core/recompute.py`; before 0.19 in
        `transformer_block.py`).
        """
        if not self.method:
            return ()
        if self.is_block_method:
            return (1,) * min(self.layers, layers)
        num_full_groups, remaining_layers = divmod(layers, self.layers)
        full_groups = (self.layers,) * num_full_groups
        return (*full_groups, remaining_layers) if remaining_layers else full_groups


Recompute.NONE = Recompute()
Recompute.SELECTIVE = Recompute(frozenset({_SCORES}))
Recompute.FULL = Recompute(method="uniform", layers=1)
_NAMED = {"none": Recompute.NONE, "selective": Recompute.SELECTIVE, "full": Recompute.FULL}

_GRANULARITY, _MODULES = "--recompute-granularity", "--recompute-modules"
_METHOD, _LAYERS = "--recompute-method", "--recompute-num-layers"
_RECOMPUTE_EXPERTS = "--moe-layer-recompute"


def recompute_flags(recompute: Recompute) -> tuple[str, ...]:
    """Return Megatron's flags for this recomputation; empty for none."""
    if recompute == Recompute.NONE:
        return ()
    is_selective = recompute == Recompute.SELECTIVE
    details = () if is_selective else format_fields_as_flags(recompute, "recompute")
    return (_GRANULARITY, recompute.granularity, *details)


def parse_recompute(flags: Flags) -> Recompute:
    """Return the recomputation that the flags select.

    Without such flags the result is `Recompute.NONE`. Selective recomputation without named modules recomputes
    the attention scores.

    Raises:
        ValueError: Megatron does not have a module or the method, or the number of layers is below 1.
    """
    granularity = flags.text(_GRANULARITY)
    if granularity == "full":
        method, layers = flags.text(_METHOD, "uniform"), flags.integer(_LAYERS, 1)
        if method not in _METHODS or layers < 1:
            raise ValueError(
                f"Megatron does not accept {_METHOD} {method} {_LAYERS} {layers}; use uniform or block, and "
                "1 layer or more."
            )
        return Recompute(method=method, layers=layers)
    recomputes_experts = flags.has(_RECOMPUTE_EXPERTS)
    is_selective = granularity == "selective" or flags.has("--recompute-activations")
    if not is_selective and not recomputes_experts:
        return Recompute.NONE
    modules = flags.names(_MODULES) if flags.has(_MODULES) else [_SCORES]
    refuse_unknown(_MODULES, modules, sorted(RECOMPUTED_MODULES))
    if recomputes_experts:
        modules = [*modules, "moe"]
    return Recompute(frozenset(modules))
