"""A command from its name to its exit code: what it is given, what runs it, how it is refused.

Its values come from the environment's variables (`from_make`) or from options (`from_words`).
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
)
from parakit.cluster import image_tag
from parakit.config.setting import SettingError
from parakit.config.settings import ARGS
from parakit.formatting.terminal import say

REFUSED, INTERRUPTED = 2, 130


def run_target(name: str, words: Sequence[str] = (), given: Sequence[str] = ()) -> int:
    """Run a target with the variables of this environment; its exit code, 2 if it was refused.

    Args:
        name: The target.
        words: Further arguments of a launch script.
        given: Names of variables that the user wrote down; one that the target does not use is refused.
    """
    from parakit.launch import Interrupted, interruptible, parse_target

    def run() -> int:
        refuse_strange_target_name(name)
        refuse_removed(name, "make")
        command, title = find_command(name), name
        environment = dict(os.environ)
        # What this command starts has arguments of its own.
        os.environ.pop(ARGS.name, None)
        if command is BENCH and (bench := environment.get(BENCH_NAME.name, "")):
            command = find_bench(bench)
            title = command.name
        if command is None or not command.handler:
            _refuse_misspelt(name)
            parse_target(name)  # Refuses it, with the near names.
            raise AssertionError(name)
        return call_handler(
            command, title, parse_make_variables(title, command, environment, words, given)
        )

    try:
        with interruptible():
            return _refused(run)
    except Interrupted:
        print("Interrupted; all ranks have ended.")
        return INTERRUPTED


def run_command(name: str, words: Sequence[str], program: str) -> int:
    """Run a command with the options of a command line; its exit code, 2 if it was refused."""
    command = next(one for one in COMMANDS if one.name == name)
    return _refused(lambda: call_handler(command, name, parse_arguments(command, words, program)))


def _refuse_misspelt(name: str) -> None:
    """Refuse a name that is nearest to one of a command that trains nothing."""
    rest = name.partition("-")[2]
    known = [one.name.replace("*", rest) for one in COMMANDS]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    if near and not near[0].startswith("train-"):
        raise SettingError(
            f"There is no target '{name}'; did you mean '{near[0]}'? 'make help-all' lists them."
        )


def _refused(run: Callable[[], int]) -> int:
    try:
        return run()
    except ValueError as error:
        say(Console(stderr=True, markup=False), str(error), "red")
        return REFUSED


def call_handler(command: Command, name: str, given: Namespace) -> int:
    """The handler, given what its parameters name: variables, `given` (all), `options`, `target`, …

    Raises:
        SettingError: This is the kit's image, which lacks what the command needs.
    """
    if command.on_host and image_tag():
        raise SettingError(
            f"'make {name}' is for the host; the kit's image has what training and reports need alone."
        )
    handler = import_function(command.handler)
    known: dict[str, Any] = {**vars(given), **dict(command.fixed), "given": given, "target": name}
    parameters = inspect.signature(handler).parameters
    if "options" in parameters:
        from parakit.launch import options_from_namespace

        known["options"] = options_from_namespace(given)
    if "console" in parameters:
        known["console"] = Console(markup=False)  # Log lines must not be read as markup.
    code: int | None = handler(**{each: known[each] for each in parameters if each in known})
    return code or 0
