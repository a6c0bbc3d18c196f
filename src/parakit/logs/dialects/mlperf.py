"""Dialect of MLPerf: results as JSON after `:::MLLOG`, with the time of a step in `tracked_stats`.

If a result also counts samples, `step` counts steps from 0. Otherwise (4.1 and 5.0) `step` counts samples, or tokens
for GPT-3. A time with a throughput is then the mean of a block, and `step` the count at the beginning of the block.
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
_PRESENT_NAMES = {"max_sequence_length": "seq_length"}
"""Megatron's names of arguments, by MLPerf's names."""
_BENCHMARK_OF_TOKENS = "gpt3"
"""Benchmark that counts tokens instead of samples."""
_THROUGHPUT = "throughput"
_TOO_LARGE = 2**53
_MAX_DIGITS = 9
"""Most digits of a batch size or sequence length. Longer numbers are no sizes."""
_DECODER = msgspec.json.Decoder(dict[str, Any])


def _find_step_seconds(value: dict[str, Any]) -> Any:
    """Return the time of the first name in `_TIMES` that an event has, which may be no number; None without any."""
    for name in _TIMES:
        if name in value:
            return value[name]
    return None


class Result(LineFormat):
    """Format of a `tracked_stats` event. Its time is the mean over the steps since the last such event."""

    mark = MARK.encode()
    opening = re.compile(r":::MLLOG \{")
    rank = 1
    of_blocks: ClassVar = False
    """True if the times are means of blocks."""

    def find(self, line: str) -> list[ParsedIteration]:
        """Return the step that a line reports, as a list; empty if the line reports none."""
        event = parse_event(line)
        value = event.get("value")
        if event.get("key") != "tracked_stats" or not isinstance(value, dict):
            return []
        has_times_of_blocks = _THROUGHPUT in value
        if has_times_of_blocks != self.of_blocks:
            return []
        metadata = event.get("metadata")
        if not isinstance(metadata, dict):
            return []
        numbers = {name: number for name, number in value.items() if is_number(number)}
        step, samples = metadata.get("step"), metadata.get("samples_count")
        seconds = _find_step_seconds(value)
        if not is_number(step) or not is_number(seconds):
            return []
        values = {"iteration": int(step) + 1, "elapsed_ms": 1000.0 * seconds}
        if is_number(samples):
            values["consumed_samples"] = int(samples)
        for name, number in numbers.items():
            if name in _LOSSES:
                values["lm_loss"] = float(number)
            elif name not in _TIMES:
                values[EXTRA_METRIC_PREFIX + name] = float(number)
        parsed = make_parsed_iteration(line, values)
        if is_number(samples):
            return [parsed]
        number_iteration = partial(_number_iteration, parsed.iteration, self.of_blocks)
        return [parsed._replace(by_arguments=number_iteration)]


def _number_iteration(
    iteration: Iteration, is_block_start: bool, arguments: Mapping[str, str]
) -> Iteration | None:
    """Return an iteration with its real number. Its present number is a count of samples or tokens plus one.

    A count at the start of a block does not include the block's first step. None means that the arguments do not
    state the size of a step, or that the count is no multiple of this size.
    """
    sizes = find_step_sizes(arguments)
    size = sizes["first_epoch_num"] or sizes["samples_count"]
    if not size:
        return None
    number, remainder = divmod(iteration.iteration - 1, size)
    number += is_block_start
    if not number or remainder:
        return None
    return msgspec.structs.replace(iteration, iteration=number)


def make_parsed_iteration(line: str, values: Mapping[str, float]) -> ParsedIteration:
    """Return the parsed iteration of a line with these numbers by field."""
    fields = [LineField(name, number) for name, number in values.items()]
    generation = Generation("MLPerf", "results")
    return ParsedIteration(make_iteration(fields), line.index(MARK), fields, generation=generation)


def is_number(value: object) -> TypeGuard[int | float]:
    """Return True if a value is a number that is not too large to be a measurement."""
    return isinstance(value, int | float) and abs(value) < _TOO_LARGE


def find_step_sizes(arguments: Mapping[str, str]) -> dict[str, int]:
    """Return how much one training step adds to each counter in the log's events.

    The keys are the names of the counters: `step` counts steps, and `samples_count` samples. `first_epoch_num` counts
    tokens in the GPT-3 benchmark. A value is 0 if it is unknown, and for `first_epoch_num` in other benchmarks.

    Args:
        arguments: Settings of the run by Megatron's names, as the log states them.
    """
    samples_per_step = _parse_size(arguments.get("global_batch_size", ""))
    # Only the GPT-3 benchmark writes its number of tokens into a field that is named after epochs.
    tokens_per_step = 0
    if arguments.get("submission_benchmark") == _BENCHMARK_OF_TOKENS:
        tokens_per_step = samples_per_step * _parse_size(arguments.get("seq_length", ""))
    return {"step": 1, "samples_count": samples_per_step, "first_epoch_num": tokens_per_step}


def _parse_size(text: str) -> int:
    """Return the batch size or sequence length that a setting states; 0 if it states none."""
    is_size = text.isdecimal() and len(text) <= _MAX_DIGITS
    return int(text) if is_size else 0


def parse_event(line: str) -> dict[str, Any]:
    """Return the JSON object of a line; empty if there is none."""
    start = line.find("{", line.find(MARK))
    try:
        return _DECODER.decode(line[start : line.rfind("}") + 1])
    except msgspec.DecodeError:
        return {}


def _read_setting(line: str) -> tuple[str, str] | None:
    """Return name and value of a setting under Megatron's name; None for another line."""
    event = parse_event(line) if MARK in line else {}
    key, value = event.get("key"), event.get("value")
    if not isinstance(key, str) or value is None or isinstance(value, dict | list):
        return None
    return _PRESENT_NAMES.get(key, key), str(value)


def _read_event(line: str) -> Iterator[Fact]:
    """Yield the fact that an event reports: the beginning of the settings, an evaluation, or the end of the run.

    Events of other kinds yield nothing.
    """
    event = parse_event(line)
    value, metadata = event.get("value"), event.get("metadata")
    match event.get("key"):
        case "init_start":
            yield ArgumentList(re.compile('"key": "run_start"'), _read_setting)
        case "eval_accuracy" if is_number(value):
            yield Validation(None, {"eval accuracy": float(value)})
        case "run_stop" if isinstance(metadata, dict) and metadata.get("status") == "success":
            yield Ending("run_stop: success")


DIALECT = Dialect(
    name="MLPerf",
    line=Result,
    events=(EventReader(MARK, _read_event),),
    starts=(r':::MLLOG .*"key": "init_start"',),
)
