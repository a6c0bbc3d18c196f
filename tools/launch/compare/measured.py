"""What a comparison says of one run, taken from the report and the run's ledgers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.records.measurements import Phase, RankTime
from tools.report.analyse.report_data import Entry, build_report
from tools.report.analyse.statistics import Estimate
from tools.report.explain.time_shares import mean, read_time_ledger, time_shares
from tools.report.read.runs import load_runs
from tools.spec.published import load_published
from tools.spec.run import Transport

DASH = "–"


@dataclass(frozen=True)
class Measured:
    """One row; None is "not known"."""

    backend: str
    strategy: str
    status: str
    parity: str
    estimate: Estimate | None
    """Of iteration times, in milliseconds."""
    global_batch_size: int
    peak_bytes: int | None
    """Of the rank that holds most, by the memory ledger or the device's allocator."""
    sent_bytes: int | None
    """What the busiest rank puts on the wire in an iteration."""
    nccl_bytes: int | None
    """What the same calls would be with NCCL's rings."""
    communication_seconds: float | None
    """The mean rank stands still for communication, in an iteration."""
    pass_seconds: float | None
    """Forward and backward of an iteration without the communication inside them; mean rank."""
    overhead: float | None
    """The iteration over those passes, less one; both from the same clock readings."""
    shares: tuple[float, float, float] | None
    """Forward, backward and optimizer, of their sum; mean over the ranks."""
    final_loss: float | None
    implementation: str

    @property
    def milliseconds(self) -> float | None:
        """Median iteration."""
        return self.estimate.median if self.estimate else None

    @property
    def samples_per_second(self) -> float | None:
        """Over all devices."""
        return self.global_batch_size * 1000 / self.milliseconds if self.milliseconds else None

    @property
    def implied_gigabits(self) -> float | None:
        """Bandwidth in Gbit/s that the bytes sent and the time spent on them imply."""
        if not self.sent_bytes or not self.communication_seconds:
            return None
        return self.sent_bytes * 8 / self.communication_seconds / 1e9


def measure(folders: Sequence[Path]) -> list[Measured]:
    """The runs of these folders, in their order."""
    runs, problems = load_runs(folders)
    report = build_report("comparison", runs, load_published(), problems, all_conditions=True)
    by_name = {entry.run.name: entry for entry in report.entries}
    return [_measured(by_name[folder.name], folder) for folder in folders if folder.name in by_name]


def _measured(entry: Entry, folder: Path) -> Measured:
    record, _ = read_time_ledger(folder)
    ranks = record.ranks if record else ()
    shares = [rank.as_published for rank in time_shares(record)] if record else []
    passes = mean(map(_passes, ranks))
    row = entry.row
    return Measured(
        backend=row.backend or "",
        strategy=row.strategy or "",
        status=row.status,
        parity=row.parity or "",
        estimate=entry.configuration.estimate,
        global_batch_size=row.global_batch_size or 0,
        peak_bytes=row.peak_memory_bytes,
        sent_bytes=row.comm_bytes_per_iteration,
        nccl_bytes=_nccl_bytes(entry),
        communication_seconds=mean(sum(rank.communication_seconds.values()) for rank in ranks)
        if ranks
        else None,
        pass_seconds=passes or None,
        overhead=mean(rank.iteration_seconds for rank in ranks) / passes - 1 if passes else None,
        shares=_mean_shares(shares) if shares else None,
        final_loss=row.final_loss,
        implementation=implementation(entry),
    )


def implementation(entry: Entry) -> str:
    """Whose code sharded or trained, with its version and commit."""
    record = entry.run.record
    if record is None:
        return ""
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


_SHARDED_BY = {
    "zero1": "distributed optimizer of",
    "zero2": "Megatron-FSDP optim_grads of",
    "zero3": "Megatron-FSDP optim_grads_params of",
    "fsdp2": "torch FSDP2, wrapped by",
}


def _nccl_bytes(entry: Entry) -> int | None:
    record = entry.run.ledgers.communication
    ranks = record.ranks if record else ()
    return max((rank.wire_bytes_over(Transport.NCCL) for rank in ranks), default=None)


def _passes(rank: RankTime) -> float:
    return sum(
        rank.phase_seconds.get(phase, 0.0) - rank.communication_seconds.get(phase, 0.0)
        for phase in (Phase.FORWARD, Phase.BACKWARD)
    )


def _mean_shares(shares: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    forward, backward, optimizer = (mean(column) for column in zip(*shares, strict=True))
    return forward, backward, optimizer
