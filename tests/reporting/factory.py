"""Logs and run folders for the tests, in Megatron's formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

from parakit.artifacts import run as records
from parakit.artifacts.io import write_record
from parakit.artifacts.run import HostRecord, MegatronEntry, RunRecord, Status, StatusRecord
from parakit.config.flags import merge_flags
from parakit.config.model import load_model
from parakit.config.published import Published
from parakit.config.run import DeviceKind, RunSpec, spec_from_flags, spec_from_model
from parakit.config.strategy import Batch, Parallelism, parse_strategy, strategy_flags
from parakit.logs.runs import Run
from parakit.logs.scraped import ScrapedLog
from parakit.logs.window import Window
from parakit.reporting.analyse.configurations import Configuration, estimate_pooled_runs
from parakit.reporting.analyse.entry import Entry
from parakit.reporting.analyse.parity import Parity

SHAPE_FLAGS = (
    *("--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4"),
    *("--seq-length", "64", "--max-position-embeddings", "64"),
)

_SPEC_FIELDS = {field.name for field in fields(RunSpec)}


def iteration_line(
    iteration: int,
    ms: float = 100.0,
    loss: float | None = 10.0,
    *,
    total: int = 500,
    global_batch: int = 8,
    micro: bool = False,
    extra: str = "",
    skipped: int = 0,
    nan: int = 0,
) -> str:
    """One iteration line, without its newline."""
    stamp = "2025-09-07 23:58:47" + (".123456" if micro else "")
    loss_text = f" lm loss: {loss:.6E} |" if loss is not None else ""
    return (
        f" [{stamp}] iteration {iteration:8d}/{total:8d} |"
        f" consumed samples: {iteration * global_batch:12d} |"
        f" elapsed time per iteration (ms): {ms:.1f} |{extra} learning rate: 5.999998E-05 |"
        f" global batch size: {global_batch:5d} |{loss_text} loss scale: 1.0 |"
        f" grad norm: 1.095 | number of skipped iterations: {skipped:3d} |"
        f" number of nan iterations: {nan:3d} |"
    )


def log_text(
    times: Sequence[float],
    losses: Sequence[float] | None = None,
    *,
    micro: bool = False,
    parameters: int = 3_423_424,
) -> str:
    """A log of iterations 1, 2, … that ends as Megatron's do."""
    rank = "(tensor, pipeline) model parallel rank (0, 0)"
    losses = losses or [10.8 - 0.01 * number for number in range(len(times))]
    lines = [
        iteration_line(number, ms, loss, micro=micro)
        for number, (ms, loss) in enumerate(zip(times, losses, strict=True), start=1)
    ]
    end = f"[exiting program at iteration {len(times)}] datetime: 2025-09-07 23:59:47 "
    return "\n".join(
        [
            f" > number of parameters on {rank}: {parameters}",
            *lines,
            end,
            "",
        ]
    )


def run_record(name: str, strategy: str = "baseline", **changes: object) -> RunRecord:
    """A record of a small CPU run that parity may compare."""
    splits = {
        "baseline": Parallelism(),
        "dp2": Parallelism(data=2),
        "tp2": Parallelism(tensor=2),
        "sp2": Parallelism(tensor=2, sequence_parallel=True),
        "cp2": Parallelism(context=2),
        "pp2": Parallelism(pipeline=2),
    }
    split = splits[strategy]
    argv = (*SHAPE_FLAGS, "--micro-batch-size", "2", "--global-batch-size", "8")
    spec = spec_from_flags(
        (*argv, *strategy_flags(split)), split.world_size, DeviceKind.CPU, "gpt2-tiny"
    )
    record = RunRecord(
        run=name,
        created_utc=name[:16],
        spec=replace(spec, dropout=0.0, strategy=strategy),
        exit_interval=25,
        argv=argv,
        command=("torchrun", "pretrain_gpt.py"),
        environment={},
        entry=MegatronEntry("pretrain_gpt.py", "0.19.0"),
        host=HostRecord("here", "a processor", 2, 2**34, ("a processor",) * split.world_size),
        software={"torch": "2.15.0"},
        dataset=records.DatasetIdentity("owt-ds/sample", "abc"),
        start_checkpoint="start-1",
    )
    return changed(record, **changes)


def changed(record: RunRecord, **changes: object) -> RunRecord:
    """The record with other values, of its own fields or of its spec's; `seq_length` is in `argv`."""
    if length := changes.pop("seq_length", None):
        argv = changes.get("argv", record.argv)
        changes["argv"] = merge_flags(argv, ("--seq-length", str(length)))  # type: ignore[arg-type]
    of_spec = {name: changes.pop(name) for name in _SPEC_FIELDS & set(changes)}
    spec = replace(record.spec, **of_spec)  # type: ignore[arg-type]
    return replace(record, **{"spec": spec, **changes})  # type: ignore[arg-type]


def write_run(
    root: Path,
    record: RunRecord,
    log: str | None,
    status: Status | None = Status.OK,
) -> Path:
    """Write a run folder; `None` leaves a file out."""
    folder = root / record.run
    folder.mkdir(parents=True)
    records.write_run(folder, record)
    if log is not None:
        (folder / records.LOG_FILE).write_text(log)
    if status is not None:
        write_record(folder / records.STATUS_FILE, records.StatusRecord(status, 0))
    return folder


def report_row(
    strategy: str = "baseline",
    ms: float | None = 100,
    *,
    backend: str = "megatron",
    status: str = "ok",
    parity: str = "held",
    wall_seconds: float | None = None,
    samples_ms: Sequence[float] | None = None,
    spec: Mapping[str, object] = MappingProxyType({}),
    **figures: object,
) -> Entry:
    """A row whose iterations take about `ms`, and whose figures are as a test says."""
    split = parse_strategy(strategy, 1 if strategy == "baseline" else 2)
    trained = spec_from_model(load_model("gpt2-tiny"), split, Batch(2, 8))
    trained = replace(trained, backend=backend, strategy=strategy, **spec)  # type: ignore[arg-type]
    if samples_ms is None:
        samples_ms = [ms * (1 + 1e-4 * n) for n in range(-10, 11)] if ms else ()
    run = Run(
        name=strategy,
        path=Path("nowhere") / strategy,
        spec=trained,
        status=StatusRecord(Status(status), None, "", wall_seconds=wall_seconds),
        log=ScrapedLog(""),
        window=Window(tuple(samples_ms)),
        record=replace(run_record(strategy), spec=trained),
    )
    row = Entry(
        strategy, Configuration((run,), estimate_pooled_runs([run])), Parity(parity), Published()
    )
    assert all(isinstance(getattr(Entry, name), cached_property) for name in figures), figures
    vars(row).update(figures)
    return row
