"""Run a command by its name: parse its values, call its handler, and print a refusal.

The values come from the environment's variables (`run_target`) or from options (`run_command`).
"""

from __future__ import annotations

import difflib
import inspect
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from parakit.cli.commands import BENCH, BENCH_NAME, COMMANDS, Command
from parakit.cli.options import (
    find_bench,
    find_command,
    import_function,
    parse_arguments,
    parse_make_variables,
    refuse_removed,
    refuse_strange_target_name,
    rewrite_for_parakit,
)
from parakit.cluster import image_tag
from parakit.config.setting import SettingError
from parakit.config.settings import ARGS
from parakit.formatting.caller import spelled_for_caller
from parakit.formatting.console import CallerConsole
from parakit.formatting.terminal import say

REFUSED, INTERRUPTED = 2, 130
"""Exit codes of a refused and of an interrupted command."""


def run_target(
    name: str,
    arguments: Sequence[str] = (),
    written: Sequence[str] = (),
    *,
    speaks_options: bool = False,
) -> int:
    """Run a target with the variables of this process's environment, and return its exit code.

    Args:
        name: The target.
        arguments: Further arguments of a launch script.
        written: Names of variables that the user wrote on the command line. The target is refused if it does
            not use one of them.
        speaks_options: If True, a refusal names commands and options of `parakit` instead of make's variables.

    Returns:
        The handler's exit code; 2 if the target was refused, 130 if it was interrupted.
    """
    from parakit.launch import Interrupted, interruptible

    def rewrite_refusal(text: str) -> str:
        return rewrite_for_parakit(text, find_command(name)) if speaks_options else text

    try:
        with interruptible():
            return _run_for_caller(lambda: _run_target(name, arguments, written), rewrite_refusal)
    except Interrupted:
        print("Interrupted; all ranks have ended.")
        return INTERRUPTED


def _run_target(name: str, arguments: Sequence[str], written: Sequence[str]) -> int:
    """Run a target as `run_target` does.

    Raises:
        ValueError: The target does not exist, or is refused.
    """
    from parakit.launch import parse_target

    refuse_strange_target_name(name)
    refuse_removed(name, "make")
    environment = dict(os.environ)
    # Programs that the handler starts must not take ARGS= for their own.
    os.environ.pop(ARGS.name, None)
    command, title = find_command(name), name
    bench_name = environment.get(BENCH_NAME.name, "")
    if command is BENCH and bench_name:
        command = find_bench(bench_name)
        title = command.name
    if command is None or not command.handler:
        _refuse_misspelt(name)
        parse_target(name)  # This refuses the name and suggests others.
        raise AssertionError(name)
    values = parse_make_variables(title, command, environment, arguments, written)
    return call_handler(command, title, values)


def run_command(name: str, arguments: Sequence[str], program: str) -> int:
    """Run a command with the options of a command line, and return its exit code.

    Args:
        name: The command.
        arguments: Its options and arguments.
        program: The program and the command as the user wrote them, for messages.

    Returns:
        The handler's exit code; 2 if the command was refused.
    """
    command = next(command for command in COMMANDS if command.name == name)
    is_parakit = program.startswith("parakit")
    return _run_for_caller(
        lambda: call_handler(command, name, parse_arguments(command, arguments, program)),
        (lambda text: rewrite_for_parakit(text, command)) if is_parakit else str,
    )


def _refuse_misspelt(name: str) -> None:
    """Refuse a name that is similar to the name of a command.

    A name that is similar to train-… is not refused here.

    Raises:
        SettingError: There is such a command; the sentence suggests it.
    """
    suffix = name.partition("-")[2]
    known = [command.name.replace("*", suffix) for command in COMMANDS]
    known += ["help", "help-all"]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if near and not near[0].startswith("train-"):
        raise SettingError(
            f"There is no target '{name}'; did you mean '{near[0]}'? 'make help-all' lists them."
        )


def _run_for_caller(run: Callable[[], int], rewrite: Callable[[str], str]) -> int:
    """Return what a function returns; if it raises a ValueError, print the sentence to stderr and return 2.

    `rewrite` changes this sentence, and what the function prints, to the form in which the user called the command.
    """
    try:
        with spelled_for_caller(rewrite):
            return run()
    except ValueError as error:
        say(Console(stderr=True, markup=False), rewrite(str(error)), "red")
        return REFUSED


def call_handler(command: Command, name: str, variables: Namespace) -> int:
    """Call the handler of a command, and return its exit code. A handler that returns None gives exit code 0.

    The name of a handler's parameter decides which value it gets. A parameter may have the name of a variable in
    lower case, or of an entry of the command's `fixed`. It may also be `variables` (all variables), `options` (of a
    launch), `target` (the command's name) or `console`. Parameters with other names keep their defaults.

    Raises:
        SettingError: The command is for the host, and this process runs in the kit's container image.
    """
    if command.on_host and image_tag():
        raise SettingError(
            f"'make {name}' is for the host; the kit's image has what training and reports need alone."
        )
    handler = import_function(command.handler)
    parameters = inspect.signature(handler).parameters
    known: dict[str, Any] = {
        **vars(variables),
        **dict(command.fixed),
        "variables": variables,
        "target": name,
    }
    if "options" in parameters:
        from parakit.launch import options_from_namespace

        known["options"] = options_from_namespace(variables)
    if "console" in parameters:
        # Log lines with square brackets must not be read as markup.
        known["console"] = CallerConsole(markup=False)
    arguments = {parameter: known[parameter] for parameter in parameters if parameter in known}
    code: int | None = handler(**arguments)
    return code or 0
