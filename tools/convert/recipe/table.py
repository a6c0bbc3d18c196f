"""Megatron's flags and the fields of Megatron-Bridge's `ConfigContainer` that mean the same: one table.

The writer of recipes, their reader and the comparison of both follow from `ROWS`, which `table.csv`
holds. Megatron's defaults are those of 0.19.0's parser; Bridge's are in `defaults.yaml`, as 0.3.1 writes
them. A test compares both with the packages.
"""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.spec.files import read_yaml
from tools.spec.flags import Flags

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


@dataclass(frozen=True)
class FlagFields:
    """One flag, and the fields that hold its value."""

    flag: str
    kind: ValueKind
    places: tuple[str, ...]
    """`section.field`; `!section.field` holds the opposite."""
    megatron: Value
    """What Megatron takes without the flag; None is nothing, or what it derives."""
    unit: str = ""
    only_with: str = ""
    """The flag, or the name in `CONDITIONS`, without which this flag says nothing."""
    of_device: bool = False
    """Chosen for the devices at hand: what CPU ranks need says nothing about a GPU."""

    def applies(self, flags: Flags) -> bool:
        """Whether it says something beside these flags."""
        if not self.only_with:
            return True
        known = CONDITIONS.get(self.only_with)
        return known(flags) if known else flags.has(self.only_with)

    def values(self, value: Value) -> dict[str, Value]:
        """The fields that hold a value."""
        return {
            place.removeprefix("!"): not value if place.startswith("!") else value
            for place in self.places
        }


"""Beside a flag, what another may depend on."""


def _decay_changes(flags: Flags) -> bool:
    return flags.text("--weight-decay-incr-style", "constant") != "constant"


CONDITIONS: dict[str, Callable[[Flags], bool]] = {
    "rotary": lambda flags: flags.text("--position-embedding-type") == "rope",
    "half": lambda flags: flags.has("--fp16") or flags.has("--bf16"),
    "muon": lambda flags: "muon" in flags.text("--optimizer"),
    "constant decay": lambda flags: not _decay_changes(flags),
    "changing decay": _decay_changes,
}
"""Beside a flag, what another may depend on."""


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


ON = _switch(True)
"""A flag that switches a field on."""

_KINDS = {
    "on": ON,
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


def _read_rows() -> tuple[FlagFields, ...]:
    with (Path(__file__).parent / "table.csv").open(newline="") as file:
        return tuple(_row(**line) for line in csv.DictReader(file, skipinitialspace=True))


def _row(flag: str, kind: str, places: str, megatron: str, **more: str) -> FlagFields:
    return FlagFields(
        flag,
        _KINDS[kind],
        tuple(places.split()),
        _default(kind, megatron),
        more["unit"],
        more["only with"],
        more["device"] == "device",
    )


def _default(kind: str, text: str) -> Value:
    if not text:
        return None
    return text == "true" if kind in ("on", "off") else _KINDS[kind].read([text])


ROWS = _read_rows()
BRIDGE = fields_of_yaml(read_yaml(Path(__file__).parent / "defaults.yaml"))
"""Bridge's default of every field, by `section.field`; a field that has none is not there."""
