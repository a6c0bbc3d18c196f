"""What is measured, as `bench_gpu.yaml` says it: as cells of an experiment, and as text."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from megatron_patches.fusions import NAMES
from tools.launch.job import parse_target
from tools.launch.microbenchmark import Workload
from tools.launch.options import NO_OPTIONS, Options
from tools.records.gpu_bench import MARK_MS
from tools.spec.files import read_yaml
from tools.spec.flags import flag_words
from tools.study.definition import FOLDER, Cell
from tools.study.load import option_fields
from tools.study.runner import in_turn

BUDGET_SECONDS = 510.0
"""One call stays under 9 minutes, what starts and ends it included."""
CEILINGS_SECONDS = 25.0
CEILINGS = Workload(
    matmul_size=16384, copy_bytes=4 << 30, seconds_each=4.0, warm_up_calls=5, mean=True
)
"""A product of 8.8e12 FLOP, a few hundredths of a second, and a copy of 4 GiB, far beyond any cache;
over several seconds, so that the clocks settle as they do in training."""
START_SECONDS = 40.0
"""From the command to the first iteration. Assumed, not measured."""

Run = tuple[int, Cell]
"""A repeat, from 1, of a cell."""


class BenchSetting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to train the same model and batch."""

    name: str
    why: str
    dtype: str = "fp16"
    fused: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    """Megatron's, beside the model's own and those of every setting."""
    repeats: int = 1
    timed: int = 20
    profiled: bool = False
    beside: str = ""
    """The setting whose type, patches and flags it adds to."""
    without: str = ""
    """A patch of that setting which is left out."""

    @property
    def iterations(self) -> int:
        """All that are trained, the profiled ones included."""
        return WARM_UP + self.timed + (_BENCH.profiled + 3 if self.profiled else 0)

    @property
    def extra(self) -> tuple[str, ...]:
        """`EXTRA=` of the train command."""
        return (*_BENCH.flags, *_BENCH.dtypes[self.dtype], *self.flags, *self._profile)

    @property
    def _profile(self) -> tuple[str, ...]:
        if not self.profiled:
            return ()
        start = WARM_UP + self.timed + 2
        profile = {
            "--profile": True,
            "--use-pytorch-profiler": True,
            "--profile-ranks": 0,
            "--profile-step-start": start,
            "--profile-step-end": start + _BENCH.profiled,
        }
        return flag_words(profile)


def chosen(only: str) -> tuple[BenchSetting, ...]:
    """The settings that `ONLY="a b"` names, or `SETTINGS` if it is empty.

    Raises:
        ValueError: A name is unknown.
    """
    names = only.split()
    if not names:
        return SETTINGS
    known = {setting.name: setting for setting in KNOWN}
    for name in names:
        if name not in known:
            raise ValueError(f"ONLY knows no setting '{name}'; it knows {', '.join(known)}.")
    return tuple(s for s in KNOWN if s.name in names)


class _Bench(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    target: str
    warm_up: int
    profiled: int
    flags: tuple[str, ...]
    dtypes: Mapping[str, tuple[str, ...]]
    settings: tuple[BenchSetting, ...]
    on_request: tuple[BenchSetting, ...]


def _whole(setting: BenchSetting) -> BenchSetting:
    """With what it takes from the setting beside it."""
    if not setting.beside:
        return setting
    base = next(other for other in _BENCH.settings if other.name == setting.beside)
    patches = {*base.fused, *setting.fused} - {setting.without}
    return msgspec.structs.replace(
        setting,
        dtype=base.dtype,
        fused=tuple(name for name in NAMES if name in patches),
        flags=(*base.flags, *setting.flags),
    )


_BENCH = msgspec.convert(read_yaml(FOLDER / "bench_gpu.yaml"), type=_Bench)
TARGET, WARM_UP = _BENCH.target, _BENCH.warm_up
SETTINGS = tuple(map(_whole, _BENCH.settings))
KNOWN = (*SETTINGS, *map(_whole, _BENCH.on_request))


def cells_of(
    settings: Sequence[BenchSetting], runs: Path, options: Options = NO_OPTIONS
) -> tuple[Cell, ...]:
    """A cell for each setting; those that are repeated come first, and their repeats in turn."""
    target = parse_target(TARGET)
    return tuple(
        Cell(
            target.under(
                replace(
                    options,
                    **option_fields(variables(setting, str(runs / setting.name)), setting.name),
                )
            ),
            label=setting.name,
            repeats=setting.repeats,
            expected_seconds=expected_seconds(setting),
        )
        for setting in settings
    )


def expected_seconds(setting: BenchSetting) -> float:
    """Start-up as assumed and iterations at the published time: a guess that plans, not a result."""
    return START_SECONDS + setting.iterations * MARK_MS / 1000


def variables(setting: BenchSetting, runs: str) -> dict[str, str]:
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


def describe(settings: Sequence[BenchSetting], budget: float, given: Mapping[str, str]) -> str:
    """The plan as text: what, with which patches, by which command, how long."""
    known = {setting.name: setting for setting in settings}
    kept, left = fitting(in_turn(cells_of(settings, Path())), budget - CEILINGS_SECONDS)
    lines = [
        f"Ceilings of the device: a large bf16 product, a large copy (≈{CEILINGS_SECONDS:.0f} s)"
    ]
    for repeat, cell in kept:
        lines += _lines(known[cell.label], repeat, given)
    total = CEILINGS_SECONDS + sum(cell.expected_seconds for _, cell in kept)
    lines.append(
        f"Expected: {total:.0f} s of {budget:.0f} s, if a start takes {START_SECONDS:.0f} s and an "
        f"iteration {MARK_MS:.0f} ms; what fits is decided by what the runs really take."
    )
    if left:
        names = ", ".join(f"{cell.label} {repeat}/{cell.repeats}" for repeat, cell in left)
        lines.append(f"Would not fit, for the next call (it resumes where this one ends): {names}")
    return "\n".join(lines)


def fitting(runs: Sequence[Run], seconds: float) -> tuple[tuple[Run, ...], tuple[Run, ...]]:
    """Runs that fit one after another in so many seconds, and those that are left out."""
    kept: list[Run] = []
    left: list[Run] = []
    for run in runs:
        needed = run[1].expected_seconds
        (kept if needed <= seconds else left).append(run)
        seconds -= needed if needed <= seconds else 0
    return tuple(kept), tuple(left)


def _lines(setting: BenchSetting, repeat: int, given: Mapping[str, str]) -> list[str]:
    patches = ", ".join(setting.fused) or "none"
    settings = {**variables(setting, "runs/bench-gpu"), **given}
    words = " ".join(f"{name}={shlex.quote(value)}" for name, value in settings.items())
    return [
        f"{setting.name} {repeat}/{setting.repeats}: {setting.why}; {setting.dtype}, patches: "
        f"{patches}; {setting.timed} timed iterations of {setting.iterations} "
        f"(≈{expected_seconds(setting):.0f} s)",
        f"    {words} make {TARGET}",
    ]
