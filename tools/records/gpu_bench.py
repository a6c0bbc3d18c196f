"""What `make bench-gpu` leaves on disk: the contract between the bench and the report. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tools.records.io import write_record

FOLDER, FILE = "bench-gpu", "bench.json"
"""`runs/bench-gpu/bench.json`; the runs lie beside it, apart from other runs."""

MARK_MS = 438.0
"""The H200 notes: gpt2-large, micro batch 32, one H200, Transformer Engine in NVIDIA's container."""


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches at best, measured beside the runs."""

    matmul_flops: float
    """FLOP/s of a large bf16 matrix product."""
    copy_bytes_per_second: float
    """Read and written by a large copy."""


@dataclass(frozen=True)
class BenchRun:
    """One run of a setting."""

    run: str
    iteration_ms: tuple[float, ...]
    """Of the timed iterations, in order."""
    wall_seconds: float
    """Start-up included."""
    peak_allocated_bytes: int | None = None
    """The allocator's, from Megatron's own line."""
    device_memory_bytes: int | None = None
    """The device's own reading."""
    losses: tuple[float, ...] = ()
    """Of the timed iterations."""
    groups_ms: dict[str, float] = field(default_factory=dict)
    """Milliseconds an iteration by group of kernels; empty where no trace was made."""
    note: str = ""
    """What went wrong after the timed iterations, which count nevertheless."""


@dataclass(frozen=True)
class SettingResult:
    """A setting and its runs; a reason where there is none."""

    name: str
    dtype: str
    fused: tuple[str, ...]
    flags: tuple[str, ...]
    runs: tuple[BenchRun, ...] = ()
    reason: str = ""
    """Why it was left out, or failed."""


@dataclass(frozen=True)
class GpuBench:
    """`bench.json`."""

    created_utc: str
    device: str
    driver: str | None
    software: dict[str, str]
    kit_commit: str | None
    model_flops_per_iteration: float
    ceilings: Ceilings | None
    settings: tuple[SettingResult, ...]
    schema: int = 1

    @property
    def identity(self) -> tuple[object, ...]:
        """What must be equal for results to stand in one table."""
        return (
            self.device,
            self.driver,
            sorted(self.software.items()),
            self.kit_commit,
        )

    @property
    def floor_ms(self) -> float | None:
        """Time of an iteration at the rate of the large matrix product."""
        if self.ceilings is None:
            return None
        return 1000 * self.model_flops_per_iteration / self.ceilings.matmul_flops


def read_bench(runs: Path) -> GpuBench | None:
    """The bench of a folder of runs; None if there is none.

    Raises:
        msgspec.DecodeError: The file is not JSON of this shape.
    """
    path = runs / FOLDER / FILE
    return msgspec.json.decode(path.read_bytes(), type=GpuBench) if path.is_file() else None


def write_bench(runs: Path, bench: GpuBench) -> Path:
    """Write it, whole or not at all; returns its path."""
    path = runs / FOLDER / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, bench)
    return path
