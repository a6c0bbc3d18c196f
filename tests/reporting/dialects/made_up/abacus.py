"""A trainer that nobody has: its line, units, arguments and checkpoints, in one file as any dialect."""

import re

from parakit.logs.dialects import (
    Dialect,
    EventReader,
    LineField,
    LineFormat,
    ParsedIteration,
    make_iteration,
)
from parakit.logs.iterations import EXTRA_METRIC_PREFIX
from parakit.logs.scraped import ArgumentList, CheckpointEvent

_STEP = re.compile(
    r"step (?P<iteration>\d+) of (?P<total_iterations>\d+): loss (?P<lm_loss>[\d.]+),"
    r" (?P<seconds>[\d.]+) s, beads (?P<beads>[\d,]+);"
)
_SETTING = re.compile(r"(\w+) = (.*)")


class _StepLine(LineFormat):
    mark = b"step "
    opening = re.compile(r"step \d+ of \d+:")

    def find(self, line):
        return list(_found(line))


def _found(line):
    for step in _STEP.finditer(line):

        def number(name, of, power=0, field="", step=step):
            value = of(step[name].replace(",", "")) * 10**power
            return LineField(field or name, value, *step.span(name), power)

        fields = [
            number("iteration", int),
            number("total_iterations", int),
            number("lm_loss", float),
            number("seconds", float, 3, "elapsed_ms"),
            number("beads", float, 0, f"{EXTRA_METRIC_PREFIX}beads"),
        ]
        yield ParsedIteration(make_iteration(fields), step.start(), fields)


def _setting(line):
    setting = _SETTING.match(line)
    return (setting[1], setting[2]) if setting else None


def _renamed(printed):
    names = {"width": "hidden_size", "ranks": "world_size"}
    return {names.get(name, name): value for name, value in printed.items()}


DIALECT = Dialect(
    name="Abacus",
    line=_StepLine,
    events=(
        EventReader("SETTINGS", lambda _: (ArgumentList(re.compile("SETTINGS END"), _setting),)),
        EventReader(
            "beads put away", lambda line: (CheckpointEvent("saved", int(line.split()[-1])),)
        ),
    ),
    starts=("SETTINGS",),
    arguments=_renamed,
)
