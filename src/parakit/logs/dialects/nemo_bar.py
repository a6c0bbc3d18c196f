"""Dialect of NeMo 1: a progress bar, `Epoch 0: : 47%|…| 7/15 [06:19<07:13, reduced_train_loss=11.50, …]`."""

from __future__ import annotations

import re

from parakit.logs.dialects import Dialect, StepLine, StepNumber


class _Bar(StepLine):
    """Format of a progress bar. Its counter is exact, but steps and samples in brackets have only four digits."""

    mark = b"reduced_train_loss="
    opening = re.compile(
        r"\| (?P<iteration>\d{1,9})/(?P<total_iterations>\d{1,9}) \[(?=[^]]{1,300}reduced_train_loss=)"
    )
    rank = 20
    trainer = "NeMo 1"
    numbers = (
        StepNumber("lm_loss", "reduced_train_loss=", r"(?=[,\]])"),
        StepNumber("elapsed_ms", "train_step_timing in s=", r"(?=[,\]])", 3),
        StepNumber("grad_norm", "grad_norm=", r"(?=[,\]])"),
    )


DIALECT = Dialect(name="NeMo 1", line=_Bar)
