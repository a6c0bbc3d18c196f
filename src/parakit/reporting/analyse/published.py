"""Published figures (`published.yaml`) beside what was measured: reproduced or not."""

from __future__ import annotations

from dataclasses import dataclass

from parakit.config.published import MAIN_SOURCE, Figure, Published
from parakit.config.strategy import Parallelism
from parakit.formatting.units import MIB
from parakit.logs import Run


@dataclass(frozen=True)
class Match:
    """One published quantity beside the measured one."""

    figure: Figure
    quantity: str
    """`iteration time` or `device memory`."""
    unit: str
    published: tuple[float, ...]
    measured: float | None
    expected_low: float | None
    expected_high: float | None
    verdict: str = "not comparable"
    """`reproduced`, `not reproduced` or `not comparable`."""
    differs: tuple[str, ...] = ()
    """What is different in the setup."""


def find_published_figure(run: Run, published: Published) -> Figure | None:
    """The figure of the same model, strategy and ranks; else the main source's of that strategy."""
    if run.spec is None:
        return None
    split = run.spec.parallelism
    same = [f for f in published.figures if f.parallelism == split and f.iteration_ms]
    exact = [figure for figure in same if figure.model == run.model]
    main = [figure for figure in same if figure.source.key == MAIN_SOURCE]
    return next(iter(exact or main), None)


def published_baseline_ratio(figure: Figure, published: Published) -> float | None:
    """The published time a sample over that of the same write-up's baseline."""
    same = [f for f in published.figures if f.source == figure.source and f.model == figure.model]
    baseline = next((f for f in same if f.parallelism == Parallelism()), None)
    if baseline is None or not baseline.ms_per_sample or not figure.ms_per_sample:
        return None
    return figure.ms_per_sample / baseline.ms_per_sample


def match_figure(
    run: Run, figure: Figure, iteration_ms: float | None, memory_bytes: int | None
) -> tuple[Match, ...]:
    """The figure's quantities beside the measured ones."""
    differs = _differences(run, figure)
    memory = memory_bytes / MIB if memory_bytes else None
    matches = []
    for quantity, unit, key, measured in (
        ("iteration time", "ms", "iteration_ms", iteration_ms),
        ("device memory", "MiB", "device_memory_mib", memory),
    ):
        values, tolerance = getattr(figure, key), figure.source.tolerance.get(key)
        low = high = None
        if tolerance is not None and values:
            low, high = min(values) * (1 - tolerance), max(values) * (1 + tolerance)
        verdict = "not comparable"
        if measured is not None and low is not None and not any(grave for grave, _ in differs):
            verdict = "reproduced" if low <= measured <= (high or low) else "not reproduced"
        # Beside another model's figure a quantity that was not measured says nothing.
        if values and (measured or figure.model == run.model):
            texts = tuple(text for _, text in differs)
            matches.append(
                Match(figure, quantity, unit, values, measured, low, high, verdict, texts)
            )
    return tuple(matches)


def _differences(run: Run, figure: Figure) -> list[tuple[bool, str]]:
    """What differs in the setup; True where it makes a verdict impossible."""
    spec, source = run.spec, figure.source
    entry = run.record.entry if run.record else None
    driver = run.record.host.driver if run.record else None
    commit = (entry.megatron_commit or entry.megatron_version) if entry else None
    if commit and source.megatron_commit and commit.startswith(source.megatron_commit):
        commit = source.megatron_commit
    wanted: tuple[tuple[bool, str, object, object], ...] = (
        (True, "model", run.model, figure.model),
        (True, "device", run.device, source.device or source.hardware),
        (True, "backend", spec and spec.backend, figure.backend),
        (True, "micro batch", spec and spec.batch.micro_batch_size, figure.micro_batch_size),
        (True, "global batch", run.global_batch_size, figure.global_batch_size),
        (True, "precision", spec and spec.dtype, figure.dtype),
        (False, "Megatron", commit, source.megatron_commit),
        (False, "driver", driver, source.driver),
    )
    if run.model != figure.model:
        wanted = wanted[:2]  # All else differs too, and need not be said.
    return [
        (grave, f"{name} {here if here not in (None, '') else 'unknown'} instead of {there}")
        for grave, name, here, there in wanted
        if there is not None and here != there
    ]
