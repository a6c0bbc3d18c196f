"""Find the files of text that the `--input` options of preprocessing name.

An input is a file, a folder, a glob pattern or, with `HUB_PREFIX`, a data set of the Hugging Face hub.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable
from pathlib import Path

from parakit.data.indexed import DatasetError

HUB_PREFIX = "hub:"
"""Prefix of an `--input` that names a data set of the Hugging Face hub."""
HUB_CACHES = ("HF_HOME", "HF_HUB_CACHE", "HF_DATASETS_CACHE")
"""Environment variables by which users set the folders of the hub's cache."""
INPUT_SUFFIXES = (".jsonl", ".json", ".gz", ".zst", ".zstd", ".parquet")
"""Suffixes of the files that are read if an input is a folder."""
TEXT_SUFFIX = ".txt"
"""Suffix of the files that are read if a folder holds none of INPUT_SUFFIXES, beside which they may be notes."""


def find_default_hub_cache(name: str) -> Path | None:
    """Return the folder of the hub's default cache if it holds files of the data set `name`, else None.

    The result is also None if the user has named another cache in an environment variable of HUB_CACHES.
    """
    if any(os.environ.get(variable) for variable in HUB_CACHES):
        return None
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "huggingface" / "hub"
    snapshots = folder / f"datasets--{name.replace('/', '--')}" / "snapshots"
    return folder if any(snapshots.glob("*/*")) else None


def find_input_files(patterns: Iterable[str]) -> tuple[Path, ...]:
    """Return the files that the inputs name, in the order of the inputs.

    A folder gives all its files with one of INPUT_SUFFIXES, at any depth and sorted, or else all its `.txt`
    files. A glob pattern gives its matches, sorted.

    Args:
        patterns: Values of `--input`: paths of files and folders, and glob patterns.

    Raises:
        DatasetError: An input is a pipe or a device, or matches no file.
    """
    files: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        is_special = path.exists() and not path.is_dir() and not path.is_file()
        if pattern == "-" or is_special:
            raise DatasetError(
                f"--input {pattern} is a pipe or a device: it cannot be read again, which resuming "
                "after a kill needs; write it into a file first (COMMAND > text.jsonl) and give "
                "that. Archives (.gz, .zst) are read as they are."
            )
        matches = _match_pattern(pattern)
        if not matches:
            suffixes = ", ".join((*INPUT_SUFFIXES, TEXT_SUFFIX))
            lack = f"no file ending in {suffixes}" if path.is_dir() else "nothing"
            raise DatasetError(f"--input {pattern} matches {lack}; check the path.")
        files += matches
    return tuple(files)


def _match_pattern(pattern: str) -> list[Path]:
    """Return the files that one input names: the files of a folder, a single file, or the matches of a pattern."""
    path = Path(pattern)
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
        inputs = [file for file in files if file.suffix in INPUT_SUFFIXES]
        return inputs or [file for file in files if file.suffix == TEXT_SUFFIX]
    if path.exists():
        return [path]
    names = glob.glob(pattern, recursive=True)  # noqa: PTH207
    return sorted(Path(name) for name in names)
