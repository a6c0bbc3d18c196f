"""torch.compile on CPU ranks: every function stays uncompiled.

Megatron decorates its small functions with `torch.compile` (`megatron/core/jit.py`). Loading the
compiler is a third of a CPU rank's start, and every rank would compile C++ for each function it calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_patches.registry import Patch, Replacement


def not_compiled(model: Callable[..., Any] | None = None, **_: Any) -> Any:
    """torch.compile's interface, called or as a decorator with arguments, without the compiler."""
    return not_compiled if model is None else model


PATCH = Patch(
    name="no_dynamo",
    reason="loading torch's compiler is a third of a CPU rank's start, and nothing there needs it",
    needed=lambda context: context.on_cpu and not context.fused,
    replacements=(Replacement("torch:compile", lambda _: not_compiled),),
)
