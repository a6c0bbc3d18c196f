"""One variable of make: its kind, its help, the targets that use it, and readers for the usual kinds."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path


class SettingError(ValueError):
    """A variable that is not known, not used or not of its kind; one sentence that names it."""


@dataclass(frozen=True)
class Setting[T]:
    """One variable."""

    name: str
    read: Callable[[str], T]
    """Its value from text; raises ValueError for text that is not of its kind."""
    wanted: str
    """Its kind, as a refusal names it: `a whole number above 0`."""
    help: str
    targets: tuple[str, ...]
    """Those that use it; `*` stands for the rest of a name."""
    option: str = ""
    """The option of the target's tool that takes it; empty where the tool reads the environment, or
    `*` for positional words."""
    default: T | None = None

    def value(self, environment: Mapping[str, str]) -> T | None:
        """Its value; the default where it is not set or empty.

        Raises:
            SettingError: The text is not of its kind.
        """
        text = environment.get(self.name, "")
        if not text:
            return self.default
        try:
            return self.read(text)
        except SettingError:  # A reader that has a sentence of its own.
            raise
        except ValueError:
            raise SettingError(f"{self.name}={text} is not {self.wanted}.") from None

    def read_as[U](self, read: Callable[[str], U], wanted: str = "") -> Setting[U]:
        """The same variable with a reader that this package cannot know, and no default."""
        wanted = wanted or self.wanted
        return Setting(self.name, read, wanted, self.help, self.targets, self.option)

    def used_by(self, target: str) -> bool:
        """Whether a target uses it."""
        return any(fnmatchcase(target, pattern) for pattern in self.targets)


def positive(text: str) -> int:
    """A whole number above 0."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def above_zero(text: str) -> float:
    """A finite number above 0."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


def from_one(text: str) -> float:
    """A finite number of at least 1."""
    number = float(text)
    if not 1 <= number < float("inf"):
        raise ValueError(text)
    return number


def picture(text: str) -> Path:
    """A file to write, in a folder that exists.

    Raises:
        SettingError: There is no such folder, or the file's name is a folder's.
    """
    path = Path(text)
    if path.is_dir():
        raise SettingError(f"SVG={text} is a folder; name a file in it.")
    if not path.parent.is_dir():
        raise SettingError(f"SVG={text} lies in a folder that is not there; make {path.parent}.")
    return path


def share(text: str) -> float:
    """A number from 0 up to, not including, 1."""
    number = float(text)
    if not 0 <= number < 1:
        raise ValueError(text)
    return number


def switch(text: str) -> bool:
    """0 or 1."""
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def words(text: str) -> tuple[str, ...]:
    """Words as a shell splits them."""
    return tuple(shlex.split(text))


def checkout(text: str) -> Path:
    """A folder with `pretrain_gpt.py`."""
    folder = Path(text).expanduser().resolve()
    if not (folder / "pretrain_gpt.py").is_file():
        raise ValueError(text)
    return folder


def whole_below(limit: int, first: int = 0) -> Callable[[str], int]:
    """A reader of whole numbers from `first` to `limit - 1`."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) not in range(first, limit):
            raise ValueError(text)
        return int(text)

    return read


def dataset_prefix(text: str) -> str:
    """A data set's name as the prefix of its files."""
    return f"owt-ds/{text}"


def one_of(*choices: str) -> Callable[[str], str]:
    """A reader of one of these words."""

    def read(text: str) -> str:
        if text not in choices:
            raise ValueError(text)
        return text

    return read
