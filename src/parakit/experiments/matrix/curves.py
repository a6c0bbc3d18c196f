"""What bf16 costs without any bug: losses of 200 iterations in each strategy, in fp32 and in bf16."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from parakit.config.errors import LaunchError
from parakit.config.model import load_model
from parakit.config.run import DeviceKind
from parakit.experiments.matrix.definition import Family, Layout
from parakit.experiments.matrix.outcome import CurveDistances
from parakit.experiments.verify.pairs import MICRO_BATCH
from parakit.experiments.verify.verifier import ForkedRanks, read_losses
from parakit.launch import SMALL_SAMPLE, Job, Options, compose_job

ITERATIONS = 200
ONE_RANK = Layout("one rank", "baseline", 1)


def compare_curves(
    family: Family, options: Options, ranks: ForkedRanks, folder: Path
) -> Iterator[CurveDistances]:
    """Train the family's model as it is in each strategy, on one rank first.

    Raises:
        LaunchError: A run failed.
    """
    one = _train_dtypes(family, ONE_RANK, options, ranks, folder)
    for layout in family.layouts:
        yield measure_distances(
            layout.name, one, _train_dtypes(family, layout, options, ranks, folder)
        )


def measure_distances(
    layout: str, one: Mapping[str, Sequence[float]], own: Mapping[str, Sequence[float]]
) -> CurveDistances:
    """Compare a strategy's losses, by dtype, with one rank's."""

    def apart(losses: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
        found = np.abs(np.subtract(losses, others))
        return float(found.max()), float(found.mean())

    return CurveDistances(
        layout,
        apart(own["fp32"], one["fp32"]),
        apart(own["bf16"], one["bf16"]),
        apart(own["bf16"], own["fp32"]),
        own["fp32"][-1],
        own["bf16"][-1],
    )


def _train_dtypes(
    family: Family, layout: Layout, options: Options, ranks: ForkedRanks, folder: Path
) -> dict[str, list[float]]:
    """By dtype."""
    found, log = {}, folder / "curve.txt"
    for dtype, flag in (("fp32", ""), ("bf16", "--bf16")):
        own = replace(
            options,
            runs=folder,
            data=SMALL_SAMPLE,
            extra=(*family.base, *layout.flags, *layout.own, *flag.split()),
            iterations=ITERATIONS,
            micro_batch_size=MICRO_BATCH,
            global_batch_size=layout.samples,
            dropout=0.0,
            shared_start=True,
            ledger=False,
        )
        model = load_model(family.model)
        launch = compose_job(Job(layout.strategy, model, layout.devices, DeviceKind.CPU, own))
        ranks.ensure_start(launch)
        if failure := ranks.run(launch, log):
            raise LaunchError(f"{layout.name} {flag}: the run {failure}")
        found[dtype] = read_losses(log)
    return found
