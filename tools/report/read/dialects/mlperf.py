"""MLPerf: results as JSON behind `:::MLLOG`; the time of a step is in `tracked_stats`, where it is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from tools.report.read.dialects import (
    Dialect,
    FoundIteration,
    LineField,
    LineFormat,
    News,
    iteration_of,
)
from tools.report.read.iterations import OTHER
from tools.report.read.scraped import ArgumentList, Ending, Fact, Generation, Validation

MARK = ":::MLLOG"
_TIMES = ("train_step_time", "train_step_timing in s")
_LOSSES = ("reduced_train_loss", "loss")
_ARGUMENTS = {"max_sequence_length": "seq_length"}
"""Under Megatron's names."""
_DECODER = msgspec.json.Decoder(dict[str, Any])


class Result(LineFormat):
    """A step's `tracked_stats`; `step` counts from 0 and is a mean since the line before it."""

    mark = MARK.encode()
    opening = re.compile(r":::MLLOG \{")
    rank = 1

    def find(self, line: str) -> list[FoundIteration]:
        """The step of a line."""
        found = event(line)
        value, about = found.get("value"), found.get("metadata")
        about = about if isinstance(about, dict) else {}
        if found.get("key") != "tracked_stats" or not isinstance(value, dict):
            return []
        numbers = {name: each for name, each in value.items() if isinstance(each, int | float)}
        step, samples = about.get("step"), about.get("samples_count")
        seconds = next((numbers.get(name) for name in _TIMES if name in value), None)
        if not isinstance(step, int | float) or seconds is None:
            return []
        values = {"iteration": int(step) + 1, "elapsed_ms": 1000.0 * seconds}
        if isinstance(samples, int | float):
            values["consumed_samples"] = int(samples)
        for name, number in numbers.items():
            if name not in _TIMES:
                values["lm_loss" if name in _LOSSES else OTHER + name] = float(number)
        fields = [LineField(name, number, 0, 0) for name, number in values.items()]
        start = line.index(MARK)
        return [FoundIteration(iteration_of(fields), start, fields, "", GENERATION)]


GENERATION = Generation("MLPerf", "results")


def event(line: str) -> dict[str, Any]:
    """The JSON of a line; empty where it is none."""
    start = line.find("{", line.find(MARK))
    try:
        return _DECODER.decode(line[start : line.rfind("}") + 1])
    except msgspec.DecodeError:
        return {}


def _setting(line: str) -> tuple[str, str] | None:
    found = event(line) if MARK in line else {}
    key, value = found.get("key"), found.get("value")
    if not isinstance(key, str) or value is None or isinstance(value, dict | list):
        return None
    return _ARGUMENTS.get(key, key), str(value)


def _news(line: str) -> Iterator[Fact]:
    found = event(line)
    value, about = found.get("value"), found.get("metadata")
    match found.get("key"):
        case "init_start":
            yield ArgumentList(re.compile('"key": "run_start"'), _setting)
        case "eval_accuracy" if isinstance(value, int | float):
            yield Validation(None, {"eval accuracy": float(value)})
        case "run_stop" if isinstance(about, dict) and about.get("status") == "success":
            yield Ending("run_stop: success")


DIALECT = Dialect(name="MLPerf", line=Result, news=(News(MARK, _news),))
