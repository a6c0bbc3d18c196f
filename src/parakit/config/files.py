"""The repository's root, paths as commands take them, and readers of `.args`, YAML and CSV files.

An `.args` file holds Megatron flags, one per line; `#` starts a comment. The launch scripts pass
these flags to Megatron unchanged, and the planner and the report read the same files.
"""

from __future__ import annotations

import csv
import errno
import gzip
import io
import os
import re
import shlex
import stat
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import yaml

try:
    # libyaml's loader is ten times as fast, but some builds of PyYAML lack it.
    from yaml import CSafeLoader as SafeLoader
except ImportError:
    from yaml import SafeLoader  # type: ignore[assignment]

PACKAGE = Path(__file__).resolve().parents[1]
"""The folder of the package `parakit`."""


def find_root(package: Path = PACKAGE) -> Path:
    """Return the folder that holds `examples/`: the repository's root, or in a wheel the package itself."""
    return package if (package / "examples").is_dir() else package.parents[1]


ROOT = find_root()
"""The repository's root; in an installed wheel, the folder of `parakit`, which holds `examples/`.
"""
PYTHON_PATH = os.pathsep.join((str(PACKAGE.parent), str(ROOT)))
"""Value of PYTHONPATH for a Python outside the clone's own environment, such as the one in an
image.
"""
USER_MEASUREMENTS_FILE = ROOT / "readings" / "mine.csv"
"""The user's own measured runs. `make report` adds rows, plans read them, and git ignores the file.
"""


def relative_to_root(path: Path) -> str:
    """Return the path relative to the repository's root, or the absolute path if it lies outside."""
    resolved = path.resolve()
    return str(resolved.relative_to(ROOT) if resolved.is_relative_to(ROOT) else resolved)


def is_plain_name(text: str) -> bool:
    """Return True if a text can name a file or folder: letters, digits, '.', '_' and '-', at most 101.

    A name that begins with a dot or a dash, and one with a slash, gives False.
    """
    return re.fullmatch(r"\w[\w.-]{0,100}", text) is not None


def open_regular_file(path: Path) -> BinaryIO:
    """Open a regular file to read its bytes.

    A pipe or a device is never opened: opening a pipe that nobody writes to would wait for ever.

    Raises:
        OSError: The path cannot be opened, or is no regular file.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return path.open("rb")


def read_regular_file(path: Path) -> bytes:
    """Return all bytes of a regular file. Raises OSError as `open_regular_file` does."""
    with open_regular_file(path) as file:
        return file.read()


def describe_file_problem(path: Path) -> str:
    """Return why a path is no regular file (`is missing`, `is no regular file`); empty if it is one."""
    if path.is_file():
        return ""
    return "is no regular file" if path.exists() else "is missing"


def read_args_file(path: Path) -> tuple[str, ...]:
    """Read the flags of an `.args` file, in order, split as a shell would.

    Raises:
        ValueError: A line has an unclosed quote. The message names file and line.
    """
    arguments: list[str] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            arguments += _split_line(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}; close the quote.") from None
    return tuple(arguments)


@lru_cache(maxsize=4096)
def _split_line(line: str) -> tuple[str, ...]:
    """Return the words of a line as a shell would split it. A model's file is read many times in one process.

    Raises:
        ValueError: The line has an unclosed quote.
    """
    return tuple(shlex.split(line, comments=True))


def format_args_file(comments: Iterable[str], arguments: Iterable[str]) -> str:
    """Return the text of an `.args` file: the comments, then one line per flag with its values."""
    lines = [f"# {comment}" for comment in comments]
    for argument in arguments:
        if argument.startswith("--"):
            lines.append(argument)
        else:
            lines[-1] += f" {shlex.quote(argument)}"
    return "\n".join(lines) + "\n"


def read_yaml(path: Path) -> Any:
    """Return the parsed content of a YAML file.

    Raises:
        OSError: The file cannot be read.
        yaml.YAMLError: The file is not YAML, or names a Python object.
    """
    return yaml.load(path.read_text(), Loader=SafeLoader)


class UnreadableFileError(ValueError):
    """A file that is not text or not CSV; the message gives the reason."""


def read_text(path: Path) -> str:
    """Return the text of a file. A file that gzip compressed is unpacked, and a byte order mark is dropped.

    Raises:
        UnreadableFileError: The file cannot be read or unpacked, or is not UTF-8.
    """
    try:
        raw = path.read_bytes()
        text = gzip.decompress(raw) if raw.startswith(_GZIP) else raw
        return text.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, EOFError, zlib.error) as error:
        raise UnreadableFileError(f"{path} cannot be read ({error}); name a text file.") from None


_GZIP = b"\x1f\x8b"


def read_csv_rows(text: str, path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each row of a CSV text.

    Rows with only blank cells are skipped. The delimiter is the most frequent of comma, semicolon and tab in the
    first line. `path` is only named in errors.

    Raises:
        UnreadableFileError: A cell is longer than 131,072 characters.
    """
    delimiter = max(",;\t", key=text.partition("\n")[0].count)
    reader, line = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter), 1
    try:
        for cells in reader:
            if any(map(str.strip, cells)):
                yield line, cells
            line = reader.line_num + 1
    except csv.Error as error:
        raise UnreadableFileError(f"{path}: row {line} is no CSV ({error}); correct it.") from None
