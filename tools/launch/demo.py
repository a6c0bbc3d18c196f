"""`make demo`: data, one starting checkpoint, six strategies on CPU ranks, one report."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console

from tools.launch.compose import DEFAULT_DATA
from tools.launch.options import Options
from tools.launch.series import build_report, run_module, run_series
from tools.launch.target import Target
from tools.launch.train import compose_target, flags_of_grammar
from tools.preprocess.dataset import open_dataset
from tools.preprocess.errors import DatasetError
from tools.records.run import Status
from tools.spec.files import ROOT
from tools.spec.run import DeviceKind
from tools.spec.strategy import NAMED

MODEL = "gpt2-tiny"
MICRO_BATCH, GLOBAL_BATCH = 2, 8
"""The same work for every strategy, in four micro batches, which a pipeline needs."""


def demo(options: Options, console: Console, report: str = "demo") -> int:
    """Run the demo and write its report under a name; 0 if all six ended well.

    Raises:
        LaunchError: It cannot work here.
    """
    options = replace(
        options,
        micro_batch_size=options.micro_batch_size or MICRO_BATCH,
        global_batch_size=options.global_batch_size or GLOBAL_BATCH,
        shared_start=True,
    )
    ensure_sample(console)
    targets = [
        Target(name, MODEL, 1 if name == "baseline" else 2, DeviceKind.CPU) for name in NAMED
    ]
    launches = [compose_target(target, flags_of_grammar(target), options) for target in targets]
    finished = run_series(launches, options, console)
    reported = build_report(finished, report)
    return reported or int(any(status.status is not Status.OK for _, status in finished))


def ensure_sample(console: Console) -> None:
    """Make the sample data set unless it is there and whole."""
    prefix = ROOT / DEFAULT_DATA[DeviceKind.CPU]
    try:
        open_dataset(prefix)
    except DatasetError:
        console.print("Making the sample data set from this Python's own documentation …")
        run_module("tools.preprocess", "sample", "--output-prefix", "owt-ds/sample")
    dataset = open_dataset(prefix)
    console.print(
        f"Data: {dataset.tokens:,} GPT-2 tokens in {dataset.documents} documents.", highlight=False
    )
