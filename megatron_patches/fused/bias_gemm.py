"""The bias of a linear layer added by the matrix product itself.

Megatron multiplies, then adds the bias in a pass of its own, which reads and writes the whole output: in
GPT's layers that of the query-key-value projection, which is three hidden states wide. cuBLAS adds a
bias at the end of the product at no cost; torch.addmm requests it. Transformer Engine does the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_patches.registry import PatchError, Replacement, fused_patch

_SUMS = ("add", "__add__")


class BiasInProduct(TorchFunctionMode):
    """Inside, the first product adds the bias, and the sum that follows is omitted."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self._bias = bias
        self._added = False
        self.left_out = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """torch's hook for every function that is called inside."""
        if func is torch.matmul and not self._added:
            self._added = True
            rows, columns = args
            product = torch.addmm(self._bias, rows.flatten(0, -2), columns)
            return product.view(*rows.shape[:-1], columns.size(-1))
        if self._added and func.__name__ in _SUMS and args[1:2] and args[1] is self._bias:
            self.left_out = True
            return args[0]
        return func(*args, **(kwargs or {}))

    def check(self) -> None:
        """Refuse a layer that adds its bias in another way: it would be added twice.

        Raises:
            PatchError: The product took the bias, and no sum with it followed.
        """
        if self._added and not self.left_out:
            raise PatchError(
                "FUSED=bias_gemm expects Megatron's linear layer to add its bias after the product, and "
                "this one does not; leave it out."
            )


def _in_the_product(original: Callable[..., Tensor]) -> Any:
    @functools.wraps(original)
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, *args: Any) -> Tensor:
        if bias is None:
            return original(ctx, input, weight, bias, *args)
        with BiasInProduct(bias) as mode:
            output = original(ctx, input, weight, bias, *args)
        mode.check()
        return output

    return staticmethod(forward)


PATCH = fused_patch(
    "bias_gemm",
    "a linear layer's bias is added in a pass over its whole output",
    Replacement(
        "megatron.core.tensor_parallel.layers:"
        "LinearWithGradAccumulationAndAsyncCommunication.forward",
        _in_the_product,
    ),
)
