"""What Python is told when it asks a tensor without contents for its number."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils._python_dispatch import TorchDispatchMode


class AnswerForContents(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers as a healthy iteration would.

    Truths are asked of losses and gradients (NaN? infinite?): no. Floats are flags and sums that
    should be 0 (overflow found, gradient norm). Integers are votes and counts that should not be
    (was the update made everywhere, tokens of a loss): 1.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operator; a number where it would have read one."""
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return _healthy(args[0].dtype)


def _healthy(dtype: torch.dtype) -> bool | float | int:
    if dtype == torch.bool:
        return False
    return 0.0 if dtype.is_floating_point else 1
