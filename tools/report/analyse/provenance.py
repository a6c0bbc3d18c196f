"""Whose code ran, under which optimizer, on which machine: as people call it."""

from __future__ import annotations

from collections.abc import Iterable

from tools.native.settings import MUON_RULE_FLAG
from tools.records.run import RunRecord
from tools.report.read.runs import Run
from tools.spec.flags import Flags
from tools.spec.run import Backend

_SHARDED_BY = {
    "zero1": "distributed optimizer of",
    "zero2": "Megatron-FSDP optim_grads of",
    "zero3": "Megatron-FSDP optim_grads_params of",
    "fsdp2": "torch FSDP2, wrapped by",
}


def implementation(record: RunRecord) -> str:
    """Whose code sharded or trained, with its version and commit."""
    kit = f"this kit at {_commit(record)}"
    if record.spec.backend == Backend.DEEPSPEED:
        return f"DeepSpeed {record.software.get('deepspeed', '')}, model of {kit}"
    if record.spec.backend != Backend.MEGATRON:
        return f"PyTorch {record.software.get('torch', '')}, {kit}"
    commit = record.entry.megatron_commit
    origin = f"commit {commit}" if commit else "the PyPI wheel"
    megatron = f"Megatron-LM {record.entry.megatron_version} ({origin})"
    part = _SHARDED_BY.get(record.spec.parallelism.sharding.value)
    return f"{part} {megatron}" if part else megatron


def optimizer(record: RunRecord) -> str:
    """Megatron's Muon decays matrices and updates norms at Muon's rate."""
    if Flags(record.argv).text("--optimizer") != "muon":
        return "AdamW"
    megatrons = record.spec.backend == Backend.MEGATRON or MUON_RULE_FLAG in record.argv
    return "Megatron's Muon" if megatrons else "Muon + AdamW"


def activation(record: RunRecord) -> str:
    """Between the matrices of an MLP or expert."""
    flags = Flags(record.argv)
    known = {"--swiglu": "SwiGLU", "--silu": "SiLU"}
    return next((name for flag, name in known.items() if flags.has(flag)), "GELU")


def conditions(runs: Iterable[Run]) -> list[str]:
    """The machines and the kit's commits, which no times may be read without; empty without runs."""
    records = [run.record for run in runs if run.record]
    machines = {f"{r.host.cores} cores of {r.host.cpu}, {r.spec.dtype}" for r in records}
    commits = {_commit(record) for record in records}
    said = f"Measured on {'; '.join(sorted(machines))}, kit at {', '.join(sorted(commits))}."
    return [said] if records else []


def _commit(record: RunRecord) -> str:
    return (record.kit_commit or "no commit")[:12]
