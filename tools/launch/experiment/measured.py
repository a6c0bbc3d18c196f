"""What every table takes from a run, and from the repeats of a cell: the one way to the report.

Which iterations count, what an interval is and what is "within noise" is decided in the report
(`window`, `statistics`), once for all tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tools.native.settings import MUON_RULE_FLAG
from tools.records.measurements import Counts, MemoryCategory, Phase, RankTime, choices
from tools.records.run import RunRecord, Status
from tools.report.analyse.configurations import scatter_of
from tools.report.analyse.entry import Entry, final_loss, peak_memory
from tools.report.analyse.parity import loss_curve
from tools.report.analyse.report import build_report
from tools.report.analyse.statistics import Estimate, estimate
from tools.report.explain.predicted import compare_bubble
from tools.report.explain.time_shares import mean, read_time_ledger, time_shares
from tools.report.read.runs import Run, load_runs
from tools.spec.flags import Flags
from tools.spec.published import Published
from tools.spec.run import RunSpec, Transport
from tools.text.units import DASH, bracketed

ACCURACY = "next token accuracy"
_SHARDED_BY = {
    "zero1": "distributed optimizer of",
    "zero2": "Megatron-FSDP optim_grads of",
    "zero3": "Megatron-FSDP optim_grads_params of",
    "fsdp2": "torch FSDP2, wrapped by",
}


@dataclass(frozen=True)
class Measured:
    """The newest run of a cell, and the times of its repeats too; None is "not known"."""

    backend: str
    strategy: str
    status: str = Status.OK
    parity: str = ""
    """`reference`, `held`, `broken@<iteration>`, `not comparable` or empty, as in `results.csv`."""
    optimizer: str = "AdamW"
    """As people call it: Megatron's Muon decays matrices and updates norms at Muon's rate."""
    activation: str = ""
    """Between the matrices of an MLP or expert; empty where it is not known."""
    seed: int = 0
    device: str = ""
    """As the report has it: `cpu`, or the GPU's name."""
    samples_ms: tuple[tuple[float, ...], ...] = ()
    """Times of the iterations that count, by run; none of a run that ended badly."""
    processor_ms: tuple[tuple[float, ...], ...] = ()
    """Processor time of an iteration, over the threads that train of all ranks, by run."""
    wall_seconds: float | None = None
    global_batch_size: int = 0
    losses: Mapping[int, float] = field(default_factory=dict)
    """Training loss by iteration, where a line is of one iteration alone."""
    final_loss: float | None = None
    validation_loss: float | None = None
    accuracy: float | None = None
    """Share of next tokens named right; Megatron does not print it."""
    routing: Mapping[int, Counts] = field(default_factory=dict)
    """What the routers chose in each iteration, over all ranks; empty without a ledger."""
    peak_bytes: int | None = None
    """Of the rank that holds most, by the memory ledger or the device's allocator."""
    sent_bytes: int | None = None
    """What the busiest rank puts on the wire in an iteration."""
    nccl_bytes: int | None = None
    """What the same calls would be with NCCL's rings."""
    communication_seconds: float | None = None
    """The mean rank waits for communication, in an iteration."""
    pass_seconds: float | None = None
    """Forward and backward of an iteration without the communication inside them; mean rank."""
    overhead: float | None = None
    """The iteration over those passes, less one; both from the same clock readings."""
    shares: tuple[float, float, float] | None = None
    """Forward, backward and optimizer, of their sum; mean over the ranks."""
    bubble: float | None = None
    """Idle over working time of a pipeline, mean over its ranks."""
    ideal_bubble: float | None = None
    """The same of the schedule with equal stages."""
    weight_bytes: tuple[int, ...] = ()
    """By rank, as the memory ledger counts them."""
    spec: RunSpec | None = None
    implementation: str = ""
    """Whose code sharded or trained, with its version and commit."""
    dtype: str = ""
    machines: tuple[str, ...] = ()
    """Of all repeats."""
    commits: tuple[str, ...] = ()
    """The kit's, of all repeats."""

    @property
    def estimate(self) -> Estimate | None:
        """Of iteration times, in milliseconds."""
        return pooled([self])

    @property
    def processor(self) -> Estimate | None:
        """Of the processor time of an iteration, in milliseconds."""
        return estimate(self.processor_ms, scatter=scatter_of(self.device))

    @property
    def samples_per_second(self) -> float | None:
        """Over all devices."""
        found = self.estimate
        return self.global_batch_size * 1000 / found.median if found else None

    @property
    def implied_gigabits(self) -> float | None:
        """Bandwidth in Gbit/s that the bytes sent and the time spent on them imply."""
        if not self.sent_bytes or not self.communication_seconds:
            return None
        return self.sent_bytes * 8 / self.communication_seconds / 1e9


def pooled(cells: Sequence[Measured]) -> Estimate | None:
    """The iteration time of cells together, in milliseconds; None where none has a time."""
    scatter = scatter_of(next((cell.device for cell in cells), ""))
    return estimate([samples for cell in cells for samples in cell.samples_ms], scatter=scatter)


def time_text(found: Estimate | None, shape: str = ".1f") -> str:
    """`157.8 [140.5, 175.2]`, by the format specification."""
    return DASH if found is None else bracketed(found.median, found.low, found.high, shape)


def conditions(runs: Iterable[Measured]) -> list[str]:
    """The machine and the kit's commits, which no times may be read without; empty without runs."""
    measured = tuple(runs)
    machines = _distinct(f"{name}, {run.dtype}" for run in measured for name in run.machines)
    commits = _distinct(commit for run in measured for commit in run.commits)
    return [f"Measured on {'; '.join(machines)}, kit at {', '.join(commits)}."] if measured else []


def measure(cells: Sequence[Sequence[Path]]) -> list[Measured | None]:
    """Of each cell's run folders, newest first; None where there is none that can be read."""
    loaded = [load_runs(folders)[0] for folders in cells]
    runs = [run for each in loaded for run in each]
    report = build_report("experiment", runs, Published(), all_conditions=True)
    entries = {run.name: entry for entry in report.entries for run in entry.configuration.runs}
    return [_measured(each, entries.get(each[0].name)) if each else None for each in loaded]


def _measured(runs: Sequence[Run], entry: Entry | None) -> Measured:
    run = runs[0]
    records = [each.record for each in runs if each.record]
    times, _ = read_time_ledger(run.path)
    ranks = times.ranks if times else ()
    shares = [rank.as_published for rank in time_shares(times)] if times else []
    passes = mean(map(_passes, ranks))
    waits = [sum(rank.communication_seconds.values()) for rank in ranks]
    bubbles = compare_bubble(run.spec, times) if run.spec and times else ()
    scores = run.log.validation[-1].losses if run.log.validation else {}
    record = run.record
    return Measured(
        backend=run.spec.backend if run.spec else "",
        strategy=run.strategy,
        status=run.status.status,
        parity=entry.parity.verdict if entry else "",
        optimizer=_optimizer(record) if record else "",
        activation=_activation(record) if record else "",
        seed=record.spec.seed if record else 0,
        device=run.device,
        samples_ms=tuple(each.window.samples_ms for each in runs if each.counts),
        processor_ms=tuple(filter(None, map(_processor_ms, runs))),
        wall_seconds=run.status.wall_seconds,
        global_batch_size=run.global_batch_size or 0,
        losses=loss_curve(run),
        final_loss=final_loss(run),
        validation_loss=scores.get("lm loss"),
        accuracy=scores.get(ACCURACY),
        routing=choices(run.ledgers.routing) if run.ledgers.routing else {},
        peak_bytes=peak_memory(run)[0],
        sent_bytes=max(run.ledgers.sent_bytes_by_rank.values(), default=None),
        nccl_bytes=_nccl_bytes(run),
        communication_seconds=mean(waits) if waits else None,
        pass_seconds=passes or None,
        overhead=mean(rank.iteration_seconds for rank in ranks) / passes - 1 if passes else None,
        shares=_mean_shares(shares) if shares else None,
        bubble=mean(each.measured for each in bubbles) if bubbles else None,
        ideal_bubble=bubbles[0].predicted if bubbles else None,
        weight_bytes=tuple(
            held[MemoryCategory.WEIGHTS]
            for _, held in sorted(run.ledgers.memory_categories_by_rank.items())
        ),
        spec=run.spec,
        implementation=_implementation(record) if record else "",
        dtype=run.spec.dtype if run.spec else "",
        machines=_distinct(f"{one.host.cores} cores of {one.host.cpu}" for one in records),
        commits=_distinct((one.kit_commit or "no commit")[:12] for one in records),
    )


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(set(texts)))


def _implementation(record: RunRecord) -> str:
    kit = f"this kit at {(record.kit_commit or 'no commit')[:12]}"
    if record.spec.backend == "deepspeed":
        version = record.software.get("deepspeed", "")
        return f"DeepSpeed {version}, model of {kit}"
    if record.spec.backend != "megatron":
        return f"PyTorch {record.software.get('torch', '')}, {kit}"
    commit = record.entry.megatron_commit
    origin = f"commit {commit}" if commit else "the PyPI wheel"
    megatron = f"Megatron-LM {record.entry.megatron_version} ({origin})"
    part = _SHARDED_BY.get(record.spec.parallelism.sharding.value)
    return f"{part} {megatron}" if part else megatron


def _optimizer(record: RunRecord) -> str:
    if Flags(record.argv).text("--optimizer") != "muon":
        return "AdamW"
    megatrons = record.spec.backend == "megatron" or MUON_RULE_FLAG in record.argv
    return "Megatron's Muon" if megatrons else "Muon + AdamW"


def _activation(record: RunRecord) -> str:
    flags = Flags(record.argv)
    known = {"--swiglu": "SwiGLU", "--silu": "SiLU"}
    return next((name for flag, name in known.items() if flags.has(flag)), "GELU")


def _nccl_bytes(run: Run) -> int | None:
    record = run.ledgers.communication
    ranks = record.ranks if record else ()
    return max((rank.wire_bytes_over(Transport.NCCL) for rank in ranks), default=None)


def _passes(rank: RankTime) -> float:
    return sum(
        rank.phase_seconds.get(phase, 0.0) - rank.communication_seconds.get(phase, 0.0)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )


def _processor_ms(run: Run) -> tuple[float, ...]:
    times, _ = read_time_ledger(run.path) if run.counts else (None, "")
    ranks = [rank.processor_seconds for rank in times.ranks] if times else []
    return tuple(1000 * sum(seconds) for seconds in zip(*ranks, strict=False))


def _mean_shares(shares: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    forward, backward, optimizer = (mean(column) for column in zip(*shares, strict=True))
    return forward, backward, optimizer
