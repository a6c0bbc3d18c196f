"""`python -m tools.plan dryrun --model gpt3-175b --tensor 8 --pipeline 16 --data 8`."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import replace

from tools.plan.dryrun.comparison import dry_run
from tools.plan.dryrun.job import DryRunError, DryRunner, check, ranks_named
from tools.plan.dryrun.show import as_data, print_comparisons
from tools.plan.memory import PRECISIONS
from tools.plan.request import with_sequence
from tools.spec.flags import refuse_misspelled
from tools.spec.model import Model, model_of
from tools.spec.recompute import Recompute
from tools.spec.run import RunSpec, spec_of_model
from tools.spec.strategy import Batch, Parallelism, Sharding


def dryrun(given: Namespace) -> int:
    """Dry-run the ranks that are named; 1 if one differs from its closed form.

    Raises:
        ValueError: What is asked for cannot be; one sentence.
    """
    model = model_of(given.model)
    refuse_misspelled(model.flags)
    spec = spec_from(given, model)
    ranks = ranks_named(given.ranks, spec)
    check(spec)
    with DryRunner(verbose=given.verbose) as runner:
        comparisons = dry_run(runner, model, spec, ranks)
    if given.json:
        print(json.dumps(as_data(model, spec, comparisons), indent=2))
    else:
        print_comparisons(model, spec, comparisons)
    return 0 if all(comparison.agrees for comparison in comparisons) else 1


def dryrun_arguments(parser: ArgumentParser) -> None:
    """What no variable says."""
    parser.add_argument("--verbose", action="store_true", help="also what Megatron prints")


def spec_from(given: Namespace, model: Model) -> RunSpec:
    """The run that is asked for.

    Raises:
        DryRunError: An unknown dtype.
    """
    parallelism = Parallelism(
        data=given.dp,
        tensor=given.tp,
        pipeline=given.pp,
        context=given.cp,
        expert=given.ep,
        virtual_stages=given.vpp,
        # Experts under TP need it; Megatron drops it where there is no TP.
        sequence_parallel=given.tp > 1 and (given.sp or bool(model.shape.experts)),
        sharding=Sharding.ZERO1 if given.zero1 else Sharding.NONE,
    )
    dtype = given.dtype or model.dtype
    if dtype not in PRECISIONS:
        raise DryRunError(f"There is no dtype '{dtype}'; use {', '.join(PRECISIONS)}.")
    micro = given.micro_batch or model.batch.micro_batch_size
    # Twice as many micro batches as stages: the schedule reaches its steady state.
    whole = given.global_batch or micro * given.dp * 2 * given.pp
    plain = spec_of_model(model, parallelism, Batch(micro, whole))
    return replace(
        with_sequence(plain, given.seq), dtype=dtype, recompute=given.recompute or Recompute.NONE
    )
