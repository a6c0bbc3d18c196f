"""A log's figures by its whole lines' words alone: shares no code with `src/parakit/logs`."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

type Figures = dict[int, dict[str, set[float]]]
type Figure = tuple[int, str, float]

FIELDS = ("elapsed_ms", "lm_loss", "grad_norm")
_BARS = {
    "elapsed time per iteration (ms)": ("elapsed_ms", 1.0),
    "elapsed time per iteration (s)": ("elapsed_ms", 1000.0),
    "lm loss": ("lm_loss", 1.0),
    "lm_loss": ("lm_loss", 1.0),
    "grad norm": ("grad_norm", 1.0),
}
_BAR_LINE = re.compile(r"iteration +(\d+)/ *\d+ \|(.*\|)")
_NUMBER = r"([-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)"
_METRICS = (
    (
        *("timing_s/", r"\bstep:(\d+) - "),
        {
            "timing_s/step": ("elapsed_ms", 1000.0),
            "perf/time_per_step": ("elapsed_ms", 1000.0),
            "actor/grad_norm": ("grad_norm", 1.0),
        },
    ),
    ("perf/step_time", r"\bperf (\d+): \{", {"perf/step_time": ("elapsed_ms", 1000.0)}),
    ("'train/", r"\bstep (\d+): \{", {"train/grad_norm": ("grad_norm", 1.0)}),
    (
        *("train_speed(s/it)", r"""(?:iteration|max_steps)['"]: ['"](\d+)/\d"""),
        {"grad_norm": ("grad_norm", 1.0), "loss": ("lm_loss", 1.0)},
    ),
)
"""Of verl, slime and ms-swift: what a line holds, its number, names with field and unit."""
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_MOST = 2**53
_NEAR = 60
"""Iterations that a mean is held against; nothing damages so many in a row."""


def figures(text: bytes) -> Figures:
    """What whole lines say of iterations, by number and field."""
    figures_by_step: Figures = defaultdict(lambda: defaultdict(set))
    plain = re.sub(rb"\x1b\[[0-9;]*m", b"", text)
    lines = [line.decode("latin-1") for line in re.split(rb"[\r\n]", plain)]
    for of_trainer in (_of_bars, _of_metrics, _of_means, _of_results):
        for iteration, field, value in of_trainer(lines):
            figures_by_step[iteration][field].add(value)
    return figures_by_step


def _of_bars(lines: Sequence[str]) -> Iterator[Figure]:
    for line in lines:
        for match in _BAR_LINE.finditer(line):
            for part in match[2].split("|"):
                name, colon, value = part.strip().partition(":")
                number = re.match(f" *{_NUMBER}", value)
                if colon and name in _BARS and number:
                    field, unit = _BARS[name]
                    yield int(match[1]), field, float(number[1]) * unit


def _named(line: str, name: str) -> float | None:
    """A number that something closes, by its name."""
    before = rf"""(?<![\w/]){re.escape(name)}['"]?: ?['"]?(?:np\.float64\()?"""
    match = re.search(rf"""{before}{_NUMBER}(?=['")]?(?: - |[,}}]))""", line)
    return float(match[1]) if match else None


def _of_metrics(lines: Sequence[str]) -> Iterator[Figure]:
    for line in lines:
        for mark, number, names in _METRICS:
            if (count := re.search(number, line)) and mark in line:
                for name, (field, unit) in names.items():
                    if (value := _named(line, name)) is not None:
                        yield int(count[1]), field, value * unit


def _of_means(lines: Sequence[str]) -> Iterator[Figure]:
    """Of ms-swift: a mean, and what is between two of them."""
    so_far: list[tuple[int, float]] = []
    for line in lines:
        mean, count = _named(line, "train_speed(s/it)"), re.search(_METRICS[-1][1], line)
        since = re.search(r"""elapsed_time['"]: ['"]([\dhms ]+)['"]""", line)
        if count and mean and mean > 1e-3 and since:
            number = int(count[1][:15])
            elapsed = sum(int(part[:-1]) * _SECONDS[part[-1]] for part in since[1].split())
            steps = range(number, number + 1)
            if (
                abs(mean * number - elapsed) > 1 + elapsed / 1000
            ):  # It was resumed from some iteration.
                least = min((elapsed - 1) / mean, 1e9)
                steps = range(int(least), int(least + 2 / mean) + 2)
            for item in filter(None, steps[:_NEAR]):
                so_far.append((number, min(max(mean * item, elapsed - 0.5), elapsed + 0.5)))
                yield number, "elapsed_ms", 1000 * so_far[-1][1] / item
    for number, ended in so_far:
        for other, begun in so_far:
            if 0 < number - other < _NEAR:
                yield number, "elapsed_ms", 1000 * (ended - begun) / (number - other)


def _of_results(lines: Sequence[str]) -> Iterator[Figure]:
    """Of MLPerf: steps with a time; where none has one the means of blocks, and losses."""
    events = [event for line in lines if ":::MLLOG {" in line for event in _events(line)]
    settings = {event["key"]: event.get("value") for event in events}
    batch, length = settings.get("global_batch_size"), settings.get("max_sequence_length")
    sizes = {"step": 1.0, "samples_count": batch}
    if settings.get("submission_benchmark") == "gpt3" and batch and length:
        sizes["first_epoch_num"] = batch * length
    timed = [
        event
        for event in events
        if _seconds(event) and "throughput" not in event["value"] and "step" in event["metadata"]
    ]
    for event in timed or events:
        about, value = event.get("metadata") or {}, event.get("value")
        values = value if isinstance(value, dict) else {}
        step, ahead = about.get("step"), bool(timed) or "throughput" in values
        if not isinstance(step, float) or event["key"] != "tracked_stats":
            continue
        size = sizes.get("first_epoch_num") or batch
        if "samples_count" in about:
            number = step + ahead
        elif size and not step % size:
            number = step // size + ("throughput" in values)
        else:
            continue
        if seconds := _seconds(event):
            yield int(number), "elapsed_ms", 1000 * seconds
        for name in ("train_loss", "loss", "reduced_train_loss"):
            if name in values:
                yield int(number), "lm_loss", values[name]
    if not timed:
        yield from _of_blocks(events, sizes)


def _of_blocks(events: Sequence[dict[str, Any]], sizes: dict[str, Any]) -> Iterator[Figure]:
    begin: dict[str, Any] | None = None
    for event in events:
        if event["key"] == "block_start":
            begin = event
        if event["key"] == "block_stop" and begin:
            first, last, begun = begin["metadata"], dict(event["metadata"]), begin["time_ms"]
            begin = None
            if "epoch_count" in first:
                last["first_epoch_num"] = first["first_epoch_num"] + first["epoch_count"]
            for name, size in sizes.items():
                trained = last.get(name, 0) - first.get(name, last.get(name, 0))
                if size and trained > 0:
                    item = (event["time_ms"] - begun) * size / trained
                    yield round(last[name] / size), "elapsed_ms", item


def _events(line: str) -> Iterator[dict[str, Any]]:
    try:
        text = line[line.index("{") :].strip()
        # A constant is NaN or an infinity, which JSON has not.
        event = json.loads(text, parse_int=_plain, parse_float=_plain, parse_constant=int)
    except ValueError:
        return
    if isinstance(event, dict) and "key" in event:
        yield event


def _plain(text: str) -> float:
    value = float(text)
    return value if abs(value) < _MOST else 0.0


def _seconds(event: dict[str, Any]) -> float | None:
    value = event.get("value")
    if event["key"] != "tracked_stats" or not isinstance(value, dict):
        return None
    return value.get("train_step_time", value.get("train_step_timing in s"))
