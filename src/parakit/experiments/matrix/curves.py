"""Measure what bf16 costs without any bug: losses of 200 iterations per layout, in fp32 and in bf16."""

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
    """Train the family's default model on one rank and in each layout; yield each layout's distances.

    Raises:
        LaunchError: A run failed.
    """
    one_rank = _train_dtypes(family, ONE_RANK, options, ranks, folder)
    for layout in family.layouts:
        losses = _train_dtypes(family, layout, options, ranks, folder)
        yield measure_distances(layout.name, one_rank, losses)


def measure_distances(
    layout: str, one_rank: Mapping[str, Sequence[float]], losses: Mapping[str, Sequence[float]]
) -> CurveDistances:
    """Return the distances of a layout's losses to those of one rank; both are losses by dtype."""

    def compare(curve: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
        differences = np.abs(np.subtract(curve, reference))
        return float(differences.max()), float(differences.mean())

    return CurveDistances(
        layout,
        fp32=compare(losses["fp32"], one_rank["fp32"]),
        bf16=compare(losses["bf16"], one_rank["bf16"]),
        cost=compare(losses["bf16"], losses["fp32"]),
        last_fp32=losses["fp32"][-1],
        last_bf16=losses["bf16"][-1],
    )


def _train_dtypes(
    family: Family, layout: Layout, options: Options, ranks: ForkedRanks, folder: Path
) -> dict[str, list[float]]:
    """Train a layout in fp32 and in bf16; return the losses of all iterations by dtype."""
    losses = {}
    log = folder / "curve.txt"
    for dtype, dtype_flags in (("fp32", ()), ("bf16", ("--bf16",))):
        run_options = replace(
            options,
            runs=folder,
            data=SMALL_SAMPLE,
            extra=(*family.base, *layout.flags, *layout.strategy_flags, *dtype_flags),
            iterations=ITERATIONS,
            micro_batch_size=MICRO_BATCH,
            global_batch_size=layout.samples,
            dropout=0.0,
            shared_start=True,
            ledger=False,
        )
        job = Job(
            layout.strategy,
            load_model(family.model),
            devices=layout.devices,
            device=DeviceKind.CPU,
            options=run_options,
        )
        launch = compose_job(job)
        ranks.ensure_start(launch)
        failure = ranks.run(launch, log)
        if failure:
            raise LaunchError(f"{layout.name} {' '.join(dtype_flags)}: the run {failure}")
        losses[dtype] = read_losses(log)
    return losses
