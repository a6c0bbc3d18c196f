"""`verify.html`: one file that opens offline, with the verdict, the map and the first wrong tensor."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from parakit.artifacts.io import write_whole
from parakit.artifacts.verdict import Outcome, Verdict
from parakit.formatting.html import environment
from parakit.formatting.units import DASH, count
from parakit.verify.comparison import CaptureComparison, TensorComparison
from parakit.verify.map import BOUNDS, COLUMNS, WRONG, MapRow, build_map_rows, colour_level
from parakit.verify.picture import Picture, describe_range
from parakit.verify.verdict import Judgement

PAGE_FILE = "verify.html"
_TEMPLATES = Path(__file__).parent / "templates"
_MOST_LISTED = 12
"""Tensors of one cell that the page describes: the worst."""
_BARS_A_DECADE, _DECADES = 4, 4
_BY_ITSELF = {
    True: "yes: it is wrong with the reference's own tensors as its inputs",
    False: "no: with the reference's own tensors as inputs every module is right; errors add up",
    None: "not asked",
}


@dataclass(frozen=True)
class RatioBar:
    """Tensors whose error over tolerance is in one range."""

    text: str
    tensors: int
    share: float
    """Of the highest bar."""
    level: int


def write_page(folder: Path, judgement: Judgement) -> None:
    """Write `verify.html` into a folder that exists."""
    write_whole(folder / PAGE_FILE, render_page(judgement))


def render_page(judgement: Judgement) -> str:
    """The whole page."""
    verdict, compared, first = judgement.verdict, judgement.compared, judgement.first
    pair = first.worst if first else None
    rows = build_map_rows(compared, first.key if first else None) if compared else []
    return (
        environment(_TEMPLATES)
        .get_template("verify.html.j2")
        .render(
            verdict=verdict,
            sentence=_sentence(verdict),
            facts=_facts(verdict, first),
            rows=rows,
            stages=[*Counter(column.stage for column in COLUMNS).items()],
            columns=COLUMNS,
            cells=_described(rows),
            shown=_shown_first(rows),
            legend=_legend(),
            red=WRONG,
            number=_short,
            picture=Picture(pair, first.tolerance) if first and pair else None,
            first=first,
            range_of=describe_range,
            bars=_bars(compared) if compared and not first else [],
            spread=_spread(compared) if compared and not first else "",
            folds=any(row.children for row in rows),
        )
    )


def _sentence(verdict: Verdict) -> str:
    layout, reference = verdict.layout or "The strategy", verdict.reference or "the reference"
    if verdict.verdict is Outcome.NOT_COMPARABLE:
        return f"{layout} could not be compared with {reference}."
    if verdict.verdict is Outcome.HELD:
        worst = verdict.worst_ratio or 0.0
        return (
            f"{layout} computes what {reference} computes: no error is above {_short(worst)} of its"
            " tolerance."
        )
    return f"{layout} differs from {reference} at {verdict.stage}, {verdict.module} ({verdict.tensor})."


def _facts(verdict: Verdict, first: TensorComparison | None) -> Mapping[str, str]:
    """What is known of the verdict, each under its name."""
    facts: dict[str, str | None] = {"reason": verdict.reason}
    if first is not None and verdict.error is not None and verdict.tolerance is not None:
        ranks = ", ".join(map(str, verdict.ranks))
        right = sorted(first.right_ranks - set(verdict.ranks))
        facts |= {
            "kind": verdict.kind,
            "ranks": ranks + (f" (right on {', '.join(map(str, right))})" if right else ""),
            "error": f"{verdict.error:.3g}, tolerance {verdict.tolerance:.3g}"
            f" ({_short(first.ratio)} times the tolerance)",
            "wrong by itself": _BY_ITSELF[verdict.confirmed],
            "worst element": verdict.worst,
            "source": verdict.source,
            "also wrong by itself": "; ".join(verdict.also),
        }
    facts["log"] = verdict.logged
    facts |= {"reference": verdict.reference, "layout": verdict.layout, "mode": verdict.mode}
    if verdict.seen:
        share = f"{verdict.compared / verdict.seen:.1%}"
        facts["compared"] = f"{count(verdict.compared)} of {count(verdict.seen)} tensors ({share})"
    facts["command"] = verdict.command
    return {name: text for name, text in facts.items() if text}


def _described(rows: Sequence[MapRow]) -> dict[str, list[object]]:
    """What is shown of a cell when it is pointed at, by row and column."""
    sides, found = {"in": " (of its inputs)", "out": " (of its outputs)", "": ""}, {}
    for place, row in enumerate(rows):
        for number, (cell, column) in enumerate(zip(row.cells, COLUMNS, strict=True)):
            if cell.tensors:
                worst = sorted(cell.tensors, key=lambda one: (-one.differs, -one.ratio))
                found[f"{place}-{number}"] = [
                    f"{row.name}: {column.stage}{sides[column.side]}",
                    [_tensor_line(one, row) for one in worst[:_MOST_LISTED]],
                    max(0, len(worst) - _MOST_LISTED),
                ]
    return found


def _tensor_line(one: TensorComparison, row: MapRow) -> list[object]:
    _, name, slot = one.key
    own = name.removeprefix(f"{row.name}.") if name != row.name else ""
    if one.replicas_differ:
        where = f"copies on ranks {', '.join(map(str, one.replicas_differ))} differ"
    elif one.uncovered:
        where = f"{count(one.uncovered)} elements on no rank"
    elif one.wrong_ranks:
        where = ", ".join(map(str, sorted(one.wrong_ranks)))
    else:
        where = DASH
    ratio = _short(one.ratio)
    texts = [f"{own} {slot}".strip(), f"{one.error:.2e}", f"{one.tolerance:.2e}", ratio, where]
    return [*texts, one.differs]


def _shown_first(rows: Sequence[MapRow]) -> str:
    """The cell whose tensors are described before one is pointed at: the first wrong, or the worst."""
    ranked = [
        ((cell.first, worst.differs, worst.ratio), f"{place}-{column}")
        for place, row in enumerate(rows)
        for column, cell in enumerate(row.cells)
        if (worst := cell.worst) is not None
    ]
    return max(ranked, default=((), ""))[1]


def _legend() -> list[tuple[int, str]]:
    edges = [f"{bound:g}" if bound < 1e4 else "10⁴" for bound in BOUNDS]
    between = [f"{low}–{high}" for low, high in pairwise(edges)]
    return [*enumerate(["no error", f"below {edges[0]}", *between, f"above {edges[-1]}"])]


def _bars(compared: CaptureComparison) -> list[RatioBar]:
    """Tensors by error over tolerance: those without an error, then by powers of ten up to 1."""
    most = _BARS_A_DECADE * _DECADES
    edges = [10 ** (place / _BARS_A_DECADE - _DECADES) for place in range(most + 1)]
    ratios = (one.ratio for one in compared.comparisons)
    found = Counter(min(max(bisect_right(edges, r), 1), most) if r > 0 else 0 for r in ratios)
    highest = max(found.values(), default=1)
    bars = [RatioBar("no error", found[0], found[0] / highest, 0)]
    for place, (above, upto) in enumerate(pairwise(edges), start=1):
        level = colour_level(math.sqrt(above * upto), differs=False)
        bars.append(
            RatioBar(f"{above:.2g} to {upto:.2g}", found[place], found[place] / highest, level)
        )
    return bars


def _spread(compared: CaptureComparison) -> str:
    ratios = sorted(one.ratio for one in compared.comparisons)
    if not ratios:
        return "Nothing was compared."
    worst = max(compared.comparisons, key=lambda one: one.ratio)
    stage, name, slot = worst.key
    middle = ratios[len(ratios) // 2]
    return (
        f"Of {count(len(ratios))} tensors, each over all ranks and micro batches,"
        f" {count(ratios.count(0))} have no error; the median of error over tolerance is"
        f" {_short(middle)}, the largest {_short(worst.ratio)}: {name} ({slot}), {stage}."
    )


def _short(ratio: float) -> str:
    """A ratio in a cell's width: `0.12`, `3.4`, `120`, `2e6`, `∞`."""
    if math.isinf(ratio):
        return "∞"
    if ratio < 10:
        return f"{ratio:.2g}"
    return f"{ratio:.0f}" if ratio < 1000 else f"{ratio:.0e}".replace("e+0", "e").replace("e+", "e")
