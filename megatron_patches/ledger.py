"""Report to the communication log where an iteration and its parts begin and end.

Targets: `Timers.__call__`, whose timers also open and close spans of the recorder's timeline, and
`train_step`, which is one iteration. Megatron starts and stops a timer around every forward pass,
backward pass, transfer, gradient reduction and optimizer step, by the same names in every version. The
log level switches most timers off, but the calls are made. Without the patch, the kit could not say what
a rank sends, holds and waits for in an iteration.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from megatron_patches.registry import Patch, Replacement
from parakit.accounting import Recorder, Timeline
from parakit.config import variables

_recorder = functools.cache(Recorder.create_from_environment)
"""Returns the recorder of this process. It is made at the first call, because a forked rank gets its
environment only after this module is imported."""


class _WatchedTimer:
    """A timer of Megatron that also opens and closes a span of a timeline."""

    def __init__(self, timer: Any, name: str, timeline: Timeline) -> None:
        self._timer = timer
        self._name = name
        self._timeline = timeline

    def start(self, *args: Any, **kwargs: Any) -> None:
        """Start the timer, then open the span, so that the timer's barrier is not in the span."""
        self._timer.start(*args, **kwargs)
        self._timeline.begin(self._name)

    def stop(self, *args: Any, **kwargs: Any) -> None:
        """Close the span, then stop the timer."""
        self._timeline.end(self._name)
        self._timer.stop(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timer, name)


def wrap_timers(original: Callable[..., Any], timeline: Timeline) -> Callable[..., Any]:
    """Return a `Timers.__call__` with timers that also open and close spans of `timeline`."""

    @functools.wraps(original)
    def call(timers: Any, name: str, *args: Any, **kwargs: Any) -> _WatchedTimer:
        return _WatchedTimer(original(timers, name, *args, **kwargs), name, timeline)

    return call


def _watch_timers(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `Timers.__call__` with timers that report to this process's recorder."""
    return wrap_timers(original, _recorder().timeline)


def _watch_steps(original: Callable[..., Any]) -> Callable[..., Any]:
    """Install the recorder, and return a `train_step` that begins and ends an iteration in it."""
    recorder = _recorder()
    recorder.install()

    @functools.wraps(original)
    def train_step(
        forward_step_func: Any,
        data_iterator: Any,
        model: Any,
        optimizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        recorder.begin_iteration(model, optimizer)
        _write_figures(recorder)
        try:
            return original(forward_step_func, data_iterator, model, optimizer, *args, **kwargs)
        finally:
            recorder.end_step()

    return train_step


def _write_figures(recorder: Recorder) -> None:
    """Write the figures of the last iteration to TensorBoard and W&B.

    Only the rank that Megatron lets write there does so; other ranks return. Megatron's own
    `--log-timers-to-tensorboard` is not used, because it gathers timers over all ranks in each
    iteration, and those messages would be counted.
    """
    from megatron.core.num_microbatches_calculator import get_current_global_batch_size
    from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer

    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    figures, memory = recorder.last, recorder.memory.result
    if writer is None or figures is None:
        return
    args = get_args()
    tokens = get_current_global_batch_size() * args.seq_length
    scalars = {
        "ledger/iteration-ms": figures.seconds * 1e3,
        "ledger/tokens-per-second": tokens / figures.seconds,
        "ledger/exposed-communication-ms": figures.exposed_seconds * 1e3,
        "ledger/sent-bytes": figures.sent_bytes,
    }
    if memory is not None:
        scalars["ledger/peak-memory-bytes"] = memory.peak_bytes
    for name, value in scalars.items():
        writer.add_scalar(name, value, args.curr_iteration)
    if wandb:
        wandb.log(scalars, args.curr_iteration)


PATCH = Patch(
    name="ledger",
    reason="Megatron does not report what it sends, holds and waits for",
    needed=lambda context: variables.LEDGER in os.environ,
    replacements=(
        Replacement("megatron.core.timers:Timers.__call__", _watch_timers),
        Replacement("megatron.training.training:train_step", _watch_steps),
    ),
)
