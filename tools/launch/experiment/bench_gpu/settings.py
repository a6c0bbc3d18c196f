"""What is measured, as `examples/experiments/bench_gpu.yaml` says it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from megatron_patches.fusions import NAMES
from tools.launch.experiment.definition import FOLDER
from tools.spec.files import read_yaml


@dataclass(frozen=True)
class Setting:
    """One way to train the same model and batch."""

    name: str
    why: str
    dtype: str
    fused: tuple[str, ...]
    flags: tuple[str, ...]
    """Megatron's, beside the model's own and those of every setting."""
    repeats: int
    timed: int
    profiled: bool

    @property
    def iterations(self) -> int:
        """All that are trained, the profiled ones included."""
        return WARM_UP + self.timed + (_BENCH.profiled + 3 if self.profiled else 0)

    @property
    def extra(self) -> tuple[str, ...]:
        """`EXTRA=` of the train command."""
        precision = shlex.split(_BENCH.dtypes[self.dtype])
        return (*shlex.split(_BENCH.flags), *precision, *self.flags, *self._profile)

    @property
    def _profile(self) -> tuple[str, ...]:
        if not self.profiled:
            return ()
        start = WARM_UP + self.timed + 2
        end = start + _BENCH.profiled
        return (
            *("--profile", "--use-pytorch-profiler", "--profile-ranks", "0"),
            *("--profile-step-start", str(start), "--profile-step-end", str(end)),
        )


def chosen(only: str) -> tuple[Setting, ...]:
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


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    why: str
    dtype: str = "fp16"
    fused: tuple[str, ...] = ()
    flags: str = ""
    repeats: int = 1
    timed: int = 20
    profiled: bool = False
    beside: str = ""
    """The setting whose type, patches and flags it adds to."""
    without: str = ""
    """A patch of that setting which is left out."""


class _Bench(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    target: str
    warm_up: int
    profiled: int
    flags: str
    dtypes: Mapping[str, str]
    settings: tuple[_Entry, ...]
    on_request: tuple[_Entry, ...]


def _setting(entry: _Entry, known: Mapping[str, _Entry]) -> Setting:
    base = known[entry.beside] if entry.beside else None
    fused, dtype = entry.fused, entry.dtype
    flags = shlex.split(entry.flags)
    if base is not None:
        patches = {*base.fused, *fused} - {entry.without}
        fused, dtype = tuple(name for name in NAMES if name in patches), base.dtype
        flags = [*shlex.split(base.flags), *flags]
    return Setting(
        entry.name,
        entry.why,
        dtype,
        fused,
        tuple(flags),
        entry.repeats,
        entry.timed,
        entry.profiled,
    )


def _settings(entries: Sequence[_Entry]) -> tuple[Setting, ...]:
    known = {entry.name: entry for entry in _BENCH.settings}
    return tuple(_setting(entry, known) for entry in entries)


_BENCH = msgspec.convert(read_yaml(FOLDER / "bench_gpu.yaml"), type=_Bench)
TARGET, WARM_UP = _BENCH.target, _BENCH.warm_up
SETTINGS = _settings(_BENCH.settings)
KNOWN = (*SETTINGS, *_settings(_BENCH.on_request))
