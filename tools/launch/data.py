"""The data sets that the kit makes by itself, from text that comes with Python."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from tools.dataset.indexed import DatasetError, idx_path, open_dataset
from tools.launch.compose import DEFAULT_DATA, UNIQUE_SAMPLE, Launch
from tools.launch.errors import LaunchError
from tools.records.io import lock
from tools.spec.files import ROOT
from tools.spec.run import DeviceKind

SAMPLE = DEFAULT_DATA[DeviceKind.CPU]
_SUFFIX = "_text_document"
_WHAT: Mapping[str, tuple[str, tuple[str, ...]]] = {
    SAMPLE: ("the sample data set from this Python's own documentation", ()),
    UNIQUE_SAMPLE: ("the sample data set, each paragraph once", ("--unique",)),
}
"""What is said of each, and the flags that make it."""

WAIT_SECONDS = 0.2


def make_missing_data(launches: Sequence[Launch], console: Console) -> None:
    """Make those of the kit's own samples that these launches train on and that are not there.

    Raises:
        LaunchError: One could not be made.
    """
    for prefix in _WHAT.keys() & {launch.data for launch in launches}:
        if not idx_path(ROOT / prefix).is_file():
            _make(prefix, console)


def ensure_data(launches: Sequence[Launch], console: Console) -> None:
    """As `make_missing_data`, but damaged ones are made anew; say how large the sample is.

    Raises:
        LaunchError: One could not be made.
    """
    named = {launch.data for launch in launches}
    if SAMPLE in named:
        ensure_sample(console)
    if UNIQUE_SAMPLE in named:
        _make(UNIQUE_SAMPLE, console)


def ensure_sample(console: Console) -> None:
    """Make the sample data set unless it is there and whole; say how large it is.

    Raises:
        LaunchError: It could not be made.
    """
    _make(SAMPLE, console)
    dataset = open_dataset(ROOT / SAMPLE)
    console.print(
        f"Data: {dataset.tokens:,} GPT-2 tokens in {dataset.documents} documents.", highlight=False
    )


def run_module(*arguments: str) -> int:
    """`python -m …` from the repository root; its exit code."""
    return subprocess.run((sys.executable, "-m", *arguments), cwd=ROOT, check=False).returncode


def _make(prefix: str, console: Console) -> None:
    what, flags = _WHAT[prefix]
    output = prefix.removesuffix(_SUFFIX)
    if _is_whole(prefix):
        return
    with _alone(ROOT / f"{output}.lock"):
        if _is_whole(prefix):  # Another launcher made it meanwhile.
            return
        console.print(f"Making {what} …", highlight=False)
        if run_module("tools.preprocess", "sample", *flags, "--output-prefix", output):
            raise LaunchError(
                f"{prefix} could not be made, for the reason above; try 'make prepare-ds-sample', or "
                "name another data set with DATA=."
            )


def _is_whole(prefix: str) -> bool:
    try:
        open_dataset(ROOT / prefix)
    except DatasetError:
        return False
    return True


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other launcher, also of another node, makes the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        while True:
            try:
                lock(file)
                break
            except BlockingIOError:
                time.sleep(WAIT_SECONDS)
        yield
        path.unlink(missing_ok=True)
