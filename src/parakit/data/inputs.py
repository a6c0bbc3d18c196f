"""Text that a data set is made from: which files an `--input` names, and how the hub is named."""

from __future__ import annotations

import glob
from collections.abc import Iterable
from pathlib import Path

from parakit.data.indexed import DatasetError

HUB_PREFIX = "hub:"
"""Start of an input that is a data set of the Hugging Face hub."""
HUB_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE")
"""Variables that name a user's own cache of the hub."""
INPUT_SUFFIXES = (".jsonl", ".json", ".gz", ".zst", ".zstd", ".parquet")
"""Endings of files that are read where an input is a folder."""


def find_input_files(patterns: Iterable[str]) -> tuple[Path, ...]:
    """Return the files that inputs name: files, folders (searched for known endings) and globs, sorted.

    Raises:
        DatasetError: An input is a pipe or a device, or matches no file.
    """
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if pattern == "-" or (path.exists() and not path.is_dir() and not path.is_file()):
            raise DatasetError(
                f"--input {pattern} is a pipe or a device: it cannot be read again, which resuming "
                "after a kill needs; write it into a file first (COMMAND > text.jsonl) and give "
                "that. Archives (.gz, .zst) are read as they are."
            )
        if path.is_dir():
            matches = sorted(
                p for p in path.rglob("*") if p.suffix in INPUT_SUFFIXES and p.is_file()
            )
        elif path.exists():
            matches = [path]
        else:
            matches = sorted(Path(p) for p in glob.glob(pattern, recursive=True))  # noqa: PTH207
        if not matches:
            what = f"no file ending in {', '.join(INPUT_SUFFIXES)}" if path.is_dir() else "nothing"
            raise DatasetError(f"--input {pattern} matches {what}; check the path.")
        files += matches
    return tuple(files)
