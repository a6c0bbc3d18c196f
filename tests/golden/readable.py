"""Conversion of pages, pictures, JSON and figures of a report into text for golden files."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

DRAWN = ("path", "use", "rect", "image", "text")
BLOCKS = {"h1", "h2", "h3", "h4", "p", "li", "td", "th", "dt", "dd", "pre", "summary", "title"}
BLOCKS |= {"figcaption"}
STRUCTURE = {"header", "section", "table", "thead", "tbody", "figure", "details", "nav", "main"}
HIDDEN = {"style", "script", "metadata", "defs"}
SAMPLES = 6
"""Number of values that are shown at either end of a long list."""

LINE = 160
"""Longest value in characters that is written on a single line."""

FIGURES = (
    *("label", "status", "iteration_ms_median", "iteration_ms_ci_low", "iteration_ms_ci_high"),
    *("tokens_per_second_per_device", "peak_memory_bytes", "comm_bytes_per_iteration"),
    *("final_loss", "parity"),
)
"""Columns of a report's row in a golden file. The verdict on speed comes after them."""


def page_as_text(page: str) -> str:
    """Return the visible text of a page in its structure, and labels and counts of each inline picture."""
    reader = _PageReader()
    reader.feed(page)
    reader.close()
    return "\n".join(reader.lines)


def picture_as_text(picture: str) -> str:
    """Return the labels of an SVG in their order, and the number of elements of each kind."""
    root = ElementTree.fromstring(picture)
    drawn: Counter[str] = Counter()
    labels: list[str] = []

    def walk(element: ElementTree.Element) -> None:
        tag = element.tag.rpartition("}")[2]
        if tag in HIDDEN:
            return
        drawn[tag] += tag in DRAWN
        if tag == "text":
            labels.append(" ".join("".join(element.itertext()).split()))
        for child in element:
            walk(child)

    walk(root)
    counts = ", ".join(f"{drawn[tag]} {tag}" for tag in DRAWN if drawn[tag])
    return "\n".join((counts, *labels))


def figures_as_text(text: str) -> str:
    """Return the figures that matter of `results.json`: which keys it has, then one line per row.

    What the other keys hold is tested where it is computed. A table of everything would change in hundreds of
    lines with every change of the report.
    """
    results = json.loads(text)
    rows = results["rows"]
    lines = [
        f"keys: {' '.join(results)}",
        f"keys of a row: {' '.join(rows[0])}",
        " | ".join((*FIGURES, "speed")),
    ]
    for row in rows:
        comparison = (row["speed"] or {}).get("per_iteration") or {}
        speed = (comparison.get("verdict", ""), comparison.get("ratio"))
        lines.append(
            " | ".join(map(_figure, (*(row[name] for name in FIGURES), *speed))).rstrip(" |")
        )
    return "\n".join(lines)


def _figure(value: object) -> str:
    """Return a value with six digits, or an empty text if the value is unknown."""
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)


def json_as_text(text: str) -> str:
    """Return indented JSON, with floats of nine digits and only the ends of long lists."""
    return "\n".join(_json_lines(_shortened(json.loads(text)), ""))


def _json_lines(value: Any, indent: str, key: str = "") -> Iterator[str]:
    on_one_line = json.dumps(value, ensure_ascii=False)
    if len(on_one_line) <= LINE or not isinstance(value, (dict, list)):
        yield f"{indent}{key}{on_one_line}"
        return
    yield f"{indent}{key}{'{' if isinstance(value, dict) else '['}"
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _json_lines(item, indent + " ", f"{json.dumps(name)}: ")
    else:
        for item in value:
            yield from _json_lines(item, indent + " ")
    yield f"{indent}{'}' if isinstance(value, dict) else ']'}"


def _shortened(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shortened(item) for key, item in value.items()}
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if not isinstance(value, list):
        return value
    short = [_shortened(item) for item in value]
    if len(short) > 2 and all(isinstance(item, dict) for item in short):
        return [short[0], f"… {len(short) - 2} more …", short[-1]]
    if len(short) > 2 * SAMPLES and all(isinstance(item, (int, float, list)) for item in short):
        return [*short[:SAMPLES], f"… {len(short) - 2 * SAMPLES} more …", *short[-SAMPLES:]]
    return short


class _PageReader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._open: list[str] = []
        self._text: list[str] = []
        self._picture: Counter[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("meta", "link", "br", "img", "input", "hr"):
            return
        self._open.append(tag)
        if tag == "svg":
            self._picture = Counter()
        if self._picture is not None:
            self._picture[tag] += tag in DRAWN and "defs" not in self._open
        elif tag in BLOCKS:
            self._flush()
        elif tag in STRUCTURE:
            self._flush()
            named = dict(attrs)
            marks = "".join(f" {k}={named[k]}" for k in ("id", "class") if named.get(k))
            self.lines.append(f"<{tag}{marks}>")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self._open and self._open[-1] == tag:
            self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass
        if self._picture is not None:
            if tag == "svg":
                drawn = ", ".join(f"{self._picture[t]} {t}" for t in DRAWN if self._picture[t])
                self._flush("svg labels")
                self.lines.append(f"svg draws: {drawn}")
                self._picture = None
            elif tag == "text":
                self._text.append(" · ")
        elif tag in ("td", "th"):
            self._text.append(" | ")
            if self._open and self._open[-1] == "tr":
                self._keep_in_row()
        elif tag == "tr":
            self._flush("row")
        elif tag in BLOCKS:
            self._flush(tag)

    def handle_data(self, data: str) -> None:
        if not HIDDEN.intersection(self._open):
            self._text.append(data)

    def _keep_in_row(self) -> None:
        self._text = ["".join(self._text)]

    def _flush(self, name: str = "text") -> None:
        if name == "text" and self._open and self._open[-1] in ("td", "th"):
            return  # Cells of a row stay on a single line.
        text = re.sub(r"\s+", " ", "".join(self._text)).strip()
        self._text = []
        if text:
            self.lines.append(f"{name}: {text}")
