"""Create on the CPU the tensors that Megatron requests on `cuda`.

Targets: torch's factories (`torch.empty`, `Tensor.new_zeros`, …), `Tensor.to`, `Tensor.cuda`,
`Module.to`, `Module.cuda`, `Tensor.type` and a few others. Without the patch, the first tensor that is
requested on `cuda` would fail, because this torch has no CUDA device.

The factories themselves are wrapped, because a TorchFunctionMode is not active inside backward: torch
removes it while it dispatches `Tensor.backward`, and Megatron allocates tensors there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_patches.registry import Replacement, cpu_patch, wrap_original

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
    """Return the CPU for a CUDA device, and any other value unchanged.

    A CUDA device is a number, a text or a `torch.device` that begins with `cuda`.
    """
    is_number = isinstance(device, int) and not isinstance(device, bool)
    is_cuda_name = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return torch.device("cpu") if is_number or is_cuda_name else device


@wrap_original
def _create_on_cpu(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Call a factory with the CPU in place of a CUDA device, and without pinned memory."""
    if "device" in kwargs:
        kwargs["device"] = to_cpu(kwargs["device"])
    # Rotary embeddings under context parallelism pin an index, and pinning needs a CUDA driver.
    kwargs.pop("pin_memory", None)
    return original(*args, **kwargs)


@wrap_original
def _move_to_cpu(original: Function, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Call `Tensor.to` or `Module.to` with the CPU in place of a CUDA device; types are converted."""
    if "device" in kwargs:
        kwargs["device"] = to_cpu(kwargs["device"])
    return original(self, *(to_cpu(argument) for argument in args), **kwargs)


@wrap_original
def _return_self(_: Function, self: Any, *__: Any, **___: Any) -> Any:
    """Return the tensor or module itself in place of calling a method that needs CUDA."""
    return self


@wrap_original
def _name_cuda_type(original: Function, *args: Any, **kwargs: Any) -> Any:
    """Return `torch.cuda.FloatTensor` where `Tensor.type()` would return `torch.FloatTensor`.

    Megatron's optimizer and gradient clipping recognise fp32, fp16 and bf16 by the name with `cuda`.
    """
    result = original(*args, **kwargs)
    return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result


@wrap_original
def _disable_pinning(original: Function, *args: Any, **kwargs: Any) -> None:
    """Make a data loader without pinned memory, which needs a CUDA driver."""
    original(*args, **kwargs | {"pin_memory": False})


PATCH = cpu_patch(
    "cpu_factories",
    "Megatron creates and moves tensors to 'cuda' by name and by index",
    *(Replacement(f"torch:{name}", _create_on_cpu) for name in _FACTORIES),
    *(Replacement(f"torch:Tensor.{name}", _create_on_cpu) for name in _METHODS),
    Replacement("torch:Tensor.to", _move_to_cpu),
    Replacement("torch:Tensor.cuda", _return_self),
    Replacement("torch:Tensor.record_stream", _return_self),
    Replacement("torch:Tensor.pin_memory", _return_self),
    Replacement("torch:Tensor.type", _name_cuda_type),
    Replacement("torch.nn:Module.to", _move_to_cpu),
    Replacement("torch.nn:Module.cuda", _return_self),
    Replacement("torch.utils.data:DataLoader.__init__", _disable_pinning),
)
