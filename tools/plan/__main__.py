"""`python -m tools.plan --model gpt2-large --gpus 2 --gpu h200`: which configuration, and why.

`python -m tools.plan dryrun --model gpt3-175b --tensor 8 --pipeline 16 --data 8` runs Megatron's own
iteration for chosen ranks, `… schedules --pipeline 4 --microbatches 8` compares pipeline schedules,
`python -m tools.plan residuals` prints how far the published figures are missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tools.plan.request import RequestError, request_from_options
from tools.plan.search import Plan, Request, search


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 2 and one sentence on stderr for what cannot be."""
    words = sys.argv[1:] if arguments is None else arguments
    if words[:1] == ["schedules"]:
        from tools.plan.schedules.command import main as schedules

        return schedules(words[1:])
    if words[:1] == ["dryrun"]:
        from tools.plan.dryrun.command import main as dryrun

        return dryrun(words[1:])
    if words == ["residuals"]:
        from tools.plan.residuals import residual_tables

        print(residual_tables(), end="")
        return 0
    options = _parser().parse_args(words)
    try:
        return _plan(options)
    except (RequestError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2


def _plan(options: argparse.Namespace) -> int:
    request = request_from_options(options)
    plan = search(request, slack=_PICTURE_SLACK if options.svg else 1.0)
    if plan.winner is None:
        print(_refusal(plan), file=sys.stderr)
        return 1
    _show(options, plan)
    if options.svg:
        from tools.plan.picture import draw_plan

        draw_plan(plan, options.svg)
    return 0


def _show(options: argparse.Namespace, plan: Plan) -> None:
    from tools.plan.dryrun.comparison import verify
    from tools.plan.dryrun.show import print_verified, verified_as_data
    from tools.plan.search import scaling, training_days

    days = training_days(plan, options.tokens) if options.tokens else None
    scaled = scaling(plan) if options.tokens else None
    verified = verify(plan, options.verify) if options.verify else []
    if options.json:
        from tools.plan.show import plan_as_data

        data = plan_as_data(plan, days, scaled)
        print(json.dumps(data | {"verified": verified_as_data(verified)}, indent=2))
        return
    from rich.console import Console

    from tools.plan.show import print_plan

    console = Console(width=None if sys.stdout.isatty() else 140)
    print_plan(plan, console, days, scaled)
    if verified:
        print_verified(verified, console)


def _refusal(plan: Plan) -> str:
    """Why nothing fits, and on how many devices it would."""
    from tools.plan.advice import no_fit_sentence
    from tools.plan.search import devices_needed

    sentence = no_fit_sentence(plan)
    if plan.lightest is None:
        return sentence
    needed = devices_needed(plan.request)
    if needed is None:
        return sentence
    return f"{sentence} {_nodes_sentence(plan.request, needed)}"


def _nodes_sentence(request: Request, devices: int) -> str:
    if request.cluster.nodes == 1:
        return f"It fits on {devices}."
    nodes = -(-devices // request.cluster.per_node)
    return f"It fits on {devices} ({nodes} nodes of {request.cluster.per_node})."


_PICTURE_SLACK = 1.5


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.plan",
        description="Rank every legal way to split a model, with memory, communication and time.",
    )
    parser.add_argument("--model", required=True, help="a model of examples/*/models")
    parser.add_argument("--gpus", type=int, help="devices in all")
    parser.add_argument("--gpu", default="h200", help="key in hardware.yaml, or a driver's name")
    parser.add_argument("--global-batch", type=int, help="samples an iteration")
    parser.add_argument("--nodes", type=int, help="machines")
    parser.add_argument("--gpus-per-node", type=int, help="devices in each (8)")
    parser.add_argument("--intra", help="link inside a node (the device's own)")
    parser.add_argument("--inter", help="link between nodes (the device's usual network)")
    parser.add_argument("--seq", type=int, help="sequence length (the model's)")
    parser.add_argument("--dtype", help="fp16, bf16 or fp32 (the model's)")
    parser.add_argument("--tokens", type=float, help="tokens to train on: adds days and efficiency")
    parser.add_argument("--calibration", type=Path, help="JSON file of measured constants")
    parser.add_argument("--verify", type=int, default=0, help="dry-run so many of the best")
    parser.add_argument("--svg", type=Path, help="write the picture here")
    parser.add_argument("--json", action="store_true", help="print data instead of tables")
    return parser


if __name__ == "__main__":
    sys.exit(main())
