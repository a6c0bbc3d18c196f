"""MLPerf: results as JSON behind `:::MLLOG`; the time of a step is in `tracked_stats`, where it is.

Beside a count of samples `step` counts steps from 0. Alone (4.1 and 5.0) it counts samples, in GPT-3's
tokens, and a time beside a rate is then the mean of a block, under the count at which it begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar, TypeGuard

import msgspec

from parakit.logs.dialects import (
    Dialect,
    EventReader,
    LineField,
    LineFormat,
    ParsedIteration,
    make_iteration,
)
from parakit.logs.iterations import EXTRA_METRIC_PREFIX, Iteration
from parakit.logs.scraped import ArgumentList, Ending, Fact, Generation, Validation

MARK = ":::MLLOG"
_TIMES = ("train_step_time", "train_step_timing in s")
_LOSSES = ("reduced_train_loss", "loss")
_ARGUMENTS = {"max_sequence_length": "seq_length"}
"""Under Megatron's names."""
_TOKENS = "gpt3"
"""The benchmark whose counts are of tokens."""
_RATE = "throughput"
_TOO_LARGE = 2**53
_MAX_DIGITS = 10
_DECODER = msgspec.json.Decoder(dict[str, Any])


class Result(LineFormat):
    """A step's `tracked_stats`; its time is a mean since the line before it."""

    mark = MARK.encode()
    opening = re.compile(r":::MLLOG \{")
    rank = 1
    of_blocks: ClassVar = False
    """Whether its times are means of blocks."""

    def find(self, line: str) -> list[ParsedIteration]:
        """The step of a line."""
        found = parse_event(line)
        value, about = found.get("value"), found.get("metadata")
        about = about if isinstance(about, dict) else {}
        if found.get("key") != "tracked_stats" or not isinstance(value, dict):
            return []
        if (_RATE in value) != self.of_blocks:
            return []
        numbers = {name: each for name, each in value.items() if is_number(each)}
        step, samples = about.get("step"), about.get("samples_count")
        seconds = next((numbers.get(name) for name in _TIMES if name in value), None)
        if not is_number(step) or not is_number(seconds):
            return []
        values = {"iteration": int(step) + 1, "elapsed_ms": 1000.0 * seconds}
        if is_number(samples):
            values["consumed_samples"] = int(samples)
        for name, number in numbers.items():
            if name not in _TIMES:
                values["lm_loss" if name in _LOSSES else EXTRA_METRIC_PREFIX + name] = float(number)
        one = make_parsed_iteration(line, values)
        counted = partial(_counted, one.iteration, self.of_blocks)
        return [one if is_number(samples) else one._replace(by_arguments=counted)]


def _counted(found: Iteration, begins: bool, given: Mapping[str, str]) -> Iteration | None:
    """An iteration whose number is a count of samples or tokens, and one more, by its own number.

    A count that begins a block is of what was trained before it.
    """
    sizes = find_step_sizes(given)
    size = sizes["first_epoch_num"] or sizes["samples_count"]
    number, rest = divmod(found.iteration - 1, size) if size else (0, 1)
    number += begins
    return msgspec.structs.replace(found, iteration=number) if number and not rest else None


def make_parsed_iteration(line: str, values: Mapping[str, float]) -> ParsedIteration:
    """The iteration of a result with these numbers."""
    fields = [LineField(name, number) for name, number in values.items()]
    generation = Generation("MLPerf", "results")
    return ParsedIteration(make_iteration(fields), line.index(MARK), fields, generation=generation)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a number that a trainer can mean."""
    return isinstance(value, int | float) and abs(value) < _TOO_LARGE


def find_step_sizes(given: Mapping[str, str]) -> dict[str, int]:
    """What a step adds to each count, by what the log has set; 0 where that is not known."""
    batch, length = (
        int(text) if (text := given.get(name, "")).isdecimal() and len(text) < _MAX_DIGITS else 0
        for name in ("global_batch_size", "seq_length")
    )
    tokens = batch * length if given.get("submission_benchmark") == _TOKENS else 0
    return {"step": 1, "samples_count": batch, "first_epoch_num": tokens}


def parse_event(line: str) -> dict[str, Any]:
    """The JSON of a line; empty where it is none."""
    start = line.find("{", line.find(MARK))
    try:
        return _DECODER.decode(line[start : line.rfind("}") + 1])
    except msgspec.DecodeError:
        return {}


def _setting(line: str) -> tuple[str, str] | None:
    found = parse_event(line) if MARK in line else {}
    key, value = found.get("key"), found.get("value")
    if not isinstance(key, str) or value is None or isinstance(value, dict | list):
        return None
    return _ARGUMENTS.get(key, key), str(value)


def _news(line: str) -> Iterator[Fact]:
    found = parse_event(line)
    value, about = found.get("value"), found.get("metadata")
    match found.get("key"):
        case "init_start":
            yield ArgumentList(re.compile('"key": "run_start"'), _setting)
        case "eval_accuracy" if is_number(value):
            yield Validation(None, {"eval accuracy": float(value)})
        case "run_stop" if isinstance(about, dict) and about.get("status") == "success":
            yield Ending("run_stop: success")


DIALECT = Dialect(
    name="MLPerf",
    line=Result,
    events=(EventReader(MARK, _news),),
    starts=(r':::MLLOG .*"key": "init_start"',),
)
