"""The names that `FUSED=` takes, and the flags that would disable each. No torch here.

What each does is in its module of `fused/` and in `examples/gpt3/no_te.md`.
"""

from __future__ import annotations

from collections.abc import Sequence

_KERNELS = ("attention_flash", "attention_cudnn")
"""They exclude each other."""
NAMES = (
    "bias_gelu",
    "bias_gemm",
    "norm",
    "cross_entropy",
    "adamw",
    "multi_tensor",
    "gradient_gemm",
    *_KERNELS,
)
_DROPPED = {
    "bias_gelu": "--no-bias-gelu-fusion",
    "gradient_gemm": "--no-gradient-accumulation-fusion",
}


def parse_fusions(text: str) -> tuple[str, ...]:
    """Names out of a list with commas, in the order of `NAMES`.

    Raises:
        ValueError: A name is unknown, or two exclude each other; the message is a sentence.
    """
    asked = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [name for name in asked if name not in NAMES]
    if unknown:
        raise ValueError(f"FUSED knows no '{unknown[0]}'; it knows {', '.join(NAMES)}.")
    if set(asked).issuperset(_KERNELS):
        raise ValueError(f"FUSED={' and '.join(_KERNELS)} exclude each other; name one.")
    return tuple(name for name in NAMES if name in asked)


def dropped_flags(names: Sequence[str]) -> tuple[str, ...]:
    """Flags of the runtime that would switch off what these patches provide."""
    return tuple(flag for name, flag in _DROPPED.items() if name in names)
