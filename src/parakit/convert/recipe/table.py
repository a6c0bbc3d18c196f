"""Hold which flag of Megatron is which field of Megatron-Bridge's `ConfigContainer`, for both directions.

`FLAGS_WITH_FIELDS` are the lines of the flag table (`src/parakit/config/flags.csv`) that name fields.
`VALUE_KINDS` converts a flag's values into a field's value and back. The constants and
`implied_switches` hold what several flags or fields say together. Bridge's sections with their classes
and defaults are in `defaults.yaml`, as Bridge 0.3.1 writes them. The tests compare all of it with both
packages.
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
    """A Python name that stands as a value: a type (`torch.bfloat16`), a function or an enum's member."""

    path: str


type Value = bool | int | float | str | list[Value] | Symbol | None
type Fields = Mapping[str, Value]
"""Values by `section.field`."""


def format_value(value: Value) -> str:
    """Return a value as Python source writes it."""
    if isinstance(value, Symbol):
        return value.path
    if isinstance(value, list):
        return f"[{', '.join(format_value(item) for item in value)}]"
    return repr(value)


def parse_container(document: object) -> dict[str, Value]:
    """Return the fields of a container by `section.field`.

    `document` is the parsed YAML that Bridge's `to_yaml` writes.

    Raises:
        ValueError: The document is no `ConfigContainer`, or has a section that Bridge does not know.
    """
    if not isinstance(document, Mapping) or not str(document.get("_target_")).endswith(CONTAINER):
        raise ValueError(f"it has no '_target_: …{CONTAINER}'")
    fields: dict[str, Value] = {}
    for section, content in document.items():
        if section not in _DEFAULTS:
            matches = difflib.get_close_matches(str(section), _DEFAULTS, n=1)
            hint = f", did you mean {matches[0]}" if matches else f"; it has {', '.join(_DEFAULTS)}"
            raise ValueError(f"a container has no section '{section}'{hint}")
        if isinstance(content, Mapping):
            for name, field_content in content.items():
                fields[f"{section}.{name}"] = _parse_value(field_content)
        elif section != "_target_":
            fields[section] = _parse_value(content)
    return fields


def _parse_value(content: object) -> Value:
    """Return the Python value of one field of a YAML file.

    Numbers, truth values and text stay as they are, and a list is converted item by item. A mapping with the
    key `_target_` names a Python object and becomes a `Symbol` with the dotted name of the object. For a member
    of an enumeration, this name ends in the name of the member. Any other mapping becomes its text. Everything
    else, including an empty mapping, becomes None.
    """
    if isinstance(content, list):
        return [_parse_value(item) for item in content]
    if not isinstance(content, Mapping):
        return content if isinstance(content, (bool, int, float, str)) else None
    path = str(content.get("_target_", ""))
    members = _ENUM_MEMBERS.get(path)
    if members and content.get("_args_"):
        return Symbol(f"{path}.{members.get(content['_args_'][0], '?')}")
    if path:
        return Symbol(_PUBLIC_NAMES.get(path, path))
    return str(dict(content)) if content else None


_ENUM_MEMBERS = {
    _ATTENTION.rstrip("."): {1: "flash", 2: "fused", 3: "unfused", 4: "local", 5: "auto"}
}
"""Names of the members by number of each enumeration, because Bridge writes members by number."""
_PUBLIC_NAMES = {"torch._C._nn.gelu": "torch.nn.functional.gelu"}
"""The public name of a function that Bridge writes by a private name."""

BRIDGE_DEFAULTS = parse_container(_DEFAULTS)
"""Bridge's default of every field, by `section.field`; a field without a default is missing."""


@dataclass(frozen=True)
class ValueKind:
    """A kind of value, such as a whole number: converts between the arguments of a flag and the value of a field."""

    wanted: str
    """What a value has to be, as error messages name it: 'a whole number'."""
    read: Callable[[Sequence[str]], Value]
    """Returns the value for the arguments after the flag; raises ValueError for other arguments."""
    arguments: Callable[[Value], tuple[str, ...] | None]
    """Returns the arguments after the flag for a value; None if the value is said by leaving the flag
    out. Raises TypeError for a value of another kind."""


def _make_switch(value_if_present: bool) -> ValueKind:
    """Return the kind of a flag without arguments whose presence means `value_if_present`."""

    def to_arguments(value: Value) -> tuple[str, ...] | None:
        if not isinstance(value, bool):
            raise TypeError
        return () if value is value_if_present else None

    return ValueKind("True or False", lambda _: value_if_present, to_arguments)


def _make_single(
    wanted: str,
    convert: Callable[[str], Value],
    is_valid: Callable[[Any], bool],
    to_text: Callable[[Any], str] = str,
) -> ValueKind:
    """Return the kind of a flag with one argument.

    A list of one item counts as that item, because some of Megatron's flags take several arguments.
    """

    def read(arguments: Sequence[str]) -> Value:
        (argument,) = arguments
        return convert(argument)

    def to_arguments(value: Value) -> tuple[str, ...]:
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if not is_valid(value):
            raise TypeError
        return (to_text(value),)

    return ValueKind(wanted, read, to_arguments)


def _make_list(wanted: str, convert: Callable[[str], Value]) -> ValueKind:
    """Return the kind of a flag with one or more arguments, whose field is a list."""

    def to_arguments(value: Value) -> tuple[str, ...]:
        if not isinstance(value, list) or not value:
            raise TypeError
        return tuple(map(str, value))

    return ValueKind(
        wanted, lambda arguments: [convert(argument) for argument in arguments], to_arguments
    )


def _is_number(value: Value) -> bool:
    """Return True for a finite number; False for True and False, which Python counts as numbers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


VALUE_KINDS = {
    "on": _make_switch(True),
    "off": _make_switch(False),
    "whole": _make_single(
        "a whole number",
        int,
        is_valid=lambda value: _is_number(value) and float(value).is_integer(),
        to_text=lambda value: str(int(value)),
    ),
    "decimal": _make_single("a number", float, _is_number),
    "text": _make_single("a text", str, lambda value: isinstance(value, str) and value != ""),
    "texts": _make_list("a list of texts", str),
    "numbers": _make_list("a list of whole numbers", int),
    "backend": _make_single(
        "a member of AttnBackend",
        lambda argument: Symbol(_ATTENTION + argument),
        is_valid=lambda value: isinstance(value, Symbol) and value.path.startswith(_ATTENTION),
        to_text=lambda value: value.path.removeprefix(_ATTENTION),
    ),
}
"""Conversions by the names in the flag table's column `kind`."""


def megatron_default(flag: KnownFlag) -> Value:
    """Return the value that Megatron uses if the flag is missing.

    None stands for no value, or for a value that Megatron derives from other flags.
    """
    if flag.kind == "backend" and isinstance(flag.default, str):
        return Symbol(_ATTENTION + flag.default)
    return flag.default


def negate_if_marked(field: str, value: Value) -> Value:
    """Convert between a flag's value and a field's: `not value` if `field` begins with `!`, else `value`.

    The flag table marks with `!` a field that holds the opposite of its flag.
    """
    return not value if field.startswith("!") else value


FLAGS_WITH_FIELDS = tuple(
    flag for flag in FLAGS.values() if "." in "".join(flag.recipe) and flag.role != "tokenizer"
)
"""Flags that have fields of their own, except those of the tokenizer."""
TOKENIZER_FIELDS = {
    flag.name: flag.recipe[0] for flag in FLAGS.values() if flag.role == "tokenizer" and flag.recipe
}
"""The field of each of the tokenizer's flags."""
NULL_TOKENIZER = "NullTokenizer"
ACTIVATIONS: dict[tuple[bool, str], str] = {
    (False, "torch.nn.functional.gelu"): "",
    (True, "torch.nn.functional.silu"): "--swiglu",
    (False, "megatron.core.activations.squared_relu"): "--squared-relu",
    (True, "megatron.core.fusions.fused_bias_geglu.quick_gelu"): "--quick-geglu",
}
"""The flag of each activation, by whether the MLP is gated and by its function; GELU needs no flag."""
LOCAL_LAYER_SPEC = Symbol("megatron.bridge.models.gpt_provider.local_layer_spec")
ACCUMULATE_IN_FP32 = "--accumulate-allreduce-grads-in-fp32"
REDUCE_IN_BF16 = "--grad-reduce-in-bf16"
POSITIONS_FLAG = "--max-position-embeddings"


def implied_switches(flags: Flags) -> tuple[str, ...]:
    """Return the switches that Megatron's `validate_args` sets because of other flags. Bridge does not set them."""
    switches = []
    if flags.has("--fp16") and not flags.has("--loss-scale"):
        # With a dynamic loss scale an overflow skips the update, and must not end the run.
        switches.append("--no-check-for-nan-in-loss-and-grad")
    if flags.has("--use-megatron-fsdp"):
        switches.append("--use-distributed-optimizer")
    return tuple(switches)
