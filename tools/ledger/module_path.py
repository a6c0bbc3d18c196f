"""Which module of a model is computing, through hooks that last as long as a `with` block."""

from __future__ import annotations

import re
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch

_LAYER = re.compile(r"(?:.*\.)?layers\.\d+")


class ModulePath:
    """The names of the modules that are in their forward, innermost last."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self._models = tuple(models)
        self._open: list[str] = []
        self._handles: list[Any] = []

    @property
    def current(self) -> str:
        """The innermost module's name, or nothing between modules."""
        return self._open[-1] if self._open else ""

    @property
    def layer(self) -> str:
        """The transformer layer that is computing, or the module; the loss is in neither."""
        match = _LAYER.match(self.current)
        return _short(match[0] if match else self.current) or "loss"

    def __enter__(self) -> Self:
        for model in self._models:
            for name, module in model.named_modules():
                self._handles.append(module.register_forward_pre_hook(self._enter(name)))
                self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, name: str) -> Any:
        return lambda module, arguments: self._open.append(name)

    def _leave(self, *_: Any) -> None:
        if self._open:
            self._open.pop()


def _short(name: str) -> str:
    """A module's name without the wrappers around the model."""
    return re.sub(r"^(module(\.|$))+", "", name)
