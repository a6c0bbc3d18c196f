"""The command `make plan`: rank all strategies of a model, or predict one of them.

The result is printed as tables or as JSON, and drawn if SVG= names a file.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace

from parakit.formatting.terminal import wide_console
from parakit.planner.advise import print_answers
from parakit.planner.largest import show_largest
from parakit.planner.measured_step import resolve_measured_step
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


def plan(variables: Namespace) -> int:
    """Run the command `plan` and return its exit code: 0, or 1 if no strategy fits.

    With LARGEST= the command searches for the largest models. With STRATEGY= it predicts one strategy. Otherwise it
    ranks all strategies.

    Raises:
        ValueError: The options contradict each other, or name something that does not exist. The message is one
            sentence.
    """
    options = resolve_measured_step(plan_options(variables))
    if options.largest:
        return show_largest(options)
    return _predict_one_strategy(options) if options.strategy else _rank_strategies(options)


def _predict_one_strategy(options: PlanOptions) -> int:
    """Print the prediction of the strategy in STRATEGY=, and return 0.

    With WHAT_IF=, the prediction with the changed options is printed too. With SVG=, the predictions are also drawn.
    """
    if options.recipe:
        raise RequestError("RECIPE= is of a search; give STRATEGY= its flags with EXTRA=.")
    strategies = [time_strategy(options)]
    if options.what_if:
        strategies.append(time_strategy(apply_what_if(options, options.what_if)))
    if options.json:
        print(json.dumps(encode_timed_strategy(*strategies), indent=2))
    else:
        print_timed_strategies(strategies, wide_console())
    if options.svg:
        draw_timed_strategies(strategies, options.svg)
    return 0


def _rank_strategies(options: PlanOptions) -> int:
    """Print the ranking of all strategies and return 0. If nothing fits, print the reason on stderr and return 1.

    With SVG=, the ranking is also drawn.
    """
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
