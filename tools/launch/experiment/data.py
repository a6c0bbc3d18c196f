"""The data sets that experiments on CPU ranks make by themselves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from rich.console import Console

from tools.launch.compose import DEFAULT_DATA, UNIQUE_SAMPLE, Launch
from tools.preprocess.dataset import open_dataset
from tools.preprocess.errors import DatasetError
from tools.spec.files import ROOT
from tools.spec.run import DeviceKind

_SUFFIX = "_text_document"


def ensure_data(launches: Sequence[Launch], console: Console) -> None:
    """Make those of the kit's own samples that these launches train on."""
    named = {launch.data for launch in launches}
    if DEFAULT_DATA[DeviceKind.CPU] in named:
        ensure_sample(console)
    if UNIQUE_SAMPLE in named:
        _make(UNIQUE_SAMPLE, console, "the sample data set, each paragraph once", "--unique")


def ensure_sample(console: Console) -> None:
    """Make the sample data set unless it is there and whole; say how large it is."""
    prefix = DEFAULT_DATA[DeviceKind.CPU]
    _make(prefix, console, "the sample data set from this Python's own documentation")
    dataset = open_dataset(ROOT / prefix)
    console.print(
        f"Data: {dataset.tokens:,} GPT-2 tokens in {dataset.documents} documents.", highlight=False
    )


def run_module(*arguments: str) -> int:
    """`python -m …` from the repository root; its exit code."""
    return subprocess.run((sys.executable, "-m", *arguments), cwd=ROOT, check=False).returncode


def _make(prefix: str, console: Console, what: str, *flags: str) -> None:
    try:
        open_dataset(ROOT / prefix)
    except DatasetError:
        console.print(f"Making {what} …")
        output = prefix.removesuffix(_SUFFIX)
        run_module("tools.preprocess", "sample", *flags, "--output-prefix", output)
