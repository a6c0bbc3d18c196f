"""Write `verify.html`: the verdict, the map of modules and stages, and the first wrong tensor.

The page is one file that opens offline.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from parakit.artifacts.io import write_atomically
from parakit.artifacts.verdict import VerifyOutcome, VerifyVerdict
from parakit.formatting.html import environment
from parakit.formatting.units import DASH, count
from parakit.verify.comparison import CaptureComparison, TensorComparison
from parakit.verify.map import BOUNDS, COLUMNS, WRONG, MapRow, build_map_rows, colour_level
from parakit.verify.picture import Picture, describe_range
from parakit.verify.verdict import Judgement

PAGE_FILE = "verify.html"
_TEMPLATES = Path(__file__).parent / "templates"
_MAX_LISTED_TENSORS = 12
"""Number of tensors that the page lists per cell, largest error over tolerance first."""
_BARS_PER_DECADE, _NUM_DECADES = 4, 4
_WRONG_BY_ITSELF = {
    True: "yes: it is wrong with the reference's own tensors as its inputs",
    False: "no: with the reference's own tensors as inputs every module is right; errors add up",
    None: "not asked",
}
"""Text of `Verdict.confirmed`."""


@dataclass(frozen=True)
class RatioBar:
    """Bar of the histogram: tensors whose error over tolerance is in one range."""

    text: str
    """The range, such as `0.1 to 0.18`."""
    tensors: int
    """Number of tensors in the range."""
    share: float
    """Height as a fraction of the highest bar."""
    level: int
    """Colour level."""


def write_page(folder: Path, judgement: Judgement) -> None:
    """Write `verify.html` into a folder that exists."""
    write_atomically(folder / PAGE_FILE, render_page(judgement))


def render_page(judgement: Judgement) -> str:
    """Return the HTML of the page.

    The map is left out if nothing was compared. The picture of the first wrong tensor is drawn if there is
    one, and the histogram of all errors if there is none.
    """
    verdict, compared, first = judgement.verdict, judgement.compared, judgement.first
    rows = build_map_rows(compared, first.key if first else None) if compared else []
    picture = None
    if first and first.worst:
        picture = Picture(first.worst, first.tolerance)
    bars, spread = [], ""
    if compared and not first:
        bars, spread = _build_bars(compared), _summarize_ratios(compared)
    num_columns_by_stage = Counter(column.stage for column in COLUMNS)
    template = environment(_TEMPLATES).get_template("verify.html.j2")
    return template.render(
        verdict=verdict,
        sentence=_summarize_verdict(verdict),
        facts=_list_facts(verdict, first),
        rows=rows,
        stages=list(num_columns_by_stage.items()),
        columns=COLUMNS,
        cells=_describe_cells(rows),
        shown=_find_cell_to_show(rows),
        legend=_list_legend(),
        red=WRONG,
        number=_format_ratio,
        picture=picture,
        first=first,
        describe_range=describe_range,
        bars=bars,
        spread=spread,
        folds=any(row.children for row in rows),
    )


def _summarize_verdict(verdict: VerifyVerdict) -> str:
    """Return the verdict as one sentence, the heading of the page."""
    layout, reference = verdict.layout or "The strategy", verdict.reference or "the reference"
    if verdict.verdict is VerifyOutcome.NOT_COMPARABLE:
        return f"{layout} could not be compared with {reference}."
    if verdict.verdict is VerifyOutcome.HELD:
        worst_ratio = verdict.worst_ratio or 0.0
        return (
            f"{layout} computes what {reference} computes: no error is above "
            f"{_format_ratio(worst_ratio)} of its tolerance."
        )
    return f"{layout} differs from {reference} at {verdict.stage}, {verdict.module} ({verdict.tensor})."


def _list_facts(verdict: VerifyVerdict, first: TensorComparison | None) -> Mapping[str, str]:
    """Return the known facts of a verdict by name; facts without a text are left out."""
    facts: dict[str, str | None] = {"reason": verdict.reason}
    if first is not None:
        facts |= _list_facts_of_error(verdict, first)
    facts["log"] = verdict.logged
    facts |= {"reference": verdict.reference, "layout": verdict.layout, "mode": verdict.mode}
    if verdict.seen:
        fraction = f"{verdict.compared / verdict.seen:.1%}"
        facts["compared"] = (
            f"{count(verdict.compared)} of {count(verdict.seen)} tensors ({fraction})"
        )
    facts["command"] = verdict.command
    return {name: text for name, text in facts.items() if text}


def _list_facts_of_error(
    verdict: VerifyVerdict, first: TensorComparison
) -> Mapping[str, str | None]:
    """Return the facts on the first wrong tensor by name; empty if the verdict has no error or tolerance."""
    if verdict.error is None or verdict.tolerance is None:
        return {}
    ranks = _join_numbers(verdict.ranks)
    right_ranks = sorted(first.right_ranks - set(verdict.ranks))
    if right_ranks:
        ranks += f" (right on {_join_numbers(right_ranks)})"
    return {
        "kind": verdict.kind,
        "ranks": ranks,
        "error": f"{verdict.error:.3g}, tolerance {verdict.tolerance:.3g}"
        f" ({_format_ratio(first.ratio)} times the tolerance)",
        "wrong by itself": _WRONG_BY_ITSELF[verdict.confirmed],
        "worst element": verdict.worst,
        "source": verdict.source,
        "also wrong by itself": "; ".join(verdict.also),
    }


def _join_numbers(numbers: Sequence[int]) -> str:
    """Return the numbers as text, separated by commas."""
    return ", ".join(map(str, numbers))


def _describe_cells(rows: Sequence[MapRow]) -> dict[str, list[object]]:
    """Return the descriptions that the page shows when the reader points at a cell, by `row-column`.

    A description is a list of a heading, the lines of the worst tensors, and the number of tensors without a
    line. Cells without tensors have no description.
    """
    side_texts = {"in": " (of its inputs)", "out": " (of its outputs)", "": ""}
    descriptions: dict[str, list[object]] = {}
    for row_index, row in enumerate(rows):
        for column_index, (cell, column) in enumerate(zip(row.cells, COLUMNS, strict=True)):
            if not cell.tensors:
                continue
            worst_first = sorted(
                cell.tensors, key=lambda comparison: (-comparison.differs, -comparison.ratio)
            )
            listed = worst_first[:_MAX_LISTED_TENSORS]
            descriptions[f"{row_index}-{column_index}"] = [
                f"{row.name}: {column.stage}{side_texts[column.side]}",
                [_describe_tensor(comparison, row) for comparison in listed],
                len(worst_first) - len(listed),
            ]
    return descriptions


def _describe_tensor(comparison: TensorComparison, row: MapRow) -> list[object]:
    """Return a line of the page's table: name, error, tolerance, ratio, ranks, and whether it differs."""
    _, name, slot = comparison.key
    parameter = name.removeprefix(f"{row.name}.") if name != row.name else ""
    if comparison.replicas_differ:
        ranks = f"copies on ranks {_join_numbers(comparison.replicas_differ)} differ"
    elif comparison.uncovered:
        ranks = f"{count(comparison.uncovered)} elements on no rank"
    elif comparison.wrong_ranks:
        ranks = _join_numbers(sorted(comparison.wrong_ranks))
    else:
        ranks = DASH
    return [
        f"{parameter} {slot}".strip(),
        f"{comparison.error:.2e}",
        f"{comparison.tolerance:.2e}",
        _format_ratio(comparison.ratio),
        ranks,
        comparison.differs,
    ]


def _find_cell_to_show(rows: Sequence[MapRow]) -> str:
    """Return `row-column` of the cell that is described at first; empty if no cell has tensors.

    The cell with the first wrong tensor is taken. If all tensors are right, the cell with the largest error
    over tolerance is taken.
    """
    candidates = []
    for row_index, row in enumerate(rows):
        for column_index, cell in enumerate(row.cells):
            worst = cell.worst
            if worst is not None:
                priority = (cell.first, worst.differs, worst.ratio)
                candidates.append((priority, f"{row_index}-{column_index}"))
    return max(candidates, default=((), ""))[1]


def _list_legend() -> list[tuple[int, str]]:
    """Return each colour level with the range of error over tolerance that it stands for."""
    bounds = [f"{bound:g}" if bound < 1e4 else "10⁴" for bound in BOUNDS]
    ranges = [f"{low}–{high}" for low, high in pairwise(bounds)]
    return [*enumerate(["no error", f"below {bounds[0]}", *ranges, f"above {bounds[-1]}"])]


def _build_bars(compared: CaptureComparison) -> list[RatioBar]:
    """Return the histogram of error over tolerance: tensors without error first, then ranges from 1e-4 to 1.

    Tensors below the lowest range are counted in the lowest, and tensors above 1 in the highest.
    """
    num_ranges = _BARS_PER_DECADE * _NUM_DECADES
    edges = [10 ** (index / _BARS_PER_DECADE - _NUM_DECADES) for index in range(num_ranges + 1)]
    counts: Counter[int] = Counter()
    for comparison in compared.comparisons:
        if comparison.ratio > 0:
            bar_index = bisect_right(edges, comparison.ratio)
            counts[min(max(bar_index, 1), num_ranges)] += 1
        else:
            counts[0] += 1
    highest = max(counts.values(), default=1)
    bars = [RatioBar("no error", tensors=counts[0], share=counts[0] / highest, level=0)]
    for bar_index, (low, high) in enumerate(pairwise(edges), start=1):
        bar = RatioBar(
            f"{low:.2g} to {high:.2g}",
            tensors=counts[bar_index],
            share=counts[bar_index] / highest,
            level=colour_level(math.sqrt(low * high), differs=False),
        )
        bars.append(bar)
    return bars


def _summarize_ratios(compared: CaptureComparison) -> str:
    """Return a sentence with the median and the largest error over tolerance."""
    ratios = sorted(comparison.ratio for comparison in compared.comparisons)
    if not ratios:
        return "Nothing was compared."
    worst = max(compared.comparisons, key=lambda comparison: comparison.ratio)
    stage, name, slot = worst.key
    median = ratios[len(ratios) // 2]
    return (
        f"Of {count(len(ratios))} tensors, each over all ranks and micro batches,"
        f" {count(ratios.count(0))} have no error; the median of error over tolerance is"
        f" {_format_ratio(median)}, the largest {_format_ratio(worst.ratio)}: {name} ({slot}), {stage}."
    )


def _format_ratio(ratio: float) -> str:
    """Return a ratio as text that fits into a cell: `0.12`, `3.4`, `120`, `2e6`, `∞`."""
    if math.isinf(ratio):
        return "∞"
    if ratio < 10:
        return f"{ratio:.2g}"
    return f"{ratio:.0f}" if ratio < 1000 else f"{ratio:.0e}".replace("e+0", "e").replace("e+", "e")
