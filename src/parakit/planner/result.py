"""The result of a search, with everything that the options ask of its winner: what `plan` prints and returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from parakit.config.flags import Flags
from parakit.config.stages import LAYOUT_FLAG
from parakit.formatting.presented import PresentedTable, flatten
from parakit.planner.advice import no_fit_sentence
from parakit.planner.advise import print_answers
from parakit.planner.alpa import compare_with_alpa
from parakit.planner.dryrun.command import encode_verified, print_verified
from parakit.planner.dryrun.comparison import VerifiedStrategy, dry_run_plan
from parakit.planner.options import PlanOptions, RequestError
from parakit.planner.readings.neighbours import Uncertainty, estimate_uncertainty
from parakit.planner.recipes import DEFAULTS, ChosenSwitch, recipe_sentence, search_recipes
from parakit.planner.request import build_request
from parakit.planner.screen import advice_sentences, print_screen
from parakit.planner.search import (
    Candidate,
    Plan,
    Scaling,
    compare_with_fewest_devices,
    estimate_training_days,
    find_devices_needed,
)
from parakit.planner.show import encode_candidate, encode_plan, print_tables, training_sentence
from parakit.planner.training_command import SLURM, format_training_command, state_chosen_flags

if TYPE_CHECKING:
    from rich.console import Console

_OPTIONS_OF_ONE_STRATEGY = ("micro_batch", "recompute", "what_if")


class NothingFitsError(ValueError):
    """No legal configuration fits the devices; the message says why, and on how many devices one fits."""


@dataclass(frozen=True, repr=False)
class PlanResult(PresentedTable):
    """Plan that has a winner, with the further results for which the options ask."""

    plan: Plan
    recipe: str = ""
    """Name of the recipe that was searched; empty for Megatron's defaults."""
    switches: tuple[ChosenSwitch, ...] = ()
    """Switches of the recipe that the winner uses."""
    training_days: float | None = None
    """Days to train on the tokens that were asked for; None without them."""
    scaling: Scaling | None = None
    """Comparison with the fewest devices that hold the model; None if nobody asked for it."""
    alpa: str = ""
    """The answer of Alpa's algorithm as a sentence; empty if nobody asked for it."""
    verified: tuple[VerifiedStrategy, ...] = ()
    """Dry runs of the first strategies; empty if nobody asked for them."""

    @property
    def winner(self) -> Candidate:
        """Strategy to use, with its prediction."""
        return self.plan.ranked[0]

    @property
    def ranked(self) -> tuple[Candidate, ...]:
        """The fastest strategies that fit: the winner, then the remaining ones by time, at most ten."""
        return self.plan.ranked

    @property
    def tied(self) -> tuple[Candidate, ...]:
        """Strategies whose times are too close to the winner's to tell which one is faster."""
        return self.plan.tied

    @cached_property
    def uncertainty(self) -> Uncertainty:
        """Winner's time with the error to expect of it."""
        request = self.plan.request
        return estimate_uncertainty(self.winner.spec, request.cluster, request.own_runs)

    def show(self, console: Console) -> None:
        """Print the first screen, then Alpa's answer and the dry runs, if asked for."""
        self.show_screen(console)

    def show_screen(self, console: Console, command: str = "") -> None:
        """Print the first screen, then Alpa's answer and the dry runs, if asked for.

        Args:
            console: Where to print.
            command: Text that starts the run in a trainer; empty for the commands of the kit and of torchrun.
        """
        further = {}
        if self.recipe:
            further["Switches"] = recipe_sentence(self.recipe, self.switches)
        if self.training_days is not None:
            devices = self.plan.request.cluster.devices
            further["Training"] = training_sentence(devices, self.training_days, self.scaling)
        print_screen(self.plan, self.uncertainty, console, further, command)
        if self.alpa:
            console.print(self.alpa, highlight=False)
        if self.verified:
            print_verified(list(self.verified), console)

    def show_tables(self, console: Console) -> None:
        """Print the rankings, the winner's components and further answers, which `ALL=1` adds to the first screen."""
        print_tables(self.plan, console)
        print_answers(self.plan, console)

    def format_command(self, trainer: str, launcher: str) -> str:
        """Return the text that starts the winner in a trainer, as `format_training_command` writes it.

        The text is empty if neither a trainer nor a launcher is named.
        """
        if not trainer and launcher != SLURM:
            return ""
        request = state_chosen_flags(self.plan.request, self.winner)
        return format_training_command(request, self.winner.spec, trainer, launcher)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as a dictionary for `parakit plan --json`, in bytes, seconds and tokens per second."""
        advice = advice_sentences(self.plan, self.uncertainty)
        data = encode_plan(self.plan, advice, self.training_days, self.scaling)
        if self.recipe:
            data["recipe"] = [asdict(switch) for switch in self.switches]
        data["uncertainty"] = self.uncertainty.to_dict()
        if self.alpa:
            data["alpa"] = self.alpa
        return data | {"verified": encode_verified(list(self.verified))}

    def to_rows(self) -> Sequence[Mapping[str, Any]]:
        """Return a row per ranked strategy, with the names of `to_dict()["ranked"]`."""
        request = self.plan.request
        return [flatten(encode_candidate(request, candidate)) for candidate in self.ranked]


def plan_strategies(options: PlanOptions) -> PlanResult:
    """Rank every legal strategy for a model on the devices, and return the ranking.

    The result also has what the options ask for: days of training, a comparison with Alpa's method, and dry runs.

    Raises:
        NothingFitsError: No strategy fits these devices.
        RequestError: An option needs STRATEGY=, or options contradict one another.
        ValueError: The model or the hardware is unknown, or `build_request` refuses the options for another reason.
    """
    for name in _OPTIONS_OF_ONE_STRATEGY:
        if getattr(options, name) is not None:
            message = f"{name.upper()}= is of one strategy; name it: STRATEGY=tp8pp16dp8."
            raise RequestError(message)
    request = build_request(options)
    if Flags(request.extra).has(LAYOUT_FLAG):
        raise RequestError(
            f"EXTRA has {LAYOUT_FLAG}, which is of one strategy; name it: STRATEGY=pp16dp8."
        )
    # A picture also shows configurations that are somewhat slower than the ranked ones.
    slack = 1.5 if options.svg else 1.0
    plan, switches = search_recipes(options.recipe or DEFAULTS, options, slack)
    if plan.winner is None:
        raise NothingFitsError(_refusal(plan))
    training_days = scaling = None
    if options.tokens:
        training_days = estimate_training_days(plan, options.tokens)
        scaling = compare_with_fewest_devices(plan)
    alpa = compare_with_alpa(plan) if options.alpa else ""
    verified = tuple(dry_run_plan(plan, options.verify)) if options.verify else ()
    return PlanResult(
        plan,
        recipe=options.recipe or "",
        switches=switches,
        training_days=training_days,
        scaling=scaling,
        alpa=alpa,
        verified=verified,
    )


def _refusal(plan: Plan) -> str:
    """Return sentences with the reason why nothing fits, and the number of devices on which the model would fit.

    The number is left out if no number of devices is enough.
    """
    sentence, cluster = no_fit_sentence(plan), plan.request.cluster
    needed = find_devices_needed(plan.request) if plan.lightest else None
    if needed is None:
        return sentence
    nodes = f" ({-(-needed // cluster.per_node)} nodes of {cluster.per_node})"
    return f"{sentence} It fits on {needed}{nodes if cluster.nodes > 1 else ''}."
