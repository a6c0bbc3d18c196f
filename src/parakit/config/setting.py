"""Values of make's variables: each text is parsed as the variable's kind, or refused in one
sentence.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from parakit.config import settings
from parakit.config.files import ROOT, is_plain_name
from parakit.config.recompute import Recompute
from parakit.config.run import Backend, OptimizerName, RuntimeName
from parakit.config.settings import RENAMED, REPLACED, Setting


class SettingError(ValueError):
    """A variable that is unknown, unused or not of its kind; the message is one sentence that names
    it.
    """


def refuse_renamed(name: str) -> None:
    """Raise an error if `name` is an older version's name of a variable.

    Raises:
        SettingError: The name is old; the message has the present name.
    """
    if name in RENAMED:
        raise SettingError(f"{name}= is {RENAMED[name]}= now.")
    if name in REPLACED:
        raise SettingError(f"{name}= is {REPLACED[name]} now.")


def parse_setting(setting: Setting, text: str, reader: Callable[[str], Any] | None = None) -> Any:
    """Return a variable's value, parsed from text by `reader` or else by its kind.

    Raises:
        SettingError: The text is not of the variable's kind.
    """
    try:
        return (reader or _reader(setting.kind))(text)
    except SettingError:  # A reader that has a sentence of its own.
        raise
    except ValueError:
        raise SettingError(f"{setting.name}={text} is not {setting.kind}.") from None


def parse_settings(known: Iterable[Setting], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the value of every variable by its lower-case name: parsed from its text, or the
    default.

    Raises:
        SettingError: A text is not of its variable's kind.
    """
    found = {setting: texts.get(setting.name) or setting.default for setting in known}
    return {
        setting.name.lower(): parse_setting(setting, value) if isinstance(value, str) else value
        for setting, value in found.items()
    }


def format_setting(value: object) -> str:
    """Return a value as text for make; `parse_setting` restores the value."""
    if isinstance(value, bool):
        return str(int(value))
    return shlex.join(value) if isinstance(value, tuple) else str(value)


_NUMBER = re.compile(
    r"a (whole )?number(?: of \w+)?(?: (above|from) (\d+))?(?: up)?(?: to (\d+))?"
    r"(?: to, not including, (\d+))?"
)


def _reader(kind: str) -> Callable[[str], Any]:
    """Return the function that parses texts of a kind."""
    if kind in _READERS:
        return _READERS[kind]
    if bounds := _NUMBER.fullmatch(kind):
        return partial(_number, *bounds.groups())
    return partial(_one_of, re.split(", | or ", kind))


def _number(
    whole: str | None,
    begins: str | None,
    lower: str | None,
    upper: str | None,
    below: str | None,
    text: str,
) -> int | float:
    """Return the number in `text`; the other arguments are the bounds in the words of its kind.

    If there is an upper bound `most`, the text must consist of digits.
    """
    number = int(text) if whole else float(text)
    first, last = float(lower or "-inf"), float(below or "inf")
    is_in = (first < number if begins == "above" else first <= number) and number < last
    if not is_in or (upper and not (text.isdecimal() and number <= int(upper))):
        raise ValueError(text)
    return number


def _one_of(choices: Sequence[str], text: str) -> str:
    """Return the text if it is one of the choices; raises ValueError if not."""
    if text not in choices:
        raise ValueError(text)
    return text


def _switch(text: str) -> bool:
    """Return True for `1` and False for `0`; raises ValueError for other texts."""
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _words(text: str) -> tuple[str, ...]:
    """Return the arguments in the text, split as a shell would."""
    return tuple(shlex.split(text))


def _plain_name(text: str) -> str:
    """Return the text if it can name a file or folder; raises ValueError if not."""
    if not is_plain_name(text):
        raise ValueError(text)
    return text


def _picture(text: str) -> Path:
    """Return the path of a picture to write; raises SettingError if its folder does not exist."""
    path = Path(text)
    if path.is_dir():
        raise SettingError(f"SVG={text} is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise SettingError(f"SVG={text} lies in a folder that is not there; make {path.parent}.")
    return path


_DATA, _MADE = "owt-ds/", "_text_document"
"""Folder that `make prepare-ds NAME=` writes to, and the suffix that it adds to the name."""


def _prefix(text: str) -> str:
    """Return the prefix of a data set, found by prefix or by name; the text's prefix if there is no
    such file.
    """
    plain = text.removesuffix(".bin").removesuffix(".idx")
    named = plain if "/" in plain else _DATA + plain
    known = (plain, plain + _MADE, named, named + _MADE)
    unmade = plain if "/" in plain or plain.endswith(_MADE) else named + _MADE
    return next((prefix for prefix in known if Path(f"{ROOT / prefix}.idx").is_file()), unmade)


_NO_MEGATRON_DEEPSPEED = (
    "a fork of an older Megatron-LM with flags and engines of its own, which the kit does not start; "
    "BACKEND=deepspeed trains a plain model by DeepSpeed's ZeRO, BACKEND=megatron by Megatron's, and "
    "'make report LOGS=' reads that fork's logs."
)


_NO_DATA_PARALLEL = (
    "torch.nn.DataParallel, one process over several CUDA devices, which splits nothing where there is "
    "none; BACKEND=native trains dp2 by DistributedDataParallel, which PyTorch recommends in its place."
)


def _backend(text: str) -> Backend:
    """Return the backend; raises SettingError for two backends of other projects that the kit does
    not start.
    """
    if text.replace("_", "-") == "megatron-deepspeed":
        raise SettingError(f"BACKEND={text} is {_NO_MEGATRON_DEEPSPEED}")
    if re.sub("[-_]", "", text).lower() == "dataparallel":
        raise SettingError(f"BACKEND={text} is {_NO_DATA_PARALLEL}")
    return Backend(text)


def _checkout(text: str) -> Path:
    """Return the folder of a Megatron-LM checkout; raises SettingError for Megatron-DeepSpeed."""
    folder = Path(text).expanduser().resolve()
    entry = folder / "pretrain_gpt.py"
    if not entry.is_file():
        raise ValueError(text)
    if re.search(r"^(import|from) deepspeed", entry.read_text(errors="replace"), re.MULTILINE):
        raise SettingError(f"MEGATRON_LM={text} is Megatron-DeepSpeed, {_NO_MEGATRON_DEEPSPEED}")
    return folder


_READERS: dict[str, Callable[[str], Any]] = {
    settings.TEXT: str,
    settings.SWITCH: _switch,
    settings.WORDS: _words,
    "words": _words,
    settings.PATH: Path,
    settings.FOLDER: Path,
    settings.CHECKOUT: _checkout,
    settings.PLAIN_NAME: _plain_name,
    "a file to write": _picture,
    "a prefix": _prefix,
    settings.OPTIMIZER.kind: OptimizerName,
    settings.BACKEND.kind: _backend,
    settings.RUNTIME.kind: RuntimeName,
    settings.RECOMPUTE.kind: Recompute.parse,
    # What only the launcher can read, and refuses itself.
    "an NGC tag": str,
    "1 or a strategy": str,
    "a rate such as 1gbps or 200mbps": str,
    "devices such as 2gpu": str,
    "a Python file, or several with commas between them": str,
}
