"""Values of make's variables: each text is parsed as the variable's kind, or refused in one
sentence.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from parakit.config import settings
from parakit.config.blend import format_blend, is_weight, parse_blend, split_arguments
from parakit.config.files import ROOT, is_plain_name
from parakit.config.recompute import Recompute
from parakit.config.run import Backend, OptimizerName, RuntimeName
from parakit.config.settings import RENAMED, REPLACED, Setting


class SettingError(ValueError):
    """A variable that is unknown, unused or not of its kind; the message is one sentence that names
    it.
    """


def refuse_renamed(name: str) -> None:
    """Raise an error if `name` is a variable's name from an older version.

    Raises:
        SettingError: The name is old. The message has the present name.
    """
    if name in RENAMED:
        raise SettingError(f"{name}= is {RENAMED[name]}= now.")
    if name in REPLACED:
        raise SettingError(f"{name}= is {REPLACED[name]} now.")


def parse_setting(setting: Setting, text: str, reader: Callable[[str], Any] | None = None) -> Any:
    """Return the value of a variable of make, parsed from its text.

    Args:
        setting: The variable.
        text: The text of the value.
        reader: Function that parses the text. None means the parser of the variable's kind.

    Raises:
        SettingError: The text is not of the variable's kind.
    """
    try:
        return (reader or _choose_parser(setting.kind))(text)
    except SettingError:
        # The parser has already named the variable and the fix.
        raise
    except ValueError:
        hint = suggest_digits(text, setting.kind)
        if setting.kind == settings.CHECKOUT:
            hint = "; give the folder of a clone of NVIDIA/Megatron-LM, or leave it out"
        raise SettingError(f"{setting.name}={text} is not {setting.kind}{hint}.") from None


def suggest_digits(text: str, kind: str) -> str:
    """Return a clause with the digits of a number that is written as a word, such as `; write 8`.

    The clause is empty if the kind is no number, or if the text is no number up to sixteen.
    """
    is_number = _NUMBER.fullmatch(kind) is not None or kind == settings.COUNTS
    digits = _NUMBER_WORDS.index(text.lower()) + 1 if text.lower() in _NUMBER_WORDS else 0
    return f"; write {digits}" if is_number and digits else ""


_NUMBER_WORDS = (
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen"),
)


def parse_settings(known: Iterable[Setting], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the value of every variable of make, by the variable's lower-case name.

    A variable without a text, or with an empty one, has its default.

    Raises:
        SettingError: A text is not of its variable's kind.
    """
    values: dict[str, Any] = {}
    for setting in known:
        value = texts.get(setting.name) or setting.default
        if isinstance(value, str):
            value = parse_setting(setting, value)
        values[setting.name.lower()] = value
    return values


def settings_by_field(options: type) -> dict[str, Setting]:
    """Return the variables of make that set the fields of a dataclass of options, by field name.

    A field has a variable if its type is `Annotated` with a `Setting`. Other fields are left out.
    """
    settings: dict[str, Setting] = {}
    for name, kind in get_type_hints(options, include_extras=True).items():
        for annotation in getattr(kind, "__metadata__", ()):
            if isinstance(annotation, Setting):
                settings[name] = annotation
    return settings


def format_setting(value: object) -> str:
    """Return a value as text for make; `parse_setting` restores the value."""
    if isinstance(value, bool):
        return str(int(value))
    return shlex.join(value) if isinstance(value, tuple) else str(value)


_NUMBER = re.compile(
    r"a (whole )?number(?: of \w+)?(?: (above|from) (\d+))?(?: up)?(?: to (\d+))?"
    r"(?: to, not including, (\d+))?"
)


def _choose_parser(kind: str) -> Callable[[str], Any]:
    """Return the function that parses a text of this kind.

    A kind that is neither a known word nor a range of numbers is read as a list of allowed texts.
    """
    if kind in _PARSERS:
        return _PARSERS[kind]
    bounds = _NUMBER.fullmatch(kind)
    if bounds:
        return partial(_parse_number, *bounds.groups())
    return partial(_parse_choice, re.split(", | or ", kind))


def _parse_number(
    whole: str | None,
    lower_kind: str | None,
    lower: str | None,
    upper: str | None,
    below: str | None,
    text: str,
) -> int | float:
    """Return the number in `text`: an int if `whole` is stated, else a float.

    The bounds are parts of the text of a variable's kind, such as `a whole number from 0 to 10`. A bound that is
    None does not apply.

    Args:
        whole: Any text, if only whole numbers are allowed.
        lower_kind: `from` if the lower bound itself is allowed, `above` if it is not.
        lower: The lower bound.
        upper: The largest allowed number. With it, `text` must consist of digits.
        below: The smallest number that is too large.
        text: The text to parse.

    Raises:
        ValueError: The text is no number, or the number is out of bounds.
    """
    number = int(text) if whole else float(text)
    if not number < float(below or "inf"):  # Infinity and NaN are refused, too.
        raise ValueError(text)
    if lower:
        is_excluded = lower_kind == "above" and number == float(lower)
        if number < float(lower) or is_excluded:
            raise ValueError(text)
    if upper:
        has_only_digits = text.isdecimal()
        if not has_only_digits or number > int(upper):
            raise ValueError(text)
    return number


def _parse_choice(choices: Sequence[str], text: str) -> str:
    """Return the text if it is one of the choices; raises ValueError if not."""
    if text not in choices:
        raise ValueError(text)
    return text


def _parse_switch(text: str) -> bool:
    """Return True for `1` and False for `0`; raises ValueError for other texts."""
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _parse_counts(text: str) -> tuple[int, ...]:
    """Return the whole numbers in a text such as `128,512`; raises ValueError for other texts."""
    return tuple(int(part) for part in text.split(","))


def _split_arguments(text: str) -> tuple[str, ...]:
    """Return the arguments in the text, split as a shell would."""
    return tuple(shlex.split(text))


def _parse_plain_name(text: str) -> str:
    """Return the text if it can name a file or folder; raises ValueError if not."""
    if not is_plain_name(text):
        raise ValueError(text)
    return text


def _parse_picture_path(text: str) -> Path:
    """Return the path of a picture to write.

    Raises:
        SettingError: The path is a folder, or its folder does not exist.
    """
    path = Path(text)
    if path.is_dir():
        raise SettingError(f"SVG={text} is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise SettingError(
            f"SVG={text} cannot be written, because the folder {path.parent} does not exist; make it."
        )
    return path


_DATA_FOLDER, _PREPARED_SUFFIX = "owt-ds/", "_text_document"
"""Folder that `make prepare-ds NAME=` writes to, and the suffix that it adds to the name."""


def _find_data(text: str) -> str:
    """Return the prefixes of the data sets that DATA= names, as one text, each with its weight if
    it has one.

    DATA= may name a data set by its prefix or by its name.

    Raises:
        SettingError: The weights do not fit the data sets.
    """
    prefix = _find_data_prefix(text)
    if Path(f"{ROOT / prefix}.idx").is_file():
        return prefix
    arguments: list[str] = []
    for argument in split_arguments(text):
        arguments.append(argument if is_weight(argument) else _find_data_prefix(argument))
    try:
        parts = parse_blend(shlex.join(arguments))
    except ValueError as error:
        raise SettingError(
            f"DATA={error} Write the data sets alone, or a weight above 0 before each: DATA='0.3 a 0.7 b'."
        ) from None
    if len(parts) == 1:
        return prefix
    return format_blend(parts)


def _find_data_prefix(text: str) -> str:
    """Return the prefix of the files of a data set.

    If there is no such data set, return the prefix that `make prepare-ds` would write.

    Args:
        text: The data set's prefix or name.
    """
    prefix = text.removesuffix(".bin").removesuffix(".idx")
    is_name = "/" not in prefix
    in_folder = _DATA_FOLDER + prefix if is_name else prefix
    candidates = (prefix, prefix + _PREPARED_SUFFIX, in_folder, in_folder + _PREPARED_SUFFIX)
    for candidate in candidates:
        if Path(f"{ROOT / candidate}.idx").is_file():
            return candidate
    if is_name and not prefix.endswith(_PREPARED_SUFFIX):
        return in_folder + _PREPARED_SUFFIX
    return prefix


_NO_MEGATRON_DEEPSPEED = (
    "a fork of an older Megatron-LM that the kit does not start, because it has other flags and "
    "engines; use BACKEND=deepspeed for DeepSpeed's ZeRO or BACKEND=megatron for Megatron's, and read "
    "the fork's logs with 'make report LOGS='."
)


_NO_DATA_PARALLEL = (
    "torch.nn.DataParallel, one process for several CUDA devices, which the kit does not start; use "
    "BACKEND=native, which trains dp2 with DistributedDataParallel, as PyTorch recommends."
)


def _parse_backend(text: str) -> Backend:
    """Return the backend with this name.

    Raises:
        SettingError: The name is `megatron-deepspeed` or `dataparallel`, which the kit does not start.
        ValueError: There is no such backend.
    """
    if text.replace("_", "-") == "megatron-deepspeed":
        raise SettingError(f"BACKEND={text} is {_NO_MEGATRON_DEEPSPEED}")
    if re.sub("[-_]", "", text).lower() == "dataparallel":
        raise SettingError(f"BACKEND={text} is {_NO_DATA_PARALLEL}")
    return Backend(text)


def _find_checkout(text: str) -> Path:
    """Return the absolute path of a Megatron-LM checkout.

    Raises:
        ValueError: The folder has no `pretrain_gpt.py`.
        SettingError: The folder holds Megatron-DeepSpeed.
    """
    folder = Path(text).expanduser().resolve()
    entry = folder / "pretrain_gpt.py"
    if not entry.is_file():
        raise ValueError(text)
    if re.search(r"^(import|from) deepspeed", entry.read_text(errors="replace"), re.MULTILINE):
        raise SettingError(f"MEGATRON_LM={text} is Megatron-DeepSpeed, {_NO_MEGATRON_DEEPSPEED}")
    return folder


_PARSERS: dict[str, Callable[[str], Any]] = {
    settings.TEXT: str,
    settings.SWITCH: _parse_switch,
    settings.WORDS: _split_arguments,
    "words": _split_arguments,
    settings.COUNTS: _parse_counts,
    settings.PATH: Path,
    settings.FOLDER: Path,
    settings.CHECKOUT: _find_checkout,
    settings.PLAIN_NAME: _parse_plain_name,
    "a file to write": _parse_picture_path,
    settings.DATA.kind: _find_data,
    settings.OPTIMIZER.kind: OptimizerName,
    settings.BACKEND.kind: _parse_backend,
    settings.RUNTIME.kind: RuntimeName,
    settings.RECOMPUTE.kind: Recompute.parse,
    # Only the launcher can parse these texts. It refuses wrong ones itself.
    "an NGC tag": str,
    "1 or a strategy": str,
    "a rate such as 1gbps or 200mbps": str,
    "devices such as 2gpu": str,
    "a Python file, or several with commas between them": str,
}
