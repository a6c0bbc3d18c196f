"""What of a layer is computed again in backward instead of kept."""

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
"""Of `--recompute-modules` (core_v0.19.0, `transformer_config.py`). `layernorm`, `mla_up_proj`,
`moe_act` and `gdn_norm_out` drop the output that its reader would keep, the others what is inside."""
_METHODS = ("uniform", "block")


@dataclass(frozen=True)
class Recompute:
    """Modules of each layer, or whole layers; the default is nothing."""

    modules: frozenset[str] = frozenset()
    """Of `RECOMPUTED_MODULES`, with granularity `selective`."""
    method: str = ""
    """Of whole layers, with granularity `full`: `uniform` keeps the input of each so many, `block`
    computes the first so many of each virtual stage again and keeps the others."""
    layers: int = 0
    """How many those are."""

    NONE: ClassVar[Recompute]
    SELECTIVE: ClassVar[Recompute]
    """`core_attn` alone: scores, softmax and their product with V."""
    FULL: ClassVar[Recompute]
    """Every layer keeps its input only."""

    @classmethod
    def parse(cls, text: str) -> Recompute:
        """`none`, `selective`, `full`, `full uniform 2`, `full block 1` or modules, `mlp layernorm`.

        Raises:
            ValueError: It is none of these.
        """
        words = text.split()
        if named := _NAMED.get(" ".join(words)):
            return named
        if words[:1] == ["full"]:
            if len(words) == 3 and words[1] in _METHODS and words[2].isdecimal() and int(words[2]):
                return cls(method=words[1], layers=int(words[2]))
        elif words and RECOMPUTED_MODULES.issuperset(words):
            return cls(frozenset(words))
        raise ValueError(f"'{text}' is no way to recompute")

    def __str__(self) -> str:
        own = f"full {self.method} {self.layers}" if self.method else " ".join(sorted(self.modules))
        return next((name for name, known in _NAMED.items() if known == self), own)

    @property
    def granularity(self) -> str:
        """As `--recompute-granularity` names it; empty where nothing is recomputed."""
        return "full" if self.method else "selective" if self.modules else ""

    @property
    def is_full(self) -> bool:
        """Whether layers are computed again whole: all, or the first of each virtual stage."""
        return bool(self.method)

    @property
    def is_block_method(self) -> bool:
        """Whether these are the first of each virtual stage."""
        return self.method == "block"

    def recomputes(self, *modules: str) -> bool:
        """Whether backward repeats what is in any of these modules; what is in none, with its layer."""
        return bool(self.method) or not self.modules.isdisjoint(modules)

    def layers_per_checkpoint(self, layers: int) -> tuple[int, ...]:
        """Layers of each checkpoint in a virtual stage of so many, in order; those behind are kept.

        As `checkpointed_forward` lays them (`megatron/core/recompute.py`; before 0.19
        `transformer_block.py`).
        """
        if not self.method:
            return ()
        if self.is_block_method:
            return (1,) * min(self.layers, layers)
        whole, left = divmod(layers, self.layers)
        return (self.layers,) * whole + (left,) * (left > 0)


Recompute.NONE = Recompute()
Recompute.SELECTIVE = Recompute(frozenset({_SCORES}))
Recompute.FULL = Recompute(method="uniform", layers=1)
_NAMED = {"none": Recompute.NONE, "selective": Recompute.SELECTIVE, "full": Recompute.FULL}

_GRANULARITY, _MODULES = "--recompute-granularity", "--recompute-modules"
_METHOD, _LAYERS = "--recompute-method", "--recompute-num-layers"
_EXPERTS_TOO = "--moe-layer-recompute"


def recompute_flags(recompute: Recompute) -> tuple[str, ...]:
    """Megatron's flags for a way to recompute."""
    if recompute == Recompute.NONE:
        return ()
    alone = recompute == Recompute.SELECTIVE
    own = () if alone else format_fields_as_flags(recompute, "recompute")
    return (_GRANULARITY, recompute.granularity, *own)


def parse_recompute(flags: Flags) -> Recompute:
    """How the flags recompute.

    Raises:
        ValueError: A module or a method that Megatron does not have.
    """
    granularity = flags.text(_GRANULARITY)
    if granularity == "full":
        method, layers = flags.text(_METHOD, "uniform"), flags.integer(_LAYERS, 1)
        if method not in _METHODS or layers < 1:
            raise ValueError(
                f"{_METHOD} {method} {_LAYERS} {layers} is not one of Megatron's; use uniform or block, "
                "and 1 layer or more."
            )
        return Recompute(method=method, layers=layers)
    experts = flags.has(_EXPERTS_TOO)
    if not (granularity == "selective" or flags.has("--recompute-activations") or experts):
        return Recompute.NONE
    named = flags.names(_MODULES) if flags.has(_MODULES) else [_SCORES]
    refuse_unknown(_MODULES, named, sorted(RECOMPUTED_MODULES))
    return Recompute(frozenset(named + ["moe"] * experts))
