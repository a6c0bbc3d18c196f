"""Tells the kit's ledger where an iteration and its parts begin and end, as Megatron's timers do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn

from tools.ledger.recorder import Recorder


class Watch:
    """Named spans for the ledger; without one it does nothing and costs nothing."""

    def __init__(self) -> None:
        self._recorder = Recorder.from_environment()
        if self._recorder is not None:
            self._recorder.install()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A span under one of Megatron's timer names."""
        if self._recorder is None:
            yield
            return
        self._recorder.timeline.begin(name)
        yield
        self._recorder.timeline.end(name)

    def begin_iteration(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """An iteration begins; the one before it ends."""
        if self._recorder is not None:
            self._recorder.begin_iteration([model], optimizer)

    def end_step(self) -> None:
        """The update is done."""
        if self._recorder is not None:
            self._recorder.end_step()
