"""numpy.product, which NumPy 2 dropped and Megatron up to 0.15 asks for when it saves sharded states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from packaging.version import Version

from megatron_patches.registry import Patch, Replacement

FIRST_WITHOUT = Version("0.16.0rc0")


def _also_as_product(prod: Callable[..., Any]) -> Callable[..., Any]:
    vars(np)["product"] = prod
    return prod


PATCH = Patch(
    name="numpy_product",
    reason="Megatron up to 0.15 saves sharded optimizer states with a function that NumPy 2 dropped",
    needed=lambda situation: (
        situation.megatron < FIRST_WITHOUT and Version(np.__version__) >= Version("2")
    ),
    replacements=(Replacement("numpy:prod", _also_as_product),),
)
