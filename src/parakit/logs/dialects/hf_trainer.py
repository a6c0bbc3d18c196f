"""Dialect of the Hugging Face Trainer: `{'loss': 1.6595, 'grad_norm': …, 'learning_rate': …, 'epoch': 0.03}`.

A dictionary has no number of its step and no time. The number is taken from the progress bar before it; without a bar
the dictionaries are numbered from 1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from parakit.logs.dialects import (
    NUMBER,
    Dialect,
    EventReader,
    LineField,
    LineFormat,
    ParsedIteration,
    make_iteration,
)
from parakit.logs.iterations import EXTRA_METRIC_PREFIX
from parakit.logs.scraped import Fact, Generation, StepAhead

_METRIC = re.compile(rf"'([\w./() -]{{1,80}})': '?{NUMBER}'?(?=[,}}])")
_BAR = re.compile(r"\d{1,3}%\|[^|]{0,200}\| {0,4}(\d{1,9})/(\d{1,9}) \[")
_FIELDS = {"loss": "lm_loss", "grad_norm": "grad_norm", "learning_rate": "learning_rate"}
_MAX_METRICS = 100


def _list_fields(metrics: dict[str, str]) -> Iterator[LineField]:
    """Yield the fields of a dictionary of metrics; a metric without a field of Megatron's is an extra metric.

    Rewards belong to a policy. Its loss is not a language model's, so the loss is then an extra metric too.
    """
    is_policy = any("reward" in name for name in metrics)
    for name, digits in metrics.items():
        field = _FIELDS.get(name, EXTRA_METRIC_PREFIX + name)
        if is_policy and name == "loss":
            field = EXTRA_METRIC_PREFIX + name
        yield LineField(field, float(digits.replace(",", "")))


class _Step(LineFormat):
    """Format of a step's metrics. They are complete if the closing brace is there."""

    mark = b"{'loss': "
    opening = re.compile(r"\{'loss': '?[\d.ni]")
    rank = 22

    def find(self, line: str) -> list[ParsedIteration]:
        """Return the steps of a line, in order. Each is a dictionary of metrics with a loss and an epoch."""
        steps = []
        for opening in self.opening.finditer(line):
            start = opening.start()
            end = line.find("}", start)
            if end < 0:
                continue
            metrics = dict(_METRIC.findall(line[start : end + 1])[:_MAX_METRICS])
            if "loss" not in metrics or "epoch" not in metrics:
                continue
            # The number stands in the last progress bar before the metrics.
            bars = _BAR.findall(line[:start])
            number = int(bars[-1][0]) if bars else 0
            fields = [LineField("iteration", number), *_list_fields(metrics)]
            step = ParsedIteration(
                make_iteration(fields),
                start,
                fields,
                generation=Generation("the Hugging Face Trainer", "steps"),
                by_order=not number,
            )
            steps.append(step)
        return steps


def _read_bar(line: str) -> Iterator[Fact]:
    """Yield the number of the step that a progress bar shows, for the next metrics."""
    bars = _BAR.findall(line)
    if not bars:
        return
    number, total = map(int, bars[-1])
    yield StepAhead(number, total)


DIALECT = Dialect(
    name="the Hugging Face Trainer", line=_Step, events=(EventReader("%|", _read_bar),)
)
