"""`make compare-zero` and `make compare-backends`: a set of runs on equal terms, and what it shows."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tools.launch.backends import NO_DEEPSPEED
from tools.launch.compare import backends as compare_backends
from tools.launch.compare import zero as compare_zero
from tools.launch.compare.measured import Measured, measure
from tools.launch.compose import Launch
from tools.launch.devices import visible_gpus
from tools.launch.experiment.data import ensure_sample
from tools.launch.options import Options
from tools.launch.series import build_report, run_series
from tools.launch.target import Target
from tools.launch.train import compose_target, flags_of_grammar
from tools.spec.files import ROOT
from tools.spec.model import load_model
from tools.spec.run import Backend, DeviceKind

RANKS = 2
MICRO_BATCH, GLOBAL_BATCH = 2, 8
DEFAULT_MODEL = "gpt2-tiny"
FILE = "comparison.md"


def compare_zero_stages(model: str, options: Options, console: Console) -> int:
    """Seed 002's set; 0 if every run ended well with the same losses."""
    options = equal_terms(model, options)
    launches = [_launch(Backend.MEGATRON, name, model, options) for name in compare_zero.STRATEGIES]
    runs, folder = _run(launches, f"compare-zero-{model}", options, console)
    return _finish(compare_zero.render(model, runs), runs, folder, console)


def compare_backends_of(model: str, options: Options, console: Console) -> int:
    """Every backend that is installed; 0 if every run ended well with the same losses."""
    options = equal_terms(model, options)
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    chosen = [
        (backend, strategy)
        for backend, strategy in compare_backends.RUNS
        if backend is not Backend.DEEPSPEED or has_deepspeed
    ]
    missing = () if has_deepspeed else (f"DeepSpeed is left out: {NO_DEEPSPEED}",)
    launches = [_launch(backend, strategy, model, options) for backend, strategy in chosen]
    runs, folder = _run(launches, f"compare-backends-{model}", options, console)
    return _finish(compare_backends.render(model, runs, missing), runs, folder, console)


def equal_terms(model: str, options: Options) -> Options:
    """The same batches, weights and no random numbers for all, unless other ones were asked for.

    The model's own micro batch; the global batch of all ranks. gpt2-tiny takes the demo's, which
    gives a pipeline four micro batches.
    """
    own = load_model(model).batch
    tiny = model == DEFAULT_MODEL
    micro = MICRO_BATCH if tiny else own.micro_batch_size
    whole = GLOBAL_BATCH if tiny else own.global_batch_size * RANKS
    return replace(
        options,
        micro_batch_size=options.micro_batch_size or micro,
        global_batch_size=options.global_batch_size or whole,
        dropout=0.0 if options.dropout is None else options.dropout,
        shared_start=True,
    )


def _launch(backend: Backend, strategy: str, model: str, options: Options) -> Launch:
    kind = DeviceKind.GPU if len(visible_gpus()) >= RANKS else DeviceKind.CPU
    target = Target(strategy, load_model(model).name, RANKS, kind)
    return compose_target(target, flags_of_grammar(target), replace(options, backend=backend))


def _run(
    launches: Sequence[Launch], name: str, options: Options, console: Console
) -> tuple[list[Measured], Path]:
    if options.data is None and launches[0].spec.device is DeviceKind.CPU:
        ensure_sample(console)
    finished = run_series(launches, options, console)
    build_report(finished, name)
    return measure([folder for folder, _ in finished]), ROOT / "reports" / name


def _finish(text: str, runs: Sequence[Measured], folder: Path, console: Console) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(text + "\n")
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print(f"Comparison: {(folder / FILE).relative_to(ROOT)}", highlight=False)
    return int(any(run.status != "ok" or run.parity.startswith("broken") for run in runs))
