"""The program `parakit`: run a command of this installation or of a clone of the repository.

Commands that read and predict run from any folder. Commands that train run in a clone: their options become make
variables of the same name, and the clone's environment runs them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
import tomllib
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from parakit.cli.commands import BENCH, COMMANDS, INTERNAL, Command
from parakit.cli.dispatch import REFUSED, run_command, run_target
from parakit.cli.options import (
    build_parser,
    find_bench,
    find_command,
    option_name,
    refuse_removed,
    rewrite_as_options,
    rewrite_as_variables,
)
from parakit.config.files import ROOT
from parakit.config.settings import SETTINGS

EXTRAS = {"matplotlib": "charts", "torch": "train", "megatron": "train", "mcp": "mcp"}
"""The extra of the wheel that installs a package, by package. Other optional packages are in `data`."""

FAMILIES = {
    "plan": ("validate", "dryrun", "schedules"),
    "report": ("scrape", "explain", "trace", "build"),
}
"""Commands that can also follow another command, such as `parakit report scrape`, by that command."""

_EXAMPLES = {
    "train": "tp2-gpt2-tiny-2cpu",
    "train-auto": "gpt2-tiny-2cpu",
    "trace": "tp2-gpt2-tiny-2cpu",
    "verify": "sp2-gpt2-tiny-2cpu",
}
"""An example of a target, by the command that needs the name of one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Without options, the values come from the environment's variables, which make and the launch scripts set.

    Args:
        arguments: The command line after the program's name; None for that of this process.

    Returns:
        The exit code of the command; 2 if the command line was refused.
    """
    argv = list(sys.argv[1:] if arguments is None else arguments)
    if "_ARGCOMPLETE" in os.environ:
        _print_completions()
    if not argv or argv[0] in ("-h", "--help", "--version"):
        _build_overview().parse_args(argv or ["--help"])
    try:
        return _run(*_split_command_line(argv))
    except ValueError as error:
        print(error, file=sys.stderr)
        return REFUSED


def find_clone(folder: Path) -> Path | None:
    """Return the nearest clone of the repository at or above a folder, or None outside of a clone."""
    for parent in (folder, *folder.parents):
        if (parent / "Makefile").is_file() and (parent / "src/parakit/__main__.py").is_file():
            return parent
    return None


def _split_command_line(argv: list[str]) -> tuple[str, list[str]]:
    """Return the command's name and its arguments.

    `train tp2-x-2cpu` gives the name `train-tp2-x-2cpu`. `report scrape` gives the name `report` and the argument
    --scrape.

    Raises:
        ValueError: The command needs the name of a target and has none.
    """
    name, *arguments = argv
    if arguments and arguments[0] in FAMILIES.get(name, ()):
        return _split_family_member(arguments[0], arguments[1:])
    if name in FAMILIES and arguments[:1] == ["advise"]:
        name = "advise"  # An old command, which is refused by this name.
    has_targets = any(command.name == f"{name}-*" for command in COMMANDS)
    if not has_targets or find_command(name) is not None:
        return name, arguments
    if not arguments:
        called = f"make {name}-" if "MAKELEVEL" in os.environ else f"parakit {name} "
        raise ValueError(f"Name a target, for example: {called}{_EXAMPLES[name]}")
    if arguments[0].startswith("-"):
        return name, arguments
    return f"{name}-{arguments[0]}", arguments[1:]


def _split_family_member(member: str, arguments: list[str]) -> tuple[str, list[str]]:
    """Return the command's name and its arguments for a command of FAMILIES, such as `scrape` in `report scrape`."""
    if member == "scrape":
        return "report", ["--scrape", *arguments]
    if member == "build":
        return "report", arguments
    return member, arguments


def _run(name: str, arguments: list[str]) -> int:
    """Run a command, or print its help; return its exit code.

    Raises:
        ValueError: The command line is refused.
    """
    refuse_removed(name, "make" if "MAKELEVEL" in os.environ else "parakit")
    command = _find_command_or_bench(name, arguments)
    if arguments and arguments[0] in ("-h", "--help"):
        documented = command or _find_example_command(name)
        if documented is not None:
            return _print_help(name, documented)
    if command is None or command in INTERNAL:
        speaks_options = command is None and not _uses_make_variables()
        return run_target(name, arguments, speaks_options=speaks_options)
    if command.packages is None:
        return _run_in_clone(name, command, arguments)
    if _is_outside_of_wheel(command) and find_clone(ROOT) is None:
        return _start_in_clone(name, arguments, "uses the clone's own tools")
    return _run_anywhere(name, command, arguments)


def _find_command_or_bench(name: str, arguments: list[str]) -> Command | None:
    """Return the command of a name, or the bench that its first argument names; None for an unknown name.

    Raises:
        ValueError: There is no bench of this name.
    """
    command = find_command(name)
    if command is BENCH and arguments and not arguments[0].startswith("-"):
        return find_bench(arguments[0].removeprefix("NAME="))
    return command


def _find_example_command(name: str) -> Command | None:
    """Return the command that a name such as `train` becomes with the name of a target; None for other names."""
    if name not in _EXAMPLES:
        return None
    return find_command(f"{name}-{_EXAMPLES[name]}")


def _run_anywhere(name: str, command: Command, arguments: list[str]) -> int:
    """Run a command that needs no clone.

    Raises:
        ValueError: A package that the command imports is not installed; the sentence names the extra to install.
    """
    try:
        for package in command.packages or ():
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(name=package)
        if not arguments and _has_make_variables(command):
            return run_target(name)
        return run_command(name, arguments, f"parakit {name}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("parakit", "megatron_patches", "examples", ""):
            raise
        raise ValueError(
            f"'parakit {name}' needs {missing}, which is not installed: "
            f"pip install 'parakit[{EXTRAS.get(missing, 'data')}]', or use a clone and make."
        ) from None


def _has_make_variables(command: Command) -> bool:
    """Return True if make started this process, or if the environment has a variable of the command."""
    return "MAKELEVEL" in os.environ or any(
        os.environ.get(setting.name) for setting in command.variables
    )


def _uses_make_variables() -> bool:
    """Return True if make started this process, or if the environment has any variable of make."""
    return "MAKELEVEL" in os.environ or any(os.environ.get(setting.name) for setting in SETTINGS)


def _run_in_clone(name: str, command: Command, arguments: list[str]) -> int:
    """Run a command that needs a clone.

    The command runs in this process if this program belongs to the clone. Its options then become environment
    variables. Otherwise the clone's own program replaces this process.
    """
    speaks_options = not _uses_make_variables()
    variables = _parse_assignments(rewrite_as_variables(arguments, command))
    clone = find_clone(Path.cwd())
    if find_clone(ROOT) is None or (clone is not None and clone != ROOT):
        return _start_in_clone(name, arguments, "trains or looks at runs")
    os.environ.update(variables)
    os.chdir(ROOT)  # make does so too: runs, data and reports are in folders of the clone.
    return run_target(name, written=tuple(variables), speaks_options=speaks_options)


def _is_outside_of_wheel(command: Command) -> bool:
    """Return True if a command's code is not in the package: it is in `tools/` or in `examples/`."""
    return not command.handler.startswith("parakit.")


def _start_in_clone(name: str, arguments: Sequence[str], reason: str) -> int:
    """Replace this process by the program of the clone around the current folder, which runs the command.

    Args:
        name: The command.
        arguments: Its arguments.
        reason: Why the command needs a clone, as a clause for the refusal.

    Raises:
        ValueError: The current folder is in no clone.
    """
    clone = find_clone(Path.cwd())
    if clone is None:
        raise ValueError(
            f"'parakit {name}' {reason}, which takes a clone of the kit, and {Path.cwd()} is in none; "
            "change into a clone, or use plan, report or another command of 'parakit --help'."
        )
    return _exec_in_clone(clone, name, arguments)


def _parse_assignments(arguments: Sequence[str]) -> dict[str, str]:
    """Return NAME=VALUE arguments as a dictionary.

    Raises:
        ValueError: An argument is not NAME=VALUE.
    """
    for argument in arguments:
        if "=" not in argument or argument.startswith("-"):
            raise ValueError(f"'{argument}' is no option; see --help.")
    return dict(argument.split("=", 1) for argument in arguments)


def _exec_in_clone(clone: Path, name: str, arguments: Sequence[str]) -> int:
    """Set up a clone's environment if needed, and replace this process by the clone's program."""
    script = 'tools/setup.sh && exec .venv/bin/python -m parakit "$@"'
    os.chdir(clone)
    sys.stdout.flush()
    os.execvp("bash", ("bash", "-c", script, "parakit", name, *arguments))


def _print_help(name: str, command: Command) -> int:
    """Print the help of a command, and return 0."""
    if command.packages is not None:
        return run_command(name, ["--help"], f"parakit {name}")
    _build_overview().parse_args([command.name.removesuffix("-*"), "--help"])
    return 0


def _build_overview() -> ArgumentParser:
    """Return the parser of the program itself, with one subcommand per public command."""
    parser = ArgumentParser(
        prog="parakit",
        description="Plan, train, measure and verify ways to split a model over devices.",
        epilog="'parakit COMMAND --help' lists a command's options. Tab completion: "
        'eval "$(register-python-argcomplete parakit)".',
    )
    parser.add_argument("--version", action="version", version=f"parakit {_version()}")
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        if command.packages is not None:
            subparsers.add_parser(command.name, help=rewrite_as_options(command.help, command))
    for command in COMMANDS:
        if command.packages is None and command not in INTERNAL and command.handler:
            _add_clone_command(subparsers, command)
    return parser


def _add_clone_command(subparsers: Any, command: Command) -> None:
    """Add a command that needs a clone, with the options of its variables in the help text."""
    name = command.name.removesuffix("-*")
    option_lines = (
        f"  {option_name(setting):<18}  {rewrite_as_options(setting.meaning, command)}"
        for setting in command.variables
    )
    parser = subparsers.add_parser(
        name,
        help=f"{rewrite_as_options(command.help, command)} (in a clone)",
        epilog="\n".join(("variables of the run, as options:", *option_lines)),
        formatter_class=RawDescriptionHelpFormatter,
    )
    if command.name.endswith("-*"):
        parser.add_argument("name", help=f"such as {_EXAMPLES[name]}")
    parser.add_argument(
        "options", nargs="*", metavar="--OPTION VALUE", help="or NAME=VALUE, as for make"
    )


def _version() -> str:
    """Return the version of the clone, else of the installed wheel."""
    project = ROOT / "pyproject.toml"
    if project.is_file():
        return str(tomllib.loads(project.read_text())["project"]["version"])
    return importlib.metadata.version("parakit")


def _print_completions() -> None:
    """Print completions for the shell's Tab key, and end the process.

    Once the name of a command is complete, the command's options are completed. Options of a command that needs a
    clone are not completed.
    """
    import argcomplete

    line = os.environ["COMP_LINE"]
    typed = line.split(" ")
    command = None
    if len(typed) > 2:  # The program, the complete name of a command, and what is being typed.
        command = find_command(typed[1])
    if command is None or command.packages is None:
        argcomplete.autocomplete(_build_overview())
        return
    # The parser of the command must not see the command's name.
    line_without_name = " ".join((typed[0], *typed[2:]))
    removed_characters = len(line) - len(line_without_name)
    cursor = int(os.environ["COMP_POINT"]) - removed_characters
    os.environ["COMP_LINE"], os.environ["COMP_POINT"] = line_without_name, str(cursor)
    argcomplete.autocomplete(build_parser(command, typed[1]))
