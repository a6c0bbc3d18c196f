"""Residuals in figures: by source, by GPU, the worst and why, what was refused."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from parakit.config.run import RunSpec
from parakit.costs import COMPONENTS, find_peak_rank
from parakit.formatting.table import Column
from parakit.formatting.units import DASH, percent
from parakit.planner.readings.facts import container_release, source_facts
from parakit.planner.readings.intervals import LEVELS, PredictionErrors
from parakit.planner.readings.residual import Residual, Residuals, predicted_memory
from parakit.planner.readings.table import Refusal
from parakit.planner.ties import choose_preferred
from parakit.planner.time.iteration import TIME_COMPONENTS, iteration_seconds
from parakit.planner.verdict import judge_fit_on_cluster, needed_bytes

MEMORY, TIME = "memory", "time"


@dataclass(frozen=True)
class ErrorGroup:
    """Errors of the readings that have something in common."""

    name: str
    metric: str
    """As in the file; several metrics are joined by `+`."""
    readings: int
    errors: tuple[float, ...]
    """Of those predicted."""

    @property
    def figures(self) -> dict[str, float]:
        """Of the errors' sizes; the median's sign shows the bias. Empty where nothing is predicted."""
        sizes = sorted(map(abs, self.errors))
        if not sizes:
            return {}
        return {
            "median_abs_error": statistics.median(sizes),
            "mean_abs_error": statistics.mean(sizes),
            "median_error": statistics.median(self.errors),
            "p90_abs_error": sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
            "within_10%": statistics.mean(size <= 0.10 for size in sizes),
            "within_15%": statistics.mean(size <= 0.15 for size in sizes),
        }


def metric_kind(metric: str) -> str:
    """Time or memory."""
    return MEMORY if "memory" in metric else TIME


def group_by_source(residuals: Residuals) -> list[ErrorGroup]:
    """A group for each source; memory is a group of its own where the source also has times, and so is
    what is predicted without a fact that the source does not state."""
    kinds: dict[str, set[str]] = defaultdict(set)
    for item in residuals.predicted:
        kinds[item.measurement.source].add(metric_kind(item.measurement.metric))

    def name(residual: Residual) -> str:
        source, kind = residual.measurement.source, metric_kind(residual.measurement.metric)
        if residual.unstated:
            return f"{source}, {' and '.join(residual.unstated)} not stated"
        return f"{source}, memory" if kind == MEMORY and TIME in kinds[source] else source

    return _groups(residuals.predicted, name, residuals.refused)


def group_by_gpu(residuals: Residuals) -> list[ErrorGroup]:
    """A group for each device, times and memory apart."""
    return _groups(
        residuals.predicted,
        lambda item: (
            f"{item.measured_run.cluster.device.name}, {metric_kind(item.measurement.metric)}"
        ),
    )


def group_by_kind(residuals: Residuals) -> list[ErrorGroup]:
    """A group for each kind of run that the README names, times in seconds or tokens and bytes."""
    found = _groups(filter(_kind_of_run, residuals.predicted), _kind_of_run)
    groups = {group.name: group for group in found}
    return [groups[kind] for kind in _KINDS if kind in groups]


_KINDS: dict[str, tuple[str, ...]] = {
    "vTrain 64-512": ("VIA-Research/vTrain multi-node",),
    "vTrain 2-8": ("VIA-Research/vTrain single-node",),
    "H100 BF16 recipes": (),
    "H100 FP8 recipes": (),
    "B200, GB200 dense": (),
    "B300, GB300 dense": (),
    "FSDP, dense": (
        *("mosaicml/llm-foundry", "pytorch/torchtitan", "foundation-model-stack/fms-fsdp"),
    ),
    "MoE, H100": (),
    "MoE, Blackwell": (),
    "memory allocated between iterations, Megatron's tests": ("memory_allocated_bytes",),
    "peak memory, Megatron's tests": ("peak_memory_allocated_bytes",),
    "layers of several kinds": (),
    "BigScience, 384 A100": ("BigScience (Jean Zay, A100)",),
    "MLPerf, dense": tuple(
        f"NVIDIA/NeMo MLPerf {task}" for task in ("v4.1 gpt3", "v5.0 405b", "v5.1 405b", "v5.1 8b")
    ),
    "Zero Bubble, 8-32 A100": tuple(
        f"Zero Bubble (arXiv:2401.10241) Table {number}" for number in (4, 6)
    ),
}
"""In the README's order, with sources of one kind alone; of Megatron's tests the metrics."""
_KIND_OF = {known: kind for kind, found in _KINDS.items() for known in found}
_NOT_FITTED = ("", "vTrain 2-8", "MLPerf, dense", "Zero Bubble, 8-32 A100")
_TESTS = "NVIDIA/Megatron-LM golden values"
_RECIPES = ("NVIDIA-NeMo/Megatron-Bridge", "NVIDIA/dgxc-benchmarking")
_DIRECT = ("step_time_s", "tokens_per_s_per_gpu")
_DERIVED = ("model_tflops_per_gpu", "hardware_tflops_per_gpu")


def _kind_of_run(item: Residual) -> str:
    """Empty where the README names none."""
    measurement = item.measurement
    of_tests = measurement.source == _TESTS
    if measurement.metric not in _DIRECT and not of_tests:
        return ""
    if measurement.source not in _RECIPES:
        return _KIND_OF.get(measurement.metric if of_tests else measurement.source, "")
    device, spec = item.measured_run.cluster.device, item.measured_run.spec
    hopper = device.generation == "hopper"
    if spec.shape.blocks:
        return "layers of several kinds"
    if spec.shape.experts:
        return "MoE, H100" if hopper else "MoE, Blackwell"
    if hopper:
        return "H100 FP8 recipes" if spec.fp8_recipe else "H100 BF16 recipes"
    return "B300, GB300 dense" if "B300" in device.name else "B200, GB200 dense"


def group_by_split(residuals: Residuals) -> list[ErrorGroup]:
    """Of the kinds that constants are fitted to: the third that fits do not use, and the others."""
    timed = [item for item in residuals.predicted if item.seconds]
    fitted = [item for item in timed if _kind_of_run(item) not in _NOT_FITTED]
    names = ("the other two thirds", "kept back from the fit")
    return _groups(fitted, lambda item: names[item.measurement.is_held_out])


def largest_residuals(residuals: Residuals, count: int) -> list[Residual]:
    """Those that are missed most."""
    return sorted(residuals.predicted, key=lambda item: -abs(item.error))[:count]


def describe_largest_parts(residual: Residual) -> str:
    """The largest parts of a predicted time, or of a predicted memory."""
    measurement = residual.measurement
    if measurement.metric == "matmul_tflops":
        return ""
    spec, cluster = residual.measured_run.spec, residual.measured_run.cluster
    if metric_kind(measurement.metric) == MEMORY:
        held = predicted_memory(spec, measurement.metric)
        live = (name for name in COMPONENTS if name != "allocator")
        parts = {name: getattr(held, name) / held.live for name in live}
    else:
        seconds = iteration_seconds(spec, cluster)
        parts = {name: getattr(seconds, name) / seconds.total for name in TIME_COMPONENTS}
    largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in largest)


@dataclass(frozen=True)
class StrategyChoice:
    """Readings that differ in strategy alone, and the one that the planner would take."""

    readings: int
    chosen: Residual
    regret: float
    """Time lost by it over the fastest that was measured, as a share."""
    apart: tuple[float, ...] = ()
    """Of each strategy that was measured more than once, the slowest over the fastest time, less 1: no
    choice can be known better than that."""

    @property
    def decidable(self) -> bool:
        """Whether the readings can tell the strategies apart: what repeats of one strategy of the group
        lie apart is less than the loss, no strategy was repeated, or nothing is lost."""
        return not 0 < self.regret <= max(self.apart, default=0.0)


def evaluate_choices(residuals: Residuals, across_releases: bool = False) -> list[StrategyChoice]:
    """Every group of two or more strategies of one model, batch, device and source, and, unless it may
    lie `across_releases`, of one release of a container; what was measured more than once counts with
    its median."""
    groups: dict[tuple[object, ...], list[Residual]] = defaultdict(list)
    for item in residuals.predicted:
        measurement, spec = item.measurement, item.measured_run.spec
        if item.seconds is None or measurement.metric in _DERIVED:
            continue
        # Readings of other software differ in more than strategy: another variant, trainer or release.
        variant, *others = measurement.notes.split(";")
        facts = source_facts(measurement)
        software = [variant, facts.get("trainer", "")]
        software += [part for part in others if "not Megatron" in part]
        if not across_releases:
            software.append(str(container_release(measurement, facts)))
        batch = (spec.shape, spec.batch.global_batch_size, spec.dtype, spec.fp8_recipe)
        what = (
            measurement.source,
            measurement.model,
            measurement.gpu,
            measurement.gpus,
            " ".join(software),
        )
        groups[*what, *batch, spec.recompute].append(item)
    found = []
    for items in groups.values():
        times: dict[RunSpec, list[float]] = defaultdict(list)
        for item in items:
            times[item.measured_run.spec].append(item.published_seconds)
        if len(times) < 2:
            continue
        seconds = {item.measured_run.spec: item.seconds or 0.0 for item in items}
        spec = choose_preferred(seconds, lambda spec: find_peak_rank(spec)[1].total)
        chosen = next(item for item in items if item.measured_run.spec == spec)
        medians = {spec: statistics.median(measured) for spec, measured in times.items()}
        regret = medians[spec] / min(medians.values()) - 1
        apart = (max(measured) / min(measured) - 1 for measured in times.values() if measured[1:])
        found.append(StrategyChoice(len(items), chosen, regret, tuple(apart)))
    return found


def format_signed_percent(share: float | None) -> str:
    """A share of 1 with its sign."""
    return DASH if share is None else f"{share:+.1%}"


def _whole(share: float | None) -> str:
    return DASH if share is None else f"{share:.0%}"


def _errors(name: str, figure: str, text: Callable[[Any], str]) -> Column[ErrorGroup]:
    return Column(name, lambda group: group.figures.get(figure), text)


ERROR_COLUMNS = (
    _errors("median |error|", "median_abs_error", percent),
    _errors("mean |error|", "mean_abs_error", percent),
    _errors("median error", "median_error", format_signed_percent),
    _errors("p90 |error|", "p90_abs_error", percent),
    _errors("within 10%", "within_10%", _whole),
    _errors("within 15%", "within_15%", _whole),
)
"""How far a group is predicted off."""


def group_refusals(refused: Iterable[Refusal]) -> list[tuple[str, str, list[int]]]:
    """Source, reason and lines of what is not predicted, most lines first."""
    lines: dict[tuple[str, str], list[int]] = defaultdict(list)
    for item in refused:
        lines[item.source, item.reason].append(item.line)
    ordered = sorted(lines.items(), key=lambda item: -len(item[1]))
    return [(source, reason, found) for (source, reason), found in ordered]


def collect_errors(residuals: Residuals) -> PredictionErrors:
    """Of all times and all memory."""
    return PredictionErrors.of(drop_matrix_products(residuals))


def drop_matrix_products(residuals: Residuals) -> list[Residual]:
    """All but single matrix products."""
    return [item for item in residuals.predicted if item.measurement.metric != "matmul_tflops"]


def group_by_coverage(residuals: Residuals, errors: PredictionErrors) -> list[IntervalCoverage]:
    """What intervals cover, of the kinds of `by_kind`, of all times and of all memory."""
    found = []
    members: dict[str, list[Residual]] = defaultdict(list)
    for item in drop_matrix_products(residuals):
        for name in filter(
            None, (_kind_of_run(item), f"all {metric_kind(item.measurement.metric)}")
        ):
            members[name].append(item)
    for name in filter(members.__contains__, (*_KINDS, f"all {TIME}", f"all {MEMORY}")):
        own, others = (
            {
                level: statistics.mean(errors.covers(i, level, elsewhere) for i in members[name])
                for level in LEVELS
            }
            for elsewhere in (False, True)
        )
        found.append(IntervalCoverage(name, len(members[name]), own, others))
    return found


@dataclass(frozen=True)
class IntervalCoverage:
    """Of a kind's published figures, the share inside their intervals."""

    name: str
    readings: int
    shares: dict[float, float]
    """By the intervals' level."""
    elsewhere: dict[float, float]
    """Of intervals that other sources alone make."""


def _row(item: Residual, errors: PredictionErrors) -> dict[str, Any]:
    spec, cluster = item.measured_run.spec, item.measured_run.cluster
    is_run = item.measurement.metric != "matmul_tflops"
    is_judged = is_run and not source_facts(item.measurement)["unjudged"]
    memory = find_peak_rank(spec)[1]
    return {
        "line": item.measurement.line,
        "published": item.measurement.value,
        "predicted": item.predicted,
        "error": item.error,
        "fits": judge_fit_on_cluster(spec, memory, cluster) if is_judged else None,
        "memory_bytes": needed_bytes(memory, cluster) if is_run else None,
        "interval_80": errors.interval(item, 0.80) if is_run else None,
        "interval_95": errors.interval(item, 0.95) if is_run else None,
        "unstated": list(item.unstated),
        "range": item.ranged,
    }


_SAID = ("mean_abs_error", "median_error", "p90_abs_error")


def encode_summary(residuals: Residuals, errors: PredictionErrors) -> dict[str, Any]:
    """The contract of `validate --json`."""
    return {
        "sources": {
            group.name: {
                "metric": group.metric,
                "readings": group.readings,
                "predicted": len(group.errors),
                **{name: group.figures.get(name) for name in _SAID},
            }
            for group in group_by_source(residuals)
        },
        "rows": [_row(item, errors) for item in residuals.predicted],
        "refused": [{"line": item.line, "reason": item.reason} for item in residuals.refused],
    }


def _groups(
    predicted: Iterable[Residual],
    name: Callable[[Residual], str],
    refused: Iterable[Refusal] = (),
) -> list[ErrorGroup]:
    lacking = Counter(item.source for item in refused)
    members: dict[str, list[Residual]] = {source: [] for source in lacking}
    for item in predicted:
        members.setdefault(name(item), []).append(item)
    groups = []
    for title, items in sorted(members.items()):
        metrics = dict.fromkeys(item.measurement.metric for item in items)
        errors, readings = tuple(item.error for item in items), len(items) + lacking[title]
        groups.append(ErrorGroup(title, "+".join(metrics), readings, errors))
    return groups
