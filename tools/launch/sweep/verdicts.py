"""Where one backend overtakes another, in one sentence a number of devices; never beyond the noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from tools.launch.sweep.results import Devices, Measured, compare_tokens, fastest
from tools.report.analyse.statistics import Verdict
from tools.spec.run import Backend


@dataclass(frozen=True)
class Point:
    """Both backends at one size."""

    model: str
    parameters: int
    verdict: Verdict
    """On the second backend against the first."""

    @property
    def text(self) -> str:
        """`gpt3-64m (63.8M)`."""
        return f"{self.model} ({size(self.parameters)})"


def verdicts(results: Sequence[Measured]) -> list[str]:
    """One sentence for each pair of backends on each number of devices."""
    lines = fastest(results)
    backends = list(dict.fromkeys(result.cell.backend for result in results))
    counts = list(dict.fromkeys((r.cell.devices, r.cell.device) for r in results))
    sentences = []
    for devices in counts:
        for one, two in combinations(backends, 2):
            points = _points(lines.get((devices, one), []), lines.get((devices, two), []))
            sentences.append(overtaking(devices, one, two, points))
    return sentences


def overtaking(devices: Devices, one: Backend, two: Backend, points: Sequence[Point]) -> str:
    """What the sizes, small to large, allow to say of the pair."""
    where = f"On {devices[0]} {devices[1].upper()} rank{'s' * (devices[0] > 1)}"
    clear = [p for p in points if p.verdict in (Verdict.FASTER, Verdict.SLOWER)]
    unclear = [point.text for point in points if point.verdict is Verdict.NOISE]
    unknown = [point.text for point in points if point.verdict is Verdict.UNKNOWN]
    tail = f"; within noise of each other at {_join(unclear)}" if unclear and clear else ""
    tail += f"; too few samples at {_join(unknown)}" if unknown and (clear or unclear) else ""
    if not clear:
        if unclear:
            noise = f"{two} is within noise of {one} at {_join(unclear)}"
            return f"{where} {noise}{tail}: neither overtakes."
        return f"{where} nothing can be said of {two} against {one}: {_nothing(unknown)}."
    crossings = [
        f"{_winner(big, one, two)} overtakes {_loser(big, one, two)} between {small.text} and {big.text}"
        for small, big in pairwise(clear)
        if small.verdict is not big.verdict
    ]
    if crossings:
        return f"{where} {' and '.join(crossings)}{tail}."
    winner, loser = _winner(clear[0], one, two), _loser(clear[0], one, two)
    sizes = _join([point.text for point in clear])
    return f"{where} {winner} is faster than {loser} at {sizes}{tail}: no size measured turns it round."


def size(parameters: int) -> str:
    """`3.4M`, `1.3B`."""
    if parameters >= 1_000_000_000:
        return f"{parameters / 1e9:.1f}B"
    return f"{parameters / 1e6:.1f}M"


def _points(one: Sequence[Measured], two: Sequence[Measured]) -> list[Point]:
    others = {result.cell.model: result for result in two}
    points = []
    for result in one:
        other = others.get(result.cell.model)
        found = compare_tokens(result, other) if other else None
        if found:
            points.append(Point(result.cell.model, result.parameters, found.verdict))
    return points


def _winner(point: Point, one: Backend, two: Backend) -> Backend:
    return two if point.verdict is Verdict.FASTER else one


def _loser(point: Point, one: Backend, two: Backend) -> Backend:
    return one if point.verdict is Verdict.FASTER else two


def _nothing(unknown: Sequence[str]) -> str:
    return f"too few samples at {_join(unknown)}" if unknown else "no size has both"


def _join(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
