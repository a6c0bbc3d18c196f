"""Megatron 0.19's log lines, so that one scraper reads every backend.

From 0.16 on Megatron prints the first iteration without resetting what it adds up, so its second line
is the mean of two. That is kept: the kit's memory ledger slows the second iteration down, and readers of
these logs leave that line out of the times, as they do of Megatron's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

from tools.native.engines import Update
from tools.native.settings import Settings

NAMES = ("lm loss", "load_balancing_loss", "z_loss")
"""What an engine's means are, in their order; a dense model has the first alone."""


@dataclass
class Log:
    """Adds iterations up and writes a line every `--log-interval`, and after the first."""

    settings: Settings
    _milliseconds: float = 0.0
    _losses: list[float] = field(default_factory=list)
    _updates: int = 0
    _skipped: int = 0
    _not_numbers: int = 0

    def add(self, milliseconds: float, losses: Sequence[float], update: Update) -> None:
        """Add one iteration; a skipped one has no loss."""
        self._milliseconds += milliseconds
        self._skipped += update.skipped
        self._not_numbers += math.isnan(losses[0])
        if not update.skipped:
            self._updates += 1
            before = self._losses or [0.0] * len(losses)
            self._losses = [old + new for old, new in zip(before, losses, strict=True)]

    def line(self, iteration: int, rate: float, update: Update) -> str | None:
        """The line of this iteration, if it has one; `rate` is the next update's, as Megatron's is."""
        if iteration > 1 and iteration % self.settings.log_interval:
            return None
        text = self._text(iteration, rate, update)
        if iteration > 1:
            self._milliseconds, self._losses = 0.0, []
            self._updates = self._skipped = self._not_numbers = 0
        return text

    def _text(self, iteration: int, rate: float, update: Update) -> str:
        batch = self.settings.global_batch_size
        elapsed = self._milliseconds / (self._updates + self._skipped)
        means = [total / max(1, self._updates) for total in self._losses or [0.0]]
        losses = "".join(f" {name}: {mean:.6E} |" for name, mean in zip(NAMES, means, strict=False))
        norm = "" if update.gradient_norm is None else f" grad norm: {update.gradient_norm:.3f} |"
        return (
            f" [{_now()}] iteration {iteration:8d}/{self.settings.train_iters:8d} |"
            f" consumed samples: {iteration * batch:12d} |"
            f" elapsed time per iteration (ms): {elapsed:.1f} | learning rate: {rate:.6E} |"
            f" global batch size: {batch:5d} |{losses}"
            f" loss scale: {update.loss_scale:.1f} |{norm}"
            f" number of skipped iterations: {self._skipped:3d} |"
            f" number of nan iterations: {self._not_numbers:3d} |"
        )


def parameters_line(tensor_rank: int, pipeline_rank: int, parameters: int) -> str:
    """How many parameters this tensor- and pipeline-parallel rank holds."""
    return (
        " > number of parameters on (tensor, gtp_remat, pipeline) model parallel rank "
        f"({tensor_rank}, 0, {pipeline_rank}): {parameters}"
    )


def validation_lines(iteration: int, loss: float, accuracy: float) -> str:
    """Megatron's validation line between its rules, and the accuracy that Megatron does not have."""
    line = (
        f" validation loss at iteration {iteration} | lm loss value: {loss:.6E} |"
        f" lm loss PPL: {math.exp(min(20, loss)):.6E} | next token accuracy value: {accuracy:.6E} | "
    )
    rule = "-" * (len(line) + 1)
    return f"{rule}\n{line}\n{rule}"


def exit_line(iteration: int) -> str:
    """Megatron's last line at `--exit-interval`."""
    return f"[exiting program at iteration {iteration}] datetime: {_now()}"


def _now() -> str:
    return datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")
