"""A sheet of an SVG that follows the page's colours, and the ranks that stand on it.

Text and boxes in the page's classes, and nothing else: matplotlib, which draws the kit's charts, is no
part of what runs in the browser.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from itertools import groupby, product
from textwrap import wrap
from typing import NamedTuple

from parakit.config.groups import Group
from parakit.config.strategy import Parallelism

WIDTH = 380
EXACT_BYTES = 10**8
"""Up to which bytes are written out."""
_LETTERS = {"q": 5.3, "b": 6.2}
_LETTER = 5.5
"""Widths of a letter, on average, by class."""


class Sheet:
    """Grows downwards; `y` is where the next line begins."""

    def __init__(self, name: str, title: str) -> None:
        self.y = 0.0
        self._name, self._title, self._parts = name, title, [""]

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """One line; `anchor` is start, middle or end."""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}"{_kind(kind)} text-anchor="{anchor}">{escape(words)}</text>'
        )

    def lines(self, x: float, width: float, words: str, kind: str = "") -> int:
        """Lines from `y` on, broken at a width; how many they are."""
        broken = wrap(words, max(8, int(width / _LETTERS.get(kind, _LETTER))))
        for place, line in enumerate(broken):
            self.text(x, self.y + 11 + 13 * place, line, kind)
        return len(broken)

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """A rectangle."""
        size = f'width="{max(width, 0.5):.6g}" height="{height:.6g}"'
        self._parts.append(f'<rect x="{x:.6g}" y="{y:.6g}" {size}{_kind(kind)}/>')

    def line(self, x: float, y: float, to_x: float, to_y: float, kind: str, ends: str = "") -> None:
        """A line; `ends` names where it has an arrow: `start`, `end`."""
        arrows = "".join(f' marker-{end}="url(#arrow)"' for end in ends.split())
        ways = f'x1="{x:.6g}" y1="{y:.6g}" x2="{to_x:.6g}" y2="{to_y:.6g}"'
        self._parts.append(f"<line {ways}{_kind(kind)}{arrows}/>")

    def thread(self, x: float, y: float) -> None:
        """A line down to where the sheet ends so far, behind everything."""
        ways = f'x1="{x:.6g}" y1="{y:.6g}" x2="{x:.6g}" y2="{self.y:.6g}"'
        self._parts[0] += f'<line {ways} class="thread"/>'

    def open(self, title: str, **data: object) -> None:
        """Begin a part with a title, which a pointer shows, and data that a reader can add up."""
        words = "".join(f' data-{name}="{escape(str(value))}"' for name, value in data.items())
        self._parts.append(f"<g{words}><title>{escape(title)}</title>")

    def close(self) -> None:
        """End it."""
        self._parts.append("</g>")

    def svg(self) -> str:
        """The sheet."""
        return (
            f'<svg class="sheet" viewBox="0 0 {WIDTH} {self.y + 4:g}" role="group" '
            f'aria-labelledby="{self._name}"><title id="{self._name}">{escape(self._title)}</title>'
            + "".join(self._parts)
            + "</svg>"
        )


def _kind(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


MOST_SHOWN = 8


class DrawnRank(NamedTuple):
    """A rank in Megatron's order, tp-cp-ep-dp-pp, TP innermost (`parallel_state.RankGenerator`)."""

    number: int
    tensor: int
    context: int
    data: int
    stage: int
    expert_tensor: int
    expert: int
    expert_data: int


def select_ranks(split: Parallelism) -> list[DrawnRank]:
    """All ranks, if a drawing has room for them; else the first and the last along a dimension."""
    if split.world_size <= MOST_SHOWN:
        return [locate_rank(split, number) for number in range(split.world_size)]
    ends, room = [], MOST_SHOWN
    for degree in (split.tensor, split.pipeline, split.data, split.context):
        two = degree > 1 and room > 1
        room //= 2 if two else 1
        ends.append((0, degree - 1) if two else (0,))
    numbers = (
        tensor + split.tensor * (context + split.context * (data + split.data * stage))
        for tensor, stage, data, context in product(*ends)
    )
    return [locate_rank(split, number) for number in sorted(numbers)]


def locate_rank(split: Parallelism, number: int) -> DrawnRank:
    """The places of a global rank; experts have dimensions of their own inside a stage."""
    rest, tensor = divmod(number, split.tensor)
    rest, context = divmod(rest, split.context)
    stage, data = divmod(rest, split.data)
    inside = number % (split.world_size // split.pipeline)
    inside, expert_tensor = divmod(inside, split.effective_expert_tensor)
    expert_data, expert = divmod(inside, split.expert)
    return DrawnRank(number, tensor, context, data, stage, expert_tensor, expert, expert_data)


_STAYS = {
    Group.TENSOR: ("context", "data", "stage"),
    Group.CONTEXT: ("tensor", "data", "stage"),
    Group.TENSOR_CONTEXT: ("data", "stage"),
    Group.DATA_CONTEXT: ("tensor", "stage"),
    Group.TENSOR_DATA_CONTEXT: ("stage",),
    Group.PIPELINE: ("tensor", "context", "data"),
    Group.EMBEDDING: ("tensor", "context", "data"),
    Group.MODEL: ("context", "data"),
    Group.WORLD: (),
    Group.EXPERT: ("expert_tensor", "expert_data", "stage"),
    Group.EXPERT_TENSOR: ("expert", "expert_data", "stage"),
    Group.TENSOR_EXPERT: ("expert_data", "stage"),
    Group.EXPERT_DATA: ("expert_tensor", "expert", "stage"),
    Group.EXPERT_MODEL: ("expert_data",),
}
"""The places that all ranks of one group share."""


def group_ranks_by(group: Group, ranks: list[DrawnRank]) -> list[list[DrawnRank]]:
    """The ranks by the group of this kind that they are in."""

    def key(rank: DrawnRank) -> tuple[int, ...]:
        return tuple(getattr(rank, place) for place in _STAYS[group])

    return sorted(list(members) for _, members in groupby(sorted(ranks, key=key), key))


def draw_rank_headings(
    sheet: Sheet, split: Parallelism, ranks: Iterable[DrawnRank], start: float, wide: float
) -> None:
    """The ranks, and where they stand in each dimension that has more than one place."""
    degrees = {"tp": split.tensor, "cp": split.context, "dp": split.data, "pp": split.pipeline}
    degrees["ep"] = split.expert
    for column, rank in enumerate(ranks):
        places = dict(zip(degrees, (*rank[1:5], rank.expert), strict=True))
        middle = start + wide * (column + 0.5)
        narrow = wide < 50
        if narrow:  # Long numbers take turns in height.
            low = 12 * (column % 2) if rank.number > 99 or wide < 16 else 12
            sheet.text(middle, sheet.y + 12 + low, f"{rank.number}", "b", "middle")
        else:
            sheet.text(middle, sheet.y + 12, f"rank {rank.number}", "b", "middle")
            said = " ".join(f"{name}{places[name]}" for name in degrees if degrees[name] > 1)
            sheet.text(middle, sheet.y + 24, said, "q", "middle")
    sheet.y += 30
