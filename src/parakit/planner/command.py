"""`make plan`: every strategy ranked, or one of them; with memory, communication and time."""

from __future__ import annotations

import json
import sys
from argparse import Namespace

from parakit.formatting.terminal import wide_console
from parakit.planner.advise import print_answers
from parakit.planner.largest import show_largest
from parakit.planner.one_strategy import (
    apply_what_if,
    draw_timed_strategies,
    encode_timed_strategy,
    print_timed_strategies,
    time_strategy,
)
from parakit.planner.options import PlanOptions, RequestError, plan_options
from parakit.planner.picture import draw_plan
from parakit.planner.result import NothingFitsError, plan_strategies


def plan(given: Namespace) -> int:
    """Rank every legal way to split a model, or time STRATEGY= alone; 1 if nothing fits.

    Raises:
        ValueError: What is asked for cannot be; one sentence.
    """
    options = plan_options(given)
    if options.largest:
        return show_largest(options)
    return _layout(options) if options.strategy else _plan(options)


def _layout(options: PlanOptions) -> int:
    if options.recipe:
        raise RequestError("RECIPE= is of a search; give STRATEGY= its flags with EXTRA=.")
    every = [time_strategy(options)]
    if options.what_if:
        every.append(time_strategy(apply_what_if(options, options.what_if)))
    if options.json:
        print(json.dumps(encode_timed_strategy(*every), indent=2))
    else:
        print_timed_strategies(every, wide_console())
    if options.svg:
        draw_timed_strategies(every, options.svg)
    return 0


def _plan(options: PlanOptions) -> int:
    try:
        result = plan_strategies(options)
    except NothingFitsError as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        console = wide_console()
        result.show_costs(console)
        print_answers(result.plan, console)
        result.show_command(console)
    if options.svg:
        draw_plan(result.plan, options.svg)
    return 0
