"""Leave CUDA code uncompiled that Megatron compiles at start-up or import.

Targets: `torch.utils.cpp_extension.load_inline` and, up to Megatron 0.16, `megatron.legacy.fused_kernels.load`.
Without the patch, a machine without nvcc would fail at the legacy fused kernels, which Megatron up to 0.16 loads on
every start. From 0.15 on Megatron also builds an allocator for managed memory (at import in 0.15.0). It continues
without the allocator if the build raises RuntimeError, so the patch raises one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packaging.version import Version

from megatron_patches.registry import Replacement, cpu_patch, wrap_original


@wrap_original
def _refuse_cuda(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Raise RuntimeError if an extension contains CUDA code, else build it."""
    if kwargs.get("with_cuda"):
        raise RuntimeError("CUDA extensions are not built for CPU ranks")
    return original(*args, **kwargs)


PATCH = cpu_patch(
    "cuda_extensions",
    "Megatron compiles CUDA code at start-up, which CPU ranks neither can nor need",
    Replacement("torch.utils.cpp_extension:load_inline", _refuse_cuda),
    Replacement(
        "megatron.legacy.fused_kernels:load",
        lambda _: lambda args: None,
        before=Version("0.17.0rc0"),
    ),
)
