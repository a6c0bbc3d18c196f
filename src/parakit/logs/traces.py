"""Read Chrome traces (`traceEvents`) of PyTorch or of this kit, and split an iteration's time into groups of kernels.

The name of a matrix product or of attention says what the kernel is. Elementwise kernels have the same names in all
operators, so they are classified by the operators that launched them; `correlation` connects a kernel with its
launch. A trace of a CPU has no kernels: there the time of each operator counts, without the operators inside it.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

TRACE = "torch_profile/rank-0.json.gz"
"""Path of the trace that `--use-pytorch-profiler` writes in a run folder (Megatron 0.19)."""

GAPS, OTHER = "gaps", "other"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_HOST = ("cpu_op", "user_annotation", *_LAUNCHES)
_STEP = "ProfilerStep#"

# Patterns of groups, in any case; the first that fits counts. They are searched in the names of the operators
# around a launch, in the kernel's name, or in both.
_BY_OPERATOR = {"optimizer": r"Optimizer\.step#|fused_adam"}
_BY_KERNEL = {
    "communication": "nccl",
    "attention": "flash|fmha|sdpa|attention|cudnn::fusion",
    "GEMM": r"gemm|gemv|cutlass|cublas|nvjet|xmma|splitk|addmm|aten::mm\b|aten::bmm",
}
_BY_EITHER = {
    "cross entropy": "cross_?entropy|log_?sum_?exp|log_softmax|nll_loss",
    "layer norm": "layer_?norm|rms_?norm|GammaBeta|cuComputeGradInput|rsqrt",
    "dropout": "dropout|bernoulli|inductor_random|philox",
    # Besides the product, Megatron's linear layers add a bias and sum its gradient.
    "GELU and bias": "gelu|tanh|LinearWithGradAccumulation",
    "embedding": "embedding|index_?select|RadixSort",
    "gradient handling": (
        "multi_tensor|foreach|vector_norm|linalg_norm|aten::norm|_amp_|AccumulateGrad|clip|l2norm"
    ),
    "copies": r"memcpy|memset|copy|aten::to\b|aten::zero_|aten::fill_",
}
GROUPS = (*_BY_KERNEL, *_BY_EITHER, *_BY_OPERATOR, OTHER, GAPS)


class EventArguments(msgspec.Struct, frozen=True, gc=False):
    """The part of an event's `args` that is read."""

    correlation: int = -1
    """Number that a kernel shares with the call that launched it; -1 if there is none."""


class TraceEvent(msgspec.Struct, frozen=True, gc=False):
    """One event of a trace. Times are in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float = 0.0
    dur: float = -1.0
    args: EventArguments = EventArguments()

    @property
    def end(self) -> float:
        """End of the event in µs."""
        return self.ts + self.dur


class _Trace(msgspec.Struct, frozen=True):
    traceEvents: list[TraceEvent]  # noqa: N815 - Chrome's name


def read_trace_events(path: Path) -> list[TraceEvent]:
    """Read the complete events of a trace, which may be compressed with gzip.

    Raises:
        OSError: The file cannot be read or unpacked.
        msgspec.DecodeError: The file is no trace.
    """
    raw = path.read_bytes()
    trace = msgspec.json.decode(gzip.decompress(raw) if path.suffix == ".gz" else raw, type=_Trace)
    return [event for event in trace.traceEvents if event.ph == "X" and event.dur >= 0]


class DeviceInterval(NamedTuple):
    """Time during which a kernel of a device ran, or an operator on the CPU."""

    name: str
    operators: tuple[str, ...]
    """Names of the operators around the launch, outermost first."""
    start_us: float
    duration_us: float


def read_group_milliseconds(folder: Path, on_gpu: bool) -> tuple[Mapping[str, float], str]:
    """Return the milliseconds per iteration of each group of kernels, from the profiler's trace in a run folder.

    The second value is empty. If the trace cannot be used, the mapping is empty and the second value is the
    reason. With `on_gpu`, a trace without events of the GPU cannot be used.
    """
    try:
        events = read_trace_events(folder / TRACE)
        if on_gpu and not any(event.cat in _ON_DEVICE for event in events):
            return {}, "the profiler saw nothing of the GPU (CUPTI may not be allowed here)"
        return milliseconds_by_group(events), ""
    except (OSError, ValueError, EOFError, zlib.error) as error:  # The file may be cut off.
        return {}, f"the profiler's trace cannot be read: {error}"


def milliseconds_by_group(events: Sequence[TraceEvent]) -> dict[str, float]:
    """Return the milliseconds per iteration of each group of kernels; the gaps between kernels are a group too.

    Groups without time are left out. The time from the beginning of the first profiled step to the end of the
    last step is counted. A kernel that begins before this end and runs beyond it is counted up to the end. Kernels
    that run concurrently on several streams are counted separately, so the groups may add up to more than an
    iteration.

    Raises:
        ValueError: The trace has no profiled step, or nothing ran in the steps.
    """
    # Each step has a second event on the row of the device, which is not counted.
    steps = [
        event for event in events if event.cat == "user_annotation" and event.name.startswith(_STEP)
    ]
    if not steps:
        raise ValueError("The trace has no profiled step.")
    begin, end = min(step.ts for step in steps), max(step.end for step in steps)
    intervals = [
        interval for interval in _find_device_intervals(events) if begin <= interval.start_us < end
    ]
    if not intervals:
        raise ValueError("The trace has steps and nothing that ran in them.")
    microseconds: dict[str, float] = defaultdict(float)
    for interval in intervals:
        group = classify_kernel(interval.name, interval.operators)
        microseconds[group] += min(interval.duration_us, end - interval.start_us)
    microseconds[GAPS] = max(end - begin - _count_busy_microseconds(intervals, end), 0.0)
    num_steps = len({step.name for step in steps})
    return {
        group: microseconds[group] / 1000 / num_steps for group in GROUPS if microseconds.get(group)
    }


def _count_busy_microseconds(intervals: Sequence[DeviceInterval], end: float) -> float:
    """Return how many microseconds up to `end` at least one interval was running."""
    busy = busy_until = 0.0
    for interval in sorted(intervals, key=lambda interval: interval.start_us):
        start = max(interval.start_us, busy_until)
        stop = min(interval.start_us + interval.duration_us, end)
        if stop > start:
            busy += stop - start
            busy_until = stop
    return busy


@cache
def classify_kernel(name: str, operators: tuple[str, ...] = ()) -> str:
    """Return the group of a kernel, found by the kernel's name and the operators around its launch.

    Operators of the optimizer are decisive. Otherwise the kernel's name is tried first, and then the operators
    from the innermost to the outermost. A kernel that fits no group gives OTHER.
    """
    all_names = "\n".join((name, *operators))
    searches = [(all_names, _BY_OPERATOR), (name, _BY_KERNEL)]
    searches += [(text, _BY_EITHER) for text in (name, *reversed(operators))]
    for text, patterns in searches:
        for group, pattern in patterns.items():
            if re.search(pattern, text, re.IGNORECASE):
                return group
    return OTHER


def _find_device_intervals(events: Sequence[TraceEvent]) -> list[DeviceInterval]:
    """Return the intervals in which kernels ran on a device.

    If there are no kernels, the operators of the CPU are returned, each without the time of its inner operators.
    """
    events_by_thread: dict[object, list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event.cat in _ON_HOST and not event.name.startswith(_STEP):
            events_by_thread[event.pid, event.tid].append(event)
    operators_by_launch: dict[int, tuple[str, ...]] = {}
    host_intervals: list[DeviceInterval] = []
    for thread in events_by_thread.values():
        outer_first = sorted(thread, key=lambda event: (event.ts, -event.dur))
        _walk_thread(outer_first, operators_by_launch, host_intervals)
    kernels = [
        DeviceInterval(
            name=event.name,
            operators=operators_by_launch.get(event.args.correlation, ()),
            start_us=event.ts,
            duration_us=event.dur,
        )
        for event in events
        if event.cat in _ON_DEVICE
    ]
    return kernels or host_intervals


def _walk_thread(
    events: Sequence[TraceEvent],
    operators_by_launch: dict[int, tuple[str, ...]],
    host_intervals: list[DeviceInterval],
) -> None:
    """Add the launches and operators of one thread to `operators_by_launch` and `host_intervals`, in place.

    `events` must be in the order of their beginnings, with outer events before inner ones.
    """
    open_events: list[tuple[TraceEvent, list[float]]] = []
    """Events that have not ended, outermost first, with the durations of the operators in them."""

    def close_events(until: float) -> None:
        while open_events and open_events[-1][0].end <= until:
            event, inner_durations = open_events.pop()
            if event.cat == "cpu_op":
                operators = tuple(outer.name for outer, _ in open_events)
                duration = max(event.dur - sum(inner_durations), 0.0)
                host_intervals.append(DeviceInterval(event.name, operators, event.ts, duration))

    for event in events:
        close_events(event.ts)
        if event.cat in _LAUNCHES:
            operators = tuple(outer.name for outer, _ in open_events)
            operators_by_launch[event.args.correlation] = operators
            continue
        if open_events and event.cat == "cpu_op":
            open_events[-1][1].append(event.dur)
        open_events.append((event, []))
    close_events(float("inf"))
