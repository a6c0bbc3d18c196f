"""Run folders with ledgers: what the closed forms say, unless a test changes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from parakit.artifacts import run as records
from parakit.artifacts.io import write_record
from parakit.artifacts.measurements import (
    CallSummary,
    CommunicationRecord,
    MemoryCategory,
    MemoryRecord,
    RankCommunication,
    RankMemory,
    RankTime,
    TimeRecord,
)
from parakit.artifacts.run import RunRecord
from parakit.config.published import Published
from parakit.config.run import RunSpec, Transport
from parakit.costs.collectives.rank import rank_collectives
from parakit.costs.operations import Operation, Phase, describe_algorithm
from parakit.logs.runs import Run, load_folder
from parakit.reporting.analyse.report import Report, build_report
from parakit.reporting.explain.closed_form import require_closed_form_spec
from tests.reporting.factory import log_text, run_record, write_run

ALL_CATEGORIES = dict.fromkeys(MemoryCategory, 0)


def write(
    root: Path, strategy: str, times: Sequence[float] = (100.0,) * 9, **changes: object
) -> Path:
    """A run folder of gpt2-tiny with a log, without ledgers."""
    record = run_record(f"run-{strategy}", strategy, **changes)
    return write_run(root, _local_layers(record), log_text(list(times)))


def load(folder: Path) -> tuple[Run, RunSpec]:
    run = load_folder(folder)
    return run, require_closed_form_spec(run)


def report_of(*folders: Path) -> Report:
    return build_report("r", [load_folder(folder) for folder in folders], Published())


def communication(folder: Path) -> CommunicationRecord:
    """A record in which every rank makes exactly the calls of the closed form."""
    _, configuration = load(folder)
    ranks = range(configuration.parallelism.world_size)
    return CommunicationRecord(tuple(rank_communication(configuration, rank) for rank in ranks))


def rank_communication(configuration: RunSpec, rank: int) -> RankCommunication:
    traffic = rank_collectives(configuration, configuration.parallelism.pipeline_rank(rank))
    return RankCommunication(
        rank,
        9,
        0,
        tuple(
            call(i.group.value, i.operation.value, i.payload_bytes, i.calls, Phase(i.phase.value))
            for i in traffic
        ),
    )


def call(
    group: str, operation: str, payload: int, calls: int = 1, phase: Phase = Phase.FORWARD
) -> CallSummary:
    kind = Operation(operation)
    passes = 2 if kind in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER, Operation.SEND) else 1
    return CallSummary(
        group, 2, kind, phase, "float32", calls, payload, calls * (passes * payload // 2),
        describe_algorithm(kind, Transport.GLOO), 0.001, 0.002,
    )  # fmt: skip


def seconds(
    rank: int, phases: dict[Phase, float], calls: dict[Phase, float] | None = None
) -> RankTime:
    return RankTime(rank, sum(phases.values()), phases, calls or {})


def write_times(folder: Path, *ranks: RankTime) -> None:
    write_record(folder / records.TIME_FILE, TimeRecord(ranks))


def write_calls(folder: Path, record: CommunicationRecord) -> None:
    write_record(folder / records.COMMUNICATION_FILE, record)


def held(
    rank: int,
    categories: dict[MemoryCategory, int],
    phase: Phase = Phase.BACKWARD,
    kept: dict[str, int] | None = None,
    peaks: dict[Phase, int] | None = None,
) -> RankMemory:
    whole = ALL_CATEGORIES | categories
    return RankMemory(
        rank, 2, sum(whole.values()), phase, "output_layer", whole, kept or {}, peaks or {}
    )


def write_memory(folder: Path, *ranks: RankMemory) -> None:
    write_record(folder / records.MEMORY_FILE, MemoryRecord(ranks))


def write_trace(folder: Path, *spans: tuple[int, str, str, float, float]) -> None:
    """Spans as rank, name, category, start and end in ms."""
    events = [
        {"ph": "X", "pid": rank, "name": name, "cat": category, "ts": 1e3 * start,
         "dur": 1e3 * (end - start)}
        for rank, name, category, start, end in spans
    ]  # fmt: skip
    meta = {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "rank 0"}}
    (folder / records.TRACE_FILE).write_text(json.dumps({"traceEvents": [meta, *events]}))


def _local_layers(record: RunRecord) -> RunRecord:
    return replace(record, argv=(*record.argv, "--no-gradient-accumulation-fusion"))
