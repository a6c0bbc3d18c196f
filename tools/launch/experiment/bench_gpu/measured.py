"""What a run folder holds of its timed iterations."""

from __future__ import annotations

import zlib
from pathlib import Path

from tools.launch.experiment.bench_gpu.kernels import (
    milliseconds_by_group,
    read_trace,
    saw_the_device,
)
from tools.launch.experiment.bench_gpu.settings import WARM_UP, Setting
from tools.records.gpu_bench import BenchRun
from tools.report.analyse.entry import memory_by_rank
from tools.report.read.runs import load_folder
from tools.spec.run import DeviceKind

TRACE = "torch_profile/rank-0.json.gz"
"""Where `--use-pytorch-profiler` puts it, beside the TensorBoard folder (Megatron 0.19)."""


FEWEST = 0.8
"""Share of the timed iterations that must count: fp16 skips an update now and then."""


class MeasureError(RuntimeError):
    """A run did not give what it was made for; the message says why."""


class UnfinishedError(MeasureError):
    """A run ended badly; what it had measured until then is in its folder."""

    def __init__(self, folder: Path, reason: str) -> None:
        super().__init__(reason)
        self.folder = folder


def measured(folder: Path, setting: Setting, wall_seconds: float) -> BenchRun:
    """Times, memory, losses and the split of an iteration; a trace that cannot be read is a note.

    Raises:
        MeasureError: Too few of the timed iterations are there.
    """
    run = load_folder(folder)
    timed = range(WARM_UP + 1, WARM_UP + setting.timed + 1)
    found = [i for i in run.log.iterations if i.iteration in timed and not i.skipped_iterations]
    times = tuple(i.elapsed_ms for i in found if i.elapsed_ms is not None)
    if len(times) < FEWEST * setting.timed:
        raise MeasureError(
            f"{folder.name} has {len(times)} of {setting.timed} timed iterations that were not skipped"
        )
    on_gpu = run.record is not None and run.record.spec.device is DeviceKind.GPU
    groups, note = _split(folder, on_gpu) if setting.profiled else ({}, "")
    return BenchRun(
        run=folder.name,
        iteration_ms=times,
        wall_seconds=wall_seconds,
        peak_allocated_bytes=max(memory_by_rank(run).values(), default=None),
        device_memory_bytes=run.samples.peak_memory_bytes,
        losses=tuple(i.lm_loss for i in found if i.lm_loss is not None),
        groups_ms=groups,
        note=note,
    )


def _split(folder: Path, on_gpu: bool) -> tuple[dict[str, float], str]:
    """Milliseconds by group, or why there are none."""
    try:
        events = read_trace(folder / TRACE)
        if on_gpu and not saw_the_device(events):
            return {}, "the profiler saw nothing of the GPU (CUPTI may not be allowed here)"
        return milliseconds_by_group(events), ""
    except (OSError, ValueError, EOFError, zlib.error) as error:  # A cut gzip ends too early.
        return {}, f"the profiler's trace cannot be read: {error}"
