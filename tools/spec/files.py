"""The repository's root, paths as commands take them, and readers of `*.args` and YAML files.

`*.args` files are plain Megatron flags, one a line, `#` starts a comment. The launch scripts pass these
flags to Megatron as they are; planner and report read the same files.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml

try:  # libyaml's is ten times as fast, and not in every build of PyYAML.
    from yaml import CSafeLoader as SafeLoader
except ImportError:
    from yaml import SafeLoader  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parents[2]
"""The repository's root."""
OWN_READINGS = ROOT / "readings" / "mine.csv"
"""One's own measured runs, as `make report` adds them and plans use them; ignored by git."""


def from_root(path: Path) -> str:
    """A path as the ranks see it: relative to the repository root where it lies inside."""
    resolved = path.resolve()
    return str(resolved.relative_to(ROOT) if resolved.is_relative_to(ROOT) else resolved)


def read_args_file(path: Path) -> tuple[str, ...]:
    """Read the flags of an `.args` file, in order, split as a shell would.

    Raises:
        ValueError: A line has an unclosed quote; the message names file and line.
    """
    words: list[str] = []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            words += shlex.split(line, comments=True)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}; close the quote.") from None
    return tuple(words)


def read_yaml(path: Path) -> Any:
    """Parse a YAML file.

    Raises:
        OSError: It cannot be read.
        yaml.YAMLError: It is not YAML, or names a Python object.
    """
    return yaml.load(path.read_text(), Loader=SafeLoader)
