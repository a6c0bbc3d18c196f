"""Compute gradient norm, clipping and copies of parameters over all tensors at once.

Targets (`FUSED=multi_tensor`): `l2_norm_impl`, `multi_tensor_scale_impl` and
`multi_tensor_scale_tensor_impl` of `clip_grads`, `_multi_tensor_copy_this_to_that` of the optimizer, and
`_copy_model_grads_to_main_grads`. Without the patch, and without Transformer Engine and Apex, Megatron
loops over the tensors: the norm reads one number per tensor from the device and waits for it; scaling and
copying start one or two kernels per tensor. torch's `_foreach` functions take all tensors in a few
kernels. From 0.17 on the norm also stays on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor

from megatron_patches.l2_norm import l2_norm
from megatron_patches.registry import Replacement, fused_patch, wrap_original

Lists = Sequence[Sequence[Tensor]]
_CLIPPING = "megatron.core.optimizer.clip_grads"
_OPTIMIZER = "megatron.core.optimizer.optimizer"


def scale(_: int, __: Any, lists: Lists, factor: float | Tensor) -> None:
    """Write the tensors of the first list, times `factor`, into those of the second list.

    It has the signature of Apex's `multi_tensor_scale`; the first two arguments are ignored.
    """
    sources, targets = lists
    is_in_place = all(source is target for source, target in zip(sources, targets, strict=True))
    if not is_in_place:
        copy_all(sources, targets)
    if isinstance(factor, Tensor):
        factor = factor.view(())
    torch._foreach_mul_(targets, factor)  # type: ignore[call-overload]


def copy_all(this: Sequence[Tensor], that: Sequence[Tensor], overflow_buf: Any = None) -> None:  # noqa: ARG001 - Megatron's signature
    """Copy each tensor of `this` into its counterpart in `that`, converting its type."""
    if this:
        torch._foreach_copy_(list(that), list(this))


def wide_gradients(gradients: Sequence[Tensor]) -> list[Tensor]:
    """Return the gradients in fp32, in their order.

    fp32 gradients are not copied; all other gradients are copied into one new buffer.
    """
    narrow = [gradient for gradient in gradients if gradient.dtype != torch.float32]
    if not narrow:
        return list(gradients)
    sizes = [gradient.numel() for gradient in narrow]
    buffer = torch.empty(sum(sizes), dtype=torch.float32, device=narrow[0].device)
    parts = torch.split(buffer, sizes)
    copies = [part.view(gradient.shape) for part, gradient in zip(parts, narrow, strict=True)]
    copy_all(narrow, copies)
    # The copies have the order of the gradients that they replace.
    remaining_copies = iter(copies)
    wide = []
    for gradient in gradients:
        wide.append(gradient if gradient.dtype == torch.float32 else next(remaining_copies))
    return wide


@wrap_original
def _copy_gradients_at_once(original: Callable[..., None], self: Any) -> None:
    """Copy the model's gradients to the fp32 master parameters, all in a few kernels.

    If a parameter has no `main_grad`, Megatron's own method is called.
    """
    parameters: list[Any] = []
    masters: list[Any] = []
    for group, master_group in zip(self.float16_groups, self.fp32_from_float16_groups, strict=True):
        parameters += group
        masters += master_group
    if any(getattr(parameter, "main_grad", None) is None for parameter in parameters):
        return original(self)
    gradients = wide_gradients([parameter.main_grad for parameter in parameters])
    for parameter, master, gradient in zip(parameters, masters, gradients, strict=True):
        master.grad, parameter.grad = gradient, None
    for group in self.fp32_from_fp32_groups:
        for parameter in group:
            parameter.grad = parameter.main_grad
    return None


PATCH = fused_patch(
    "multi_tensor",
    "Megatron's fallbacks go tensor by tensor and wait for the device at each",
    Replacement(f"{_CLIPPING}:l2_norm_impl", lambda _: l2_norm),
    Replacement(f"{_CLIPPING}:multi_tensor_scale_impl", lambda _: scale),
    Replacement(
        f"{_CLIPPING}:multi_tensor_scale_tensor_impl",
        lambda _: scale,
        since=Version("0.17.0rc0"),
    ),
    Replacement(f"{_OPTIMIZER}:_multi_tensor_copy_this_to_that", lambda _: copy_all),
    Replacement(
        f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params._copy_model_grads_to_main_grads",
        _copy_gradients_at_once,
    ),
)
