"""Dialect of nanotron: a step as `iteration: 2 / 15 | name: value | …`, whose numbers have three digits."""

from __future__ import annotations

import re

from parakit.logs.dialects import SHORT_NUMBER, Dialect, StepLine, StepNumber
from parakit.logs.iterations import (
    EXTRA_METRIC_PREFIX,
    PRINTED_TOKENS_PER_DEVICE,
    PRINTED_TOKENS_PER_SECOND,
)


def _make_number(field: str, name: str) -> StepNumber:
    """Return a number with its name. A bar must follow it, because the last number of a line may be cut off."""
    return StepNumber(field, rf"\| {name}: ", value=SHORT_NUMBER)


class _Step(StepLine):
    """Format of a step. Versions print the global batch in samples or in tokens, so the batch is not read."""

    mark = b"iteration: "
    opening = re.compile(
        r"iteration: (?P<iteration>\d{1,9}) / (?P<total_iterations>\d{1,9}) (?=\| consumed_tokens: )"
    )
    rank = 11
    trainer = "nanotron"
    numbers = (
        _make_number("elapsed_ms", "(?:elapsed_)?time_per_iteration_ms"),
        _make_number("lm_loss", "lm_loss"),
        _make_number("grad_norm", "grad_norm"),
        _make_number("learning_rate", "lr"),
        _make_number("throughput_tflops_per_gpu", "model_tflops_per_gpu"),
        _make_number(PRINTED_TOKENS_PER_SECOND, "tokens_per_sec"),
        _make_number(PRINTED_TOKENS_PER_DEVICE, "tokens_per_sec_per_gpu"),
        _make_number(EXTRA_METRIC_PREFIX + "consumed tokens", "consumed_tokens"),
    )


DIALECT = Dialect(name="nanotron", line=_Step)
