"""The command `make plan`: rank all strategies of a model, or predict one of them.

The result is printed as tables or as JSON, and drawn if SVG= names a file.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace

from parakit.formatting.caller import spell_for_caller
from parakit.formatting.terminal import wide_console
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
from parakit.planner.request import build_request
from parakit.planner.result import NothingFitsError, plan_strategies
from parakit.planner.scaling import Failures, draw_scaling, plan_scaling
from parakit.planner.training_command import refuse_trainer_without_adapters


def plan(variables: Namespace) -> int:
    """Run the command `plan` and return its exit code: 0, or 1 if no strategy fits.

    With LARGEST= the command searches for the largest models. With several numbers in GPUS= it shows how the plan
    scales. With STRATEGY= it predicts one strategy. Otherwise it ranks all strategies.

    Raises:
        ValueError: The options contradict each other, or name something that does not exist. The message is one
            sentence.
    """
    options = resolve_measured_step(plan_options(variables))
    numbers = vars(variables).get("gpus")
    has_several = isinstance(numbers, tuple) and len(numbers) > 1
    if vars(variables).get("mtbf") and not has_several:
        raise RequestError("MTBF= is of several numbers of devices; list them: GPUS=128,512,1024.")
    if options.largest:
        return show_largest(options)
    if has_several:
        return _show_scaling(options, variables)
    if options.strategy:
        return _predict_one_strategy(options, variables)
    return _rank_strategies(options, variables)


def _predict_one_strategy(options: PlanOptions, variables: Namespace) -> int:
    """Print the prediction of the strategy in STRATEGY=, and return 0.

    With WHAT_IF=, the prediction with the changed options is printed too. With SVG=, the predictions are also drawn.
    """
    trainer, launcher = _read_trainer(variables)
    if options.recipe:
        raise RequestError("RECIPE= is of a search; give STRATEGY= its flags with EXTRA=.")
    strategies = [time_strategy(options)]
    lora = strategies[0].request.template.lora
    refuse_trainer_without_adapters(lora, trainer, launcher)
    if options.what_if:
        strategies.append(time_strategy(apply_what_if(options, options.what_if)))
    if options.json:
        print(json.dumps(encode_timed_strategy(*strategies), indent=2))
    else:
        print_timed_strategies(strategies, wide_console(), trainer, launcher)
    if options.svg:
        draw_timed_strategies(strategies, options.svg)
    return 0


def _rank_strategies(options: PlanOptions, variables: Namespace) -> int:
    """Print the best strategy and return 0. If nothing fits, print the reason on stderr and return 1.

    With ALL=1, the ranking and further answers are printed too. With SVG=, the ranking is also drawn.
    """
    trainer, launcher = _read_trainer(variables)
    if options.peft:
        lora = build_request(options).template.lora
        refuse_trainer_without_adapters(lora, trainer, launcher)
    try:
        result = plan_strategies(options)
    except NothingFitsError as error:
        print(spell_for_caller(str(error)), file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        console = wide_console()
        result.show_screen(console, result.format_command(trainer, launcher))
        if getattr(variables, "all", False):
            result.show_tables(console)
    if options.svg:
        draw_plan(result.plan, options.svg)
    return 0


def _show_scaling(options: PlanOptions, variables: Namespace) -> int:
    """Print the plans on several numbers of devices and return 0. If the model fits on none of them, return 1."""
    values = vars(variables)
    failures = None
    if values.get("mtbf"):
        failures = Failures(values["mtbf"], values["checkpoint_seconds"], values["restart_seconds"])
    try:
        result = plan_scaling(options, values["gpus"], failures)
    except NothingFitsError as error:
        print(error, file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(result.to_dict(), indent=2))
    else:
        result.show(wide_console())
    if options.svg:
        draw_scaling(result, options.svg)
    return 0


def _read_trainer(variables: Namespace) -> tuple[str, str]:
    """Return the values of FOR= and LAUNCHER=; empty texts if they are not set."""
    values = vars(variables)
    return values.get("for") or "", values.get("launcher") or ""
