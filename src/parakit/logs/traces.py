"""Chrome traces (`traceEvents`), PyTorch's or the ledger's own, and an iteration's time by kernels.

A kernel's own name says matrix product or attention; elementwise kernels have the same names wherever
they come from, so those are known by the operators that launched them (`correlation` leads from a kernel
to its launch). A trace without kernels, of a CPU, is split by the operators' own time.
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
"""Where `--use-pytorch-profiler` puts it, beside the TensorBoard folder (Megatron 0.19)."""

GAPS, OTHER = "gaps", "other"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_ON_HOST = ("cpu_op", "user_annotation", *_LAUNCHES)
_STEP = "ProfilerStep#"

# The first that fits counts; patterns see the kernel's name, or those of operators around its launch,
# in any case.
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
    # Beside the product, Megatron's linear layers add a bias and sum its gradient.
    "GELU and bias": "gelu|tanh|LinearWithGradAccumulation",
    "embedding": "embedding|index_?select|RadixSort",
    "gradient handling": (
        "multi_tensor|foreach|vector_norm|linalg_norm|aten::norm|_amp_|AccumulateGrad|clip|l2norm"
    ),
    "copies": r"memcpy|memset|copy|aten::to\b|aten::zero_|aten::fill_",
}
GROUPS = (*_BY_KERNEL, *_BY_EITHER, *_BY_OPERATOR, OTHER, GAPS)


class EventArguments(msgspec.Struct, frozen=True, gc=False):
    """What is read of an event's `args`."""

    correlation: int = -1
    """Of a kernel and the call that launched it."""


class TraceEvent(msgspec.Struct, frozen=True, gc=False):
    """One event; times in µs."""

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
        """In µs."""
        return self.ts + self.dur


class _Trace(msgspec.Struct, frozen=True):
    traceEvents: list[TraceEvent]  # noqa: N815 - Chrome's name


def read_trace_events(path: Path) -> list[TraceEvent]:
    """The whole events of a trace, packed or not.

    Raises:
        OSError: It cannot be read or unpacked.
        msgspec.DecodeError: It is no trace.
    """
    raw = path.read_bytes()
    trace = msgspec.json.decode(gzip.decompress(raw) if path.suffix == ".gz" else raw, type=_Trace)
    return [event for event in trace.traceEvents if event.ph == "X" and event.dur >= 0]


class DeviceInterval(NamedTuple):
    """A stretch of the device's time."""

    name: str
    around: tuple[str, ...]
    """Names of the operators around its launch, outermost first."""
    start_us: float
    duration_us: float


def read_group_milliseconds(folder: Path, on_gpu: bool) -> tuple[Mapping[str, float], str]:
    """Milliseconds an iteration by group in a run folder's trace, or why there are none."""
    try:
        events = read_trace_events(folder / TRACE)
        if on_gpu and not any(event.cat in _ON_DEVICE for event in events):
            return {}, "the profiler saw nothing of the GPU (CUPTI may not be allowed here)"
        return milliseconds_by_group(events), ""
    except (OSError, ValueError, EOFError, zlib.error) as error:  # A cut gzip ends too early.
        return {}, f"the profiler's trace cannot be read: {error}"


def milliseconds_by_group(events: Sequence[TraceEvent]) -> dict[str, float]:
    """Milliseconds an iteration of each group, gaps included; groups without any are left out.

    Counted from the beginning of the first profiled step to the end of the last. Kernels that overlap on
    several streams count each for itself, so that groups may add up to more than the iteration.

    Raises:
        ValueError: The trace has no profiled step, or nothing in it.
    """
    # Each step has a second event on the device's row.
    steps = [e for e in events if e.cat == "user_annotation" and e.name.startswith(_STEP)]
    if not steps:
        raise ValueError("The trace has no profiled step.")
    begin, end = min(step.ts for step in steps), max(step.end for step in steps)
    busy = [b for b in _busy(events) if begin <= b.start_us < end]
    if not busy:
        raise ValueError("The trace has steps and nothing that ran in them.")
    found: dict[str, float] = defaultdict(float)
    covered = reached = 0.0  # µs in which anything ran, and up to where.
    for stretch in sorted(busy, key=lambda b: b.start_us):
        found[classify_kernel(stretch.name, stretch.around)] += stretch.duration_us
        start = max(stretch.start_us, reached)
        stop = min(stretch.start_us + stretch.duration_us, end)
        if stop > start:
            covered += stop - start
            reached = stop
    found[GAPS] = max(end - begin - covered, 0.0)
    count = len({step.name for step in steps})
    return {name: found[name] / 1000 / count for name in GROUPS if found.get(name)}


@cache
def classify_kernel(name: str, around: tuple[str, ...] = ()) -> str:
    """The group of a kernel, by its own name first and then by the operators around its launch."""
    everything = "\n".join((name, *around))
    tries = [(everything, _BY_OPERATOR), (name, _BY_KERNEL)]
    tries += [(text, _BY_EITHER) for text in (name, *reversed(around))]
    groups = ((group, p, text) for text, patterns in tries for group, p in patterns.items())
    return next((group for group, p, text in groups if re.search(p, text, re.IGNORECASE)), OTHER)


def _busy(events: Sequence[TraceEvent]) -> list[DeviceInterval]:
    """The device's kernels; without one, each operator's time without those inside it."""
    by_thread: dict[object, list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event.cat in _ON_HOST and not event.name.startswith(_STEP):
            by_thread[event.pid, event.tid].append(event)
    around: dict[int, tuple[str, ...]] = {}
    own: list[DeviceInterval] = []
    for thread in by_thread.values():
        _walk(sorted(thread, key=lambda e: (e.ts, -e.dur)), around, own)
    kernels = [event for event in events if event.cat in _ON_DEVICE]
    return [
        DeviceInterval(k.name, around.get(k.args.correlation, ()), k.ts, k.dur) for k in kernels
    ] or own


def _walk(
    ordered: Sequence[TraceEvent], around: dict[int, tuple[str, ...]], own: list[DeviceInterval]
) -> None:
    """One thread's events, outer before inner: keep a stack of those that are open."""
    open_: list[tuple[TraceEvent, list[float]]] = []

    def close(until: float) -> None:
        while open_ and open_[-1][0].end <= until:
            event, inside = open_.pop()
            if event.cat == "cpu_op":
                names = tuple(outer.name for outer, _ in open_)
                own.append(
                    DeviceInterval(event.name, names, event.ts, max(event.dur - sum(inside), 0.0))
                )

    for event in ordered:
        close(event.ts)
        if event.cat in _LAUNCHES:
            around[event.args.correlation] = tuple(outer.name for outer, _ in open_)
            continue
        if open_ and event.cat == "cpu_op":
            open_[-1][1].append(event.dur)
        open_.append((event, []))
    close(float("inf"))
