"""A sheet of an SVG that follows the page's colours: text and boxes in its classes, and nothing else.

matplotlib draws the kit's charts; it is no part of what runs in the browser.
"""

from __future__ import annotations

from html import escape
from textwrap import wrap

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
