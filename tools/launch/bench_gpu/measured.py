"""What a run folder tells of its timed iterations."""

from __future__ import annotations

from pathlib import Path

from tools.gpu_bench import Measured
from tools.launch.bench_gpu.kernels import milliseconds_by_group, read_trace
from tools.launch.bench_gpu.settings import WARM_UP, Setting
from tools.report.rows import memory_by_rank
from tools.report.runs import load_folder

TRACE = "torch_profile/rank-0.json.gz"
"""Where `--use-pytorch-profiler` puts it, beside the TensorBoard folder (Megatron 0.19)."""


class MeasureError(RuntimeError):
    """A run did not give what it was made for; the message says why."""


def measured(folder: Path, setting: Setting, wall_seconds: float) -> Measured:
    """Times, memory, losses and the split of an iteration.

    Raises:
        MeasureError: Iterations, or a trace that the setting asks for, are missing.
    """
    run = load_folder(folder)
    timed = range(WARM_UP + 1, WARM_UP + setting.timed + 1)
    found = [i for i in run.log.iterations if i.iteration in timed and not i.skipped_iterations]
    times = tuple(i.elapsed_ms for i in found if i.elapsed_ms is not None)
    if len(times) < setting.timed:
        raise MeasureError(
            f"{folder.name} has {len(times)} of {setting.timed} timed iterations that were not skipped"
        )
    return Measured(
        run=folder.name,
        iteration_ms=times,
        wall_seconds=wall_seconds,
        peak_allocated_bytes=max(memory_by_rank(run).values(), default=None),
        device_memory_bytes=run.samples.peak_memory_bytes,
        losses=tuple(i.lm_loss for i in found if i.lm_loss is not None),
        groups_ms=_split(folder) if setting.profiled else {},
    )


def _split(folder: Path) -> dict[str, float]:
    try:
        return milliseconds_by_group(read_trace(folder / TRACE))
    except (OSError, ValueError) as error:
        raise MeasureError(f"the profiler's trace cannot be read: {error}") from error
