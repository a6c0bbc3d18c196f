"""What is measured, as data: the published setting, the tuned one, and each patch alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_patches.fusions import NAMES

TARGET = "train-baseline-gpt2-large-1gpu"
WARM_UP = 12
"""Iterations that are not timed: compilers work, and the first updates allocate Adam's state."""
TIMED = 50
TIMED_ALONE = 20
"""Of a patch alone, so that more of them fit."""
PROFILED = 3

# Nothing but training in the timed part; the order of samples is of no interest here.
EVERYWHERE = (
    *("--train-iters", "2000", "--eval-interval", "100000", "--eval-iters", "0"),
    # The sample is small: in a split of one part in a hundred there is no sequence of 1024 tokens.
    *("--split", "80,10,10"),
)
# Megatron begins at 2³² and skips updates until the scale fits: 16 of the published runs' iterations.
LOSS_SCALE = ("--initial-loss-scale", "65536")


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
        precision = ("--bf16",) if self.dtype == "bf16" else LOSS_SCALE
        return (*EVERYWHERE, *precision, *self.flags, *self._profile)

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
    "bf16, all patches but those of which one excludes the other",
    dtype="bf16",
    fused=(
        *("bias_gelu", "bias_gemm", "norm", "cross_entropy"),
        *("adamw", "multi_tensor", "gradient_gemm"),
    ),
    flags=(
        # Each would wait for the device inside the step, or stop Python at a time of its own choosing.
        *("--no-check-for-nan-in-loss-and-grad", "--rerun-mode", "disabled"),
        *("--manual-gc", "--manual-gc-interval", "100"),
        # Else a dozen figures are written between two steps, when the device has nothing to do.
        *("--tensorboard-log-interval", "1000"),
    ),
    repeats=2,
    timed=TIMED,
    profiled=True,
)
# The one expected to matter most comes first: what does not fit in the time is left out at the end.
_ALONE = (
    *("multi_tensor", "attention_cudnn", "gradient_gemm", "cross_entropy", "adamw"),
    *("bias_gemm", "norm", "bias_gelu"),
)
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
)


def _beside_tuned(
    name: str, why: str, fused: tuple[str, ...] = TUNED.fused, *flags: str
) -> Setting:
    return replace(
        TUNED,
        name=name,
        why=why,
        fused=tuple(known for known in NAMES if known in fused),
        flags=(*TUNED.flags, *flags),
        repeats=1,
        timed=TIMED_ALONE,
        profiled=False,
    )


FLAGS_BESIDE_TUNED = (
    _beside_tuned(
        "tuned+cuda-graph",
        "forward and backward as one CUDA graph, captured after three iterations",
        TUNED.fused,
        *("--cuda-graph-impl", "full_iteration"),
    ),
    _beside_tuned(
        "tuned+bf16-gradients",
        "gradients reduced and kept in bf16: half the bytes, other rounding",
        TUNED.fused,
        "--grad-reduce-in-bf16",
    ),
)
SETTINGS = (PUBLISHED, TUNED, *ALONE, *FLAGS_ALONE, *FLAGS_BESIDE_TUNED)
ON_REQUEST = (
    *(
        _beside_tuned(f"tuned-{name}", f"tuned without {name}", tuple({*TUNED.fused} - {name}))
        for name in TUNED.fused
    ),
    *(
        _beside_tuned(f"tuned+{name}", f"tuned with {name}", (*TUNED.fused, name))
        for name in NAMES
        if name not in TUNED.fused
    ),
)
"""Run where `ONLY=` names them: when a patch fails in tuned, or its own measurement speaks for it."""

KNOWN = (*SETTINGS, *ON_REQUEST)


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
