"""Dialect of slime and miles: times of a rollout in a dictionary, `perf 3: {'perf/step_time': 43.9, …}`.

The line of the training step comes before: `step 3: {'train/loss': 0.25, 'train/grad_norm': 0.3, …}`. Its numbers
belong to the rollout if the rollout has one training step, so that both have one number.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from parakit.logs.dialects import Dialect, EventReader, MetricsLine, Names, ParsedIteration
from parakit.logs.iterations import Iteration
from parakit.logs.scraped import NumbersAhead

_METRIC = re.compile(
    r"'([^']{1,80})': (?:np\.\w{1,10}\()?"
    r"([-+]?(?:\d{1,20}(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?|nan|inf))\)?(?=[,}])"
)
"""Pattern of a name and a number in a dictionary. The number may be one of numpy's."""
STEP_NAMES: Names = {
    "train/loss": ("lm_loss", 0),
    "train/grad_norm": ("grad_norm", 0),
    "train/lr-pg_0": ("learning_rate", 0),
}
"""Fields of the numbers in the line of a training step."""


class SlimeStep(MetricsLine):
    """Format of the line of a training step, which has no time. The loss of a policy keeps its printed name."""

    mark = b"'train/"
    opening = re.compile(r"(?<!critic-)step (?P<iteration>\d{1,9}): \{")
    rank = 20
    trainer = "slime"
    metric = _METRIC
    needs_time = False

    def numbers(self, text: str) -> dict[str, str]:
        """Return the numbers of a step by name, as text.

        The loss is left out if the line is cut off, because the text that follows would show whether the loss is
        that of a policy.
        """
        numbers = super().numbers(text)
        if not text.endswith(self.end):
            numbers.pop("train/loss", None)
        return numbers


class _Rollout(MetricsLine):
    """Format of the line with the time of a full step, one of two `perf` lines per rollout."""

    mark = b"'perf/"
    opening = re.compile(r"perf (?P<iteration>\d{1,9}): \{")
    rank = 3
    trainer = "slime"
    metric = _METRIC


def _read_steps(line: str) -> Iterator[NumbersAhead]:
    """Yield the numbers of each training step in a line, to be added to the rollout with the same number."""
    for step in SlimeStep(STEP_NAMES).find(line):
        yield NumbersAhead(_add_numbers_of(step.iteration))


def _add_numbers_of(
    step: Iteration,
) -> Callable[[ParsedIteration, object, dict[str, Any]], Iteration | None]:
    """Return a function that returns a rollout with the numbers of a training step.

    The function returns None if the rollout has another number than the step.
    """

    def complete(rollout: ParsedIteration, *_: object) -> Iteration | None:
        iteration = rollout.iteration
        if iteration.iteration != step.iteration:
            return None
        return msgspec.structs.replace(
            iteration,
            lm_loss=step.lm_loss,
            grad_norm=step.grad_norm,
            learning_rate=step.learning_rate,
            extra_metrics=(iteration.extra_metrics or {}) | (step.extra_metrics or {}),
        )

    return complete


DIALECT = Dialect(
    name="slime",
    line=_Rollout,
    names={
        "perf/step_time": ("elapsed_ms", 3),
        # The name until October 2025.
        "perf/total_train_time": ("elapsed_ms", 3),
        "perf/actor_train_tflops": ("throughput_tflops_per_gpu", 0),
    },
    events=(EventReader("'train/", _read_steps),),
)
