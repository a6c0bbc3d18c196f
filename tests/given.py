"""What a command is given, from variables as make has them."""

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence

from parakit.cli.commands import Command
from parakit.cli.dispatch import call_handler
from parakit.cli.options import find_bench, find_command, parse_arguments, parse_make_variables
from parakit.config.setting import parse_settings
from parakit.config.settings import Setting
from parakit.experiments.definition import SWEEP, Experiment
from parakit.experiments.load import AXES, load_sweep
from parakit.launch.options import NO_OPTIONS, Options
from parakit.planner.options import PlanOptions, plan_options


def given(target: str, variables: Mapping[str, str] = {}) -> Namespace:
    """To `make TARGET VARIABLES`."""
    command = command_named(target)
    return parse_make_variables(target, command, variables)


def command_named(target: str) -> Command:
    """Return the command of a target and its variables; `bench NAME=soak` is one of its own."""
    name, _, bench = target.partition(" NAME=")
    command = find_bench(bench) if name == "bench" else find_command(name.partition(" ")[0])
    assert command is not None
    return command


def run(target: str, variables: Mapping[str, str] = {}) -> int:
    """`make TARGET VARIABLES`, whose refusals are raised."""
    command = command_named(target)
    return call_handler(command, target, parse_make_variables(target, command, variables))


def asked_of_plan(words: Sequence[str]) -> PlanOptions:
    """What `python -m parakit plan WORDS` is asked for."""
    command = find_command("plan")
    assert command is not None
    return plan_options(parse_arguments(command, words, "plan"))


def read_of(known: Iterable[Setting], variables: Mapping[str, str]) -> Namespace:
    """The values of some variables."""
    return Namespace(**parse_settings(known, variables), texts=dict(variables))


def swept(variables: Mapping[str, str], options: Options = NO_OPTIONS) -> Experiment:
    """What `make sweep VARIABLES` trains under further options."""
    axes = {name: text for name, text in variables.items() if name in AXES}
    return load_sweep(variables.get("NAME", SWEEP), options, axes)
