"""`python -m tools.plan dryrun --model gpt3-175b --tensor 8 --pipeline 16 --data 8`."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace

from tools.plan.dryrun.comparison import CheckedRank, dry_run
from tools.plan.dryrun.job import DryRunError, DryRunner, check, ranks_named
from tools.plan.memory import PRECISIONS
from tools.plan.parser import RequestParser
from tools.plan.request import with_sequence
from tools.spec.model import Model, model_of
from tools.spec.recompute import Recompute
from tools.spec.run import RunSpec, spec_of_model
from tools.spec.settings import add_options, program
from tools.spec.strategy import Batch, Parallelism, Sharding


def main(arguments: list[str]) -> int:
    """Run the command; 1 if a rank differs from its closed form, 2 for what cannot be."""
    try:
        options = command_line().parse_args(arguments)
        model = model_of(options.model)
        spec = spec_from(options, model)
        ranks = ranks_named(options.ranks, spec)
        check(spec)
        with DryRunner(verbose=options.verbose) as runner:
            comparisons = dry_run(runner, model, spec, ranks)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    _show(options, model, spec, comparisons)
    return 0 if all(comparison.agrees for comparison in comparisons) else 1


def spec_from(options: argparse.Namespace, model: Model) -> RunSpec:
    """The run that the options describe.

    Raises:
        DryRunError: An unknown dtype.
    """
    tensor = options.tensor
    parallelism = Parallelism(
        data=options.data,
        tensor=tensor,
        pipeline=options.pipeline,
        context=options.context,
        expert=options.expert,
        virtual_stages=options.virtual,
        # Experts under TP need it; Megatron drops it where there is no TP.
        sequence_parallel=tensor > 1 and (options.sequence_parallel or bool(model.shape.experts)),
        sharding=Sharding.ZERO1 if options.distributed_optimizer else Sharding.NONE,
    )
    dtype = options.dtype or model.dtype
    if dtype not in PRECISIONS:
        raise DryRunError(f"There is no dtype '{dtype}'; use {', '.join(PRECISIONS)}.")
    micro = options.micro_batch or model.batch.micro_batch_size
    # Twice as many micro batches as stages: the schedule reaches its steady state.
    whole = options.global_batch or micro * options.data * 2 * options.pipeline
    plain = spec_of_model(model, parallelism, Batch(micro, whole))
    return replace(with_sequence(plain, options.seq), dtype=dtype, recompute=options.recompute)


def _show(
    options: argparse.Namespace,
    model: Model,
    spec: RunSpec,
    comparisons: list[CheckedRank],
) -> None:
    from tools.plan.dryrun.show import as_data, print_comparisons

    if options.json:
        print(json.dumps(as_data(model, spec, comparisons), indent=2))
    else:
        print_comparisons(model, spec, comparisons)


def command_line() -> RequestParser:
    """The command line, for `--help` and completion."""
    parser = RequestParser(
        prog=program("tools.plan dryrun"),
        description="One iteration of Megatron's own code for chosen ranks, without devices.",
    )
    add_options(
        parser,
        "dryrun",
        required={"MODEL"},
        PP=1,
        VPP=1,
        RECOMPUTE=Recompute.NONE,
        RANKS="first,last",
    )
    parser.add_argument("--verbose", action="store_true", help="also what Megatron prints")
    return parser
