"""Dialect of verl: metrics of a step in one line, `step:4 - actor/entropy:0.37 - timing_s/step:161.1 - …`."""

from __future__ import annotations

import re

from parakit.logs.dialects import Dialect, MetricsLine
from parakit.logs.iterations import PRINTED_TOKENS_PER_DEVICE

_METRIC = re.compile(
    r"(?<= - )([a-z][\w@./-]{1,80}(?:\([\w-]{1,8}\))?):"
    r"(?:np\.\w{1,10}\()?([-+]?\d{1,20}(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?)\)?( - |\s*\Z)"
)
"""Pattern of a name, a number, and the text that closes the number: a dash, or the end of the line."""
_NAME = re.compile(r"(?<= - )[a-z][\w@./-]{1,80}(?:\([\w-]{1,8}\))?(?=:)")
_SEPARATOR = " - "
_COMPLETE_DIGITS = 15
"""Significant digits of a number that is complete to a float's precision even if the line was cut off in it."""
_ROUNDED_TO_ZERO = ("0.000", "-0.000")
"""Zeros of verl before 0.5, which printed three decimals: a learning rate of 1e-6 was `0.000` too."""


class VerlLine(MetricsLine):
    """Format of verl's line of metrics: names and numbers that dashes separate."""

    trainer = "verl"
    metric = _METRIC
    end = ""

    def numbers(self, text: str) -> dict[str, str]:
        """Return the numbers of a step by name, as text.

        The dictionary is empty if a name comes twice, because another line was then written into this one. A last
        number with few digits may have lost some, and a zero with three decimals may be any small number: both are
        left out.
        """
        names = _NAME.findall(text)
        if len(set(names)) < len(names):
            return {}
        matches = self.metric.findall(text)
        numbers = {name: digits for name, digits, _ in matches}
        for name, digits, closing in matches:
            may_be_cut = closing != _SEPARATOR and _count_digits(digits) < _COMPLETE_DIGITS
            if may_be_cut or digits in _ROUNDED_TO_ZERO:
                del numbers[name]
        return numbers


def _count_digits(number: str) -> int:
    """Return the number of significant digits of a printed number, without those of its exponent."""
    mantissa = number.partition("e")[0]
    return len(re.sub(r"\D", "", mantissa).lstrip("0"))


class _Step(VerlLine):
    """Format of a step. Its loss is that of a policy, so it is stored under its printed name."""

    mark = b"timing_s/"
    opening = re.compile(r"(?<![A-Za-z_])step:(?P<iteration>\d{1,9}) - ")
    rank = 2


DIALECT = Dialect(
    name="verl",
    line=_Step,
    names={
        "timing_s/step": ("elapsed_ms", 3),
        "perf/time_per_step": ("elapsed_ms", 3),
        "actor/grad_norm": ("grad_norm", 0),
        "actor/lr": ("learning_rate", 0),
        "perf/throughput": (PRINTED_TOKENS_PER_DEVICE, 0),
    },
)
