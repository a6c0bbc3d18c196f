"""Tensors requested on `cuda` are created on the CPU.

The factories themselves are wrapped, because a TorchFunctionMode is not active inside backward:
torch pops it while it dispatches `Tensor.backward`, and Megatron allocates there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.registry import Replacement, around, cpu_patch

_FACTORIES = [
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "tensor",
    "zeros",
    "zeros_like",
]
_METHODS = ["new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"]

Function = Callable[..., Any]


def to_cpu(device: Any) -> Any:
    """The CPU for any CUDA device, else the same."""
    by_number = isinstance(device, int) and not isinstance(device, bool)
    by_name = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return torch.device("cpu") if by_number or by_name else device


@around
def _on_cpu(original: Function, *args: Any, **kwargs: Any) -> Any:
    if "device" in kwargs:
        kwargs["device"] = to_cpu(kwargs["device"])
    # Rotary embeddings under context parallelism pin an index; pinning needs a driver.
    kwargs.pop("pin_memory", None)
    return original(*args, **kwargs)


@around
def _to(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    if "device" in kwargs:
        kwargs["device"] = to_cpu(kwargs["device"])
    return original(self, *(to_cpu(argument) for argument in args), **kwargs)


@around
def _unchanged(_: Function, self: Any, *__: Any, **___: Any) -> Any:
    return self


@around
def _type(original: Function, *args: Any, **kwargs: Any) -> Any:
    # Megatron's optimizer and gradient clipping distinguish fp32, fp16 and bf16 by this name.
    answer = original(*args, **kwargs)
    return answer.replace("torch.", "torch.cuda.", 1) if isinstance(answer, str) else answer


@around
def _without_pinning(original: Function, *args: Any, **kwargs: Any) -> None:
    original(*args, **kwargs | {"pin_memory": False})


PATCH = cpu_patch(
    "cpu_factories",
    "Megatron creates and moves tensors to 'cuda' by name and by index",
    *(Replacement(f"torch:{n}", _on_cpu) for n in _FACTORIES),
    *(Replacement(f"torch:Tensor.{n}", _on_cpu) for n in _METHODS),
    Replacement("torch:Tensor.to", _to),
    Replacement("torch:Tensor.cuda", _unchanged),
    Replacement("torch:Tensor.record_stream", _unchanged),
    Replacement("torch:Tensor.pin_memory", _unchanged),
    Replacement("torch:Tensor.type", _type),
    Replacement("torch.nn:Module.to", _to),
    Replacement("torch.nn:Module.cuda", _unchanged),
    Replacement("torch.utils.data:DataLoader.__init__", _without_pinning),
)
