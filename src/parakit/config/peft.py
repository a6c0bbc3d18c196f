"""Parameter-efficient fine-tuning with LoRA: which linear layers have adapters, and how the frozen weights are stored.

LoRA adds two small matrices to a linear layer, A with rank × inputs elements and B with outputs × rank elements
(arXiv:2106.09685). Only these adapters are trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

ROW_PARALLEL_LINEARS = frozenset({"linear_proj", "linear_fc2"})
"""Linear layers whose input columns tensor parallelism splits. It splits the output columns of all others."""
_USUAL_TARGETS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
_LATENT_TARGETS = (
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"),
    *("linear_kv_down_proj", "linear_kv_up_proj"),
)
LORA_TARGETS = (*_USUAL_TARGETS, *_LATENT_TARGETS)
"""Names of linear layers that can have an adapter, as Megatron-Core has them. The last five are of latent attention."""


class FrozenWeights(StrEnum):
    """Type in which the frozen weights of linear layers are stored."""

    BF16 = "bf16"
    """The run's own half-precision type."""
    NF4 = "nf4"
    """NormalFloat with 4 bits and doubly quantised scales, as QLoRA stores it (arXiv:2305.14314)."""


NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
"""Bits per weight in NF4: the weight, a scale of 8 bits per block of 64 weights, and a scale of 32 bits per 256 of
these scales (arXiv:2305.14314 section 3)."""


@dataclass(frozen=True)
class Lora:
    """LoRA fine-tuning of a run.

    The defaults are those of Megatron-Bridge (`megatron/bridge/peft/lora.py: LoRA.dim` and `target_modules`).
    """

    rank: int = 32
    targets: tuple[str, ...] = _USUAL_TARGETS
    """Names of `LORA_TARGETS`. A name that the model lacks stands for no layer."""
    weights: FrozenWeights = FrozenWeights.BF16

    @property
    def has_nf4_weights(self) -> bool:
        """True if the frozen weights of linear layers are stored in NF4."""
        return self.weights is FrozenWeights.NF4

    def __str__(self) -> str:
        return f"lora rank={self.rank} targets={','.join(self.targets)} weights={self.weights}"


def parse_peft(text: str) -> Lora | None:
    """Parse `lora`, or `lora rank=16 targets=linear_qkv,linear_proj weights=nf4` with any of these words.

    The text `none` gives None: all weights are trained.

    Raises:
        ValueError: The text has none of these forms. The message is a sentence that says which forms there are.
    """
    method, *assignments = text.split() or [""]
    if method == "none" and not assignments:
        return None
    if method != "lora":
        raise ValueError(f"There is no fine-tuning '{method}'; use lora or none.")
    values: dict[str, str] = {}
    for assignment in assignments:
        name, _, value = assignment.partition("=")
        if name not in ("rank", "targets", "weights") or not value or name in values:
            raise ValueError(
                f"'{assignment}' says nothing of LoRA; use rank=16, targets=linear_qkv,linear_proj or "
                "weights=nf4, each once."
            )
        values[name] = value
    usual = Lora()
    return Lora(
        rank=_parse_rank(values["rank"]) if "rank" in values else usual.rank,
        targets=_parse_targets(values["targets"]) if "targets" in values else usual.targets,
        weights=_parse_weights(values["weights"]) if "weights" in values else usual.weights,
    )


def _parse_rank(text: str) -> int:
    """Return the rank that the text states.

    Raises:
        ValueError: The text is no whole number above 0.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"LoRA's rank {text} is not a whole number above 0.")
    return int(text)


def _parse_targets(text: str) -> tuple[str, ...]:
    """Return the linear layers that the text names, in the order of `LORA_TARGETS`.

    Raises:
        ValueError: There is no such linear layer.
    """
    names = text.split(",")
    for name in names:
        if name not in LORA_TARGETS:
            raise ValueError(f"LoRA has no target '{name}'; use some of {', '.join(LORA_TARGETS)}.")
    return tuple(name for name in LORA_TARGETS if name in names)


def _parse_weights(text: str) -> FrozenWeights:
    """Return the type of the frozen weights that the text names.

    Raises:
        ValueError: There is no such type.
    """
    if text not in set(FrozenWeights):
        raise ValueError(f"Frozen weights cannot be in '{text}'; use {' or '.join(FrozenWeights)}.")
    return FrozenWeights(text)
