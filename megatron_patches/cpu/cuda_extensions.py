"""CUDA code that Megatron compiles at start-up or import stays uncompiled on CPU ranks.

Up to 0.16 it loads its legacy fused kernels on every start and fails where there is no nvcc; from
0.15 on it builds an allocator for managed memory, at import in 0.15.0, and continues without it when
the build raises RuntimeError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from packaging.version import Version

from megatron_patches.registry import Replacement, around, cpu_patch


@around
def _refuse_cuda(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
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
