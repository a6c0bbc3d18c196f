"""Leave every function uncompiled on CPU ranks, and keep torch's compiler from being loaded.

Targets: `torch.compile`, and methods of torch's optimizers and of the kit's memory accounting that would
load the compiler. Megatron decorates its small functions with `torch.compile` (`megatron/core/jit.py`).
Without the patch, loading the compiler would be a third of a CPU rank's start, and every rank would
compile C++ code for each function it calls. torch's optimizers and dispatch modes also load the compiler
at their first call, to exclude themselves from compilation (`torch/_compile.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches.registry import Patch, Replacement


def skip_compilation(model: Callable[..., Any] | None = None, **_: Any) -> Any:
    """Return the function unchanged, in place of `torch.compile`.

    Without a function, return this function itself: `torch.compile` with only options is a decorator.
    """
    return skip_compilation if model is None else model


def remove_decorator(method: Callable[..., Any]) -> Any:
    """Return the method without the decorator that excludes it from compilation.

    A method without a decorator is returned unchanged.
    """
    return getattr(method, "__wrapped__", method)


def remove_step_decorator(step: Callable[..., Any]) -> Any:
    """Return an optimizer's `step` without the decorator that loads the compiler.

    Like that decorator, it switches gradients off unless the optimizer is differentiable.
    """
    import torch

    update = remove_decorator(step)

    @functools.wraps(update)
    def step_without_compiler(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return update(optimizer, *args, **kwargs)

    return step_without_compiler


_DECORATED_METHODS = (
    "torch.optim:Optimizer.add_param_group",
    "torch.optim:Optimizer.zero_grad",
    "torch.optim:Optimizer.state_dict",
    "torch.optim:Optimizer.load_state_dict",
    "parakit.accounting.memory:_ResultObserver.__torch_dispatch__",
)
"""Methods whose decorator loads the compiler at the first call."""

PATCH = Patch(
    name="no_dynamo",
    reason="loading torch's compiler is a third of a CPU rank's start, and nothing there needs it",
    needed=lambda context: context.on_cpu and not context.fused,
    replacements=(
        Replacement("torch:compile", lambda _: skip_compilation),
        *(Replacement(target, remove_decorator) for target in _DECORATED_METHODS),
        Replacement("torch.optim:Adam.step", remove_step_decorator),
    ),
)
"""`tests/patches/fused/test_in_megatron.py` checks that Megatron loads no compiler with this patch."""
