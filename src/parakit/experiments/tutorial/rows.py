"""Rows of the tutorial's tables: what was printed, and the job that trains the same."""

from __future__ import annotations

import csv
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property

from parakit.config.errors import LaunchError
from parakit.config.files import ROOT, read_args_file
from parakit.config.flags import drop_flags, format_flags, merge_flags, pick_flags
from parakit.config.model import Model, load_model
from parakit.config.run import DeviceKind
from parakit.config.strategy import Parallelism, parse_strategy
from parakit.launch import Job, Options

FOLDER = ROOT / "examples" / "experiments" / "tutorial"
OUT_OF_MEMORY = "oom"
"""Text in the column of the memory for a run that went out of memory."""

CHAPTERS = ("dp", "tp", "sp", "cp", "pp", "ep")
_CHAPTER_BY_DIGIT = {"1": "dp", "2": "tp", "3": "cp", "4": "pp", "5": "ep"}
_LAYERS_PER_VIRTUAL_STAGE = "--num-layers-per-virtual-pipeline-stage"
_DEGREE_FLAGS = {
    "--tensor-model-parallel-size": "tensor",
    "--pipeline-model-parallel-size": "pipeline",
    "--context-parallel-size": "context",
}
"""Flags that every script of the tutorial states, also where the degree is 1, by the field of the degree."""

_PUBLISHED_ITERATIONS = 100
PUBLISHED_DROPOUT = 0.1
"""Megatron's default, which the tutorial keeps. The kit's mixtures train without dropout unless they are told."""


@dataclass(frozen=True)
class TutorialRow:
    """One row of the tutorial's tables."""

    id: str
    target: str
    """Name of the published target behind its id."""
    model: str
    gpus: int
    label: str
    """Description of the run in the tutorial's table."""
    strategy: str
    """Strategy that the flags of the script select, such as `tp2pp4`. It may differ from the label."""
    global_batch: int
    micro_batch: int
    seq_length: int
    flags: tuple[str, ...]
    """Megatron's flags of the script beyond model, degrees, batch and training."""
    memory_gb: float | None
    """Printed memory of a device in thousands of MiB; None if the run went out of memory."""
    step_ms: float | None
    """Printed milliseconds per iteration; None if the run went out of memory."""
    note: str

    @property
    def name(self) -> str:
        """The published make target, such as `446-gpt2-8.3B-tpsp2-pp4-vpp6-m4`."""
        return f"{self.id}-{self.target}"

    @property
    def chapter(self) -> str:
        """Chapter of the row: one of `CHAPTERS`."""
        return "sp" if self.id.startswith("28") else _CHAPTER_BY_DIGIT[self.id[0]]

    @property
    def ran_out_of_memory(self) -> bool:
        """True if the published run went out of memory."""
        return self.memory_gb is None

    @property
    def micro_batches(self) -> int:
        """Micro batches per iteration and rank."""
        return self.global_batch // (self.micro_batch * self.parallelism.data)

    @cached_property
    def parallelism(self) -> Parallelism:
        """Degrees of the strategy that ran."""
        return parse_strategy(self.strategy, self.gpus)

    @cached_property
    def loaded_model(self) -> Model:
        """The model as its file describes it, before the row's sequence length."""
        return load_model(self.model)

    @cached_property
    def parallel_flags(self) -> tuple[str, ...]:
        """Flags of the script that select the strategy. The script gives layers per virtual stage, not their number."""
        degrees: dict[str, object] = {}
        for flag, field in _DEGREE_FLAGS.items():
            degrees[flag] = getattr(self.parallelism, field)
        # The scripts of the mixtures pass the flag with TP 1, where Megatron drops it.
        states_sequence = self.parallelism.sequence_parallel or self.chapter == "ep"
        sequence_flags = ("--sequence-parallel",) if states_sequence else ()
        stage_flags = pick_flags(self.flags, _STRATEGY_FLAGS)
        return (*format_flags(degrees), *sequence_flags, *stage_flags)

    @cached_property
    def training_flags(self) -> tuple[str, ...]:
        """Flags of the script beyond the model's file, the degrees and the batch."""
        chapter_flags: dict[str, str] = {}
        if self.chapter == "cp":
            chapter_flags = {
                "--seq-length": str(self.seq_length),
                "--max-position-embeddings": str(self.seq_length),
                "--attention-backend": "flash",
                "--eval-interval": "25",
            }
        return merge_flags(
            read_args_file(FOLDER / "training.args"),
            format_flags(chapter_flags),
            drop_flags(self.flags, {*_STRATEGY_FLAGS, *_flag_names(self.loaded_model.flags)}),
        )

    def make_job(self, options: Options) -> Job:
        """Return the job that trains the row on as many GPUs as were published; the caller's variables count."""
        # Megatron stops at --train-iters, so a longer ITERS= raises it.
        iterations = max(options.iterations or 0, _PUBLISHED_ITERATIONS)
        stop = ("--train-iters", str(iterations))
        options = replace(
            options,
            micro_batch_size=options.micro_batch_size or self.micro_batch,
            global_batch_size=options.global_batch_size or self.global_batch,
            dropout=PUBLISHED_DROPOUT if options.dropout is None else options.dropout,
            extra=merge_flags(self.training_flags, stop, options.extra),
        )
        return Job(
            self.strategy,
            self.loaded_model,
            devices=self.gpus,
            device=DeviceKind.GPU,
            options=options,
            script_flags=self.parallel_flags,
        )


_STRATEGY_FLAGS = (
    _LAYERS_PER_VIRTUAL_STAGE,
    "--expert-model-parallel-size",
    "--expert-tensor-parallel-size",
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
)
"""Flags in the table's column `flags` that belong to the strategy."""


def _flag_names(arguments: Iterable[str]) -> set[str]:
    """Return the names of the flags among arguments."""
    return {argument for argument in arguments if argument.startswith("--")}


@cache
def read_rows() -> tuple[TutorialRow, ...]:
    """Return all rows in the order of their ids."""
    with (FOLDER / "rows.csv").open(newline="", encoding="utf-8") as file:
        return tuple(_parse_row(fields) for fields in csv.DictReader(file))


def _parse_row(fields: dict[str, str]) -> TutorialRow:
    """Return the row of a line of the file."""
    is_timed = fields["memory_gb"] != OUT_OF_MEMORY
    return TutorialRow(
        id=fields["id"],
        target=fields["target"],
        model=fields["model"],
        gpus=int(fields["gpus"]),
        label=fields["label"],
        strategy=fields["strategy_run"],
        global_batch=int(fields["global_batch"]),
        micro_batch=int(fields["micro_batch"]),
        seq_length=int(fields["seq_length"]),
        flags=tuple(shlex.split(fields["flags"])),
        memory_gb=float(fields["memory_gb"]) if is_timed else None,
        step_ms=float(fields["step_ms"]) if is_timed else None,
        note=fields["note"],
    )


@cache
def read_printed_columns() -> dict[tuple[str, str], str]:
    """Return what the tables print in their other columns, by the row's id and the column."""
    with (FOLDER / "columns.csv").open(newline="", encoding="utf-8") as file:
        return {(line["id"], line["column"]): line["printed"] for line in csv.DictReader(file)}


def find_row(name: str) -> TutorialRow:
    """Return the row with an id such as `446`, or with the published target of that id.

    Raises:
        LaunchError: No row has the id, or the row of the id has another target; the sentence names it.
    """
    rows_by_id = {row.id: row for row in read_rows()}
    row = rows_by_id.get(name.partition("-")[0])
    if row is None:
        begin = name[:2]
        similar_ids = [row_id for row_id in rows_by_id if row_id[:2] == begin]
        known = "its ids are those of examples/experiments/tutorial/rows.csv"
        if similar_ids:
            known = f"its ids that begin with {begin} are {', '.join(similar_ids)}"
        raise LaunchError(f"The tutorial has no run {name}; {known}.")
    if name not in (row.id, row.name):
        raise LaunchError(f"The tutorial's run {row.id} is {row.name}, not {name}; use {row.id}.")
    return row


def rows_of_chapter(chapter: str | None) -> tuple[TutorialRow, ...]:
    """Return the rows of a chapter; None returns those of all chapters.

    Raises:
        LaunchError: There is no such chapter.
    """
    if chapter is not None and chapter not in CHAPTERS:
        raise LaunchError(
            f"The tutorial has no chapter {chapter}; its chapters are {', '.join(CHAPTERS)}."
        )
    return tuple(row for row in read_rows() if chapter in (None, row.chapter))


def printed_gigabytes_to_bytes(gigabytes: float) -> float:
    """Return the bytes of a printed memory: the tables divide nvidia-smi's MiB by 1,000."""
    return gigabytes * 1000 * 2**20
