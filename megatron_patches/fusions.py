"""The names that `FUSED=` takes, and the flags that would disable each. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fusion:
    """One switchable patch."""

    name: str
    what: str
    drops: tuple[str, ...] = ()
    """Flags of the runtime that would switch off what the patch provides."""
    excludes: tuple[str, ...] = ()
    """Names that cannot be on beside it."""


FUSIONS = (
    Fusion(
        "bias_gelu",
        "bias and GELU in one compiled function, whose backward also sums the bias gradient",
        drops=("--no-bias-gelu-fusion",),
    ),
    Fusion("bias_gemm", "the bias of query, key and value added by the matrix product itself"),
    Fusion("norm", "LayerNorm compiled, forward and backward, in place of torch's own kernels"),
    Fusion("cross_entropy", "loss over chunks of tokens; the gradient replaces the 16-bit logits"),
    Fusion("adamw", "AdamW in one kernel (torch's fused=True)"),
    Fusion(
        "multi_tensor",
        "gradient norm, clipping and the copies to and from fp32 parameters over all tensors at once",
    ),
    Fusion(
        "gradient_gemm",
        "weight gradients added to the gradient buffer by the matrix product itself",
        drops=("--no-gradient-accumulation-fusion",),
    ),
    Fusion(
        "attention_flash", "attention by torch's flash kernel only", excludes=("attention_cudnn",)
    ),
    Fusion("attention_cudnn", "attention by cuDNN only", excludes=("attention_flash",)),
)
NAMES = tuple(fusion.name for fusion in FUSIONS)


def parse_fusions(text: str) -> tuple[str, ...]:
    """Names out of a list with commas, in the order of `FUSIONS`.

    Raises:
        ValueError: A name is unknown, or two exclude each other; the message is a sentence.
    """
    asked = [word.strip() for word in text.split(",") if word.strip()]
    unknown = [name for name in asked if name not in NAMES]
    if unknown:
        raise ValueError(f"FUSED knows no '{unknown[0]}'; it knows {', '.join(NAMES)}.")
    for fusion in _of(asked):
        for other in fusion.excludes:
            if other in asked:
                raise ValueError(f"FUSED={fusion.name} and {other} exclude each other; name one.")
    return tuple(fusion.name for fusion in _of(asked))


def dropped_flags(names: tuple[str, ...]) -> tuple[str, ...]:
    """Flags of a runtime that these patches must not be combined with."""
    return tuple(flag for fusion in _of(names) for flag in fusion.drops)


def _of(names: list[str] | tuple[str, ...]) -> list[Fusion]:
    return [fusion for fusion in FUSIONS if fusion.name in names]
