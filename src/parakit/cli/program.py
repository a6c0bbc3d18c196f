"""The program `parakit`: a command line to its command, on this machine, in a clone or from a wheel.

Commands that read and predict run from any folder. Commands that train run in a clone of the repository:
their options become the variables of the same name, and the clone's own environment runs them.
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

EXTRAS = {"matplotlib": "charts", "torch": "train", "megatron": "train"}
"""The extra of the wheel that installs a package; every other optional package is in `data`."""

FAMILIES = {
    "plan": ("validate", "dryrun", "schedules"),
    "report": ("scrape", "explain", "trace", "build"),
}
"""Commands that are also written behind another one, such as `parakit report scrape`."""

_EXAMPLES = {
    "train": "tp2-gpt2-tiny-2cpu",
    "train-auto": "gpt2-tiny-2cpu",
    "trace": "tp2-gpt2-tiny-2cpu",
    "verify": "sp2-gpt2-tiny-2cpu",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Without options, the values come from the environment's variables, as make and the launch scripts set
    them.

    Args:
        arguments: The command line behind the program's name; None is that of this process.

    Returns:
        The exit code of the command; 2 if the command line was refused.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    if not words or words[0] in ("-h", "--help", "--version"):
        _overview().parse_args(words or ["--help"])
    try:
        return _run(*_command_line(words))
    except ValueError as error:
        print(error, file=sys.stderr)
        return REFUSED


def find_clone(folder: Path) -> Path | None:
    """Return the nearest clone of the repository at or above a folder, or None outside of a clone."""
    for parent in (folder, *folder.parents):
        if (parent / "Makefile").is_file() and (parent / "src/parakit/__main__.py").is_file():
            return parent
    return None


def _command_line(words: list[str]) -> tuple[str, list[str]]:
    """Return the command's name and its arguments: `train tp2-x-2cpu` is the name `train-tp2-x-2cpu`.

    Raises:
        ValueError: The command needs the name of a target and has none.
    """
    name, arguments = words[0], words[1:]
    if arguments and arguments[0] in FAMILIES.get(name, ()):
        name, arguments = arguments[0], arguments[1:]
        if name == "scrape":
            return "report", ["--scrape", *arguments]
        return ("report" if name == "build" else name), arguments
    if name in FAMILIES and arguments[:1] == ["advise"]:
        name = arguments[0]
    if f"{name}-*" in {command.name for command in COMMANDS} and find_command(name) is None:
        if not arguments:
            raise ValueError(f"Name what, for example: parakit {name} {_EXAMPLES[name]}")
        if not arguments[0].startswith("-"):
            return f"{name}-{arguments[0]}", arguments[1:]
    return name, arguments


def _run(name: str, arguments: list[str]) -> int:
    refuse_removed(name, "make" if "MAKELEVEL" in os.environ else "parakit")
    command = find_command(name)
    if command is BENCH and arguments and not arguments[0].startswith("-"):
        command = find_bench(arguments[0].removeprefix("NAME="))
    pattern = find_command(f"{name}-{_EXAMPLES[name]}") if name in _EXAMPLES else None
    if arguments and arguments[0] in ("-h", "--help") and (command or pattern):
        return _help(name, command or pattern)
    if command is None or command in INTERNAL:
        return run_target(name, arguments)
    if command.packages is not None:
        if _is_outside_of_wheel(command) and find_clone(ROOT) is None:
            return _start_in_clone(name, arguments, "uses the clone's own tools")
        return _run_anywhere(name, command, arguments)
    return _run_in_clone(name, command, arguments)


def _run_anywhere(name: str, command: Command, arguments: list[str]) -> int:
    """Run a command that needs no clone, if the packages that it imports are installed."""
    try:
        for package in command.packages or ():
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(name=package)
        if not arguments and _variables_are_set(command):
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


def _variables_are_set(command: Command) -> bool:
    """Return True if make runs this process, or if the environment has a variable of the command."""
    return "MAKELEVEL" in os.environ or any(
        os.environ.get(setting.name) for setting in command.variables
    )


def _run_in_clone(name: str, command: Command, arguments: list[str]) -> int:
    """Run a command of a clone: here if this is the clone's own program, else by the clone's program."""
    variables = _variables(rewrite_as_variables(arguments, command))
    clone = find_clone(Path.cwd())
    if find_clone(ROOT) is None or (clone is not None and clone != ROOT):
        return _start_in_clone(name, arguments, "trains or looks at runs")
    os.environ.update(variables)
    os.chdir(ROOT)  # As make does: runs, data and reports lie in folders of the clone.
    return run_target(name, given=tuple(variables))


def _is_outside_of_wheel(command: Command) -> bool:
    """Return True if a command's code lies beside the package: in `tools/` or in `examples/`."""
    return not command.handler.startswith("parakit.")


def _start_in_clone(name: str, arguments: Sequence[str], reason: str) -> int:
    """Start a command by the program of the clone around this folder.

    Raises:
        ValueError: This folder is in no clone.
    """
    clone = find_clone(Path.cwd())
    if clone is None:
        raise ValueError(
            f"'parakit {name}' {reason}, which takes a clone of the kit, and "
            f"{Path.cwd()} is in none: change into one, or use plan, report and the others of "
            "'parakit --help'."
        )
    return _start_program_of(clone, name, arguments)


def _variables(words: Sequence[str]) -> dict[str, str]:
    """Return NAME=VALUE words as a dictionary.

    Raises:
        ValueError: A word is neither an option nor NAME=VALUE.
    """
    for word in words:
        if "=" not in word or word.startswith("-"):
            raise ValueError(f"'{word}' is no option; see --help.")
    return dict(word.split("=", 1) for word in words)


def _start_program_of(clone: Path, name: str, arguments: Sequence[str]) -> int:
    """Replace this process by another clone's own program, whose environment is set up first."""
    script = 'tools/setup.sh && exec .venv/bin/python -m parakit "$@"'
    os.chdir(clone)
    sys.stdout.flush()
    os.execvp("bash", ("bash", "-c", script, "parakit", name, *arguments))


def _help(name: str, command: Command | None) -> int:
    assert command is not None
    if command.packages is not None:
        return run_command(name, ["--help"], f"parakit {name}")
    _overview().parse_args([command.name.removesuffix("-*"), "--help"])
    return 0


def _overview() -> ArgumentParser:
    parser = ArgumentParser(
        prog="parakit",
        description="What each way of splitting a model costs: plan, read logs, train, verify.",
        epilog="'parakit COMMAND --help' lists a command's options. Tab completion: "
        'eval "$(register-python-argcomplete parakit)".',
    )
    parser.add_argument("--version", action="version", version=f"parakit {_version()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        if command.packages is not None:
            commands.add_parser(command.name, help=rewrite_as_options(command.help, command))
    for command in COMMANDS:
        if command.packages is not None or command in INTERNAL or not command.handler:
            continue
        name = command.name.removesuffix("-*")
        lines = (
            f"  {option_name(setting):<18}  {rewrite_as_options(setting.help, command)}"
            for setting in command.variables
        )
        made = commands.add_parser(
            name,
            help=f"{rewrite_as_options(command.help, command)} (in a clone)",
            epilog="\n".join(("of the run:", *lines)),
            formatter_class=RawDescriptionHelpFormatter,
        )
        if command.name.endswith("-*"):
            made.add_argument("name", help=f"such as {_EXAMPLES[name]}")
        made.add_argument(
            "options", nargs="*", metavar="--OPTION VALUE", help="or NAME=VALUE, as for make"
        )
    return parser


def _version() -> str:
    project = ROOT / "pyproject.toml"
    if project.is_file():
        return str(tomllib.loads(project.read_text())["project"]["version"])
    return importlib.metadata.version("parakit")


def _complete() -> None:
    """Answer the shell's Tab: with a command's own options once its name is complete."""
    import argcomplete

    line = os.environ["COMP_LINE"]
    typed = line.split(" ")
    command = find_command(typed[1]) if len(typed) > 2 else None
    if command is None or command.packages is None:
        argcomplete.autocomplete(_overview())
        return
    changed = " ".join((typed[0], *typed[2:]))
    os.environ["COMP_LINE"] = changed
    os.environ["COMP_POINT"] = str(int(os.environ["COMP_POINT"]) + len(changed) - len(line))
    argcomplete.autocomplete(build_parser(command, typed[1]))
