"""Define `numpy.product` again, which NumPy 2 removed.

Target: `numpy.prod`, which stays as it is and is also stored as `numpy.product`. Megatron up to 0.15
calls `numpy.product` when it saves sharded optimizer states. Without the patch, saving a checkpoint would
fail with an AttributeError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from packaging.version import Version

from megatron_patches.registry import Patch, Replacement

_FIRST_WITHOUT = Version("0.16.0rc0")
"""First Megatron version that does not call `numpy.product`."""


def _define_product(prod: Callable[..., Any]) -> Callable[..., Any]:
    """Store `prod` as `numpy.product` and return `prod`."""
    vars(np)["product"] = prod
    return prod


PATCH = Patch(
    name="numpy2_compat",
    reason="Megatron up to 0.15 saves sharded optimizer states with a function that NumPy 2 removed",
    needed=lambda context: (
        context.megatron < _FIRST_WITHOUT and Version(np.__version__) >= Version("2")
    ),
    replacements=(Replacement("numpy:prod", _define_product),),
)
