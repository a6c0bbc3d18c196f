"""Switches of Megatron's that published recipes set and its defaults do not, as choices of a search:
`RECIPE=tuned` those that change only how an iteration is computed and sent, `RECIPE=all` also those that
store or multiply in fewer bits.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from parakit.config.flags import Flags
from parakit.formatting.units import GIB, gib, joined
from parakit.planner.options import PlanOptions
from parakit.planner.request import build_request
from parakit.planner.search import (
    Candidate,
    Plan,
    Request,
    evaluate_configuration,
    search_configurations,
)

DEFAULTS, TUNED, ALL = "defaults", "tuned", "all"


@dataclass(frozen=True)
class Switch:
    """Flags that are set together."""

    name: str
    flags: tuple[str, ...]
    needs: str = ""
    """Another, without which Megatron refuses it."""
    is_of_shards: bool = False
    """Megatron refuses it without a distributed optimizer."""


@dataclass(frozen=True)
class ChosenSwitch:
    """A switch of a plan, and what the winner has of it."""

    name: str
    flags: tuple[str, ...]
    saves: float
    """Of the time without it."""
    saved_bytes: int
    """Of the fullest rank's; below 0 it needs more."""
    is_needed: bool
    """Without it the winner takes more memory than a recommended plan may."""

    @property
    def is_worth_it(self) -> bool:
        """Whether it saves time, or memory for no time."""
        free = self.saves > -_LEAST and self.saved_bytes > _LEAST_BYTES
        return self.is_needed or self.saves > _LEAST or free

    def __str__(self) -> str:
        found = [f"{self.saves:.1%} of the time"] if abs(self.saves) > _LEAST else []
        if abs(self.saved_bytes) > _LEAST_BYTES:
            found.append(f"{gib(self.saved_bytes)} GiB")
        return f"{self.name} ({', '.join(found) or 'it would take too much memory without'})"


_LEAST, _LEAST_BYTES = 0.001, GIB // 4
"""Of an iteration's time, and of memory, what a switch brings to be chosen."""

_GRADIENTS = Switch("gradients beside backward", ("--overlap-grad-reduce",))
_WEIGHTS = Switch("weights beside forward", ("--overlap-param-gather",), _GRADIENTS.name, True)
_TENSOR = Switch("TP's calls beside products", ("--tp-comm-overlap",))
_LOSS = Switch("a fused loss", ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"))
_DEEPEP = Switch(
    "DeepEP",
    ("--moe-token-dispatcher-type", "flex", "--moe-flex-dispatcher-backend", "deepep"),
)
_HALF = Switch("gradients reduced in bf16", ("--grad-reduce-in-bf16",))
_EIGHT = Switch("fp8 products", ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"))
_MICROSCALED = replace(_EIGHT, flags=("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"))
_GATHERED = Switch("weights kept in fp8", ("--fp8-param-gather",), _EIGHT.name, True)


def list_switches(recipe: str, request: Request) -> tuple[Switch, ...]:
    """Those that this model and device have, and the request does not speak of."""
    said = Flags((*request.model.flags, *request.extra))
    device, template = request.cluster.device, request.template
    if recipe == DEFAULTS or device.key == "cpu":
        return ()
    known = [_GRADIENTS, _WEIGHTS, _TENSOR, _LOSS]
    if template.shape.experts and device.generation in ("hopper", "blackwell"):
        known.append(_DEEPEP)
    if recipe == ALL and template.dtype == "bf16":
        known.append(_HALF)
        if "fp8" in device.peak_tflops:
            known += [_MICROSCALED if device.generation == "blackwell" else _EIGHT, _GATHERED]
    found = [each for each in known if not any(map(said.has, each.flags))]
    names = {switch.name for switch in found}
    return tuple(switch for switch in found if not switch.needs or switch.needs in names)


def search_recipes(
    recipe: str, options: PlanOptions, slack: float = 1.0
) -> tuple[Plan, tuple[ChosenSwitch, ...]]:
    """The plan with every switch that brings its winner anything, and what each one brings it."""
    plain = build_request(options)
    used = list_switches(recipe, plain)
    plan = search_configurations(_with(options, used), slack=slack)
    if not used or plan.winner is None:
        return plan, ()
    winner, kept = plan.winner, used
    for switch in used:
        fewer = _without(kept, switch)
        other = _under(_with(options, fewer), winner)
        refused = switch.is_of_shards and not winner.spec.parallelism.sharding
        if refused or not _chosen(switch, other, winner).is_worth_it:
            kept, winner = fewer, other
    if kept != used:
        plan = search_configurations(_with(options, kept), slack=slack)
    best = plan.winner or winner
    others = ((each, _under(_with(options, _without(kept, each)), best)) for each in kept)
    return plan, tuple(_chosen(each, other, best) for each, other in others)


def recipe_sentence(recipe: str, chosen: Sequence[ChosenSwitch]) -> str:
    """What a plan's command sets beyond Megatron's defaults, and what each part brings."""
    if not chosen:
        return f"RECIPE={recipe} has nothing that would make this faster or smaller."
    return (
        f"RECIPE={recipe} sets {joined([str(each) for each in chosen])}: what the plan would lack "
        "without each, the others kept; the command has their flags."
    )


def _without(used: Sequence[Switch], switch: Switch) -> tuple[Switch, ...]:
    return tuple(each for each in used if switch.name not in (each.name, each.needs))


def _with(options: PlanOptions, used: Sequence[Switch]) -> Request:
    words = shlex.join(word for switch in used for word in switch.flags)
    return build_request(replace(options, extra=f"{options.extra or ''} {words}"))


def _under(request: Request, candidate: Candidate) -> Candidate:
    """The same strategy under another request's flags."""
    chosen = ("parallelism", "batch", "recompute", "stages", "cp_comm_type")
    same: dict[str, Any] = {name: getattr(candidate.spec, name) for name in chosen}
    return evaluate_configuration(request, replace(request.template, **same))


def _chosen(switch: Switch, other: Candidate, found: Candidate) -> ChosenSwitch:
    return ChosenSwitch(
        switch.name,
        switch.flags,
        saves=1 - found.seconds.total / other.seconds.total,
        saved_bytes=other.memory.needed - found.memory.needed,
        is_needed=found.is_recommended and not other.is_recommended,
    )
