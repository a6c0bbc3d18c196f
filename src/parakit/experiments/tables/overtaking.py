"""Find the model size at which one backend or strategy overtakes another, from the cells of a sweep.

Only differences beyond the noise count. A *size* is a model of the sweep; the size of a crossover is its number of
parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations, pairwise
from math import exp, log

from parakit.config.run import Backend, DeviceKind
from parakit.costs import total_parameters
from parakit.experiments.runner import CellResult
from parakit.formatting.units import joined, parameters, plural
from parakit.launch import Job
from parakit.reporting import Entry, Estimate, TimeComparison, TimeVerdict, compare_times

Devices = tuple[int, DeviceKind]
"""Number of devices, and their kind."""


@dataclass(frozen=True)
class SweptCell:
    """A cell of a sweep, with what all its repeats measured together."""

    result: CellResult
    row: Entry | None
    """Row of the report; None if no run ended well."""
    estimate: Estimate | None
    """Milliseconds per iteration: wall clock time, or processor time summed over all ranks."""

    @property
    def job(self) -> Job:
        """The cell's model, strategy and devices."""
        return self.result.cell.job

    @property
    def backend(self) -> Backend:
        """Program that trains the cell."""
        return self.job.options.backend

    @property
    def devices(self) -> Devices:
        """Number of devices, and their kind."""
        return self.job.devices, self.job.device

    @cached_property
    def parameters(self) -> int:
        """Parameters of the model as it is trained."""
        return total_parameters(self.result.launch.model.shape)

    @property
    def tokens_per_iteration(self) -> int:
        """Tokens per iteration, over all devices."""
        return self.result.launch.spec.tokens_per_iteration

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second over all devices, at the median time; None without times."""
        return self._convert_to_rate(self.estimate.median) if self.estimate else None

    @property
    def rate_interval(self) -> tuple[float, float] | None:
        """95% interval of the tokens per second; None if the time has no interval."""
        estimate = self.estimate
        if estimate is None or estimate.low is None or estimate.high is None:
            return None
        return self._convert_to_rate(estimate.high), self._convert_to_rate(estimate.low)

    def _convert_to_rate(self, milliseconds: float) -> float:
        """Return tokens per second from milliseconds per iteration."""
        return self.tokens_per_iteration * 1000 / milliseconds


@dataclass(frozen=True)
class SizeComparison:
    """Comparison of two backends or strategies at one model size."""

    model: str
    parameters: int
    time: TimeComparison
    """Time per token of the second over that of the first."""

    @property
    def text(self) -> str:
        """Model and size, such as `gpt3-64m (63.8M)`."""
        return f"{self.model} ({parameters(self.parameters)})"


def estimate_crossover(comparisons: Sequence[SizeComparison]) -> tuple[float, float, float]:
    """Return the number of parameters at which the ratio of times passes 1, with the 95% interval.

    The ratio and both ends of its interval are interpolated between sizes, all in logarithms. Each of the three
    passes 1, because the interval of neither the first nor the last size contains 1.

    Args:
        comparisons: Sizes from small to large. At the first, one side is clearly faster, at the last the other.
    """
    sizes = [comparison.parameters for comparison in comparisons]

    def find_size(value: str) -> float:
        """Return the size at which a value of the comparisons is 1: `ratio`, or `low` or `high` of its interval."""
        return _find_ratio_of_one(
            sizes, [getattr(comparison.time, value) for comparison in comparisons]
        )

    # The lower end of the ratio's interval may give the larger size.
    ends = (find_size("low"), find_size("high"))
    return find_size("ratio"), min(ends), max(ends)


def _find_ratio_of_one(sizes: Sequence[int], ratios: Sequence[float]) -> float:
    """Return the first size at which the interpolated ratio is 1; the ratios must pass 1."""
    logs = [log(ratio) for ratio in ratios]
    for index, (before, after) in enumerate(pairwise(logs)):
        if before * after <= 0 and before != after:
            small, large = log(sizes[index]), log(sizes[index + 1])
            return exp(small + (large - small) * before / (before - after))
    raise AssertionError("the ratio is on one side of 1")


def compare_time_per_token(reference: SweptCell, other: SweptCell) -> TimeComparison | None:
    """Compare the time per token of `other` with that of `reference`; None if one has no times."""
    if reference.estimate is None or other.estimate is None:
        return None
    weight = reference.tokens_per_iteration / other.tokens_per_iteration
    return compare_times(reference.estimate, other.estimate, weight)


def select_fastest(
    results: Sequence[SweptCell],
) -> dict[tuple[Devices, Backend], list[SweptCell]]:
    """Return the cell of the fastest strategy for each model, from small to large, by devices and backend.

    Cells without times are left out.
    """
    cells_by_series: dict[tuple[Devices, Backend], dict[str, SweptCell]] = {}
    for cell in results:
        if not cell.estimate:
            continue
        cells_by_model = cells_by_series.setdefault((cell.devices, cell.backend), {})
        name = cell.job.model.name
        fastest = cells_by_model.get(name, cell)
        cells_by_model[name] = max(fastest, cell, key=lambda other: other.tokens_per_second or 0)
    return {
        series: sorted(cells_by_model.values(), key=lambda cell: cell.parameters)
        for series, cells_by_model in cells_by_series.items()
    }


def describe_sweep(results: Sequence[SweptCell]) -> list[str]:
    """Return a sentence for each pair of backends and each pair of a backend's strategies, per number of devices.

    Dense models and mixtures of experts are compared separately.
    """
    model_kinds = dict.fromkeys(map(_name_model_kind, results))
    sentences = []
    for devices in dict.fromkeys(cell.devices for cell in results):
        num_devices, device_kind = devices
        cells_with_devices = [cell for cell in results if cell.devices == devices]
        for model_kind in model_kinds:
            cells = [cell for cell in cells_with_devices if _name_model_kind(cell) == model_kind]
            where = f"On {plural(num_devices, f'{device_kind.upper()} rank')}"
            if len(model_kinds) > 1:
                where += f", {model_kind}:"
            for side, other_side in _list_pairs(cells):
                comparisons = _compare_sizes(side.cells, other_side.cells)
                sentences.append(describe_pair(where, side.name, other_side.name, comparisons))
    return sentences


def _name_model_kind(cell: SweptCell) -> str:
    """Return the kind of a cell's model in words."""
    return "mixtures of experts" if cell.job.model.shape.experts else "dense models"


@dataclass(frozen=True)
class _Side:
    """A backend with its fastest strategies, or one strategy of a backend."""

    name: str
    cells: Sequence[SweptCell]


def _list_pairs(results: Sequence[SweptCell]) -> Iterator[tuple[_Side, _Side]]:
    """Yield the pairs of sides to compare: all pairs of backends, then all pairs of strategies of each backend.

    Args:
        results: Cells of one number and kind of devices.
    """
    backends = list(dict.fromkeys(cell.backend for cell in results))
    fastest_cells = {backend: cells for (_, backend), cells in select_fastest(results).items()}
    sides = [_Side(backend.value, fastest_cells.get(backend, [])) for backend in backends]
    yield from combinations(sides, 2)
    for backend in backends:
        yield from combinations(_list_strategies(results, backend), 2)


def _list_strategies(results: Sequence[SweptCell], backend: Backend) -> list[_Side]:
    """Return the strategies of a backend in the order of their first cells."""
    cells_by_name: defaultdict[str, list[SweptCell]] = defaultdict(list)
    for cell in results:
        if cell.backend is backend:
            cells_by_name[f"{backend} {cell.job.strategy}"].append(cell)
    return [_Side(name, cells) for name, cells in cells_by_name.items()]


def describe_pair(
    where: str, name: str, other_name: str, comparisons: Sequence[SizeComparison]
) -> str:
    """Return a sentence on two strategies: at which size one overtakes the other, which one is always faster,
    or that noise hides the difference.

    Args:
        where: Begin of the sentence, with the devices.
        name: The first side, whose time is the reference.
        other_name: The second side.
        comparisons: Sizes that both sides have, from small to large.
    """
    clear = [comparison for comparison in comparisons if comparison.time.verdict.is_clear]
    noisy_sizes = _join_sizes_with(comparisons, TimeVerdict.NOISE)
    unknown_sizes = _join_sizes_with(comparisons, TimeVerdict.UNKNOWN)
    few_samples = f"too few samples at {unknown_sizes}" if unknown_sizes else ""
    if not clear and not noisy_sizes:
        reason = few_samples or "no size has both"
        return f"{where} nothing can be said of {other_name} against {name}: {reason}."
    tail = f"; {few_samples}" if few_samples else ""
    if not clear:
        return f"{where} {other_name} is within noise of {name} at {noisy_sizes}{tail}: neither overtakes."
    if noisy_sizes:
        tail = f"; within noise of each other at {noisy_sizes}{tail}"
    crossings = []
    for small, large in pairwise(clear):
        if small.time.verdict is not large.time.verdict:
            crossing = _describe_crossing(small, large, name, other_name, comparisons)
            crossings.append(crossing)
    if crossings:
        return f"{where} {' and '.join(crossings)}{tail}."
    winner, loser = _order_by_speed(clear[0], name, other_name)
    sizes = joined([comparison.text for comparison in clear])
    return f"{where} {winner} is faster than {loser} at {sizes}{tail}: no crossover in the range."


def _join_sizes_with(comparisons: Iterable[SizeComparison], verdict: TimeVerdict) -> str:
    """Return the sizes whose comparison has this verdict; empty if none has."""
    return joined(
        [comparison.text for comparison in comparisons if comparison.time.verdict is verdict]
    )


def _describe_crossing(
    small: SizeComparison,
    large: SizeComparison,
    name: str,
    other_name: str,
    comparisons: Sequence[SizeComparison],
) -> str:
    """Return a clause on which side overtakes the other between two sizes, and at how many parameters.

    Args:
        small: The last size at which the side that is overtaken is clearly faster.
        large: The next size with a clear difference, at which the other side is faster.
        name: The first side, whose time is the reference.
        other_name: The second side.
        comparisons: All sizes from small to large. Those between `small` and `large` locate the crossing.
    """
    winner, loser = _order_by_speed(large, name, other_name)
    between: list[SizeComparison] = []
    for comparison in comparisons:
        is_between = small.parameters <= comparison.parameters <= large.parameters
        if is_between and comparison.time.verdict is not TimeVerdict.UNKNOWN:
            between.append(comparison)
    size, low, high = (parameters(round(value)) for value in estimate_crossover(between))
    return (
        f"{winner} overtakes {loser} at {size} parameters [{low}, {high}], between {small.text} "
        f"and {large.text}"
    )


def _compare_sizes(first: Sequence[SweptCell], second: Sequence[SweptCell]) -> list[SizeComparison]:
    """Return a comparison per size that both sides have, with times, in the order of `first`."""
    cells_by_model = {cell.job.model.name: cell for cell in second}
    comparisons = []
    for cell in first:
        name = cell.job.model.name
        other = cells_by_model.get(name)
        time = compare_time_per_token(cell, other) if other else None
        if time:
            comparisons.append(SizeComparison(name, cell.parameters, time))
    return comparisons


def _order_by_speed(comparison: SizeComparison, name: str, other_name: str) -> tuple[str, str]:
    """Return the names of the faster and of the slower side."""
    if comparison.time.verdict is TimeVerdict.FASTER:
        return other_name, name
    return name, other_name
