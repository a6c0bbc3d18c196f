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
    has_same_setup = not any(difference.prevents_verdict for difference in differences)
    memory_mib = memory_bytes / MIB if memory_bytes else None
    matches = []
    for quantity, unit, key, measured in (
        ("iteration time", "ms", "iteration_ms", iteration_ms),
        ("device memory", "MiB", "device_memory_mib", memory_mib),
    ):
        published_values = getattr(figure, key)
        # A quantity that was not measured is not shown with another model's figure.
        is_shown = bool(measured) or figure.model == run.model
        if not published_values or not is_shown:
            continue
        low = high = None
        tolerance = figure.source.tolerance.get(key)
        if tolerance is not None:
            low = min(published_values) * (1 - tolerance)
            high = max(published_values) * (1 + tolerance)
        verdict = "not comparable"
        if low is not None and high is not None and measured is not None and has_same_setup:
            verdict = "reproduced" if low <= measured <= high else "not reproduced"
        match = Match(
            figure,
            quantity,
            unit,
            published=published_values,
            measured=measured,
            expected_low=low,
            expected_high=high,
            verdict=verdict,
            differs=tuple(difference.text for difference in differences),
        )
        matches.append(match)
    return tuple(matches)


@dataclass(frozen=True)
class _SetupDifference:
    """Difference between the setup of a run and that of a published figure."""

    prevents_verdict: bool
    """True if the run cannot reproduce the figure with this difference; False if the difference is only stated."""
    text: str


def _list_setup_differences(run: Run, figure: Figure) -> list[_SetupDifference]:
    """Return the differences between the setups of a run and of a published figure.

    If the figure is of another model, only the differences of model and device are listed.
    """
    source = figure.source
    comparisons = [
        _compare_property("model", run.model, figure.model),
        _compare_property("device", run.device, source.device or source.hardware),
    ]
    if run.model == figure.model:
        # With another model these properties differ too, and need not be listed.
        spec = run.spec
        micro_batch = spec.batch.micro_batch_size if spec else None
        driver = run.record.host.driver if run.record else None
        comparisons += [
            _compare_property("backend", spec.backend if spec else None, figure.backend),
            _compare_property("micro batch", micro_batch, figure.micro_batch_size),
            _compare_property("global batch", run.global_batch_size, figure.global_batch_size),
            _compare_property("precision", spec.dtype if spec else None, figure.dtype),
            _compare_property(
                "Megatron",
                _find_commit(run, source.megatron_commit),
                source.megatron_commit,
                prevents_verdict=False,
            ),
            _compare_property("driver", driver, source.driver, prevents_verdict=False),
        ]
    return [difference for difference in comparisons if difference is not None]


def _compare_property(
    name: str, value: object, published: object, *, prevents_verdict: bool = True
) -> _SetupDifference | None:
    """Return the difference of a property of the setup; None if it is equal, or if the source does not state it."""
    if published is None or value == published:
        return None
    value_text = "unknown" if value in (None, "") else value
    return _SetupDifference(prevents_verdict, f"{name} {value_text} instead of {published}")


def _find_commit(run: Run, published: str | None) -> str | None:
    """Return the commit of the run's Megatron, or else its version; None without a record.

    A source may state only the first characters of a commit. If the run's commit begins with them, `published` is
    returned.
    """
    if run.record is None:
        return None
    entry = run.record.entry
    commit = entry.megatron_commit or entry.megatron_version
    if published and commit.startswith(published):
        return published
    return commit
