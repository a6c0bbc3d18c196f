"""What is measured, as data: the published setting, the tuned one, and each patch alone."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_patches.fused.names import NAMES

TARGET = "train-baseline-gpt2-large-1gpu"
WARM_UP = 20
"""Iterations that are not timed: fp16 skips 16 while its loss scale falls, and compilers work."""
TIMED = 50
TIMED_ALONE = 20
"""Of a patch alone, so that more of them fit."""
PROFILED = 3

# Nothing but training in the timed part; the order of samples is of no interest here.
EVERYWHERE = (
    *("--train-iters", "2000", "--eval-interval", "100000", "--eval-iters", "0"),
    *("--split", "90,9,1"),  # The sample is small: a test split of 1 in 1000 would be empty.
)


@dataclass(frozen=True)
class Setting:
    """One way to train the same model and batch."""

    name: str
    why: str
    dtype: str = "fp16"
    fused: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    """Megatron's, beside the model's own."""
    repeats: int = 1
    timed: int = TIMED_ALONE
    profiled: bool = False

    @property
    def iterations(self) -> int:
        """All that are trained, the profiled ones included."""
        return WARM_UP + self.timed + (PROFILED + 3 if self.profiled else 0)

    @property
    def extra(self) -> tuple[str, ...]:
        """`EXTRA=` of the train command."""
        half = ("--bf16",) if self.dtype == "bf16" else ()
        return (*EVERYWHERE, *half, *self.flags, *self._profile)

    @property
    def _profile(self) -> tuple[str, ...]:
        if not self.profiled:
            return ()
        start = WARM_UP + self.timed + 2
        return (
            *("--profile", "--use-pytorch-profiler", "--profile-ranks", "0"),
            *("--profile-step-start", str(start), "--profile-step-end", str(start + PROFILED)),
        )


PUBLISHED = Setting("published", "fp16, as in write-up 003", repeats=2, timed=TIMED, profiled=True)
TUNED = Setting(
    "tuned",
    "bf16, all patches but those of which one excludes the other or may lose",
    dtype="bf16",
    fused=("bias_gelu", "cross_entropy", "adamw", "multi_tensor", "gradient_gemm"),
    # Both would wait for the device inside the step, or stop Python at a time of its own choosing.
    flags=("--no-check-for-nan-in-loss-and-grad", "--manual-gc", "--manual-gc-interval", "100"),
    repeats=2,
    timed=TIMED,
    profiled=True,
)
# The one expected to matter most comes first: what does not fit in the time is left out at the end.
_ALONE = ("multi_tensor", "gradient_gemm", "cross_entropy", "adamw", "bias_gelu")
ALONE = tuple(
    Setting(f"published+{name}", f"the patch {name} alone", fused=(name,))
    for name in (*_ALONE, *(name for name in NAMES if name not in _ALONE))
)
FLAGS_ALONE = (
    Setting("bf16", "the type alone", dtype="bf16"),
    Setting(
        "published-compiled",
        "what Megatron's own compiled fusions of bias, GELU, dropout and addition bring",
        flags=("--no-bias-gelu-fusion", "--no-bias-dropout-fusion"),
    ),
    Setting(
        "tuned+bf16-gradients",
        "gradients reduced and kept in bf16: half the bytes, other rounding",
        dtype="bf16",
        fused=TUNED.fused,
        flags=(*TUNED.flags, "--grad-reduce-in-bf16"),
    ),
)
SETTINGS = (PUBLISHED, TUNED, *ALONE, *FLAGS_ALONE)


def chosen(only: str) -> tuple[Setting, ...]:
    """The settings that `ONLY="a b"` names, all if it is empty.

    Raises:
        ValueError: A name is unknown.
    """
    names = only.split()
    known = {setting.name: setting for setting in SETTINGS}
    for name in names:
        if name not in known:
            raise ValueError(f"ONLY knows no setting '{name}'; it knows {', '.join(known)}.")
    return tuple(s for s in SETTINGS if not names or s.name in names)
