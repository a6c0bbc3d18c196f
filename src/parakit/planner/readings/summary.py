"""Summarise the errors of predictions: by source, GPU and kind of run, the largest errors, and refused rows."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from parakit.config.run import RunSpec
from parakit.costs import COMPONENTS, PredictedMemory, find_peak_device_memory
from parakit.formatting.table import Column
from parakit.formatting.units import DASH, percent
from parakit.planner.readings.facts import container_release, source_facts
from parakit.planner.readings.intervals import LEVELS, PredictionErrors
from parakit.planner.readings.residual import Residual, Residuals, predicted_memory
from parakit.planner.readings.table import Refusal
from parakit.planner.ties import choose_preferred
from parakit.planner.time.cluster import Cluster
from parakit.planner.time.iteration import TIME_COMPONENTS, iteration_seconds
from parakit.planner.verdict import judge_fit_on_cluster

MEMORY, TIME = "memory", "time"


@dataclass(frozen=True)
class ErrorGroup:
    """Errors of the measurements of one source, GPU or kind of run."""

    name: str
    metric: str
    """Metric as in the file; several metrics are joined by `+`."""
    readings: int
    """Number of measurements, predicted or not."""
    errors: tuple[float, ...]
    """Errors of the predicted measurements."""

    @property
    def figures(self) -> dict[str, float]:
        """Statistics of the errors, by names such as `median_abs_error` and `within_10%`.

        All statistics except `median_error` use absolute errors. The result is empty without errors.
        """
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
    """Return `MEMORY` for a metric of memory, else `TIME`."""
    return MEMORY if "memory" in metric else TIME


def group_by_source(residuals: Residuals) -> list[ErrorGroup]:
    """Return the errors grouped by source.

    A source with times and memory has two groups. Measurements whose sizes are not all stated have further groups.
    """
    kinds: dict[str, set[str]] = defaultdict(set)
    for item in residuals.predicted:
        kinds[item.measurement.source].add(metric_kind(item.measurement.metric))

    def name(residual: Residual) -> str:
        """Return the name of a measurement's group."""
        source, kind = residual.measurement.source, metric_kind(residual.measurement.metric)
        if residual.unstated:
            return f"{source}, {' and '.join(residual.unstated)} not stated"
        return f"{source}, memory" if kind == MEMORY and TIME in kinds[source] else source

    return build_groups(residuals.predicted, name, residuals.refused)


def group_by_gpu(residuals: Residuals) -> list[ErrorGroup]:
    """Return the errors of each device as two groups, one of times and one of memory."""
    return build_groups(
        residuals.predicted,
        lambda item: (
            f"{item.measured_run.cluster.device.name}, {metric_kind(item.measurement.metric)}"
        ),
    )


def group_by_kind(residuals: Residuals) -> list[ErrorGroup]:
    """Return one group of errors per kind of run that the README's table lists, in the order of the table.

    A kind without measurements has no group. Measurements of other kinds are left out. From Megatron's own tests,
    only memory is used. From other sources, only iteration times and tokens per second are used.
    """
    # The kind is empty, and so the measurement is left out, if the table has no kind for it.
    with_kind = filter(_kind_of_run, residuals.predicted)
    groups = {group.name: group for group in build_groups(with_kind, _kind_of_run)}
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
"""Sources that have one kind of run alone, by kind, in the README's order; for Megatron's tests the metrics."""
_KIND_BY_SOURCE = {source: kind for kind, sources in _KINDS.items() for source in sources}
_NOT_FITTED = ("", "vTrain 2-8", "MLPerf, dense", "Zero Bubble, 8-32 A100")
_TESTS = "NVIDIA/Megatron-LM golden values"
_RECIPES = ("NVIDIA-NeMo/Megatron-Bridge", "NVIDIA/dgxc-benchmarking")
_DIRECT = ("step_time_s", "tokens_per_s_per_gpu")
_DERIVED = ("model_tflops_per_gpu", "hardware_tflops_per_gpu")


def _kind_of_run(item: Residual) -> str:
    """Return the name of a measurement's kind of run in the table of the README, such as `MoE, H100`.

    The name is empty if the table has no row for the measurement.
    """
    measurement = item.measurement
    is_test = measurement.source == _TESTS
    if measurement.metric not in _DIRECT and not is_test:
        return ""
    if measurement.source not in _RECIPES:
        return _KIND_BY_SOURCE.get(measurement.metric if is_test else measurement.source, "")
    return kind_of_device_and_model(item)


def kind_of_device_and_model(item: Residual) -> str:
    """Return the name of the kind of run of a recipe on Hopper or Blackwell, such as `MoE, H100`."""
    device, spec = item.measured_run.cluster.device, item.measured_run.spec
    is_hopper = device.generation == "hopper"
    if spec.shape.blocks:
        return "layers of several kinds"
    if spec.shape.experts:
        return "MoE, H100" if is_hopper else "MoE, Blackwell"
    if is_hopper:
        return "H100 FP8 recipes" if spec.fp8_recipe else "H100 BF16 recipes"
    return "B300, GB300 dense" if "B300" in device.name else "B200, GB200 dense"


def group_by_split(residuals: Residuals) -> list[ErrorGroup]:
    """Return the errors of predicted times in two groups: used by the fit of the constants, and held out of the fit.

    A group without measurements is missing. Kinds of runs that no fit uses are left out.
    """
    timed = [item for item in residuals.predicted if item.seconds]
    fitted = [item for item in timed if _kind_of_run(item) not in _NOT_FITTED]
    used, held_out = "used by the fit", "held out of the fit"
    return build_groups(fitted, lambda item: held_out if item.measurement.is_held_out else used)


def largest_residuals(residuals: Residuals, count: int) -> list[Residual]:
    """Return the `count` measurements with the largest errors, largest first."""
    return sorted(residuals.predicted, key=lambda item: -abs(item.error))[:count]


def describe_largest_parts(residual: Residual) -> str:
    """Return the three largest components of a predicted time or memory as text, such as `compute 80%, bubble 9%`.

    The text is empty for the rate of a single matrix product.
    """
    measurement = residual.measurement
    if measurement.metric == "matmul_tflops":
        return ""
    spec, cluster = residual.measured_run.spec, residual.measured_run.cluster
    if metric_kind(measurement.metric) == MEMORY:
        memory = predicted_memory(spec, measurement.metric)
        # The slack of the allocator is no part of the live bytes.
        live_components = [name for name in COMPONENTS if name != "allocator"]
        fractions = {name: getattr(memory, name) / memory.live for name in live_components}
    else:
        seconds = iteration_seconds(spec, cluster)
        fractions = {name: getattr(seconds, name) / seconds.total for name in TIME_COMPONENTS}
    largest = sorted(fractions, key=lambda name: -fractions[name])[:3]
    return ", ".join(f"{name.replace('_', ' ')} {fractions[name]:.0%}" for name in largest)


@dataclass(frozen=True)
class StrategyChoice:
    """Measurements that differ only in strategy, and the strategy among them that the planner would choose."""

    readings: int
    """Number of measurements."""
    chosen: Residual
    regret: float
    """Measured time of the chosen strategy over that of the fastest one, less 1."""
    repeat_spreads: tuple[float, ...] = ()
    """Slowest over fastest time, less 1, of each strategy that was measured more than once. No choice can be judged
    more precisely than that."""

    @property
    def decidable(self) -> bool:
        """True if the measurements can judge the choice.

        They cannot if the regret is above 0 and at most as large as the differences of repeated measurements.
        """
        return not 0 < self.regret <= max(self.repeat_spreads, default=0.0)


def evaluate_choices(residuals: Residuals, across_releases: bool = False) -> list[StrategyChoice]:
    """Return the planner's choice for each job that was measured with at least two strategies.

    Measurements belong to one job if they have the same source, model, devices, batch, recomputation and software. If
    `across_releases` is True, the release of the container may differ. If a strategy was measured more than once, its
    median time counts.
    """
    choices = []
    for items in group_by_job(residuals, across_releases):
        choice = _evaluate_group(items)
        if choice is not None:
            choices.append(choice)
    return choices


def group_by_job(residuals: Residuals, across_releases: bool = False) -> list[list[Residual]]:
    """Return the timed measurements grouped by job: source, model, devices, batch, recomputation and software.

    The measurements of a group differ only in strategy, or repeat one. Rates that are derived from other figures are
    left out.

    Args:
        residuals: Measurements with their predictions.
        across_releases: True puts measurements of different releases of the container into one group.
    """
    groups: dict[tuple[object, ...], list[Residual]] = defaultdict(list)
    for item in residuals.predicted:
        if item.seconds is not None and item.measurement.metric not in _DERIVED:
            groups[_job_key(item, across_releases)].append(item)
    return list(groups.values())


def _job_key(item: Residual, across_releases: bool) -> tuple[object, ...]:
    """Return a key that is equal for measurements of one job with different strategies.

    The key holds source, model, devices, software, batch and recomputation. With `across_releases` the
    release of the container is left out.
    """
    measurement, spec = item.measurement, item.measured_run.spec
    # The notes begin with the variant. Later parts may name another trainer.
    variant, *notes = measurement.notes.split(";")
    facts = source_facts(measurement)
    software = [variant, facts.get("trainer", "")]
    software += [note for note in notes if "not Megatron" in note]
    if not across_releases:
        software.append(str(container_release(measurement, facts)))
    devices = (measurement.gpu, measurement.gpus)
    batch = (spec.shape, spec.batch.global_batch_size, spec.dtype, spec.fp8_recipe)
    job = (measurement.source, measurement.model, *devices, " ".join(software))
    return (*job, *batch, spec.recompute)


def _evaluate_group(items: list[Residual]) -> StrategyChoice | None:
    """Return the strategy that the planner would choose for a job, and the time lost against the fastest strategy.

    The result is None if all measurements have the same strategy.
    """
    published: dict[RunSpec, list[float]] = defaultdict(list)
    predicted: dict[RunSpec, float] = {}
    for item in items:
        published[item.measured_run.spec].append(item.published_seconds)
        predicted[item.measured_run.spec] = item.seconds or 0.0
    if len(published) < 2:
        return None
    cluster = items[0].measured_run.cluster
    preferred = choose_preferred(
        predicted, lambda spec: predict_device_memory(spec, cluster), cluster
    )
    chosen = next(item for item in items if item.measured_run.spec == preferred)
    medians = {spec: statistics.median(seconds) for spec, seconds in published.items()}
    regret = medians[preferred] / min(medians.values()) - 1
    spreads = []
    for seconds in published.values():
        if len(seconds) > 1:
            spreads.append(max(seconds) / min(seconds) - 1)
    return StrategyChoice(len(items), chosen, regret, tuple(spreads))


def predict_device_memory(spec: RunSpec, cluster: Cluster) -> PredictedMemory:
    """Return the memory of a run's peak rank as a plan predicts it: of the replay, if the replay knows the run."""
    return find_peak_device_memory(spec, cluster.device.memory_bytes)[1]


def format_signed_percent(fraction: float | None) -> str:
    """Return a fraction as a percentage with its sign, or a dash for None."""
    return DASH if fraction is None else f"{fraction:+.1%}"


def _format_full_percent(fraction: float | None) -> str:
    """Return a fraction as a percentage without decimals, or a dash for None."""
    return DASH if fraction is None else f"{fraction:.0%}"


def _build_error_column(name: str, figure: str, text: Callable[[Any], str]) -> Column[ErrorGroup]:
    """Return a table column that shows the statistic `figure` of each error group as `text` formats it."""
    return Column(name, lambda group: group.figures.get(figure), text)


ERROR_COLUMNS = (
    _build_error_column("median |error|", "median_abs_error", percent),
    _build_error_column("mean |error|", "mean_abs_error", percent),
    _build_error_column("median error", "median_error", format_signed_percent),
    _build_error_column("p90 |error|", "p90_abs_error", percent),
    _build_error_column("within 10%", "within_10%", _format_full_percent),
    _build_error_column("within 15%", "within_15%", _format_full_percent),
)
"""Columns with the errors of a group."""


def group_refusals(refused: Iterable[Refusal]) -> list[tuple[str, str, list[int]]]:
    """Group the rows that are not predicted by source and reason.

    An entry has the source, the reason, and the lines of the rows in the file. The group with the most rows comes
    first.
    """
    lines: dict[tuple[str, str], list[int]] = defaultdict(list)
    for item in refused:
        lines[item.source, item.reason].append(item.line)
    largest_first = sorted(lines, key=lambda group: -len(lines[group]))
    return [(source, reason, lines[source, reason]) for source, reason in largest_first]


def collect_errors(residuals: Residuals) -> PredictionErrors:
    """Return the errors of all predicted times and memory."""
    return PredictionErrors.collect(drop_matrix_products(residuals))


def drop_matrix_products(residuals: Residuals) -> list[Residual]:
    """Return the predicted measurements without those of single matrix products."""
    return [item for item in residuals.predicted if item.measurement.metric != "matmul_tflops"]


def group_by_coverage(residuals: Residuals, errors: PredictionErrors) -> list[IntervalCoverage]:
    """Return the fractions of measurements that lie inside the intervals of their predictions.

    The list has one entry per kind of run, one for all times and one for all memory. Entries without measurements
    are left out.
    """
    members: dict[str, list[Residual]] = defaultdict(list)
    levels: dict[int, frozenset[float]] = {}
    levels_elsewhere: dict[int, frozenset[float]] = {}
    for item in drop_matrix_products(residuals):
        kind = _kind_of_run(item)
        if kind:
            members[kind].append(item)
        members[f"all {metric_kind(item.measurement.metric)}"].append(item)
        levels[id(item)] = errors.find_covering_levels(item)
        levels_elsewhere[id(item)] = errors.find_covering_levels(item, elsewhere=True)
    coverages = []
    for name in (*_KINDS, f"all {TIME}", f"all {MEMORY}"):
        if name in members:
            items = members[name]
            shares = _compute_coverage([levels[id(item)] for item in items])
            elsewhere = _compute_coverage([levels_elsewhere[id(item)] for item in items])
            coverages.append(IntervalCoverage(name, len(items), shares, elsewhere))
    return coverages


def _compute_coverage(covering_levels: list[frozenset[float]]) -> dict[float, float]:
    """Return the fraction of measurements that lie inside the intervals of their predictions, by level.

    Args:
        covering_levels: For each measurement, the levels at which its published figure lies inside the interval.
    """
    return {
        level: statistics.mean(level in levels for levels in covering_levels) for level in LEVELS
    }


@dataclass(frozen=True)
class IntervalCoverage:
    """Fractions of the measurements of one kind of run that lie inside the intervals of their predictions."""

    name: str
    readings: int
    """Number of measurements."""
    shares: dict[float, float]
    """Fractions by the intervals' level."""
    elsewhere: dict[float, float]
    """Fractions for intervals that are made from errors of other sources alone."""


def _encode_residual(item: Residual, errors: PredictionErrors) -> dict[str, Any]:
    """Return a measurement as a dictionary for JSON.

    It has the published value, the prediction, the error and the intervals. It also says if the run's memory would fit.
    Figures that do not apply to the measurement are None.
    """
    spec, cluster = item.measured_run.spec, item.measured_run.cluster
    is_run = item.measurement.metric != "matmul_tflops"
    is_judged = is_run and not source_facts(item.measurement)["unjudged"]
    memory = predict_device_memory(spec, cluster)
    return {
        "line": item.measurement.line,
        "published": item.measurement.value,
        "predicted": item.predicted,
        "error": item.error,
        "fits": judge_fit_on_cluster(spec, memory, cluster) if is_judged else None,
        "memory_bytes": memory.needed if is_run else None,
        "interval_80": errors.interval(item, 0.80) if is_run else None,
        "interval_95": errors.interval(item, 0.95) if is_run else None,
        "unstated": list(item.unstated),
        "range": item.ranged,
    }


_ENCODED_FIGURES = ("mean_abs_error", "median_error", "p90_abs_error")


def _select_figures(group: ErrorGroup) -> dict[str, float | None]:
    """Return the statistics of a group that JSON has; they are None without predictions."""
    return {name: group.figures.get(name) for name in _ENCODED_FIGURES}


def _encode_figures(group: ErrorGroup | None) -> dict[str, Any] | None:
    """Return the number of predictions of a group and its statistics; None without a group."""
    return {"predicted": len(group.errors), **_select_figures(group)} if group else None


def encode_kinds(
    residuals: Residuals, blind: Mapping[str, ErrorGroup]
) -> dict[str, dict[str, Any]]:
    """Return the errors by kind of run, for `encode_summary`: those held out by source, and those of blind rows.

    A kind without measurements of one of the two has None there.
    """
    kinds = {group.name: group for group in group_by_kind(residuals)}
    return {
        name: {
            "held_out_by_source": _encode_figures(kinds.get(name)),
            "blind": _encode_figures(blind.get(name)),
        }
        for name in (*kinds, *sorted(blind.keys() - kinds.keys()))
    }


def encode_summary(
    residuals: Residuals, errors: PredictionErrors, blind: Mapping[str, ErrorGroup]
) -> dict[str, Any]:
    """Return a dictionary for `validate --json`: errors per source and kind, all predictions, and the refused rows.

    Args:
        residuals: The measurements with their predictions.
        errors: Errors from which intervals are made.
        blind: Errors of blind measurements by kind of run; empty for a file of the user.
    """
    return {
        "kinds": encode_kinds(residuals, blind),
        "sources": {
            group.name: {
                "metric": group.metric,
                "readings": group.readings,
                "predicted": len(group.errors),
                **_select_figures(group),
            }
            for group in group_by_source(residuals)
        },
        "rows": [_encode_residual(item, errors) for item in residuals.predicted],
        "refused": [{"line": item.line, "reason": item.reason} for item in residuals.refused],
    }


def build_groups(
    predicted: Iterable[Residual],
    name: Callable[[Residual], str],
    refused: Iterable[Refusal] = (),
) -> list[ErrorGroup]:
    """Group predicted measurements by the result of the function `name`. Return the groups in order of their names.

    Refused rows are counted in the group that has the name of their source.
    """
    num_refused = Counter(item.source for item in refused)
    members: dict[str, list[Residual]] = {source: [] for source in num_refused}
    for item in predicted:
        members.setdefault(name(item), []).append(item)
    groups = []
    for title, items in sorted(members.items()):
        metrics = dict.fromkeys(item.measurement.metric for item in items)
        errors = tuple(item.error for item in items)
        num_measurements = len(items) + num_refused[title]
        groups.append(ErrorGroup(title, "+".join(metrics), num_measurements, errors))
    return groups
