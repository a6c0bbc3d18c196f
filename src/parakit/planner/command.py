"""`make plan`: every strategy ranked, or one of them; with memory, communication and time."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict

from parakit.config.flags import Flags
from parakit.config.stages import LAYOUT_FLAG
from parakit.formatting.terminal import wide_console
from parakit.planner.advice import no_fit_sentence
from parakit.planner.advise import print_answers
from parakit.planner.alpa import compare_with_alpa
from parakit.planner.dryrun.command import print_verified, verified_as_data
from parakit.planner.dryrun.comparison import verify
from parakit.planner.largest import show_largest
from parakit.planner.one_strategy import (
    changed_options,
    draw_layout,
    print_layout,
    time_strategy,
    timed_as_data,
)
from parakit.planner.options import PlanOptions, RequestError, plan_options
from parakit.planner.picture import draw_plan
from parakit.planner.readings.neighbours import uncertainty
from parakit.planner.recipes import DEFAULTS, Chosen, recipe_sentence, search_recipes
from parakit.planner.request import request_from_options
from parakit.planner.search import Plan, devices_needed, scaling, training_days
from parakit.planner.show import plan_as_data, print_command, print_plan


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
        every.append(time_strategy(changed_options(options, options.what_if)))
    if options.json:
        print(json.dumps(timed_as_data(*every), indent=2))
    else:
        print_layout(every, wide_console())
    if options.svg:
        draw_layout(every, options.svg)
    return 0


def _plan(options: PlanOptions) -> int:
    for name in ("micro_batch", "recompute", "what_if"):
        if getattr(options, name) is not None:
            named = f"{name.upper()}= is of one strategy; name it: STRATEGY=tp8pp16dp8."
            raise RequestError(named)
    request = request_from_options(options)
    if Flags(request.extra).has(LAYOUT_FLAG):
        raise RequestError(
            f"EXTRA has {LAYOUT_FLAG}, which is of one strategy; name it: STRATEGY=pp16dp8."
        )
    slack = 1.5 if options.svg else 1.0
    plan, chosen = search_recipes(options.recipe or DEFAULTS, options, slack)
    if plan.winner is None:
        print(_refusal(plan), file=sys.stderr)
        return 1
    _show(options, plan, chosen)
    if options.svg:
        draw_plan(plan, options.svg)
    return 0


def _show(options: PlanOptions, plan: Plan, chosen: Sequence[Chosen]) -> None:
    days = training_days(plan, options.tokens) if options.tokens else None
    scaled = scaling(plan) if options.tokens else None
    verified = verify(plan, options.verify) if options.verify else []
    known = uncertainty(plan.ranked[0].spec, plan.request.cluster, plan.request.own)
    solved = compare_with_alpa(plan) if options.alpa else ""
    if options.json:
        data = plan_as_data(plan, days, scaled)
        if options.recipe:
            data["recipe"] = [asdict(each) for each in chosen]
        data["uncertainty"] = known.as_data()
        if solved:
            data["alpa"] = solved
        print(json.dumps(data | {"verified": verified_as_data(verified)}, indent=2))
        return
    console = wide_console()
    if known.warning:
        console.print(known.warning, style="bold yellow", highlight=False)
    if options.recipe:
        console.print(recipe_sentence(options.recipe, chosen), highlight=False)
    print_plan(plan, console, days, scaled, str(known))
    print_answers(plan, console)
    print_command(plan, console)
    if solved:
        console.print(solved, highlight=False)
    if verified:
        print_verified(verified, console)


def _refusal(plan: Plan) -> str:
    """Why nothing fits, and on how many devices it would."""
    sentence, cluster = no_fit_sentence(plan), plan.request.cluster
    needed = devices_needed(plan.request) if plan.lightest else None
    if needed is None:
        return sentence
    nodes = f" ({-(-needed // cluster.per_node)} nodes of {cluster.per_node})"
    return f"{sentence} It fits on {needed}{nodes if cluster.nodes > 1 else ''}."
