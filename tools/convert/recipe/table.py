"""Megatron's flags as fields of Megatron-Bridge's `ConfigContainer`: kinds of values, and its defaults.

The writer of recipes, their reader and the comparison of both follow from `ROWS`, those lines of the
flag table (`tools/spec/flags.csv`) that name fields. Bridge's defaults are in `defaults.yaml`, as its
0.3.1 writes them. Tests compare both with the packages.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.spec.files import read_yaml
from tools.spec.flag_table import FLAGS, KnownFlag

BRIDGE_VERSION = "0.3.1"
CONTAINER = "ConfigContainer"
_ATTENTION = "megatron.core.transformer.enums.AttnBackend."


@dataclass(frozen=True)
class Symbol:
    """A name of a package that stands as a value: `torch.bfloat16`, a function, an enum's member."""

    path: str


type Value = bool | int | float | str | list[Value] | Symbol | None


@dataclass(frozen=True)
class ValueKind:
    """How a flag's words and a field's value are one another."""

    wanted: str
    """What a value has to be, as a refusal names it."""
    read: Callable[[Sequence[str]], Value]
    """The value of the words behind the flag; raises ValueError or IndexError."""
    words: Callable[[Value], tuple[str, ...] | None]
    """The words behind the flag; None where leaving it out says the value. Raises TypeError for a value
    of another kind."""


def fields_of_yaml(document: object) -> dict[str, Value]:
    """The fields of a container as Bridge's `to_yaml` writes it, by `section.field`.

    Raises:
        ValueError: It is no such document.
    """
    if not isinstance(document, Mapping) or not str(document.get("_target_")).endswith(CONTAINER):
        raise ValueError(f"it has no '_target_: …{CONTAINER}'")
    fields: dict[str, Value] = {}
    for section, content in document.items():
        if section not in SECTIONS:
            near = difflib.get_close_matches(str(section), SECTIONS, n=1)
            hint = f", did you mean {near[0]}" if near else f"; it has {', '.join(SECTIONS)}"
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

SECTIONS = (
    "_target_",
    "model",
    "train",
    "optimizer",
    "scheduler",
    "dataset",
    "tokenizer",
    "ddp",
    "dist",
    "mixed_precision",
    "checkpoint",
    "logger",
    "rng",
    "rerun_state_machine",
    "comm_overlap",
    "optimizer_config_override_provider",
    "profiling",
    "peft",
    "ft",
    "straggler",
    "nvrx_straggler",
    "tensor_inspect",
    "inprocess_restart",
)
"""Of a `ConfigContainer`."""

_SAME = {"torch._C._nn.gelu": "torch.nn.functional.gelu"}
"""Where Bridge writes another name than the public one."""


def _whole(value: Value) -> tuple[str, ...]:
    if not (number := _number(value)).is_integer():
        raise TypeError
    return (str(int(number)),)


def _decimal(value: Value) -> tuple[str, ...]:
    _number(value)
    return (str(value),)


def _number(value: Value) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError
    return float(value)


def _text(value: Value) -> tuple[str, ...]:
    if not isinstance(value, str) or not value:
        raise TypeError
    return (value,)


def _several(value: Value) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise TypeError
    return tuple(str(each) for each in value)


def _attention(value: Value) -> tuple[str, ...]:
    if not isinstance(value, Symbol) or not value.path.startswith(_ATTENTION):
        raise TypeError
    return (value.path.removeprefix(_ATTENTION),)


def _alone(words: Callable[[Value], tuple[str, ...]]) -> Callable[[Value], tuple[str, ...]]:
    """A list of one is what it holds: some of Megatron's flags and Bridge's fields take several."""
    return lambda value: words(value[0] if isinstance(value, list) and len(value) == 1 else value)


def _first[T](convert: Callable[[str], T]) -> Callable[[Sequence[str]], T]:
    def read(words: Sequence[str]) -> T:
        if len(words) != 1:
            raise ValueError(words)
        return convert(words[0])

    return read


def _switch(present: bool) -> ValueKind:
    def words(value: Value) -> tuple[str, ...] | None:
        if not isinstance(value, bool):
            raise TypeError
        return () if value is present else None

    return ValueKind("True or False", lambda _: present, words)


KINDS = {
    "on": _switch(True),
    "off": _switch(False),
    "whole": ValueKind("a whole number", _first(int), _alone(_whole)),
    "decimal": ValueKind("a number", _first(float), _alone(_decimal)),
    "text": ValueKind("a text", _first(str), _alone(_text)),
    "texts": ValueKind("a list of texts", list, _several),
    "numbers": ValueKind(
        "a list of whole numbers", lambda words: [int(word) for word in words], _several
    ),
    "backend": ValueKind(
        "a member of AttnBackend", _first(lambda word: Symbol(_ATTENTION + word)), _attention
    ),
}
"""By the table's names."""


def default_of(flag: KnownFlag) -> Value:
    """What Megatron takes without the flag; None is nothing, or what it derives."""
    if flag.kind == "backend" and isinstance(flag.default, str):
        return Symbol(_ATTENTION + flag.default)
    return flag.default


def fields_with(flag: KnownFlag, value: Value) -> dict[str, Value]:
    """The fields that hold a flag's value."""
    return {
        place.removeprefix("!"): not value if place.startswith("!") else value
        for place in flag.recipe
    }


ROWS = tuple(
    flag for flag in FLAGS.values() if "." in "".join(flag.recipe) and flag.role != "tokenizer"
)
"""Flags that have fields of their own."""
BRIDGE = fields_of_yaml(read_yaml(Path(__file__).parent / "defaults.yaml"))
"""Bridge's default of every field, by `section.field`; a field that has none is not there."""
