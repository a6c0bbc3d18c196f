"""What is measured, as `examples/experiments/bench_gpu.yaml` says it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from megatron_patches.fusions import NAMES
from tools.launch.experiment.definition import FOLDER
from tools.spec.files import read_yaml


class Setting(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


class _Bench(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    target: str
    warm_up: int
    profiled: int
    flags: tuple[str, ...]
    dtypes: Mapping[str, tuple[str, ...]]
    settings: tuple[Setting, ...]
    on_request: tuple[Setting, ...]


def _whole(setting: Setting) -> Setting:
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
