"""Whether a strategy and its reference train the same: model, data, batch, and what experts are
given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from tools.launch.compose import Launch
from tools.spec.errors import LaunchError
from tools.spec.flag_table import of_role
from tools.spec.flags import Flags

_BALANCING = "--moe-router-load-balancing-type"
_CAPACITY = "--moe-expert-capacity-factor"


def refuse_other_work(ours: Launch, theirs: Launch) -> None:
    """Refuse a strategy and a reference of different work before anything is trained.

    Raises:
        LaunchError: With what differs.
    """
    for name, mine, other in _work(ours, theirs):
        if mine != other:
            raise LaunchError(
                f"The two runs would do different work: {name} is {mine} in the strategy and {other} in "
                "its reference; give it to both with EXTRA=."
            )
    _refuse_other_balance(ours, theirs)
    _refuse_other_tokens(ours, theirs)


def _refuse_other_balance(ours: Launch, theirs: Launch) -> None:
    """Refuse a balancing loss that is defined on other tokens."""
    flags = Flags(ours.flags)
    if not (ours.model.shape.experts and flags.number("--moe-aux-loss-coeff") > 0):
        return
    kind = flags.text(_BALANCING)
    name, batches = ours.model.name, [one.spec.batch.micro_batch_size for one in (ours, theirs)]
    ranks = [one.spec.parallelism.data for one in (ours, theirs)]
    remedy = (
        'add EXTRA="--moe-aux-loss-coeff 0", or "--moe-router-load-balancing-type seq_aux_loss".'
    )
    if kind == "aux_loss" and batches[0] != batches[1]:
        raise LaunchError(
            f"{name} balances its experts over each micro batch (aux_loss), so another micro batch "
            f"trains something else; {remedy}"
        )
    samples = [batch * rank for batch, rank in zip(batches, ranks, strict=True)]
    if kind == "global_aux_loss" and samples[0] != samples[1]:
        raise LaunchError(
            f"{name} balances its experts over the micro batches of all data-parallel ranks so far "
            f"(global_aux_loss): {samples[0]} samples at once against {samples[1]} train something "
            f'else; choose EXTRA_B="--micro-batch-size N" so that both have as many, or {remedy}'
        )


def _refuse_other_tokens(ours: Launch, theirs: Launch) -> None:
    """Refuse experts that get or drop other tokens: each rank decides over those it routes."""
    tokens, other = _routed_tokens(ours), _routed_tokens(theirs)
    if tokens == other:
        return
    counts = (
        f"{tokens} in the strategy and {other} in its reference, so the two train something else"
    )
    remedy = "or compare strategies whose ranks route as many (REFERENCE=<a strategy>)."
    if Flags(ours.flags).has(_CAPACITY):
        raise LaunchError(
            f"{ours.model.name} drops tokens beyond {_CAPACITY} of those that a rank routes, {counts}; "
            f"leave that flag out, {remedy}"
        )
    if Flags(ours.flags).text(_BALANCING) == "sinkhorn":
        raise LaunchError(
            f"{ours.model.name} balances its experts by sinkhorn over the tokens that a rank routes, "
            f"{counts}; choose another {_BALANCING}, {remedy}"
        )


def _routed_tokens(launch: Launch) -> int:
    """Of a micro batch, on one rank."""
    degrees, batch = launch.spec.parallelism, launch.spec.batch
    parts = degrees.context * (degrees.tensor if degrees.sequence_parallel else 1)
    return batch.micro_batch_size * launch.model.shape.seq_length // parts


def _work(ours: Launch, theirs: Launch) -> Iterator[tuple[str, object, object]]:
    """What both must have alike: a name, the strategy's and the reference's."""
    shapes = [asdict(launch.model.shape) for launch in (ours, theirs)]
    yield from ((f"the model's {name}", mine, shapes[1][name]) for name, mine in shapes[0].items())
    given = [Flags(launch.flags) for launch in (ours, theirs)]
    alike = of_role("data", "precision") | {"--global-batch-size", "--clip-grad"}
    for name in sorted(alike):
        mine, other = (" ".join(flags.texts(name)) or flags.has(name) for flags in given)
        yield name, mine, other
