"""Functions and a class for lists of Megatron flags (`["--num-layers", "2", "--swiglu"]`): merge, select,
check, parse and write them.

If a flag occurs twice, the last occurrence counts, as in argparse. The type and the default of a
flag's value come from the table of flags (`src/parakit/config/flag_table.py`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from parakit.config.flag_table import (
    FLAGS,
    FLAGS_WITHOUT_ROW,
    KnownFlag,
    flags_in_group,
    flags_with_role,
    parse_release,
)


def format_flags(flags: Mapping[str, object]) -> tuple[str, ...]:
    """Return the command-line arguments for a mapping from flags to values.

    True gives the flag without a value. Flags with None or False are left out.
    """
    arguments: list[str] = []
    for name, value in flags.items():
        if value is True:
            arguments.append(name)
        elif value is not None and value is not False:
            arguments += [name, str(value)]
    return tuple(arguments)


def merge_flags(*groups: Sequence[str]) -> tuple[str, ...]:
    """Join groups of flags into one list. If a flag occurs several times, only its last occurrence stays, with its
    values.

    Megatron's parser (argparse) also takes the last occurrence, so dropping the others changes nothing.
    """
    merged: dict[str, list[str]] = {}
    for arguments in groups:
        merged |= values_by_flag(arguments)
    return _join_values(merged)


def _join_values(values: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return a list of arguments: each flag, followed by its values."""
    arguments: list[str] = []
    for name, values_of_flag in values.items():
        arguments += (name, *values_of_flag)
    return tuple(arguments)


def pick_flags(arguments: Sequence[str], names: Container[str]) -> tuple[str, ...]:
    """Return the flags in `arguments` that `names` contains, with their values."""
    values = values_by_flag(arguments)
    return _join_values({name: values[name] for name in values if name in names})


def drop_flags(arguments: Sequence[str], names: Container[str]) -> tuple[str, ...]:
    """Return the flags in `arguments` that `names` does not contain, with their values."""
    values = values_by_flag(arguments)
    return _join_values({name: values[name] for name in values if name not in names})


def unlisted_flags(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the flags in `arguments` that `flags.csv` has no row for."""
    return tuple(name for name in values_by_flag(arguments) if name not in FLAGS)


def find_misspelled_flags(arguments: Sequence[str]) -> dict[str, str]:
    """Return an error sentence for each flag that no supported version of Megatron has, by flag.

    The sentence suggests a similar flag, if there is one. The result is empty if all flags are known.
    """
    sentences = {}
    for name in unlisted_flags(arguments):
        if name in FLAGS_WITHOUT_ROW:
            continue
        megatron_flags = FLAGS_WITHOUT_ROW | FLAGS.keys() - flags_with_role("kit")
        similar = difflib.get_close_matches(name, sorted(megatron_flags), n=1, cutoff=0.75)
        hint = f"did you mean {similar[0]}?" if similar else "leave it out."
        sentences[name] = f"Megatron (0.14 to 0.20) has no flag {name}; {hint}"
    return sentences


def find_invalid_numbers(arguments: Sequence[str]) -> dict[str, str]:
    """Return an error sentence for each flag whose value has to be a number and is none, by flag.

    Megatron's own parser reports such a value only after the ranks have started. Texts and choices are not checked.
    """
    sentences = {}
    for name, values in values_by_flag(arguments).items():
        flag = FLAGS.get(name)
        # Megatron also takes a list of numbers for --moe-layer-freq.
        if flag is None or flag.kind not in _NUMBERS or name == "--moe-layer-freq":
            continue
        parse, description = _NUMBERS[flag.kind]
        if not values:
            sentences[name] = f"{name} has no value; it takes {description}."
            continue
        try:
            parse(values[0])
        except ValueError:
            sentences[name] = (
                f"Megatron's flag {name} takes {description}, not '{values[0][:40]}'; correct the value."
            )
    return sentences


_NUMBERS: Mapping[str, tuple[Callable[[str], int | float], str]] = {
    "whole": (int, "a whole number"),
    "decimal": (float, "a number"),
}
"""Parser and description of a value, by the kinds of flag that take one number."""


def refuse_misspelled_flags(arguments: Sequence[str]) -> None:
    """Raise an error if `arguments` has flags that no supported Megatron has, or values that are no numbers.

    Raises:
        ValueError: There are such flags. The message has one line per flag.
    """
    sentences = find_misspelled_flags(arguments) | find_invalid_numbers(arguments)
    if sentences:
        raise ValueError("\n".join(sentences.values()))


def refuse_unknown(name: str, values: Iterable[str], known: Collection[str]) -> None:
    """Raise a ValueError if one of `values` is not in `known`.

    The error names the first unknown value in alphabetical order.

    Args:
        name: Flag that has the values.
        known: All values that Megatron has for this flag.
    """
    unknown = sorted(set(values).difference(known))
    if unknown:
        raise ValueError(
            f"Megatron does not know the value {unknown[0]} of {name}; use {', '.join(known)}."
        )


def drop_flags_newer_than(arguments: Sequence[str], megatron_version: str) -> tuple[str, ...]:
    """Return the flags in `arguments` without those that this Megatron version does not have."""
    release = parse_release(megatron_version)
    missing = {name for name, flag in FLAGS.items() if not flag.exists_in(release)}
    return drop_flags(arguments, missing)


def format_fields_as_flags(value: Any, group: str) -> tuple[str, ...]:
    """Return the flags that set the fields of the dataclass `value`.

    Fields that have their default value are left out.

    Args:
        value: The dataclass.
        group: Name of the dataclass in the table of flags, such as `shape` or `recompute`.
    """
    defaults = {
        field.name: field.default for field in fields(value) if field.default is not MISSING
    }
    arguments: list[str] = []
    for flag in flags_in_group(group):
        field_value = getattr(value, flag.field)
        if field_value == defaults.get(flag.field):
            continue
        arguments.append(flag.name)
        match flag.kind:
            case "on" | "off":
                pass
            case "texts":
                # A set has no order of its own. Equal objects must give equal flags.
                is_set = isinstance(field_value, frozenset)
                arguments += sorted(field_value) if is_set else field_value
            case "decimal":
                arguments.append(f"{field_value:g}")
            case _:
                arguments.append(str(field_value))
    return tuple(arguments)


class Flags:
    """List of Megatron flags in which values can be looked up.

    An absent flag gives Megatron's default. If Megatron has no default, it gives 0 or an empty text.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._values = values_by_flag(arguments)

    def __eq__(self, other: object) -> bool:
        """Return True if the other has the same flags with the same values, in any order."""
        return isinstance(other, Flags) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def has(self, name: str) -> bool:
        """Return True if the flag is present."""
        return name in self._values

    def text(self, name: str, default: str | None = None) -> str:
        """Return the flag's first value.

        An absent flag gives `default`, or Megatron's default if `default` is None. The result is empty if Megatron has
        no default, or a default that is no text.
        """
        values = self._values.get(name)
        if values:
            return values[0]
        if default is not None:
            return default
        megatron_default = FLAGS[name].default if name in FLAGS else None
        return megatron_default if isinstance(megatron_default, str) else ""

    def texts(self, name: str) -> list[str]:
        """Return all values of the flag; empty if it is absent."""
        return self._values.get(name, [])

    def names(self, name: str) -> list[str]:
        """Return all values of the flag, also if they are written as a Python or YAML list
        (`['mlp', 'moe']`).
        """
        return re.sub(r"[][',\"]", " ", " ".join(self.texts(name))).split()

    def integer(self, name: str, default: int | None = None) -> int:
        """Return the flag's first value as an integer.

        Raises:
            ValueError: The value is not an integer; the message names flag and value.
        """
        return self._parse_first_value(name, default, int, "a whole number")

    def number(self, name: str, default: float | None = None) -> float:
        """Return the flag's first value as a float; raises as `integer` does."""
        return self._parse_first_value(name, default, float, "a number")

    def applies(self, flag: KnownFlag) -> bool:
        """Return True if the flags that `flag` depends on (`only_with`) are present."""
        return not flag.only_with or any(map(self._holds, flag.only_with))

    def fields(self, group: str) -> dict[str, Any]:
        """Return the values of the fields of one dataclass, such as the model's shape, by field name.

        The table of flags maps flags to these fields. For an absent flag the value is Megatron's default. Fields
        whose flag is absent and has no default are left out, and so are fields whose flag does not apply.

        Args:
            group: Name of the dataclass in the table, such as `shape`.

        Raises:
            ValueError: A value is not of its flag's kind.
        """
        values: dict[str, Any] = {}
        for flag in flags_in_group(group):
            has_value = flag.default is not None or self.has(flag.name)
            if has_value and self.applies(flag):
                values[flag.field] = self._typed_value(flag)
        return values

    def _typed_value(self, flag: KnownFlag) -> Any:
        """Return the value of a flag, converted to the Python type of the flag's kind.

        Kinds `on` and `off` give a bool, `whole` an int, `decimal` a float, `texts` a tuple of texts, and all
        other kinds a text. An absent flag gives Megatron's default.
        """
        match flag.kind:
            case "on" | "off":
                return self.has(flag.name) is (flag.kind == "on")
            case "whole":
                return self.integer(flag.name)
            case "decimal":
                return self.number(flag.name)
            case "texts":
                return tuple(self.texts(flag.name))
        return self.text(flag.name)

    def _holds(self, condition: str) -> bool:
        """Return True if the condition, a flag or `flag=value`, holds."""
        name, is_value, value = condition.partition("=")
        return self.text(name) == value if is_value else self.has(name)

    def _parse_first_value[T: (int, float)](
        self, name: str, default: T | None, parse: Callable[[Any], T], valid_values: str
    ) -> T:
        """Return the flag's first value, parsed by `parse`.

        An absent flag gives `default`, or Megatron's default if `default` is None, or 0 if Megatron has no
        default.

        Args:
            valid_values: Description of a valid value, for the error sentence.

        Raises:
            ValueError: `parse` refuses the value.
        """
        values = self._values.get(name)
        if values:
            try:
                return parse(values[0])
            except ValueError:
                raise ValueError(f"{name} {values[0][:40]} is not {valid_values}.") from None
        if default is not None:
            return parse(default)
        return parse(FLAGS[name].default or 0)


def null_tokenizer_flags(entries: int, megatron_version: str) -> tuple[str, ...]:
    """Return the flags of a tokenizer without files that has `entries` entries.

    The last entry is the end-of-document token.
    """
    counted_entries = entries - _num_uncounted_entries(megatron_version)
    return ("--tokenizer-type", _NULL, "--vocab-size", str(counted_entries))


def count_end_of_document_in_vocabulary(
    arguments: Sequence[str], megatron_version: str
) -> tuple[str, ...]:
    """Return the flags with a `--vocab-size` that counts every entry of a NullTokenizer.

    Megatron up to 0.17 does not count the end-of-document token in `--vocab-size`. For these versions the token
    is added to the number. Flags without `--vocab-size` or with another tokenizer are returned unchanged.
    """
    flags = Flags(arguments)
    if flags.text("--tokenizer-type") != _NULL or not flags.has("--vocab-size"):
        return tuple(arguments)
    entries = flags.integer("--vocab-size", 0) + _num_uncounted_entries(megatron_version)
    return merge_flags(arguments, ("--vocab-size", str(entries)))


_NULL = "NullTokenizer"


def _num_uncounted_entries(megatron_version: str) -> int:
    """Return the number of NullTokenizer entries that `--vocab-size` does not count.

    Megatron up to 0.17 adds the end-of-document token to the given size; from 0.18 on that token is
    the last of the given entries (`megatron/core/tokenizers/text/libraries/null_tokenizer.py`).
    """
    return 1 if parse_release(megatron_version) < (0, 18) else 0


def values_by_flag(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Return the list of values of each flag, by flag. A flag without a value has an empty list.

    If a flag occurs twice, its last occurrence counts. Values before the first flag are dropped.
    """
    values: dict[str, list[str]] = {}
    # The list of the newest flag in `values`, or a list that nobody reads before the first flag.
    newest: list[str] = []
    for argument in arguments:
        if argument.startswith("--"):
            name, equals_sign, value = argument.partition("=")
            newest = [value] if equals_sign else []
            values[name] = newest
        else:
            newest.append(argument)
    return values
