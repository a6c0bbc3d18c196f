"""Compare published figures (`published.yaml`) with measured ones: reproduced or not."""

from __future__ import annotations

from dataclasses import dataclass

from parakit.config.published import MAIN_SOURCE, Figure, Published
from parakit.config.strategy import Parallelism
from parakit.formatting.units import MIB
from parakit.logs import Run


@dataclass(frozen=True)
class Match:
    """Published quantity with the measured one and the verdict."""

    figure: Figure
    quantity: str
    """`iteration time` or `device memory`."""
    unit: str
    published: tuple[float, ...]
    """Published values, one per published run."""
    measured: float | None
    expected_low: float | None
    expected_high: float | None
    """Range in which a reproduced value lies; None if the write-up has no tolerance."""
    verdict: str = "not comparable"
    """`reproduced`, `not reproduced` or `not comparable`."""
    differs: tuple[str, ...] = ()
    """Differences in the setup, one text each."""


def find_published_figure(run: Run, published: Published) -> Figure | None:
    """Return the published figure with a run's model and parallelism; None if there is none.

    If the model has no figure, the main source's figure of another model with this parallelism is returned.
    """
    if run.spec is None:
        return None
    split = run.spec.parallelism
    same = [f for f in published.figures if f.parallelism == split and f.iteration_ms]
    exact = [figure for figure in same if figure.model == run.model]
    main = [figure for figure in same if figure.source.key == MAIN_SOURCE]
    return next(iter(exact or main), None)


def published_baseline_ratio(figure: Figure, published: Published) -> float | None:
    """Return the published time per sample over baseline's in the same write-up; None without both."""
    same = [f for f in published.figures if f.source == figure.source and f.model == figure.model]
    baseline = next((f for f in same if f.parallelism == Parallelism()), None)
    if baseline is None or not baseline.ms_per_sample or not figure.ms_per_sample:
        return None
    return figure.ms_per_sample / baseline.ms_per_sample


def match_figure(
    run: Run, figure: Figure, iteration_ms: float | None, memory_bytes: int | None
) -> tuple[Match, ...]:
    """Return each quantity of a published figure with its measured counterpart and a verdict.

    Args:
        run: The measured run.
        figure: The published figure.
        iteration_ms: Measured time per iteration; None if unknown.
        memory_bytes: Measured device memory; None if unknown.
    """
    differences = _list_setup_differences(run, figure)
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
        if (
            measured is not None
            and low is not None
            and not any(item.prevents_verdict for item in differences)
        ):
            verdict = "reproduced" if low <= measured <= (high or low) else "not reproduced"
        # A quantity that was not measured is not shown with another model's figure.
        if values and (measured or figure.model == run.model):
            texts = tuple(item.text for item in differences)
            matches.append(
                Match(figure, quantity, unit, values, measured, low, high, verdict, texts)
            )
    return tuple(matches)


@dataclass(frozen=True)
class _SetupDifference:
    """Difference between the setup of a run and that of a published figure."""

    prevents_verdict: bool
    text: str


def _list_setup_differences(run: Run, figure: Figure) -> list[_SetupDifference]:
    """Return the differences between the setups of a run and of a published figure.

    If the figure is of another model, only the differences of model and device are listed.
    """
    spec, source = run.spec, figure.source
    entry = run.record.entry if run.record else None
    driver = run.record.host.driver if run.record else None
    commit = (entry.megatron_commit or entry.megatron_version) if entry else None
    if commit and source.megatron_commit and commit.startswith(source.megatron_commit):
        commit = source.megatron_commit
    properties: tuple[tuple[bool, str, object, object], ...] = (
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
        # With another model all other properties differ too, and need not be listed.
        properties = properties[:2]
    differences = []
    for prevents_verdict, name, value, published in properties:
        if published is not None and value != published:
            value_text = value if value not in (None, "") else "unknown"
            text = f"{name} {value_text} instead of {published}"
            differences.append(_SetupDifference(prevents_verdict, text))
    return differences
