"""The first screen of `make plan`: what to run, how long it takes, how sure that is, why, and what to do next."""

from __future__ import annotations

from typing import TYPE_CHECKING

from parakit.formatting.caller import spell_for_caller
from parakit.formatting.terminal import say
from parakit.formatting.units import joined
from parakit.planner.advice import (
    bottleneck_sentence,
    cost_sentences,
    request_sentence,
    runner_up_sentence,
    tie_sentence,
    use_sentence,
)
from parakit.planner.advise import describe_changes
from parakit.planner.readings.models import unplanned_parts
from parakit.planner.readings.neighbours import Uncertainty
from parakit.planner.request import explain_ignored_flag, list_ignored_flags
from parakit.planner.search import Plan
from parakit.planner.show import missing_file, plan_command
from parakit.planner.training_command import (
    MODEL_FLAGS,
    describe_adapter_run,
    format_short_torchrun_line,
    state_chosen_flags,
)

if TYPE_CHECKING:
    from rich.console import Console

USE, TIME, MEMORY, WHY, AS_GOOD, NEXT, CHANGES, HOW_SURE, RUN = (
    *("Use", "Time", "Memory", "Why", "As good", "Next best", "Changes it", "How sure"),
    "Run it",
)
"""Names of the answers, in the order in which they are shown."""


def answer_plan(plan: Plan, uncertainty: Uncertainty) -> dict[str, str]:
    """Return the answers for a plan that has a winner, by name, in the order in which they are shown.

    The answers that need further searches, and the command, are left out.
    """
    winner = plan.winner
    assert winner is not None
    time, memory = cost_sentences(plan)
    expected = " ".join(filter(None, (uncertainty.missed_side, uncertainty.summary)))
    answers = {
        USE: use_sentence(winner.spec),
        TIME: f"{time} {expected}",
        MEMORY: memory,
        WHY: bottleneck_sentence(plan),
    }
    if plan.tied:
        answers[AS_GOOD] = tie_sentence(plan)
    elif len(plan.ranked) > 1:
        answers[NEXT] = runner_up_sentence(winner, plan.ranked[1])
    if uncertainty.nearest_sentence:
        answers[HOW_SURE] = uncertainty.nearest_sentence
    return answers


def advice_sentences(plan: Plan, uncertainty: Uncertainty) -> list[str]:
    """Return the answers of `answer_plan` as texts without their names, and at the end the text on the job."""
    answers = answer_plan(plan, uncertainty)
    answers[USE] = f"Use {answers[USE]}"
    return [*answers.values(), request_sentence(plan.request)]


def print_screen(
    plan: Plan, uncertainty: Uncertainty, console: Console, further: dict[str, str], command: str
) -> None:
    """Print the first screen for a plan that has a winner.

    Args:
        plan: The plan.
        uncertainty: Winner's time with the error to expect of it.
        console: Where to print.
        further: Further answers by name, such as the days of training.
        command: Text that starts the run in a trainer. If it is empty, the commands of the kit and of torchrun are
            printed.
    """
    from rich.table import Table

    winner = plan.winner
    assert winner is not None
    answers = answer_plan(plan, uncertainty) | further
    answers[CHANGES] = describe_changes(plan, winner)
    uncounted = list_uncounted(plan)
    if uncounted:
        answers["Not counted"] = f"{joined(uncounted)}."
    console.print(request_sentence(plan.request), highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, answer in answers.items():
        table.add_row(name, spell_for_caller(answer))
    console.print(table, highlight=False)
    console.print(f"[bold]{RUN}[/bold]", highlight=False)
    say(console, command or _list_commands(plan))


def list_uncounted(plan: Plan) -> list[str]:
    """Return the parts of the model and the flags that the plan leaves out, each flag with the reason in brackets."""
    flags = list_ignored_flags(plan.request, is_one_strategy=False)
    reasons = [f"{flag} ({explain_ignored_flag(flag)})" for flag in flags]
    return [*unplanned_parts(plan.request.model), *reasons]


def _list_commands(plan: Plan) -> str:
    """Return the lines that start the winner: with the kit if it has the model, and with torchrun on GPUs."""
    winner, request = plan.ranked[0], plan.request
    lines, settings = [], ""
    if winner.spec.lora:
        lines.append(describe_adapter_run(request, winner.spec))
    elif not missing_file(request.model):
        lines.append(f"  {plan_command(request, winner)}")
    if request.cluster.device.key != "cpu" and not winner.spec.lora:
        lines.append(
            f"  {format_short_torchrun_line(state_chosen_flags(request, winner), winner.spec)}"
        )
        settings = (
            f"FOR=megatron writes out {MODEL_FLAGS}. FOR=bridge, FOR=torchtitan and LAUNCHER=slurm print the run "
            "for these programs. "
        )
    lines.append(f"{settings}ALL=1 prints the ranking, the parts of time and memory, and more.")
    return "\n".join(lines)
