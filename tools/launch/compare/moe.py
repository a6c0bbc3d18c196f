"""`make compare-moe`: write-up 000's question with its setup corrected, Megatron against plain PyTorch.

Both train the same mixture of experts from the same weights on the same batches under the same
optimizer, sharded alike; Muon, which only one of its two paths had, comes beside it. Repeats have seeds
of their own: other weights, other order of samples. Running it again goes on where it was stopped.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace

from rich.console import Console

from tools.launch.backends import MUON_PACKAGE
from tools.launch.compare.moe_measured import measure_run
from tools.launch.compare.moe_table import parities, render
from tools.launch.compare.windows import commonest_share, shared_windows
from tools.launch.compose import DEFAULT_DATA, UNIQUE_SAMPLE, Launch
from tools.launch.devices import visible_gpus
from tools.launch.options import Options
from tools.launch.series import build_report, run_module, run_series
from tools.launch.target import Target
from tools.launch.train import compose_target, flags_of_grammar
from tools.preprocess.dataset import open_dataset
from tools.preprocess.errors import DatasetError
from tools.spec.files import ROOT
from tools.spec.flags import Flags
from tools.spec.model import load_model
from tools.spec.run import Backend, DeviceKind, OptimizerName

RANKS = 2
CPU_DATA = UNIQUE_SAMPLE
"""Every paragraph once: the sample's own repeat, and validation would hold what was trained on."""

CPU_ITERATIONS, REPEATS = 30, 2
EVALUATION_BATCHES = 8
TINY_BATCH = (2, 8)
"""Micro and global batch of tiny models: two micro batches a rank, as published."""

FILE = "comparison.md"


@dataclass(frozen=True)
class Kind:
    """What is compared; parity must hold among those of one optimizer."""

    backend: Backend
    strategy: str
    optimizer: OptimizerName = OptimizerName.ADAMW


KINDS = (
    Kind(Backend.MEGATRON, "dp2"),
    Kind(Backend.NATIVE, "dp2"),
    Kind(Backend.MEGATRON, "ep2"),
    Kind(Backend.NATIVE, "ep2"),
    Kind(Backend.MEGATRON, "dp2", OptimizerName.MUON),
    Kind(Backend.NATIVE, "dp2", OptimizerName.MUON),
)


def compare_moe(model: str, options: Options, console: Console) -> int:
    """Train all, write the comparison; 0 if every run ended well and parity held.

    Raises:
        LaunchError: One of the runs cannot work here; nothing was started.
    """
    device = DeviceKind.GPU if len(visible_gpus()) >= RANKS else DeviceKind.CPU
    options = equal_terms(model, device, options)
    if options.data == CPU_DATA:
        _ensure_data(console)
    kinds = [kind for kind in KINDS if not _lacks_package(kind)]
    seeds = range(options.seed, options.seed + max(options.repeats, REPEATS))
    launches = [
        _launch(kind, model, device, replace(options, seed=s)) for s in seeds for kind in kinds
    ]
    finished = run_series(launches, options, console, go_on=True)
    name = f"compare-moe-{model}"
    build_report(finished, name)
    runs = [measure_run(folder) for folder, _ in finished]
    text = render(model, runs, _evaluation_notes(launches[0]))
    folder = ROOT / "reports" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(text + "\n")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Comparison: {(folder / FILE).relative_to(ROOT)}", highlight=False)
    held = all(found.held for found in parities(runs))
    return int(not held or not all(run.is_well for run in runs))


def equal_terms(model: str, device: DeviceKind, options: Options) -> Options:
    """The same batches and no dropout for all, and one evaluation at the end."""
    own = load_model(model).batch
    micro, whole = TINY_BATCH if "-tiny" in model else (own.micro_batch_size, own.global_batch_size)
    on_cpu = device is DeviceKind.CPU
    iterations = options.iterations or (CPU_ITERATIONS if on_cpu else 500)
    evaluation = ("--eval-interval", str(iterations), "--eval-iters", str(EVALUATION_BATCHES))
    return replace(
        options,
        iterations=iterations,
        micro_batch_size=options.micro_batch_size or micro,
        global_batch_size=options.global_batch_size or whole,
        dropout=0.0 if options.dropout is None else options.dropout,
        shared_start=True,
        data=options.data or (CPU_DATA if on_cpu else DEFAULT_DATA[device]),
        extra=(*evaluation, *options.extra),
    )


def _launch(kind: Kind, model: str, device: DeviceKind, options: Options) -> Launch:
    target = Target(kind.strategy, load_model(model).name, RANKS, device)
    own = replace(options, backend=kind.backend, optimizer=kind.optimizer)
    return compose_target(target, flags_of_grammar(target), own)


def _lacks_package(kind: Kind) -> bool:
    needs = kind.backend is Backend.MEGATRON and kind.optimizer is OptimizerName.MUON
    return needs and importlib.util.find_spec(MUON_PACKAGE) is None


def _ensure_data(console: Console) -> None:
    try:
        open_dataset(ROOT / CPU_DATA)
    except DatasetError:
        console.print("Making the sample data set, each paragraph once …")
        prefix = CPU_DATA.removesuffix("_text_document")
        run_module("tools.preprocess", "sample", "--unique", "--output-prefix", prefix)


def _evaluation_notes(launch: Launch) -> list[str]:
    """What the scores are measured on, and what a model that learned nothing would reach."""
    prefix, split = ROOT / launch.data, Flags(launch.flags).text("--split")
    found = shared_windows(prefix, split, launch.model.shape.seq_length)
    notes = [
        f"{found.shared:,} of the {found.windows:,} validation windows of {found.length} tokens stand "
        "in the training documents.",
        f"Naming the commonest token always would be right for {commonest_share(prefix, split):.1%} of "
        "the validation tokens.",
    ]
    if importlib.util.find_spec(MUON_PACKAGE) is None:
        notes.append(f"Megatron's own Muon is left out: it needs the package {MUON_PACKAGE}.")
    return notes
