"""Other numbers of devices: how many it takes at least, how well more of them are used."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tools.plan.search import Plan, Request, search

_LARGEST = 65536
SECONDS_A_DAY = 86400


@dataclass(frozen=True)
class Scaling:
    """A plan against the smallest number of devices that fits."""

    devices: int
    """Of the smallest."""
    strategy: str
    efficiency: float
    """Tokens a second and device, relative to the smallest; same global batch."""


def training_days(plan: Plan, tokens: float) -> float | None:
    """Days to train on `tokens` tokens with the plan's winner, without interruptions."""
    if plan.winner is None:
        return None
    return tokens / plan.winner.tokens_per_second / SECONDS_A_DAY


def scaling(plan: Plan) -> Scaling | None:
    """Efficiency against the smallest fitting power of two up to the plan's own size."""
    if plan.winner is None:
        return None
    own = plan.request.cluster.devices
    devices = 1
    while devices < own:
        smaller = search(_resized(plan.request, devices), kept=1)
        if smaller.winner is not None:
            rate = smaller.winner.tokens_per_second / devices
            relative = plan.winner.tokens_per_second / own / rate
            return Scaling(devices, smaller.winner.strategy, relative)
        devices *= 2
    return Scaling(own, plan.winner.strategy, 1.0)


def devices_needed(request: Request) -> int | None:
    """The smallest doubling of the request's devices on which the model fits; None up to 65536."""
    devices = request.cluster.devices * 2
    while devices <= _LARGEST:
        grown = _resized(request, devices, request.global_batch * devices)
        if search(grown, kept=1).winner is not None:
            return devices
        devices *= 2
    return None


def _resized(request: Request, devices: int, global_batch: int | None = None) -> Request:
    batch = global_batch or request.global_batch
    template = request.template
    sized = replace(template, batch=replace(template.batch, global_batch_size=batch))
    cluster = replace(request.cluster, devices=devices)
    return replace(request, cluster=cluster, global_batch=batch, template=sized)
