"""torch.compile on CPU ranks: every function stays uncompiled, and the compiler is not loaded.

Megatron decorates its small functions with `torch.compile` (`megatron/core/jit.py`). Loading the
compiler is a third of a CPU rank's start, and every rank would compile C++ for each function it calls.
torch's optimizers and dispatch modes, such as the memory ledger's, load it at their first call, to keep
it off what they do (torch/_compile.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.registry import Patch, Replacement


def not_compiled(model: Callable[..., Any] | None = None, **_: Any) -> Any:
    """torch.compile's interface, called or as a decorator with arguments, without the compiler."""
    return not_compiled if model is None else model


def undecorated(method: Callable[..., Any]) -> Any:
    """What the decorator that keeps the compiler off a method was given."""
    return getattr(method, "__wrapped__", method)


def step_alone(step: Callable[..., Any]) -> Any:
    """An optimizer's step, with gradients off unless it is differentiable, that loads no compiler."""
    import torch

    update = undecorated(step)

    @functools.wraps(update)
    def without_compiler(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return update(optimizer, *args, **kwargs)

    return without_compiler


_KEPT_OFF = (
    "torch.optim:Optimizer.add_param_group",
    "torch.optim:Optimizer.zero_grad",
    "torch.optim:Optimizer.state_dict",
    "torch.optim:Optimizer.load_state_dict",
    "parakit.accounting.memory:_EveryResult.__torch_dispatch__",
)

PATCH = Patch(
    name="no_dynamo",
    reason="loading torch's compiler is a third of a CPU rank's start, and nothing there needs it",
    needed=lambda context: context.on_cpu and not context.fused,
    replacements=(
        Replacement("torch:compile", lambda _: not_compiled),
        *(Replacement(target, undecorated) for target in _KEPT_OFF),
        Replacement("torch.optim:Adam.step", step_alone),
    ),
)
"""That Megatron loads no compiler with it is seen in `tests/patches/fused/test_in_megatron.py`."""
