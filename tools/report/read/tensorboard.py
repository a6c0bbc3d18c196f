"""TensorBoard event files as a second source: the curves of a run whose log has none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tools.report.read.scraped import Iteration, ScrapedLog

_TAGS = {
    "lm loss": "lm_loss",
    "iteration-time": "elapsed_ms",
    "grad-norm": "grad_norm",
    "throughput": "throughput_tflops_per_gpu",
    "learning-rate": "learning_rate",
    "batch-size": "global_batch_size",
    "loss-scale": "loss_scale",
}


def log_from_tensorboard(folder: Path, log: ScrapedLog) -> ScrapedLog | None:
    """The log with iterations from event files; None where there are none."""
    if not folder.is_dir() or not any(folder.rglob("events.out.tfevents.*")):
        return None
    scalars = read_scalars(folder)
    steps = sorted({step for tag in _TAGS for step in scalars.get(tag, {})})
    if not steps:
        return None
    iterations = [_iteration(step, scalars) for step in steps]
    iterations[0] = _first(iterations[0])
    note = "iterations come from TensorBoard's event files; the log has none"
    return replace(log, iterations=tuple(iterations), notes=(*log.notes, note))


def read_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Scalars by tag and step; of repeated steps the later counts."""
    # Imported here: it takes a second, and most reports need none of it.
    from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped]
        EventFileLoader,
    )

    scalars: dict[str, dict[int, float]] = {}
    for path in sorted(folder.rglob("events.out.tfevents.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                number = _scalar(value)
                if number is not None:
                    scalars.setdefault(value.tag, {})[event.step] = number
    return scalars


def _scalar(value: Any) -> float | None:
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if value.HasField("tensor") and len(value.tensor.float_val) == 1:
        return float(value.tensor.float_val[0])
    return None


def _iteration(step: int, scalars: dict[str, dict[int, float]]) -> Iteration:
    values: dict[str, Any] = {
        field: scalars[tag][step] for tag, field in _TAGS.items() if step in scalars.get(tag, {})
    }
    if "elapsed_ms" in values:
        values["elapsed_ms"] *= 1000
    if "global_batch_size" in values:
        values["global_batch_size"] = int(values["global_batch_size"])
    return Iteration(step, **values)


def _first(found: Iteration) -> Iteration:
    return msgspec.structs.replace(found, first_of_start=True)
