"""Columns in which a published measurement states facts about its trainer.

`sources.yaml` has these facts for sources that the kit knows. A row that states its facts in columns needs no known
source, and its prediction does not depend on the name of the source.
"""

from __future__ import annotations

from collections.abc import Callable

Fact = bool | int | float | str | tuple[int, ...]

_YES, _NO = ("1", "true", "yes"), ("0", "false", "no")


def _parse_switch(text: str) -> bool:
    """Parse `yes`, `true` or `1` as True, and `no`, `false` or `0` as False."""
    if text.lower() not in (*_YES, *_NO):
        raise ValueError(text)
    return text.lower() in _YES


def _parse_pair(text: str) -> tuple[int, ...]:
    """Parse two whole numbers, such as `8 4`."""
    numbers = tuple(map(int, text.split()))
    if len(numbers) != 2:
        raise ValueError(text)
    return numbers


_SWITCHES = (
    *("sequence_parallel", "fused_attention", "overlap", "overlap_tensor", "graphs", "eager"),
    *("eager_activation", "scatter_gather", "deduplicated", "fused_loss", "captured"),
    *("overlap_experts", "fused_experts", "broadcast_parameters", "half_gradients"),
    *("quantised_weights", "aware", "half_moments", "clamps_activations", "unfused_rotary"),
    *("blocking", "summed_profiles", "says_virtual"),
)
_WHOLE_NUMBERS = ("mtp_layers", "offload_layers", "expert_tensor", "per_node", "document_length")
_NUMBERS = ("dropout", "capacity", "network_gb_per_second", "release")
_TEXTS = ("sharding", "loss_impl", "fp8", "unstated_bits", "dispatcher", "offload_modules", "peft")

FACT_COLUMNS: dict[str, Callable[[str], Fact]] = {
    **dict.fromkeys(_SWITCHES, _parse_switch),
    **dict.fromkeys(_WHOLE_NUMBERS, int),
    **dict.fromkeys(_NUMBERS, float),
    **dict.fromkeys(_TEXTS, str),
    "groups": _parse_pair,
}
"""Parser of a fact's cell, by the name of the column. The head of `sources.yaml` says what each fact means.
`release` is the release of NVIDIA's container, such as 25.09."""

NO_SHARDING = "none"
"""Cell of the column `sharding` for no sharding. An empty cell states nothing."""


def parse_fact(name: str, text: str) -> Fact:
    """Return the fact that a cell of the column `name` states.

    Raises:
        ValueError: The cell is no value of this fact.
    """
    if name == "sharding" and text == NO_SHARDING:
        return ""
    fact = FACT_COLUMNS[name](text)
    if not isinstance(fact, str | tuple) and fact < 0:
        raise ValueError(text)
    return fact


def describe_fact_values(name: str) -> str:
    """Return the possible values of a fact as a phrase, for errors."""
    if name in _SWITCHES:
        return "yes or no"
    if name == "groups":
        return "two whole numbers such as 8 4"
    return "a whole number" if name in _WHOLE_NUMBERS else "a number of at least 0"
