"""Arguments of commands from variables of make."""

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
    """Return the arguments of `make TARGET VARIABLES`."""
    command = command_named(target)
    return parse_make_variables(target, command, variables)


def command_named(target: str) -> Command:
    """Return the command of a target. `bench NAME=soak` is a separate command."""
    name, _, bench = target.partition(" NAME=")
    command = find_bench(bench) if name == "bench" else find_command(name.partition(" ")[0])
    assert command is not None
    return command


def run(target: str, variables: Mapping[str, str] = {}) -> int:
    """Run `make TARGET VARIABLES` and return its exit code. Refusals are raised."""
    command = command_named(target)
    return call_handler(command, target, parse_make_variables(target, command, variables))


def asked_of_plan(arguments: Sequence[str]) -> PlanOptions:
    """Return the options of `python -m parakit plan ARGUMENTS`."""
    command = find_command("plan")
    assert command is not None
    return plan_options(parse_arguments(command, arguments, "plan"))


def read_of(known: Iterable[Setting], variables: Mapping[str, str]) -> Namespace:
    """Return the parsed values of settings."""
    return Namespace(**parse_settings(known, variables), texts=dict(variables))


def swept(variables: Mapping[str, str], options: Options = NO_OPTIONS) -> Experiment:
    """Return the experiment of `make sweep VARIABLES` with further options."""
    axes = {name: text for name, text in variables.items() if name in AXES}
    return load_sweep(variables.get("NAME", SWEEP), options, axes)
