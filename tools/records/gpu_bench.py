"""What `make bench-gpu` leaves beside its runs, and which of their iterations it times. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tools.records.io import write_record
from tools.spec.flags import Flags

FOLDER, FILE = "bench-gpu", "ceilings.json"
"""`runs/bench-gpu/ceilings.json`; a setting's runs lie beside it in a folder of its name."""

MARK_MS = 438.0
"""The H200 notes: gpt2-large, micro batch 32, one H200, Transformer Engine in NVIDIA's container."""

WARM_UP = 12
"""Iterations that are not timed: compilers work, and the first updates allocate Adam's state."""


@dataclass(frozen=True)
class Ceilings:
    """What the device reaches at best, measured beside the runs."""

    matmul_flops: float
    """FLOP/s of a large bf16 matrix product."""
    copy_bytes_per_second: float
    """Read and written by a large copy."""


def timed_iterations(flags: Sequence[str], iterations: int) -> range:
    """Those between the warm-up and the profiler, which follows them."""
    given = Flags(flags)
    profiled = given.integer("--profile-step-start") if given.has("--profile") else None
    return range(WARM_UP + 1, profiled - 1 if profiled else iterations + 1)


def read_ceilings(runs: Path) -> Ceilings | None:
    """Those of a folder of runs; None if they were not measured.

    Raises:
        msgspec.DecodeError: The file is not JSON of this shape.
    """
    path = runs / FOLDER / FILE
    return msgspec.json.decode(path.read_bytes(), type=Ceilings) if path.is_file() else None


def write_ceilings(runs: Path, ceilings: Ceilings) -> None:
    """Write them, whole or not at all."""
    path = runs / FOLDER / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_record(path, ceilings)
