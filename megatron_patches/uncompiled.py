"""torch.compile as it is where it need not be: on CPU ranks every function stays what it is.

Megatron decorates its small functions with `torch.compile` (`megatron/core/jit.py`). Loading it
is a third of a rank's start on a CPU, and what is called of them would be compiled as C++ by every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_patches.registry import Patch, Replacement


def as_it_is(model: Callable[..., Any] | None = None, **_: Any) -> Any:
    """torch.compile's interface, called or as a decorator with arguments, without the compiler."""
    return as_it_is if model is None else model


PATCH = Patch(
    name="uncompiled",
    reason="loading torch's compiler is a third of a CPU rank's start, and nothing there needs it",
    needed=lambda situation: situation.on_cpu and not situation.fused,
    replacements=(Replacement("torch:compile", lambda _: as_it_is),),
)
