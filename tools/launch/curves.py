"""`make loss-curve`: what `FUSED=` does to the loss curve, beside what another seed does to it.

Three runs: Megatron alone, Megatron alone from another seed, the patches from the first seed. Patches
round elsewhere, and what rounds elsewhere parts in the end, so a curve is not held against a tolerance
but against the scatter that is there anyway.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Console

from megatron_patches.fusions import FUSIONS
from tools.launch.compose import DEFAULT_DATA, Launch
from tools.launch.errors import LaunchError
from tools.launch.experiment.data import ensure_sample
from tools.launch.options import Options
from tools.launch.series import run_series
from tools.launch.target import parse_target
from tools.launch.train import compose_target, flags_of_grammar
from tools.records.run import LOG_FILE, Status
from tools.report.read.scrape import scrape_log
from tools.spec.run import DeviceKind

TARGET = "train-baseline-gpt2-tiny-1cpu"
ITERATIONS, DROPOUT, MICRO_BATCH = 200, 0.1, 2
WINDOW = 25
"""Iterations. A single loss is its batch's more than its weights': of seeds that read different batches
the mean over a window leaves what would move a curve."""
KERNELS_OF_GPUS = "attention_"


@dataclass(frozen=True)
class Distances:
    """Mean absolute differences to the unpatched curve, each point a mean over `WINDOW` iterations."""

    patched: float
    seeds: float

    @property
    def within(self) -> bool:
        """Whether the patches move the curve no further than a seed does."""
        return self.patched <= self.seeds


def loss_curve(options: Options, console: Console) -> int:
    """Train the three and tell; 0 if the patches stay within the seeds.

    Raises:
        LaunchError: It cannot work here, or a run did not end well.
    """
    launches = _launches(options)
    if launches[0].data == DEFAULT_DATA[DeviceKind.CPU]:
        ensure_sample(console)
    finished = run_series(launches, options, console)
    for folder, status in finished:
        if status.status is not Status.OK:
            raise LaunchError(f"{folder.name} ended '{status.status}': {status.reason}")
    alone, seed, patched = (
        {i.iteration: i.lm_loss for i in scrape_log(folder / LOG_FILE).iterations if i.lm_loss}
        for folder, _ in finished
    )
    found = Distances(distance(alone, patched), distance(alone, seed))
    console.print(_told(found, launches), highlight=False, markup=False, soft_wrap=True)
    return int(not found.within)


def distance(one: Mapping[int, float], other: Mapping[int, float], window: int = WINDOW) -> float:
    """Mean absolute difference of the moving means of two curves, losses by iteration.

    Only iterations that both have count: fp16 leaves some out while its loss scale falls.

    Raises:
        LaunchError: They share fewer than a window.
    """
    both = sorted(set(one) & set(other))
    if len(both) < window:
        raise LaunchError(
            f"The curves share {len(both)} iterations and a window has {window}; set ITERS= higher."
        )
    pairs = zip(*(_moving([curve[i] for i in both], window) for curve in (one, other)), strict=True)
    return statistics.fmean(abs(left - right) for left, right in pairs)


def _moving(losses: Sequence[float], window: int) -> list[float]:
    return [statistics.fmean(losses[end - window : end]) for end in range(window, len(losses) + 1)]


def _launches(options: Options) -> list[Launch]:
    target = parse_target(os.environ.get("TARGET") or TARGET)
    on_cpu = target.device is DeviceKind.CPU
    everywhere = [f.name for f in FUSIONS if not f.name.startswith(KERNELS_OF_GPUS)]
    patches = options.fused or tuple(everywhere)
    options = replace(
        options,
        iterations=options.iterations or ITERATIONS,
        dropout=DROPOUT if options.dropout is None and on_cpu else options.dropout,
        micro_batch_size=options.micro_batch_size or (MICRO_BATCH if on_cpu else None),
        global_batch_size=options.global_batch_size or (MICRO_BATCH if on_cpu else None),
        shared_start=False,  # A seed draws its own weights.
        ledger=False,
    )
    three = ((options.seed, ()), (options.seed + 1, ()), (options.seed, patches))
    return [
        compose_target(target, flags_of_grammar(target), replace(options, seed=seed, fused=fused))
        for seed, fused in three
    ]


def _told(found: Distances, launches: Sequence[Launch]) -> str:
    one, other, patched = launches
    return (
        f"Losses over {WINDOW} iterations, mean distance to Megatron alone with SEED={one.spec.seed}: "
        f"{found.patched:.2g} with FUSED={patched.environment['KIT_FUSED']}, "
        f"{found.seeds:.2g} with SEED={other.spec.seed}: "
        + ("within the scatter of seeds." if found.within else "the patches move the curve.")
    )
