"""The plain strategies as `make train-<strategy>-…` runs them: one dimension, the kit's own batch."""

from __future__ import annotations

from dataclasses import replace

from tools.plan.legality import violations_of
from tools.plan.search import Candidate, Request, evaluate
from tools.spec.strategy import batch_for, parse_strategy

WORDS = ("dp", "tp", "sp", "cp", "pp")


def named_candidates(request: Request) -> list[Candidate]:
    """Those that are legal on this many devices with this global batch, fastest first.

    The kit scales a model's batch with its devices; where that is not the requested global batch
    there is nothing to compare, and the list is empty.
    """
    devices = request.cluster.devices
    names = ["baseline"] if devices == 1 else [f"{word}{devices}" for word in WORDS]
    found = []
    for name in names:
        parallelism = parse_strategy(name, devices)
        batch = batch_for(request.model.batch, parallelism)
        configuration = replace(request.template, parallelism=parallelism, batch=batch)
        if batch.global_batch_size == request.global_batch and not violations_of(configuration):
            found.append(evaluate(request, configuration))
    return sorted(found, key=lambda candidate: candidate.seconds.total)
