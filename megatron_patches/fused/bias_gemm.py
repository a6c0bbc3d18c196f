"""Add the bias of a linear layer in the matrix product itself (`FUSED=bias_gemm`).

Target: `LinearWithGradAccumulationAndAsyncCommunication.forward`. Without the patch, Megatron multiplies,
then adds the bias in a separate pass that reads and writes the full output; in GPT's layers that is the
output of the query-key-value projection, which is three hidden states wide. cuBLAS adds a bias at the end
of the product at no cost, and torch.addmm requests that. Transformer Engine does the same.
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
    """A mode in which the first matrix product adds the bias, and the later sum with the bias is skipped."""

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self._bias = bias
        self._is_added = False
        self.has_skipped_sum = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Replace the product and the sum; torch calls this for every function inside the mode."""
        if func is torch.matmul and not self._is_added:
            self._is_added = True
            rows, columns = args
            product = torch.addmm(self._bias, rows.flatten(0, -2), columns)
            return product.view(*rows.shape[:-1], columns.size(-1))
        if self._is_added and self._is_sum_with_bias(func, args):
            self.has_skipped_sum = True
            return args[0]
        return func(*args, **(kwargs or {}))

    def _is_sum_with_bias(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Return True if a call adds the bias to another tensor."""
        return func.__name__ in _SUMS and len(args) > 1 and args[1] is self._bias

    def check(self) -> None:
        """Raise an error if the layer added its bias in another way, and so a second time.

        Raises:
            PatchError: The product added the bias, and no sum with the bias was skipped.
        """
        if self._is_added and not self.has_skipped_sum:
            raise PatchError(
                "FUSED=bias_gemm expects Megatron's linear layer to add its bias after the product, and "
                "this one does not; leave it out."
            )


def _add_bias_in_product(original: Callable[..., Tensor]) -> Any:
    """Return the static method `forward` that runs the original in `BiasInProduct` if it has a bias."""

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
        _add_bias_in_product,
    ),
)
