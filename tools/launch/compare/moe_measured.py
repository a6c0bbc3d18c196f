"""What `compare-moe` takes from one run: its times, its scores, its loss curve."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.records import run as records
from tools.records.routing import Counts, choices, read_routing
from tools.records.run import Status
from tools.report.analyse.parity import loss_curve
from tools.report.read.runs import load_folder
from tools.spec.flags import Flags

ACCURACY = "next token accuracy"


@dataclass(frozen=True)
class MoeRun:
    """One run of one kind and seed; None is "not known"."""

    backend: str
    strategy: str
    optimizer: str
    seed: int
    status: str
    samples_ms: tuple[float, ...]
    wall_seconds: float | None
    losses: dict[int, float]
    """Training loss by iteration, where a line is of one iteration alone."""
    routing: dict[int, Counts]
    """What the routers chose in each iteration, over all ranks; empty without a ledger."""
    validation_loss: float | None
    accuracy: float | None
    """Share of next tokens named right; Megatron does not say."""
    machine: str
    commit: str

    @property
    def kind(self) -> tuple[str, str, str]:
        """Repeats share it."""
        return self.backend, self.strategy, self.optimizer

    @property
    def is_well(self) -> bool:
        """It ended well and was evaluated."""
        return self.status == Status.OK and self.validation_loss is not None


def measure_run(folder: Path) -> MoeRun:
    """Read a run folder of this kit."""
    run, record = load_folder(folder), records.read_run(folder)
    scores = run.log.validation[-1].losses if run.log.validation else {}
    return MoeRun(
        backend=record.spec.backend,
        strategy=record.spec.name,
        optimizer=_optimizer(record),
        seed=record.spec.seed,
        status=run.status.status,
        samples_ms=run.window.samples_ms,
        wall_seconds=run.status.wall_seconds,
        losses=loss_curve(run),
        routing=_routing(folder),
        validation_loss=scores.get("lm loss"),
        accuracy=scores.get(ACCURACY),
        machine=f"{record.host.cores} cores of {record.host.cpu}, {record.spec.dtype}",
        commit=(record.kit_commit or "no commit")[:12],
    )


def _optimizer(record: records.RunRecord) -> str:
    """Megatron's Muon is another: it decays matrices and updates norms at Muon's rate."""
    if Flags(record.argv).text("--optimizer") != "muon":
        return "AdamW"
    return "Megatron's Muon" if record.spec.backend == "megatron" else "Muon + AdamW"


def _routing(folder: Path) -> dict[int, Counts]:
    try:
        return choices(read_routing(folder))
    except FileNotFoundError:
        return {}
