"""In which order the settings are run, how long each may take, and all of it as text."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.launch.experiment.bench_gpu.settings import TARGET, Setting
from tools.launch.microbenchmark import Workload
from tools.records.gpu_bench import MARK_MS, GpuBench

BUDGET_SECONDS = 510.0
"""One call stays under 9 minutes, what starts and ends it included."""
CEILINGS_SECONDS = 25.0
CEILINGS = Workload(
    matmul_size=16384, copy_bytes=4 << 30, seconds_each=4.0, warm_up_calls=5, median=True
)
"""A product of 8.8e12 FLOP, a few hundredths of a second, and a copy of 4 GiB, far beyond any cache;
over several seconds, so that the clocks settle as they do in training."""
START_SECONDS = 40.0
"""From the command to the first iteration. Assumed: nobody has run this on a GPU yet."""


@dataclass(frozen=True)
class Step:
    """One run of a setting."""

    setting: Setting
    repeat: int
    """From 1."""
    expected_seconds: float

    @property
    def title(self) -> str:
        """How it is called on the terminal."""
        return f"{self.setting.name} {self.repeat}/{self.setting.repeats}"


def steps(settings: Sequence[Setting], before: GpuBench | None = None) -> tuple[Step, ...]:
    """Every run that is still to be made: first all settings once, then the repeats of two and more.

    The main settings come before the others also with their repeats, because a median of one run has
    no scatter to judge the others by.
    """
    done = {s.name: len(s.runs) for s in before.settings} if before else {}
    main = [setting for setting in settings if setting.repeats > 1]
    others = [setting for setting in settings if setting.repeats == 1]
    rounds = range(1, 1 + max((setting.repeats for setting in main), default=0))
    ordered = [(s, r) for r in rounds for s in main if r <= s.repeats] + [(s, 1) for s in others]
    return tuple(Step(s, r, expected_seconds(s)) for s, r in ordered if r > done.get(s.name, 0))


def expected_seconds(setting: Setting) -> float:
    """Start-up as assumed and iterations at the published time: a guess that plans, not a result."""
    return START_SECONDS + setting.iterations * MARK_MS / 1000


def fitting(planned: Sequence[Step], seconds: float) -> tuple[tuple[Step, ...], tuple[Step, ...]]:
    """Steps that fit one after another in so many seconds, and those that are left out."""
    kept: list[Step] = []
    left: list[Step] = []
    for step in planned:
        fits = step.expected_seconds <= seconds
        (kept if fits else left).append(step)
        seconds -= step.expected_seconds if fits else 0
    return tuple(kept), tuple(left)


def variables(setting: Setting, runs: str) -> dict[str, str]:
    """The make variables of the train command."""
    fused = {"FUSED": ",".join(setting.fused)} if setting.fused else {}
    return {
        "RUNTIME": "host",
        "ITERS": str(setting.iterations),
        "EXTRA": shlex.join(setting.extra),
        "LEDGER": "0",  # Its counting would be in the times.
        "RUNS": runs,
        **fused,
    }


def describe(planned: Sequence[Step], budget: float, environment: Mapping[str, str]) -> str:
    """The plan as text: what, with which patches, by which command, how long."""
    kept, left = fitting(planned, budget - CEILINGS_SECONDS)
    lines = [
        f"Ceilings of the device: a large bf16 product, a large copy (≈{CEILINGS_SECONDS:.0f} s)"
    ]
    for step in kept:
        lines += _lines(step, environment)
    total = CEILINGS_SECONDS + sum(step.expected_seconds for step in kept)
    lines.append(
        f"Expected: {total:.0f} s of {budget:.0f} s, if a start takes {START_SECONDS:.0f} s and an "
        f"iteration {MARK_MS:.0f} ms; what fits is decided by what the runs really take."
    )
    if left:
        names = ", ".join(step.title for step in left)
        lines.append(f"Would not fit, for the next call (it resumes where this one ends): {names}")
    return "\n".join(lines)


def _lines(step: Step, environment: Mapping[str, str]) -> list[str]:
    setting = step.setting
    patches = ", ".join(setting.fused) or "none"
    settings = {**variables(setting, "runs/bench-gpu"), **environment}
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
    return [
        f"{step.title}: {setting.why}; {setting.dtype}, patches: {patches}; {setting.timed} timed "
        f"iterations of {setting.iterations} (≈{step.expected_seconds:.0f} s)",
        f"    {words} make {TARGET}",
    ]
