"""Lists of Megatron flags: merged, picked, read and written; the last occurrence counts, as in argparse.

Kinds and defaults are those of the table (`src/parakit/config/flag_table.py`).
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
    """A dict of flags as a list of words; True gives the flag alone, None and False leave it out."""
    words: list[str] = []
    for name, value in flags.items():
        if value is True:
            words.append(name)
        elif value is not None and value is not False:
            words += [name, str(value)]
    return tuple(words)


def merge_flags(*groups: Sequence[str]) -> tuple[str, ...]:
    """Join groups of flags, each flag once: a later one replaces an earlier one with its values.

    argparse takes the last one as well; a command that names each flag once is easier to read.
    """
    merged: dict[str, list[str]] = {}
    for words in groups:
        merged |= values_by_flag(words)
    return tuple(word for name, values in merged.items() for word in (name, *values))


def pick_flags(words: Sequence[str], names: Container[str]) -> tuple[str, ...]:
    """The flags of `words` that `names` contains, with their values."""
    given = values_by_flag(words).items()
    return tuple(word for name, values in given if name in names for word in (name, *values))


def drop_flags(words: Sequence[str], names: Container[str]) -> tuple[str, ...]:
    """The other flags, with their values."""
    given = values_by_flag(words).items()
    return tuple(word for name, values in given if name not in names for word in (name, *values))


def unlisted_flags(words: Sequence[str]) -> tuple[str, ...]:
    """Flags that the kit has nothing to say of."""
    return tuple(name for name in values_by_flag(words) if name not in FLAGS)


def find_misspelled_flags(words: Sequence[str]) -> dict[str, str]:
    """Flags that no Megatron has, each with a sentence that names the near ones."""
    found = {}
    for name in unlisted_flags(words):
        if name not in FLAGS_WITHOUT_ROW:
            megatrons = FLAGS_WITHOUT_ROW | FLAGS.keys() - flags_with_role("kit")
            near = difflib.get_close_matches(name, sorted(megatrons), n=1, cutoff=0.75)
            hint = f"did you mean {near[0]}?" if near else "leave it out."
            found[name] = f"{name} is no flag of Megatron (0.14 to 0.20); {hint}"
    return found


def refuse_misspelled_flags(words: Sequence[str]) -> None:
    """Refuse flags that no Megatron has.

    Raises:
        ValueError: With a line for each.
    """
    if found := find_misspelled_flags(words):
        raise ValueError("\n".join(found.values()))


def refuse_unknown(name: str, values: Iterable[str], known: Collection[str]) -> None:
    """Refuse values of a flag that Megatron does not have: a ValueError names the first of them."""
    if unknown := sorted(set(values).difference(known)):
        raise ValueError(f"{name} {unknown[0]} is not one of Megatron's; use {', '.join(known)}.")


def drop_flags_newer_than(words: Sequence[str], megatron_version: str) -> tuple[str, ...]:
    """The words without flags that such a Megatron does not have."""
    here = parse_release(megatron_version)
    return drop_flags(words, {name for name, flag in FLAGS.items() if not flag.exists_in(here)})


def format_fields_as_flags(value: Any, group: str) -> tuple[str, ...]:
    """The flags that set the fields of a dataclass; those with the field's default are left out."""
    usual = {each.name: each.default for each in fields(value) if each.default is not MISSING}
    words: list[str] = []
    for flag in flags_in_group(group):
        held = getattr(value, flag.field)
        if held == usual.get(flag.field):
            continue
        words.append(flag.name)
        if flag.kind == "texts":
            words += sorted(held) if isinstance(held, frozenset) else held
        elif flag.kind not in ("on", "off"):
            words.append(f"{held:g}" if flag.kind == "decimal" else str(held))
    return tuple(words)


class Flags:
    """Look-ups in a list of Megatron flags; without one its default, or 0 or empty where it has none."""

    def __init__(self, words: Sequence[str]) -> None:
        self._values = values_by_flag(words)

    def __eq__(self, other: object) -> bool:
        """Whether the other has the same flags with the same values, in any order."""
        return isinstance(other, Flags) and self._values == other._values

    __hash__ = None  # type: ignore[assignment]

    def has(self, name: str) -> bool:
        """Whether the flag occurs."""
        return name in self._values

    def text(self, name: str, default: str | None = None) -> str:
        """The flag's first value."""
        if values := self._values.get(name):
            return values[0]
        known = FLAGS[name].default if default is None and name in FLAGS else default
        return known if isinstance(known, str) else ""

    def texts(self, name: str) -> list[str]:
        """All of the flag's values; none where it does not occur."""
        return self._values.get(name, [])

    def names(self, name: str) -> list[str]:
        """All of the flag's values, also of a list of Python's in a log, of YAML's in a recipe."""
        return re.sub(r"[][',\"]", " ", " ".join(self.texts(name))).split()

    def integer(self, name: str, default: int | None = None) -> int:
        """The flag's first value as an integer.

        Raises:
            ValueError: It is none; the message names flag and value.
        """
        return self._parsed(name, default, int, "a whole number")

    def number(self, name: str, default: float | None = None) -> float:
        """The flag's first value as a float; raises as `integer`."""
        return self._parsed(name, default, float, "a number")

    def applies(self, flag: KnownFlag) -> bool:
        """Whether a flag says something beside these."""
        return not flag.only_with or any(map(self._holds, flag.only_with))

    def fields(self, group: str) -> dict[str, Any]:
        """The fields that these flags set of a group, with Megatron's defaults; none where it has none.

        Raises:
            ValueError: As `integer`.
        """
        return {
            flag.field: self._value(flag)
            for flag in flags_in_group(group)
            if (flag.default is not None or self.has(flag.name)) and self.applies(flag)
        }

    def _value(self, flag: KnownFlag) -> Any:
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
        name, is_value, value = condition.partition("=")
        return self.text(name) == value if is_value else self.has(name)

    def _parsed[T: (int, float)](
        self, name: str, default: T | None, parse: Callable[[Any], T], wanted: str
    ) -> T:
        if not (values := self._values.get(name)):
            return parse((FLAGS[name].default or 0) if default is None else default)
        try:
            return parse(values[0])
        except ValueError:
            raise ValueError(f"{name} {values[0][:40]} is not {wanted}.") from None


def null_tokenizer_flags(entries: int, megatron_version: str) -> tuple[str, ...]:
    """A tokenizer without files, of so many entries, of which the end of a document is the last."""
    given = entries - _uncounted(megatron_version)
    return ("--tokenizer-type", _NULL, "--vocab-size", str(given))


def count_end_of_document_in_vocabulary(
    words: Sequence[str], megatron_version: str
) -> tuple[str, ...]:
    """The words for such a Megatron, with a `--vocab-size` that counts every entry of the tokenizer."""
    flags = Flags(words)
    if flags.text("--tokenizer-type") != _NULL or not flags.has("--vocab-size"):
        return tuple(words)
    entries = flags.integer("--vocab-size", 0) + _uncounted(megatron_version)
    return merge_flags(words, ("--vocab-size", str(entries)))


_NULL = "NullTokenizer"


def _uncounted(megatron_version: str) -> int:
    """Entries that `NullTokenizer.vocab_size` has beyond the size it is given, so beyond `--vocab-size`.

    Up to 0.17 it adds the end of a document; from 0.18 on that is the last of those given
    (`megatron/core/tokenizers/text/libraries/null_tokenizer.py`).
    """
    return 1 if parse_release(megatron_version) < (0, 18) else 0


def values_by_flag(words: Sequence[str]) -> dict[str, list[str]]:
    """What follows each flag; of a flag that occurs twice, the last."""
    values: dict[str, list[str]] = {}
    current: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, joined, value = word.partition("=")
            current = values[name] = [value] if joined else []
        else:
            current.append(word)
    return values
