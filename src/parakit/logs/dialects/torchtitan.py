"""Dialect of torchtitan: a step with loss, memory and throughput; its time follows from the clock of the lines."""

from __future__ import annotations

import re
from collections.abc import Iterator

from parakit.logs.dialects import Dialect, EventReader, StepLine, StepNumber, read_first_match
from parakit.logs.iterations import EXTRA_METRIC_PREFIX, PRINTED_TOKENS_PER_DEVICE
from parakit.logs.scraped import CheckpointEvent, Ending, Fact, PrintedArgument

_BATCH = re.compile(
    r"local batch size (?P<micro_batch_size>\d{1,9}), "
    r"global batch size (?P<global_batch_size>\d{1,9})(?: \([^)]{0,80}\))?, "
    r"(?:gradient accumulation steps \d{1,9}, )?sequence length (?P<seq_length>\d{1,9}),"
)
_GAP = r"(?= {2})"
"""Two blanks, which follow a number but the last one."""
_MESH = re.compile(r"Building \d-D device mesh with \[[^]]{1,200}\], \[([\d, ]{1,60})\]")


class _Step(StepLine):
    """Format of `step:  4  loss:  7.62585  …  tps: 10,050  tflops: 314.71  mfu: 13.99%`."""

    mark = b"step: "
    opening = re.compile(r"step: {1,8}(?P<iteration>\d{1,9}) {1,4}loss: ")
    rank = 10
    trainer = "torchtitan"
    clock = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[,.]\d{3})\d{0,3} - ")
    numbers = (
        StepNumber("lm_loss", " loss: {1,4}", _GAP),
        StepNumber("grad_norm", "grad_norm: {1,4}", _GAP),
        StepNumber("throughput_tflops_per_gpu", "tflops: {1,4}", _GAP),
        StepNumber(PRINTED_TOKENS_PER_DEVICE, "(?:tps|wps): {1,4}", _GAP),
        StepNumber(EXTRA_METRIC_PREFIX + "memory GiB", "memory: {1,4}", r"GiB\("),
        StepNumber(EXTRA_METRIC_PREFIX + "mfu %", "mfu: {1,4}", "%"),
    )


def _read_batch(line: str) -> Iterator[Fact]:
    """Yield the batch and the sequence length with which training starts."""
    match = _BATCH.search(line)
    if match:
        for name, value in match.groupdict().items():
            yield PrintedArgument(name, value)


def _read_mesh(line: str) -> Iterator[Fact]:
    """Yield the number of devices of the mesh."""
    match = _MESH.search(line)
    if match:
        size = 1
        for degree in match[1].split(","):
            size *= int(degree)
        yield PrintedArgument("world_size", str(size))


DIALECT = Dialect(
    name="torchtitan",
    line=_Step,
    events=(
        EventReader("local batch size", _read_batch),
        EventReader("device mesh", _read_mesh),
        EventReader(
            "Training completed", read_first_match("Training completed", lambda m: Ending(m[0]))
        ),
        EventReader(
            "Saving the checkpoint",
            read_first_match("Saving the checkpoint", lambda _: CheckpointEvent("saving", None)),
        ),
    ),
    starts=("Training starts at step",),
)
