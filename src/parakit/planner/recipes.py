"""Switches of Megatron that published recipes set and its defaults do not, as choices of a search.

`RECIPE=tuned` tries those that change only how an iteration is computed and sent. `RECIPE=all` also tries those that
store or multiply in fewer bits.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from parakit.config.flags import Flags
from parakit.costs import PredictedMemory, find_peak_rank, supports_replay
from parakit.formatting.units import GIB, gib, joined
from parakit.planner.expert_options import NO_EXPERT_OPTIONS, ExpertOptions
from parakit.planner.options import PlanOptions
from parakit.planner.request import build_request
from parakit.planner.search import (
    Candidate,
    Plan,
    Request,
    reevaluate_candidate,
    reevaluate_plan,
    search_configurations,
)

DEFAULTS, TUNED, ALL = "defaults", "tuned", "all"


@dataclass(frozen=True)
class Switch:
    """Group of Megatron's flags that a recipe sets together."""

    name: str
    flags: tuple[str, ...]
    needs: str = ""
    """Name of another switch without which Megatron refuses this one; empty for none."""
    is_of_shards: bool = False
    """True if Megatron refuses the switch without a distributed optimizer."""
    expert_options: ExpertOptions = NO_EXPERT_OPTIONS
    """Options that each candidate of a search uses if it can. Their flags are not part of `flags`."""
    alternatives: tuple[tuple[str, ...], ...] = ()
    """Other flags with which the same switch can be set. The fastest flags are chosen for the winner."""


@dataclass(frozen=True)
class ChosenSwitch:
    """Switch that a plan sets, and the time and memory that the plan's winner saves by the switch."""

    name: str
    flags: tuple[str, ...]
    saves: float
    """Saved time, as a fraction of the time without the switch."""
    saved_bytes: int
    """Bytes that the switch saves on the rank with the peak memory; below 0 it needs more."""
    is_needed: bool
    """True if the winner takes more memory without the switch than a recommended plan may, and the bytes that the
    switch saves make the difference."""

    @property
    def is_worth_it(self) -> bool:
        """True if the switch is needed, saves time, or saves memory and costs no time."""
        costs_no_time = self.saves > -_LEAST_SAVING
        saves_memory = self.saved_bytes > _LEAST_SAVED_BYTES
        return self.is_needed or self.saves > _LEAST_SAVING or (costs_no_time and saves_memory)

    def __str__(self) -> str:
        savings = []
        if abs(self.saves) > _LEAST_SAVING:
            savings.append(f"{self.saves:.1%} of the time")
        if abs(self.saved_bytes) > _LEAST_SAVED_BYTES:
            savings.append(f"{gib(self.saved_bytes)} GiB")
        nothing = "nothing that can be measured"
        if self.is_needed:
            nothing = "it would take too much memory without"
        return f"{self.name} ({', '.join(savings) or nothing})"


_LEAST_SAVING, _LEAST_SAVED_BYTES = 0.001, GIB // 4
"""Fraction of an iteration's time, and bytes, that a switch must save to be chosen."""

_GRADIENTS = Switch("gradients overlapped with backward", ("--overlap-grad-reduce",))
_WEIGHTS = Switch(
    "weights overlapped with forward", ("--overlap-param-gather",), _GRADIENTS.name, True
)
_TENSOR = Switch("tensor-parallel calls overlapped with products", ("--tp-comm-overlap",))
_LOSS = Switch("a fused loss", ("--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"))
_DEEPEP = Switch("DeepEP", (), expert_options=ExpertOptions(deep_ep=True))
_EXPERT_OVERLAP = Switch(
    "tokens sent during another micro batch's computation",
    (),
    expert_options=ExpertOptions(overlap=True),
)
_HALF = Switch("gradients reduced in bf16", ("--grad-reduce-in-bf16",))
_EIGHT = Switch(
    "fp8 products",
    ("--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"),
    alternatives=(("--fp8-format", "e4m3", "--fp8-recipe", "blockwise"),),
)
_MICROSCALED = replace(
    _EIGHT, flags=("--fp8-format", "e4m3", "--fp8-recipe", "mxfp8"), alternatives=()
)
_GATHERED = Switch("weights kept in fp8", ("--fp8-param-gather",), _EIGHT.name, True)


def list_switches(recipe: str, request: Request) -> tuple[Switch, ...]:
    """Return the switches of a recipe that the model and the device support.

    Two kinds of switches are left out: those whose flags the request already sets, and those that need another switch
    which is left out. The result is empty for CPU ranks and for the recipe `defaults`.
    """
    device, template = request.cluster.device, request.template
    if recipe == DEFAULTS or device.key == "cpu":
        return ()
    switches = [_GRADIENTS, _WEIGHTS, _TENSOR, _LOSS]
    if template.shape.experts:
        switches.append(_EXPERT_OVERLAP)
        if device.generation in ("hopper", "blackwell"):
            switches.append(_DEEPEP)
    if recipe == ALL and template.dtype == "bf16":
        switches.append(_HALF)
        has_nf4_weights = template.lora is not None and template.lora.has_nf4_weights
        if "fp8" in device.peak_tflops and not has_nf4_weights:
            switches.append(_MICROSCALED if device.generation == "blackwell" else _EIGHT)
            switches.append(_GATHERED)
    stated = Flags((*request.model.flags, *request.extra))
    unstated = []
    for switch in switches:
        is_stated = any(stated.has(flag) for flag in _all_flags(switch))
        if not is_stated:
            unstated.append(switch)
    names = {switch.name for switch in unstated}
    return tuple(switch for switch in unstated if not switch.needs or switch.needs in names)


def search_recipes(
    recipe: str, options: PlanOptions, slack: float = 1.0
) -> tuple[Plan, tuple[ChosenSwitch, ...]]:
    """Search with the switches of a recipe, and drop the switches by which the winner gains nothing.

    Return the plan with the remaining switches, and the gain of its winner by each of them. There are no switches if
    nothing fits.

    Args:
        recipe: Name of the recipe.
        options: Options of the plan.
        slack: The argument `slack` of `search_configurations`.
    """
    switches = list_switches(recipe, build_request(options))
    plan = search_configurations(_build_request_with(options, switches), slack=slack)
    if not switches or plan.winner is None:
        return plan, ()
    kept, needs_search = _keep_gaining_switches(options, switches, plan.winner)
    kept = _choose_alternatives(options, kept, plan.winner)
    if needs_search:
        fewer_switches_plan = search_configurations(_build_request_with(options, kept), slack=slack)
        if fewer_switches_plan.winner is None:
            # The model fits only with all switches, although no switch alone saved enough to be kept.
            kept = switches
        else:
            plan = fewer_switches_plan
    elif kept != switches:
        plan = reevaluate_plan(plan, _build_request_with(options, kept))
    best = plan.winner
    if best is None:
        return plan, ()
    chosen = []
    for switch in kept:
        request = _build_request_with(options, _drop_switch(kept, switch))
        without = reevaluate_candidate(request, best)
        chosen.append(_measure_gain(switch, without, best, request.capacity))
    return plan, tuple(chosen)


def recipe_sentence(recipe: str, chosen: Sequence[ChosenSwitch]) -> str:
    """Return sentences with the switches that a plan sets beyond Megatron's defaults, and the gain by each.

    Without switches, the sentence says that the recipe has nothing to offer.
    """
    if not chosen:
        return f"RECIPE={recipe} has nothing that would make this faster or smaller."
    return (
        f"RECIPE={recipe} sets {joined([str(switch) for switch in chosen])}. In brackets is what each "
        "saves while the others stay set; the command has their flags."
    )


def _keep_gaining_switches(
    options: PlanOptions, switches: tuple[Switch, ...], winner: Candidate
) -> tuple[tuple[Switch, ...], bool]:
    """Return the switches by which the winner gains, and whether a further search without the others is needed.

    A search is needed if a dropped switch made the winner slower, because the switch may have made other candidates
    slower too. A search is also needed if the winner may not be recommended without a dropped switch.
    """
    kept, needs_search = switches, False
    for switch in switches:
        fewer = _drop_switch(kept, switch)
        request = _build_request_with(options, fewer)
        without = reevaluate_candidate(request, winner)
        is_refused = switch.is_of_shards and not winner.spec.parallelism.sharding
        gain = _measure_gain(switch, without, winner, request.capacity)
        if is_refused or not gain.is_worth_it:
            is_harmful = gain.saves < -_LEAST_SAVING
            needs_search |= is_harmful or not without.is_recommended
            kept, winner = fewer, without
    return kept, needs_search


def _choose_alternatives(
    options: PlanOptions, switches: tuple[Switch, ...], winner: Candidate
) -> tuple[Switch, ...]:
    """Return the switches with those flags among their alternatives that make the winner fastest."""
    chosen = switches
    for index, switch in enumerate(switches):
        seconds = {}
        for flags in (switch.flags, *switch.alternatives):
            variant = replace(switch, flags=flags)
            attempt = (*chosen[:index], variant, *chosen[index + 1 :])
            request = _build_request_with(options, attempt)
            seconds[attempt] = reevaluate_candidate(request, winner).seconds.total
        chosen = min(seconds, key=seconds.__getitem__)
    return chosen


def _all_flags(switch: Switch) -> tuple[str, ...]:
    """Return the flags of a switch, with those of its options for experts."""
    return (*switch.flags, *switch.expert_options.flags)


def _drop_switch(switches: Sequence[Switch], dropped: Switch) -> tuple[Switch, ...]:
    """Return the switches without one of them, and without those that need it."""
    return tuple(switch for switch in switches if dropped.name not in (switch.name, switch.needs))


def _build_request_with(options: PlanOptions, switches: Sequence[Switch]) -> Request:
    """Return the request of the options, with the flags of switches in addition."""
    flags = shlex.join(flag for switch in switches for flag in switch.flags)
    request = build_request(replace(options, extra=f"{options.extra or ''} {flags}"))
    allowed = [switch.expert_options for switch in switches]
    return replace(
        request,
        expert_options=ExpertOptions(
            deep_ep=any(choice.deep_ep for choice in allowed),
            overlap=any(choice.overlap for choice in allowed),
        ),
    )


def _measure_gain(
    switch: Switch, without: Candidate, with_switch: Candidate, capacity: int
) -> ChosenSwitch:
    """Return what a switch saves, from a candidate without and with the switch.

    `capacity` is the most bytes per rank of a recommended plan.
    """
    closed_without, closed_with = _estimate_closed_form(without), _estimate_closed_form(with_switch)
    saved_bytes = closed_without.needed - closed_with.needed
    is_needed = with_switch.is_recommended and not without.is_recommended
    if is_needed and supports_replay(without.spec) != supports_replay(with_switch.spec):
        # The replay counts the allocator's gaps in only one of the two memories. So the switch is needed only if the
        # closed form without it exceeds the limit, or if the replay without it fits after its saved bytes are
        # subtracted.
        is_needed = (
            closed_without.total > capacity or without.memory.total - saved_bytes <= capacity
        )
    return ChosenSwitch(
        switch.name,
        _all_flags(switch),
        saves=1 - with_switch.seconds.total / without.seconds.total,
        saved_bytes=saved_bytes,
        is_needed=is_needed,
    )


def _estimate_closed_form(candidate: Candidate) -> PredictedMemory:
    """Return the memory that a candidate needs by the closed form.

    The replay knows few switches. A difference between a replay and a closed form would count the allocator's gaps as
    saved by a switch.
    """
    return find_peak_rank(candidate.spec)[1]
