"""Cells over model sizes, and where one backend overtakes another; never beyond the noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from tools.launch.experiment.definition import Cell
from tools.launch.experiment.measured import Comparison, Estimate, Measured, Verdict, compare
from tools.spec.run import Backend, DeviceKind
from tools.text.units import joined, parameters

Devices = tuple[int, DeviceKind]


@dataclass(frozen=True)
class Swept:
    """One cell of a sweep, with what was measured of its repeats together."""

    cell: Cell
    backend: Backend
    parameters: int
    tokens_per_iteration: int
    measured: Measured | None
    runs: tuple[str, ...] = ()
    """Names of the run folders, newest first."""
    complete: bool = True
    """All repeats are there."""
    failure: str = ""

    @property
    def devices(self) -> Devices:
        """How many, and of which kind."""
        return self.cell.devices, self.cell.device

    @property
    def estimate(self) -> Estimate | None:
        """Of iteration times, in milliseconds."""
        return self.measured.estimate if self.measured else None

    @property
    def tokens_per_second(self) -> float | None:
        """Over all devices, at the median iteration."""
        found = self.estimate
        return self._rate(found.median) if found else None

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
class SizeVerdict:
    """Both backends at one size."""

    model: str
    parameters: int
    verdict: Verdict
    """On the second backend against the first."""

    @property
    def text(self) -> str:
        """`gpt3-64m (63.8M)`."""
        return f"{self.model} ({parameters(self.parameters)})"


def compare_tokens(reference: Swept, other: Swept) -> Comparison | None:
    """Time a token of the second over the first's; None where one has no times."""
    if reference.estimate is None or other.estimate is None:
        return None
    weight = reference.tokens_per_iteration / other.tokens_per_iteration
    return compare(reference.estimate, other.estimate, weight)


def fastest(results: Sequence[Swept]) -> dict[tuple[Devices, Backend], list[Swept]]:
    """For each number of devices and backend its fastest strategy at every size, small ones first."""
    best: dict[tuple[Devices, Backend, str], Swept] = {}
    for result in results:
        rate = result.tokens_per_second
        if rate is None:
            continue
        key = result.devices, result.backend, result.cell.model
        if key not in best or rate > (best[key].tokens_per_second or 0):
            best[key] = result
    lines: dict[tuple[Devices, Backend], list[Swept]] = {}
    for (devices, backend, _), result in best.items():
        lines.setdefault((devices, backend), []).append(result)
    return {key: sorted(line, key=lambda one: one.parameters) for key, line in lines.items()}


def verdicts(results: Sequence[Swept]) -> list[str]:
    """One sentence for each pair of backends on each number of devices."""
    lines = fastest(results)
    backends = list(dict.fromkeys(result.backend for result in results))
    sentences = []
    for devices in dict.fromkeys(result.devices for result in results):
        for one, two in combinations(backends, 2):
            points = _points(lines.get((devices, one), []), lines.get((devices, two), []))
            sentences.append(overtaking(devices, one, two, points))
    return sentences


def overtaking(devices: Devices, one: Backend, two: Backend, points: Sequence[SizeVerdict]) -> str:
    """What the sizes, small to large, allow to say of the pair."""
    where = f"On {devices[0]} {devices[1].upper()} rank{'s' * (devices[0] > 1)}"
    clear = [p for p in points if p.verdict in (Verdict.FASTER, Verdict.SLOWER)]
    unclear = [point.text for point in points if point.verdict is Verdict.NOISE]
    unknown = [point.text for point in points if point.verdict is Verdict.UNKNOWN]
    tail = f"; within noise of each other at {joined(unclear)}" if unclear and clear else ""
    tail += f"; too few samples at {joined(unknown)}" if unknown and (clear or unclear) else ""
    if not clear:
        if unclear:
            noise = f"{two} is within noise of {one} at {joined(unclear)}"
            return f"{where} {noise}{tail}: neither overtakes."
        why = f"too few samples at {joined(unknown)}" if unknown else "no size has both"
        return f"{where} nothing can be said of {two} against {one}: {why}."
    crossings = []
    for small, big in pairwise(clear):
        if small.verdict is not big.verdict:
            winner, loser = _in_order(big, one, two)
            crossings.append(f"{winner} overtakes {loser} between {small.text} and {big.text}")
    if crossings:
        return f"{where} {' and '.join(crossings)}{tail}."
    winner, loser = _in_order(clear[0], one, two)
    sizes = joined([point.text for point in clear])
    return f"{where} {winner} is faster than {loser} at {sizes}{tail}: no size measured turns it round."


def _points(one: Sequence[Swept], two: Sequence[Swept]) -> list[SizeVerdict]:
    others = {result.cell.model: result for result in two}
    points = []
    for result in one:
        other = others.get(result.cell.model)
        found = compare_tokens(result, other) if other else None
        if found:
            points.append(SizeVerdict(result.cell.model, result.parameters, found.verdict))
    return points


def _in_order(point: SizeVerdict, one: Backend, two: Backend) -> tuple[Backend, Backend]:
    """The faster and the slower."""
    return (two, one) if point.verdict is Verdict.FASTER else (one, two)
