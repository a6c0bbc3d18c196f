"""Megatron's flags as fields of Megatron-Bridge's `ConfigContainer`: kinds of values, and its defaults.

The writer of recipes, their reader and the comparison of both follow from `ROWS`, those lines of the
flag table (`src/parakit/config/flags.csv`) that name fields, and from what several flags or fields say together.
Bridge's sections with their classes and defaults are in `defaults.yaml`, as its 0.3.1 writes them. Tests
compare all with the packages.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parakit.config.files import read_yaml
from parakit.config.flag_table import FLAGS, KnownFlag
from parakit.config.flags import Flags

BRIDGE_VERSION = "0.3.1"
CONTAINER = "ConfigContainer"
_ATTENTION = "megatron.core.transformer.enums.AttnBackend."
_DEFAULTS = read_yaml(Path(__file__).with_name("defaults.yaml"))


class RecipeError(ValueError):
    """A run that no recipe can express, or a recipe that expresses no run; one sentence."""


@dataclass(frozen=True)
class Symbol:
    """A name of a package that stands as a value: `torch.bfloat16`, a function, an enum's member."""

    path: str


type Value = bool | int | float | str | list[Value] | Symbol | None
type Fields = Mapping[str, Value]
"""By `section.field`."""


def format_value(value: Value) -> str:
    """A value as Python writes it."""
    if isinstance(value, Symbol):
        return value.path
    if isinstance(value, list):
        return f"[{', '.join(format_value(each) for each in value)}]"
    return repr(value)


def parse_container(document: object) -> dict[str, Value]:
    """The fields of a container as Bridge's `to_yaml` writes it, by `section.field`.

    Raises:
        ValueError: It is no such document.
    """
    if not isinstance(document, Mapping) or not str(document.get("_target_")).endswith(CONTAINER):
        raise ValueError(f"it has no '_target_: …{CONTAINER}'")
    fields: dict[str, Value] = {}
    for section, content in document.items():
        if section not in _DEFAULTS:
            near = difflib.get_close_matches(str(section), _DEFAULTS, n=1)
            hint = f", did you mean {near[0]}" if near else f"; it has {', '.join(_DEFAULTS)}"
            raise ValueError(f"a container has no section '{section}'{hint}")
        if isinstance(content, Mapping):
            fields |= {f"{section}.{name}": _value(each) for name, each in content.items()}
        elif section != "_target_":
            fields[section] = _value(content)
    return fields


def _value(content: object) -> Value:
    if isinstance(content, list):
        return [_value(each) for each in content]
    if not isinstance(content, Mapping):
        return content if isinstance(content, (bool, int, float, str)) else None
    path = str(content.get("_target_", ""))
    members = _MEMBERS.get(path)
    if members and content.get("_args_"):
        return Symbol(f"{path}.{members.get(content['_args_'][0], '?')}")
    return Symbol(_SAME.get(path, path)) if path else str(dict(content)) if content else None


_MEMBERS = {_ATTENTION.rstrip("."): {1: "flash", 2: "fused", 3: "unfused", 4: "local", 5: "auto"}}
"""Enumerations, whose members Bridge writes by number."""
_SAME = {"torch._C._nn.gelu": "torch.nn.functional.gelu"}
"""Where Bridge writes another name than the public one."""

BRIDGE_DEFAULTS = parse_container(_DEFAULTS)
"""Bridge's default of every field, by `section.field`; a field that has none is not there."""


@dataclass(frozen=True)
class ValueKind:
    """How a flag's words and a field's value are one another."""

    wanted: str
    """What a value has to be, as a refusal names it."""
    read: Callable[[Sequence[str]], Value]
    """The value of the words behind the flag; raises ValueError."""
    words: Callable[[Value], tuple[str, ...] | None]
    """The words behind the flag; None where leaving it out says the value. Raises TypeError for a value
    of another kind."""


def _switch(present: bool) -> ValueKind:
    def words(value: Value) -> tuple[str, ...] | None:
        if not isinstance(value, bool):
            raise TypeError
        return () if value is present else None

    return ValueKind("True or False", lambda _: present, words)


def _one(
    wanted: str,
    convert: Callable[[str], Value],
    fits: Callable[[Any], bool],
    text: Callable[[Any], str] = str,
) -> ValueKind:
    """One word. A list of one is what it holds: some of Megatron's flags take several."""

    def read(words: Sequence[str]) -> Value:
        (word,) = words
        return convert(word)

    def words(value: Value) -> tuple[str, ...]:
        value = value[0] if isinstance(value, list) and len(value) == 1 else value
        if not fits(value):
            raise TypeError
        return (text(value),)

    return ValueKind(wanted, read, words)


def _several(wanted: str, convert: Callable[[str], Value]) -> ValueKind:
    def words(value: Value) -> tuple[str, ...]:
        if not isinstance(value, list) or not value:
            raise TypeError
        return tuple(map(str, value))

    return ValueKind(wanted, lambda words: [convert(word) for word in words], words)


def _is_number(value: Value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


VALUE_KINDS = {
    "on": _switch(True),
    "off": _switch(False),
    "whole": _one(
        "a whole number",
        int,
        lambda value: _is_number(value) and float(value).is_integer(),
        lambda value: str(int(value)),
    ),
    "decimal": _one("a number", float, _is_number),
    "text": _one("a text", str, lambda value: isinstance(value, str) and value != ""),
    "texts": _several("a list of texts", str),
    "numbers": _several("a list of whole numbers", int),
    "backend": _one(
        "a member of AttnBackend",
        lambda word: Symbol(_ATTENTION + word),
        lambda value: isinstance(value, Symbol) and value.path.startswith(_ATTENTION),
        lambda value: value.path.removeprefix(_ATTENTION),
    ),
}
"""By the table's names."""


def megatron_default(flag: KnownFlag) -> Value:
    """What Megatron takes without the flag; None is nothing, or what it derives."""
    if flag.kind == "backend" and isinstance(flag.default, str):
        return Symbol(_ATTENTION + flag.default)
    return flag.default


def negate_if_marked(place: str, value: Value) -> Value:
    """What a field holds for a flag's value, and the other way round; `!place` holds the opposite."""
    return not value if place.startswith("!") else value


ROWS = tuple(
    flag for flag in FLAGS.values() if "." in "".join(flag.recipe) and flag.role != "tokenizer"
)
"""Flags that have fields of their own."""
TOKENIZER_FIELDS = {
    flag.name: flag.recipe[0] for flag in FLAGS.values() if flag.role == "tokenizer" and flag.recipe
}
NULL_TOKENIZER = "NullTokenizer"
ACTIVATIONS: dict[tuple[bool, str], str] = {
    (False, "torch.nn.functional.gelu"): "",
    (True, "torch.nn.functional.silu"): "--swiglu",
    (False, "megatron.core.activations.squared_relu"): "--squared-relu",
    (True, "megatron.core.fusions.fused_bias_geglu.quick_gelu"): "--quick-geglu",
}
"""The flag for an MLP that is gated or not, with this function."""
LOCAL_LAYER_SPEC = Symbol("megatron.bridge.models.gpt_provider.local_layer_spec")
ACCUMULATE_IN_FP32, REDUCE_IN_BF16 = "--accumulate-allreduce-grads-in-fp32", "--grad-reduce-in-bf16"
POSITIONS_FLAG = "--max-position-embeddings"


def implied_switches(flags: Flags) -> tuple[str, ...]:
    """Switches that Megatron's `validate_args` sets because of others; Bridge does not."""
    # With a dynamic loss scale an overflow skips a step, and is no error.
    scaled = flags.has("--fp16") and not flags.has("--loss-scale")
    return (
        *["--no-check-for-nan-in-loss-and-grad"] * scaled,
        *["--use-distributed-optimizer"] * flags.has("--use-megatron-fsdp"),
    )
