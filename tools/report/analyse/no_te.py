"""What a run on a GPU without Transformer Engine did otherwise: patches by name, ranks on one GPU."""

from __future__ import annotations

from tools.report.read.runs import Run

SHARED = (
    "its ranks shared one GPU: memory and losses are true, times say nothing about the strategy"
)


def patches(run: Run) -> str:
    """The names of `FUSED=`, or `none`."""
    return (run.record.environment.get("KIT_FUSED") if run.record else None) or "none"


def shares_gpu(run: Run) -> bool:
    """Whether all ranks were on one GPU."""
    return run.record is not None and run.record.spec.shares_gpu


def bare_notes(run: Run) -> list[str]:
    """What a reader of the run's row must know."""
    fused = patches(run)
    notes = [SHARED] if shares_gpu(run) else []
    return notes if fused == "none" else [*notes, f"patches: {fused.replace(',', ', ')}"]
