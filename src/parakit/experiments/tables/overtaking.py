"""Cells over model sizes, and where one backend or strategy overtakes another; never beyond the
noise."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True)
class SweptCell:
    """One cell of a sweep, with what was measured of its repeats together."""

    result: CellResult
    row: Entry | None
    estimate: Estimate | None
    """Of an iteration, in milliseconds: by the clock, or of the processors, over all ranks."""

    @property
    def job(self) -> Job:
        """What is trained, and where."""
        return self.result.cell.job

    @property
    def backend(self) -> Backend:
        """Who trains it."""
        return self.job.options.backend

    @property
    def devices(self) -> Devices:
        """How many, and of which kind."""
        return self.job.devices, self.job.device

    @cached_property
    def parameters(self) -> int:
        """Of the model as it is trained."""
        return total_parameters(self.result.launch.model.shape)

    @property
    def tokens_per_iteration(self) -> int:
        """Over all devices."""
        return self.result.launch.spec.tokens_per_iteration

    @property
    def tokens_per_second(self) -> float | None:
        """Over all devices, at the median iteration."""
        return self._rate(self.estimate.median) if self.estimate else None

    @property
    def rate_interval(self) -> tuple[float, float] | None:
        """95% interval of the same."""
        found = self.estimate
        if found is None or found.low is None or found.high is None:
            return None
        return self._rate(found.high), self._rate(found.low)

    def _rate(self, milliseconds: float) -> float:
        return self.tokens_per_iteration * 1000 / milliseconds


@dataclass(frozen=True)
class SizeComparison:
    """Both sides at one size."""

    model: str
    parameters: int
    found: TimeComparison
    """The second side's time a token over the first's."""

    @property
    def text(self) -> str:
        """`gpt3-64m (63.8M)`."""
        return f"{self.model} ({parameters(self.parameters)})"


def estimate_crossover(points: Sequence[SizeComparison]) -> tuple[float, float, float]:
    """Parameters at which the ratio of two sides passes 1, with the 95% interval.

    At the first of the sizes one side is clearly faster, at the last one the other.

    Ratio and both ends of its interval are interpolated between sizes, all in logarithms. Each of the
    three passes 1, because the interval of neither end holds it.

    Args:
        points: Both sizes and those between them, small to large.
    """
    curves = [[getattr(point.found, end) for point in points] for end in ("ratio", "low", "high")]
    at, *ends = (
        _find_ratio_of_one([point.parameters for point in points], each) for each in curves
    )
    return at, min(ends), max(ends)


def _find_ratio_of_one(sizes: Sequence[int], ratios: Sequence[float]) -> float:
    logs = [log(ratio) for ratio in ratios]
    for place, (one, two) in enumerate(pairwise(logs)):
        if one * two <= 0 and one != two:
            small, big = log(sizes[place]), log(sizes[place + 1])
            return exp(small + (big - small) * one / (one - two))
    raise AssertionError("the ratio is on one side of 1")


def compare_time_per_token(reference: SweptCell, other: SweptCell) -> TimeComparison | None:
    """Time a token of the second over the first's; None where one has no times."""
    if reference.estimate is None or other.estimate is None:
        return None
    weight = reference.tokens_per_iteration / other.tokens_per_iteration
    return compare_times(reference.estimate, other.estimate, weight)


def select_fastest(results: Sequence[SweptCell]) -> dict[tuple[Devices, Backend], list[SweptCell]]:
    """For each number of devices and backend its fastest strategy at every size, small ones first."""
    lines: dict[tuple[Devices, Backend], dict[str, SweptCell]] = {}
    for one in filter(lambda one: one.estimate, results):
        line, name = lines.setdefault((one.devices, one.backend), {}), one.job.model.name
        line[name] = max(line.get(name, one), one, key=lambda each: each.tokens_per_second or 0)
    return {
        key: sorted(line.values(), key=lambda one: one.parameters) for key, line in lines.items()
    }


def describe_sweep(results: Sequence[SweptCell]) -> list[str]:
    """A sentence for each pair of backends, and of one backend's strategies, on each number of devices.

    Dense models and mixtures of experts are two axes of size.
    """
    kinds = dict.fromkeys(map(_name_model_kind, results))
    sentences = []
    for devices in dict.fromkeys(result.devices for result in results):
        for kind in kinds:
            own = [r for r in results if (r.devices, _name_model_kind(r)) == (devices, kind)]
            where = f"On {plural(devices[0], f'{devices[1].upper()} rank')}"
            where += f", {kind}:" if len(kinds) > 1 else ""
            for (one, first), (two, second) in _list_pairs(own):
                sentences.append(describe_pair(where, one, two, _compare_sizes(first, second)))
    return sentences


def _name_model_kind(result: SweptCell) -> str:
    return "mixtures of experts" if result.job.model.shape.experts else "dense models"


def _list_pairs(results: Sequence[SweptCell]) -> Iterator[tuple[tuple[str, list[SweptCell]], ...]]:
    """What is compared: backends by their fastest strategy, then the strategies of each backend."""
    best = {backend: line for (_, backend), line in select_fastest(results).items()}
    backends = list(dict.fromkeys(result.backend for result in results))
    yield from combinations([(each.value, best.get(each, [])) for each in backends], 2)
    for backend in backends:
        lines: dict[str, list[SweptCell]] = {}
        for result in results:
            if result.backend is backend:
                lines.setdefault(f"{backend} {result.job.strategy}", []).append(result)
        yield from combinations(lines.items(), 2)


def describe_pair(where: str, one: str, two: str, points: Sequence[SizeComparison]) -> str:
    """What the sizes, small to large, allow to say of the pair."""
    clear = [p for p in points if p.found.verdict.is_clear]
    unclear = joined([p.text for p in points if p.found.verdict is TimeVerdict.NOISE])
    unknown = joined([p.text for p in points if p.found.verdict is TimeVerdict.UNKNOWN])
    few = f"too few samples at {unknown}" if unknown else ""
    if not clear and not unclear:
        return f"{where} nothing can be said of {two} against {one}: {few or 'no size has both'}."
    tail = f"; {few}" if few else ""
    if not clear:
        return f"{where} {two} is within noise of {one} at {unclear}{tail}: neither overtakes."
    tail = f"; within noise of each other at {unclear}{tail}" if unclear else tail
    crossings = []
    for small, big in pairwise(clear):
        if small.found.verdict is not big.found.verdict:
            winner, loser = _order_by_speed(big, one, two)
            known = [p for p in points if p.found.verdict is not TimeVerdict.UNKNOWN]
            between = [p for p in known if small.parameters <= p.parameters <= big.parameters]
            at, low, high = (parameters(round(value)) for value in estimate_crossover(between))
            crossings.append(
                f"{winner} overtakes {loser} at {at} parameters [{low}, {high}], between {small.text} "
                f"and {big.text}"
            )
    if crossings:
        return f"{where} {' and '.join(crossings)}{tail}."
    winner, loser = _order_by_speed(clear[0], one, two)
    sizes = joined([point.text for point in clear])
    return f"{where} {winner} is faster than {loser} at {sizes}{tail}: no crossover in the range."


def _compare_sizes(one: Sequence[SweptCell], two: Sequence[SweptCell]) -> list[SizeComparison]:
    others = {result.job.model.name: result for result in two}
    return [
        SizeComparison(name, result.parameters, found)
        for result in one
        if (other := others.get(name := result.job.model.name))
        and (found := compare_time_per_token(result, other))
    ]


def _order_by_speed(point: SizeComparison, one: str, two: str) -> tuple[str, str]:
    """The faster and the slower."""
    return (two, one) if point.found.verdict is TimeVerdict.FASTER else (one, two)
