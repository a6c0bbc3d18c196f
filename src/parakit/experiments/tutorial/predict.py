"""Prediction of the tutorial's runs by the planner: `make experiment NAME=tutorial-pp GPU=h100`."""

from __future__ import annotations

import json
import shlex
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from parakit.config.errors import LaunchError
from parakit.config.flag_table import FLAGS
from parakit.config.flags import drop_flags, merge_flags, pick_flags
from parakit.config.strategy import Parallelism, Sharding
from parakit.experiments.tutorial.rows import (
    OUT_OF_MEMORY,
    PUBLISHED_DROPOUT,
    TutorialRow,
    printed_gigabytes_to_bytes,
    rows_of_chapter,
)
from parakit.formatting.table import markdown_rows
from parakit.formatting.terminal import say_markdown, wide_console
from parakit.formatting.units import DASH, joined
from parakit.planner import (
    Fit,
    PlanOptions,
    TimedStrategy,
    resolve_measured_step,
    time_strategy,
)


@dataclass(frozen=True)
class PredictedRow:
    """A run of the tutorial with its prediction."""

    row: TutorialRow
    timed: TimedStrategy

    @property
    def milliseconds(self) -> float:
        """Predicted milliseconds per iteration."""
        return 1e3 * self.timed.candidate.seconds.total

    @property
    def memory_gb(self) -> float:
        """Predicted memory of the rank with the peak memory, in the printed unit: thousands of MiB."""
        return self.timed.candidate.memory.total / printed_gigabytes_to_bytes(1)

    @property
    def time_error(self) -> float | None:
        """Predicted over printed time, less 1; None if the run went out of memory."""
        return self.milliseconds / self.row.step_ms - 1 if self.row.step_ms else None

    @property
    def memory_error(self) -> float | None:
        """Predicted over printed memory, less 1; None if the run went out of memory."""
        return self.memory_gb / self.row.memory_gb - 1 if self.row.memory_gb else None

    @property
    def verdict(self) -> Fit:
        """The planner's verdict on whether the run fits."""
        return self.timed.candidate.verdict

    def to_data(self) -> dict[str, object]:
        """Return the row for JSON: milliseconds, thousands of MiB, and errors as ratios."""
        return {
            "id": self.row.id,
            "target": self.row.name,
            "label": self.row.label,
            "ran": describe_run(self.row),
            "published_ms": self.row.step_ms,
            "predicted_ms": self.milliseconds,
            "time_error": self.time_error,
            "published_memory_gb": self.row.memory_gb,
            "predicted_memory_gb": self.memory_gb,
            "memory_error": self.memory_error,
            "fits": str(self.verdict),
        }


def predict_row(row: TutorialRow, gpu: str, calibrate: str | None = None) -> PredictedRow:
    """Return a row with the predicted time of its run on GPUs of another kind.

    The number of GPUs is that of the published run.

    Args:
        row: Published run of the tutorial.
        gpu: Name of the GPU in the planner's catalogue.
        calibrate: What was measured on the machine, as CALIBRATE= of `make plan` states it, such as
            `210 ms on 231`. None predicts with the constants of the planner alone.

    Raises:
        ValueError: The device is unknown, or `calibrate` cannot be read.
    """
    options = resolve_measured_step(_state_plan_options(row, gpu, calibrate))
    creates_mask = "--no-create-attention-mask-in-dataloader" not in row.flags
    return PredictedRow(row, time_strategy(options, copies_attention_mask=creates_mask))


def _state_plan_options(row: TutorialRow, gpu: str, calibrate: str | None) -> PlanOptions:
    """Return the options of `make plan` that state a row's run with its strategy."""
    # The name of the strategy says what these flags say, and the planner refuses to be told twice.
    named = {name for name, flag in FLAGS.items() if flag.planned.endswith("=")}
    positions = ("--max-position-embeddings", str(row.seq_length))
    rate = str(PUBLISHED_DROPOUT)
    dropout = ("--hidden-dropout", rate, "--attention-dropout", rate)
    overlap = pick_flags(row.flags, _OVERLAP)
    training = merge_flags(row.training_flags, positions, dropout, overlap)
    extra = drop_flags(training, {*named, *_WITHOUT_COST})
    return PlanOptions(
        model=row.model,
        gpu=gpu,
        gpus=row.gpus,
        strategy=row.strategy,
        micro_batch=row.micro_batch,
        global_batch=row.global_batch,
        seq=row.seq_length,
        dtype="bf16",
        extra=shlex.join(extra),
        calibrate=calibrate,
    )


_OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
"""Flags of a row that belong to its strategy, and that the name of the strategy does not say."""
_WITHOUT_COST = ("--bf16", "--moe-permute-fusion", "--log-throughput")
"""Flags that `PlanOptions` states otherwise, or that no formula counts."""


def describe_run(row: TutorialRow) -> str:
    """Return what a run's flags make run, such as `TP 2 with SP, PP 4, 3 virtual stages of 6 layers`."""
    split = row.parallelism
    parts = [*_describe_degrees(split, row), *_describe_sharding(split)]
    if "--recompute-granularity" in row.flags:
        parts.append("full recomputation")
    if row.micro_batches > 1:
        parts.append(f"{row.micro_batches} micro batches of {row.micro_batch}")
    return ", ".join(parts) or "one device"


def _describe_degrees(split: Parallelism, row: TutorialRow) -> list[str]:
    """Return a phrase per degree above 1."""
    parts = []
    if split.data > 1:
        parts.append(f"DP {split.data}")
    if split.tensor > 1:
        sequence_parallel = " with SP" if split.sequence_parallel else ""
        parts.append(f"TP {split.tensor}{sequence_parallel}")
    if split.pipeline > 1:
        parts.append(f"PP {split.pipeline}")
    if split.virtual_stages > 1:
        num_stages = split.pipeline * split.virtual_stages
        layers = row.loaded_model.shape.layers // num_stages
        parts.append(f"{split.virtual_stages} virtual stages of {layers} layers")
    elif split.pipeline > 1:
        parts.append("1F1B")
    if split.context > 1:
        comm_type = row.flags[row.flags.index("--cp-comm-type") + 1]
        parts.append(f"CP {split.context} by {comm_type}")
    if split.expert > 1:
        parts.append(f"EP {split.expert}")
    if split.expert_tensor > 1:
        parts.append(f"ETP {split.expert_tensor}")
    return parts


def _describe_sharding(split: Parallelism) -> list[str]:
    """Return the phrase of a sharding; empty without one."""
    return ["ZeRO-1"] if split.sharding is Sharding.ZERO1 else []


def predict_rows(
    rows: Sequence[TutorialRow], gpu: str, calibrate: str | None = None
) -> list[PredictedRow]:
    """Predict runs in their order.

    Raises:
        ValueError: The device is unknown, or `calibrate` cannot be read.
    """
    if calibrate and rows:
        # Each row would otherwise solve for the host's time by itself.
        calibrate = resolve_measured_step(_state_plan_options(rows[0], gpu, calibrate)).calibrate
    return [predict_row(row, gpu, calibrate) for row in rows]


def prediction_table(predictions: Sequence[PredictedRow]) -> str:
    """Return a Markdown table: a line per run with published and predicted figures, errors, and what ran."""
    header = ["run", "the table says", "it was", "ms", "predicted", "error", "memory"]
    header += ["predicted", "error"]
    return markdown_rows(header, [_prediction_cells(item) for item in predictions])


def _prediction_cells(item: PredictedRow) -> list[str]:
    """Return the cells of a prediction's line."""
    row = item.row
    if row.step_ms is None or row.memory_gb is None:
        times = [DASH, f"{item.milliseconds:,.0f}", DASH]
        memory = [OUT_OF_MEMORY, f"{item.memory_gb:.1f}", str(item.verdict)]
    else:
        times = [f"{row.step_ms:,.0f}", f"{item.milliseconds:,.0f}", _format_error(item.time_error)]
        memory = [
            f"{row.memory_gb:g}",
            f"{item.memory_gb:.1f}",
            _format_error(item.memory_error),
        ]
    return [row.id, row.label, describe_run(row), *times, *memory]


def _format_error(error: float | None) -> str:
    """Return an error as a signed percentage; a dash without one."""
    return DASH if error is None else f"{100 * error:+.0f}%"


def summarise_errors(predictions: Sequence[PredictedRow]) -> str:
    """Return a sentence with the median errors, and the verdicts on the runs that went out of memory."""
    time_errors: list[float] = []
    memory_errors: list[float] = []
    caught: list[str] = []
    missed: list[str] = []
    for prediction in predictions:
        if prediction.time_error is not None:
            time_errors.append(abs(prediction.time_error))
        if prediction.memory_error is not None:
            memory_errors.append(abs(prediction.memory_error))
        if prediction.row.ran_out_of_memory:
            if prediction.verdict is Fit.DOES_NOT_FIT:
                caught.append(prediction.row.id)
            else:
                missed.append(prediction.row.id)
    time_percent, memory_percent = 100 * median(time_errors), 100 * median(memory_errors)
    sentences = [
        f"Median error of the time {time_percent:.0f}%, of the memory {memory_percent:.0f}%. "
        "A positive error means that the predicted time is too long, or the predicted memory too large."
    ]
    if caught:
        sentences.append(f"Predicted not to fit, as published: {joined(caught)}.")
    if missed:
        sentences.append(f"Went out of memory, and is not predicted to: {joined(missed)}.")
    return " ".join(sentences)


UNITS = "Memory is in the printed unit, thousands of MiB. A device of 80 GB is full at 81.6."


def predict_chapter(arguments: Namespace, chapter: str | None) -> int:
    """Print a chapter's runs with published and predicted figures on the device GPU=; return 0.

    Args:
        arguments: Values of GPU=, CALIBRATE=, DTYPE=, MODEL= and JSON=.
        chapter: Name of the chapter; None is all chapters.

    Raises:
        LaunchError: MODEL= or DTYPE= is set, which the rows state themselves.
        ValueError: The device is unknown, or CALIBRATE= cannot be read.
    """
    for variable in ("model", "dtype"):
        if getattr(arguments, variable, None):
            raise LaunchError(
                f"The runs of the tutorial state their {variable}; leave {variable.upper()}= out."
            )
    calibrate = getattr(arguments, "calibrate", None)
    predictions = predict_rows(rows_of_chapter(chapter), arguments.gpu, calibrate)
    if arguments.json:
        print(json.dumps([item.to_data() for item in predictions], indent=2))
        return 0
    text = "\n\n".join((summarise_errors(predictions), UNITS, prediction_table(predictions)))
    say_markdown(wide_console(), text)
    return 0
