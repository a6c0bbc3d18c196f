"""A sheet of SVG to draw on, and the ranks that a drawing shows.

Text and boxes use the classes of the page, so a sheet has the page's colours. matplotlib, which draws the kit's
charts, is not used, because it is not part of what runs in the browser.
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
"""Width of a sheet in SVG units, which are pixels of a screen at full size."""
EXACT_BYTES = 10**8
"""The size below which bytes are written with all digits."""
_LETTER_WIDTHS = {"q": 5.3, "b": 6.2}
_LETTER_WIDTH = 5.5
"""Average width of a letter by class of text, and for other classes."""
_LINE_HEIGHT = 13


class Sheet:
    """An SVG that grows downwards. `y` is the vertical position of the next line."""

    def __init__(self, name: str, title: str) -> None:
        self.y = 0.0
        self._name, self._title, self._parts = name, title, [""]

    def draw_text(
        self, x: float, y: float, text: str, kind: str = "", anchor: str = "start"
    ) -> None:
        """Draw one line of text, anchored at its `start`, `middle` or `end`."""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}"{_class_attribute(kind)} text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def draw_wrapped_text(self, x: float, width: float, text: str, kind: str = "") -> int:
        """Draw text below `y`, broken at a width; return the number of lines. `y` stays."""
        letter_width = _LETTER_WIDTHS.get(kind, _LETTER_WIDTH)
        lines = wrap(text, max(8, int(width / letter_width)))
        for number, line in enumerate(lines):
            self.draw_text(x, self.y + 11 + _LINE_HEIGHT * number, line, kind)
        return len(lines)

    def draw_box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draw a rectangle, at least half a pixel wide."""
        size = f'width="{max(width, 0.5):.6g}" height="{height:.6g}"'
        self._parts.append(f'<rect x="{x:.6g}" y="{y:.6g}" {size}{_class_attribute(kind)}/>')

    def draw_line(
        self, x: float, y: float, to_x: float, to_y: float, kind: str, ends: str = ""
    ) -> None:
        """Draw a line. `ends` names the ends with an arrow head: `start`, `end`, both or none."""
        arrows = "".join(f' marker-{end}="url(#arrow)"' for end in ends.split())
        coordinates = f'x1="{x:.6g}" y1="{y:.6g}" x2="{to_x:.6g}" y2="{to_y:.6g}"'
        self._parts.append(f"<line {coordinates}{_class_attribute(kind)}{arrows}/>")

    def draw_background_line(self, x: float, y: float) -> None:
        """Draw a vertical line from `y` down to the present end of the sheet, behind everything."""
        coordinates = f'x1="{x:.6g}" y1="{y:.6g}" x2="{x:.6g}" y2="{self.y:.6g}"'
        self._parts[0] += f'<line {coordinates} class="thread"/>'

    def begin_group(self, title: str, **data: object) -> None:
        """Begin a group with a title, which a pointer shows, and `data-` attributes, which tests add up."""
        attributes = "".join(f' data-{name}="{escape(str(value))}"' for name, value in data.items())
        self._parts.append(f"<g{attributes}><title>{escape(title)}</title>")

    def end_group(self) -> None:
        """End the group that was begun last."""
        self._parts.append("</g>")

    def to_svg(self) -> str:
        """Return the sheet as an SVG element."""
        return (
            f'<svg class="sheet" viewBox="0 0 {WIDTH} {self.y + 4:g}" role="group" '
            f'aria-labelledby="{self._name}"><title id="{self._name}">{escape(self._title)}</title>'
            + "".join(self._parts)
            + "</svg>"
        )


def _class_attribute(kind: str) -> str:
    """Return the attribute for a class of the page; empty for no class."""
    return f' class="{kind}"' if kind else ""


MOST_SHOWN = 8
"""The most ranks that a drawing shows."""


class DrawnRank(NamedTuple):
    """A rank and its index in each parallel dimension.

    The order of ranks is Megatron's, tp-cp-ep-dp-pp, in which TP varies fastest (`parallel_state.RankGenerator`).
    """

    number: int
    tensor: int
    context: int
    data: int
    stage: int
    expert_tensor: int
    expert: int
    expert_data: int


def select_ranks(split: Parallelism) -> list[DrawnRank]:
    """Return the ranks to draw: all ranks, or the ends of the dimensions if there are more than MOST_SHOWN ranks.

    The ends of a dimension are its first and last index. The dimensions TP, PP, DP and CP are considered in this
    order until there is no more room. In the other dimensions the ranks have index 0.
    """
    if split.world_size <= MOST_SHOWN:
        return [locate_rank(split, number) for number in range(split.world_size)]
    end_indices: list[tuple[int, ...]] = []
    room = MOST_SHOWN
    for degree in (split.tensor, split.pipeline, split.data, split.context):
        if degree > 1 and room > 1:
            end_indices.append((0, degree - 1))
            room //= 2
        else:
            end_indices.append((0,))
    numbers = []
    for tensor, stage, data, context in product(*end_indices):
        # Ranks are numbered with TP varying fastest, then CP, then DP, then PP. See `locate_rank`.
        replica = data + split.data * stage
        context_group = context + split.context * replica
        numbers.append(tensor + split.tensor * context_group)
    return [locate_rank(split, number) for number in sorted(numbers)]


def locate_rank(split: Parallelism, number: int) -> DrawnRank:
    """Return a rank of the job with its index in each parallel dimension.

    Within a pipeline stage, experts have their own dimensions.
    """
    quotient, tensor = divmod(number, split.tensor)
    quotient, context = divmod(quotient, split.context)
    stage, data = divmod(quotient, split.data)
    rank_in_stage = number % (split.world_size // split.pipeline)
    expert_quotient, expert_tensor = divmod(rank_in_stage, split.effective_expert_tensor)
    expert_data, expert = divmod(expert_quotient, split.expert)
    return DrawnRank(
        number=number,
        tensor=tensor,
        context=context,
        data=data,
        stage=stage,
        expert_tensor=expert_tensor,
        expert=expert,
        expert_data=expert_data,
    )


_SHARED_INDICES = {
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
"""The indices that all ranks of a group share, by kind of group."""


def group_ranks_by(group: Group, ranks: list[DrawnRank]) -> list[list[DrawnRank]]:
    """Return the ranks in process groups of one kind: a list of members per group, ordered by first rank."""

    def group_key(rank: DrawnRank) -> tuple[int, ...]:
        return tuple(getattr(rank, index) for index in _SHARED_INDICES[group])

    sorted_ranks = sorted(ranks, key=group_key)
    return sorted(list(members) for _, members in groupby(sorted_ranks, group_key))


def draw_rank_headings(
    sheet: Sheet, split: Parallelism, ranks: Iterable[DrawnRank], start: float, wide: float
) -> None:
    """Draw a heading per rank: its number and, if there is room, its index in each dimension of size above 1.

    Args:
        sheet: The sheet, whose `y` moves below the headings.
        split: The strategy.
        ranks: The ranks, a column each.
        start: The left edge of the first column.
        wide: The width of a column.
    """
    for column, rank in enumerate(ranks):
        middle = start + wide * (column + 0.5)
        if wide < 50:
            is_tight = rank.number > 99 or wide < 16
            # Long numbers alternate in height, so that neighbours do not overlap.
            offset = 12 * (column % 2) if is_tight else 12
            sheet.draw_text(middle, sheet.y + 12 + offset, f"{rank.number}", "b", "middle")
            continue
        sheet.draw_text(middle, sheet.y + 12, f"rank {rank.number}", "b", "middle")
        sheet.draw_text(middle, sheet.y + 24, _format_indices(split, rank), "q", "middle")
    sheet.y += 30


def _format_indices(split: Parallelism, rank: DrawnRank) -> str:
    """Return a rank's index in each dimension of size above 1, such as `tp1 dp0`."""
    dimensions = (
        ("tp", split.tensor, rank.tensor),
        ("cp", split.context, rank.context),
        ("dp", split.data, rank.data),
        ("pp", split.pipeline, rank.stage),
        ("ep", split.expert, rank.expert),
    )
    return " ".join(f"{name}{index}" for name, degree, index in dimensions if degree > 1)
