"""List the names that `FUSED=` takes, and the flags of Megatron that would switch each of them off.

A name's patch is described in its module in `fused/` and in `examples/gpt3/no_te.md`. This module does
not import torch, because the launcher imports it.
"""

from __future__ import annotations

from collections.abc import Sequence

_ATTENTION_KERNELS = ("attention_flash", "attention_cudnn")
"""Names that exclude each other."""
NAMES = (
    "bias_gelu",
    "bias_gemm",
    "norm",
    "cross_entropy",
    "adamw",
    "multi_tensor",
    "gradient_gemm",
    *_ATTENTION_KERNELS,
)
"""All names, in the order in which they are listed and recorded."""
_DISABLING_FLAGS = {
    "bias_gelu": "--no-bias-gelu-fusion",
    "gradient_gemm": "--no-gradient-accumulation-fusion",
}


def parse_fusions(text: str) -> tuple[str, ...]:
    """Return the names in a comma-separated list, each once and in the order of `NAMES`.

    Empty text gives an empty tuple.

    Raises:
        ValueError: A name is unknown, or two names exclude each other; the message is a sentence.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown_names = [name for name in names if name not in NAMES]
    if unknown_names:
        raise ValueError(f"FUSED knows no '{unknown_names[0]}'; it knows {', '.join(NAMES)}.")
    if set(names).issuperset(_ATTENTION_KERNELS):
        raise ValueError(f"FUSED={' and '.join(_ATTENTION_KERNELS)} exclude each other; name one.")
    return tuple(name for name in NAMES if name in names)


def dropped_flags(names: Sequence[str]) -> tuple[str, ...]:
    """Return the flags that the launcher must leave out, because they would switch off these patches."""
    return tuple(flag for name, flag in _DISABLING_FLAGS.items() if name in names)
