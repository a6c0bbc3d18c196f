"""Published figures (`published.yaml`) beside what was measured: reproduced or not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tools.report.read.runs import Run
from tools.spec.published import MAIN_SOURCE, Figure, Published
from tools.spec.strategy import Parallelism
from tools.text.units import MIB


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


def figure_for(run: Run, published: Published) -> Figure | None:
    """The figure of the same model, strategy and ranks; else the main source's of that strategy."""
    spec = run.spec
    if spec is None:
        return None
    same = [
        figure
        for figure in published.figures
        if figure.parallelism == spec.parallelism and figure.iteration_ms
    ]
    exact = [figure for figure in same if figure.model == run.model]
    main = [figure for figure in same if figure.source.key == MAIN_SOURCE]
    return next(iter(exact or main), None)


def relative_to_baseline(figure: Figure, published: Published) -> float | None:
    """The published time a sample over that of the same write-up's baseline."""
    same = [f for f in published.figures if f.source == figure.source and f.model == figure.model]
    baseline = next((f for f in same if f.parallelism == Parallelism()), None)
    if baseline is None or not baseline.ms_per_sample or not figure.ms_per_sample:
        return None
    return figure.ms_per_sample / baseline.ms_per_sample


def match_figure(
    run: Run, figure: Figure, iteration_ms: float | None, memory_bytes: int | None
) -> list[Match]:
    """The figure's quantities beside the measured ones."""
    memory = memory_bytes / MIB if memory_bytes else None
    times, readings = figure.iteration_ms, figure.device_memory_mib
    matches = [
        Match(figure, "iteration time", "ms", times, iteration_ms, *_range(figure, "iteration_ms")),
        Match(
            figure, "device memory", "MiB", readings, memory, *_range(figure, "device_memory_mib")
        ),
    ]
    differs = _differences(run, figure)
    # Beside another model's figure a quantity that was not measured says nothing.
    shown = [m for m in matches if m.published and (m.measured or figure.model == run.model)]
    return [_with_verdict(match, differs) for match in shown]


def _range(figure: Figure, key: str) -> tuple[float | None, float | None]:
    tolerance = figure.source.tolerance.get(key)
    values = getattr(figure, key)
    if tolerance is None or not values:
        return None, None
    return min(values) * (1 - tolerance), max(values) * (1 + tolerance)


def _with_verdict(match: Match, differs: list[tuple[bool, str]]) -> Match:
    low, high, measured = match.expected_low, match.expected_high, match.measured
    if measured is None or low is None or high is None or any(grave for grave, _ in differs):
        verdict = "not comparable"
    else:
        verdict = "reproduced" if low <= measured <= high else "not reproduced"
    return replace(match, verdict=verdict, differs=tuple(text for _, text in differs))


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
