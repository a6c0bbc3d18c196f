"""What bf16 costs without any bug: losses of 200 iterations in each layout, in fp32 and in bf16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console

from tools.launch.compose import SMALL_SAMPLE
from tools.launch.job import Job
from tools.launch.options import Options
from tools.launch.start import ensure_start_checkpoint
from tools.launch.train import compose_job
from tools.report.read.scrape import scrape_log
from tools.spec.errors import LaunchError
from tools.spec.model import load_model
from tools.spec.run import DeviceKind
from tools.study.matrix.definition import Family, Layout
from tools.study.verify.pairs import MICRO_BATCH
from tools.study.verify.verifier import ForkedRanks

ITERATIONS = 200
SECONDS = 1200.0
ONE_RANK = Layout("one rank", "baseline", 1)


@dataclass(frozen=True)
class Curve:
    """A layout's losses against others, each as largest and mean of the absolute differences."""

    layout: str
    fp32: tuple[float, float]
    """From one rank's in fp32."""
    bf16: tuple[float, float]
    """From one rank's in bf16."""
    cost: tuple[float, float]
    """Of the layout in bf16 from itself in fp32."""
    last_fp32: float
    last_bf16: float


def curves(family: Family, options: Options, ranks: ForkedRanks, folder: Path) -> Iterator[Curve]:
    """Train the family's model as it is in each layout, on one rank first.

    Raises:
        LaunchError: A run failed.
    """
    one = _losses(family, ONE_RANK, options, ranks, folder)
    for layout in family.layouts:
        yield curve_of(layout.name, one, _losses(family, layout, options, ranks, folder))


def curve_of(
    layout: str, one: Mapping[str, Sequence[float]], own: Mapping[str, Sequence[float]]
) -> Curve:
    """Compare a layout's losses, by dtype, with one rank's."""
    return Curve(
        layout,
        _apart(own["fp32"], one["fp32"]),
        _apart(own["bf16"], one["bf16"]),
        _apart(own["bf16"], own["fp32"]),
        own["fp32"][-1],
        own["bf16"][-1],
    )


def _apart(losses: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    apart = np.abs(np.subtract(losses, others))
    return float(apart.max()), float(apart.mean())


def _losses(
    family: Family, layout: Layout, options: Options, ranks: ForkedRanks, folder: Path
) -> dict[str, list[float]]:
    return {
        dtype: _train(family, layout, flags, options, ranks, folder)
        for dtype, flags in (("fp32", ()), ("bf16", ("--bf16",)))
    }


def _train(
    family: Family,
    layout: Layout,
    flags: tuple[str, ...],
    options: Options,
    ranks: ForkedRanks,
    folder: Path,
) -> list[float]:
    chosen = replace(
        options,
        runs=folder,
        data=SMALL_SAMPLE,
        extra=(*family.base, *layout.flags, *layout.own, *flags),
        iterations=ITERATIONS,
        micro_batch_size=MICRO_BATCH,
        global_batch_size=layout.samples,
        dropout=0.0,
        shared_start=True,
        ledger=False,
    )
    model = load_model(family.model)
    launch = compose_job(Job(layout.strategy, model, layout.devices, DeviceKind.CPU, chosen))
    ensure_start_checkpoint(launch, Console(quiet=True), ranks.exit_code)
    log = folder / "curve.txt"
    if failure := ranks.run(launch, log, seconds=SECONDS):
        raise LaunchError(f"{layout.name} {' '.join(flags)}: the run {failure}")
    return [one.lm_loss for one in scrape_log(log).iterations if one.lm_loss is not None]
