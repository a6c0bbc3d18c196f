"""Tables of performance figures as rows of known quantities: CSV, or every table of a Markdown file.

A column is known by its heading, whatever its spelling (`audit.yaml`); unknown columns are left alone. A
CSV with the columns `metric` and `value` (the planner's published measurements) becomes a row for
figures of one run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from parakit.config.files import UnreadableError, csv_rows, read_text, read_yaml

KNOWN: dict[str, Any] = read_yaml(Path(__file__).with_name("audit.yaml"))
_DEGREES = ("tp", "pp", "cp", "dp", "ep", "etp", "vpp")
_HEADINGS: dict[str, re.Pattern[str]] = {
    name: re.compile(pattern) for name, pattern in KNOWN["headings"].items()
}
_WORDS = ("gpu", "dtype", "model", "notes")
_SECONDS = re.compile(
    r"(step|iter|iteration|global step|batch)s?\b.*\b(time|s|sec|secs|seconds|ms)|"
    r"(time|s|sec|secs|seconds|ms)\b.*\b(step|it|iter|iteration|batch)"
)
_NUMBER = re.compile(r"([-+]?\d[\d,_]*(?:\.\d+)?(?:e[-+]?\d+)?)(?: ?([kmbgt])\b)?", re.IGNORECASE)
_SUFFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_NODES = re.compile(r"(\d+) ?[x×*·] ?(\d+)")
_SEVERAL = re.compile(r"\d ?(?:[/–—-]|,(?!\d{3})|\b(?:or|to)\b) ?\d")
"""Several numbers, a range, or a decimal comma."""
_SCALED = re.compile(r"\b([kmb]|thousands?|millions?|billions?)\b|\b[km]tok")
_FLOPS = re.compile(r"\b(tera ?|t|peta ?|p)flops?\b")
_TOTAL = re.compile(r"\b(total|aggregate|overall|cluster)\b")
_OF_EACH = re.compile(r"(/|per) ?(gpu|device|chip|accelerator)")
_SPELLED = re.compile(r"(?<![a-z])(etp|vpp|tp|pp|cp|dp|ep|sp)[ =]*(\d+)(?:x(\d+))?")
_MARKED, _LINK = re.compile(r"[*`_#]+"), re.compile(r"\[([^\]]*)\]\([^)]*\)")
_DEVICE = re.compile(r"\b(?:GB|GH|[ABHV])\d{3}\b")
"""Where a write-up names one alone, its figures are of it."""
_ITEM = re.compile(r"[^\x00-\x20A-Za-z0-9|#]{1,12}\s+([A-Z][\w ()]*):\s+(.+)")
_BAR = re.compile(r"(?<!\\)\|")
"""Between cells; one after a backslash is part of a cell's text."""
_MOST_BILLIONS = 1e6
"""What is more counts single parameters."""

_Lines = Sequence[tuple[int, list[str]]]


class TableError(ValueError):
    """A file in which no table of figures is found; the message names it."""


@dataclass
class TableRow:
    """One run as a table has it; what is not stated is in none of the three."""

    line: int
    numbers: dict[str, float] = field(default_factory=dict)
    """By quantity: degrees, batch, shape, `step_s`, `tokens_s`, `tokens_s_gpu`, `tflops`, `mfu`."""
    words: dict[str, str] = field(default_factory=dict)
    """Also what is no single number: a range, several of them."""
    slack: dict[str, float] = field(default_factory=dict)
    """Half of the last printed digit, relative."""
    baseline: TableRow | None = None
    """The row of the same table whose speedup is 1, which the others' are over."""

    @property
    def name(self) -> str:
        """How the table calls it."""
        return self.words.get("model", "")


def read_table(path: Path) -> list[TableRow]:
    """Every row of a file.

    Raises:
        TableError: It cannot be read, or has no column that is known beside another.
    """
    try:
        text = read_text(path)
        markdown = any(_is_rule(line) for line in text.splitlines())
        listed = [] if path.suffix == ".csv" else list(_listings(text))
        tables = list(_markdown_tables(text)) if markdown or listed else [_csv_table(text, path)]
    except UnreadableError as error:
        raise TableError(str(error)) from None
    rows = [row for header, lines in tables for row in _rows(header, lines)] + listed
    if not rows:
        raise TableError(
            f"{path} holds no table of performance figures; its headings should name GPUs, degrees "
            "(TP, PP, DP), batch, sequence and a figure (step time, tokens/s, TFLOP/s, MFU)."
        )
    named = set(_DEVICE.findall(text))
    for row in rows if path.suffix != ".csv" and len(named) == 1 else ():
        row.words.setdefault("gpu", *named)
    return rows


def quantity(heading: str) -> str:
    """The quantity that a heading names; empty for one that is not known."""
    plain = " ".join(re.sub(r"[*`_()\[\]#:.-]+", " ", heading.lower()).split())
    plain = re.sub(r"(?<=[tpcde]p) ?[x×] ?(?=[tpcde]p)", "/", plain)
    if "util" not in plain and (match := _FLOPS.search(plain)):
        total = "total_" if _TOTAL.search(plain) and not _OF_EACH.search(plain) else ""
        hardware = "hardware_" if "hardware" in plain or "hfu" in plain else ""
        return f"{total}{hardware}{match[1][0]}flops"
    if "tok" in plain and re.search(r"/ ?s|per s|sec|throughput", plain):
        each = "tokens_s_gpu" if _OF_EACH.search(plain) else "tokens_s"
        return "" if _SCALED.search(plain) else each  # Thousands are left alone.
    words = re.findall(r"[a-z]+", plain)
    if re.fullmatch(r"tp\W+pp\b.*", plain):
        return " ".join(word for word in words if word in _DEGREES)
    for name, pattern in _HEADINGS.items():
        if pattern.fullmatch(plain):
            return name
    if _SECONDS.search(plain) and not plain.startswith(("tokens", "samples", "speed")):
        return "step_ms" if re.search(r"\bms\b|millisec", plain) else "step_s"
    return ""


def degrees_spelled(text: str) -> dict[str, float]:
    """Degrees in a name; `vpp16x6` is PP 16 with six virtual stages, as this kit names it."""
    found: dict[str, float] = {}
    for name, degree, stages in _SPELLED.findall(text.lower()):
        kit = name == "vpp" and stages
        found |= {"pp": float(degree), "vpp": float(stages)} if kit else {name: float(degree)}
    return found


def _csv_table(text: str, path: Path) -> tuple[list[str], _Lines]:
    (_, header), *rows = [*csv_rows(text, path)] or [(1, [])]
    return header, [(line, cells) for line, cells in rows if any(cells)]


def _markdown_tables(text: str) -> Iterator[tuple[list[str], _Lines]]:
    lines = text.splitlines()
    for place, line in enumerate(lines):
        if place and _is_rule(line):
            rows = takewhile(lambda row: "|" in row[1], enumerate(lines[place + 1 :], place + 2))
            yield _cells(lines[place - 1]), [(number, _cells(row)) for number, row in rows]


def _listings(text: str) -> Iterator[TableRow]:
    """A title that ends with a colon, and a line for each figure below it, as write-ups draw trees."""
    row = TableRow(0)
    for number, line in enumerate((*text.splitlines(), ""), 1):
        if item := _ITEM.fullmatch(line.strip()):
            name = quantity(item[1]) or quantity(re.sub(r"^[\d.,%\s]+", "", item[2]))
            if name in ("mfu", "efficiency") or name.endswith("flops") or name.startswith("tokens"):
                _put(row, "mfu" if "peak" in item[2] else name, item[2])
            continue
        if len(row.numbers) > 1:
            yield row
        row = TableRow(number, words={"model": line.strip().rstrip(":")})


def _is_rule(line: str) -> bool:
    return "|" in line and "-" in line and not set(line.strip()) - set("|-: ")


def _cells(line: str) -> list[str]:
    cells = _BAR.split(line.strip().removeprefix("|").removesuffix("|"))
    return [_MARKED.sub("", _LINK.sub(r"\1", cell)).strip() for cell in cells]


def _rows(header: Sequence[str], lines: _Lines) -> list[TableRow]:
    places = {place: name for place, text in enumerate(header) if (name := quantity(text))}
    lower = [text.strip().lower() for text in header]
    if "metric" in lower and "value" in lower:
        return _joined(places, lower, lines)
    if lower[3:] == ["difference"]:
        return [_compared(line, cells) for line, cells in lines if len(cells) == len(header)]
    rows = [_row(places, line, cells) for line, cells in lines] if len(places) > 1 else []
    baseline = next((row for row in rows if row.numbers.get("speedup") == 1), None)
    return [replace(row, baseline=baseline) for row in rows]


def _compared(line: int, cells: Sequence[str]) -> TableRow:
    """A figure of two, and in the last column how far they are apart."""
    row = TableRow(line, words={"model": cells[0], "difference": cells[3]})
    for name, text in zip(("one", "other", "difference"), cells[1:], strict=True):
        if ":" not in text:  # A time of the clock.
            _put(row, name, text)
    return row


def _joined(places: dict[int, str], header: Sequence[str], lines: _Lines) -> list[TableRow]:
    """Figures of one run in several lines, and those that its notes quote."""
    metric, value = header.index("metric"), header.index("value")
    apart = {metric, value, *(place for place, name in enumerate(header) if name == "notes")}
    rows: dict[tuple[str, ...], TableRow] = {}
    for line, cells in lines:
        if max(metric, value) >= len(cells):
            continue
        name = KNOWN["metrics"].get(cells[metric].strip())
        key = tuple(cell for place, cell in enumerate(cells) if place not in apart)
        row = rows.get(key)
        if row is None or name in row.numbers:
            row = _row(places, line, cells)
            for printed, pattern in KNOWN["printed"].items():
                if match := re.search(pattern, row.words.get("notes", "")):
                    _put(row, printed, match[1].strip(".,"))
            rows[(*key, str(line)) if key in rows else key] = row
        if name:
            _put(row, name, cells[value])
    return list(rows.values())


def _row(places: dict[int, str], line: int, cells: Sequence[str]) -> TableRow:
    row = TableRow(line)
    for place, name in places.items():
        text = cells[place].strip() if place < len(cells) else ""
        if name in _WORDS:
            row.words[name] = text
        elif name == "efficiency":
            _put(row, "mfu" if "peak" in text else name, text)
        elif name == "layout":
            row.numbers |= _layout(text)
        elif " " in name:
            found = [float(number.replace(",", "")) for number, _ in _NUMBER.findall(text)]
            if len(found) == len(name.split()):
                row.numbers |= dict(zip(name.split(), found, strict=True))
        else:
            _put(row, name, text)
    for name in ("tflops", "hardware_tflops"):
        total = row.numbers.pop(f"total_{name}", None)
        if total is not None and row.numbers.get("gpus"):
            row.numbers[name] = total / row.numbers["gpus"]
    return row


def _layout(text: str) -> dict[str, float]:
    """A layout in this kit's words too, where `vpp2` is PP 2 with two virtual stages."""
    found = degrees_spelled(text)
    if "vpp" in found and "pp" not in found:
        found |= {"pp": found["vpp"], "vpp": 2.0}
    return {"tp" if name == "sp" else name: degree for name, degree in found.items()}


def _put(row: TableRow, name: str, text: str) -> None:
    """One figure, in the quantity's unit."""
    if name == "ffn" and "/" in text:  # Also of an expert.
        row.words["experts"] = text
        return
    if name != "ffn" and _SEVERAL.search(text):
        row.words[name] = text
        return
    match = _NUMBER.search(text)
    if match is None:
        return
    digits, suffix = match[1].replace(",", "").replace("_", ""), (match[2] or "").lower()
    value = float(digits)
    slack = 0.5 * 10 ** -len(digits.partition(".")[2]) / abs(value) if value else 0.0
    if name == "gpus" and (nodes := _NODES.search(text)):
        value = float(nodes[1]) * float(nodes[2])
    elif name == "params_b":
        value *= _SUFFIXES[suffix or "b"] / 1e9 if value < _MOST_BILLIONS else 1e-9
    elif name == "seq":
        value *= {"k": 1024, "m": 1024**2}.get(suffix, 1)
    elif suffix and name not in ("tokens_s", "tokens_s_gpu"):
        return  # A batch of "4M" counts tokens, of "2K" may be 2,000 or 2,048.
    else:
        value *= _SUFFIXES[suffix]
    if name.endswith("pflops"):
        name, value = f"{name.removesuffix('pflops')}tflops", value * 1000
    if name == "step_ms" or (name == "step_s" and re.search(r"\d ?ms\b", text)):
        name, value = "step_s", value / 1000
    if name in ("mfu", "hfu") and "%" not in text and value <= 1:
        value *= 100
    row.numbers[name], row.slack[name] = value, slack
