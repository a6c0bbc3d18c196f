"""Functions that torch compiles to fewer kernels, each once in a process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as compiled; looked up when it is called, since CPU ranks replace the compiler."""
    return torch.compile(function)
