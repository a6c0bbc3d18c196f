"""`parakit`: the kit's one command, from a wheel or a clone.

A wheel holds the kit in its folder `parakit/kit`, which is put before everything else that Python
imports, because `tools` is too common a name to install. What reads and predicts runs from any folder;
what trains runs in a clone, through the clone's own Makefile, which sets up what it needs.
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

REFUSED = 2

EXTRAS = {"matplotlib": "charts", "torch": "train", "megatron": "train"}
"""The wheel's extra that brings a package; every other optional one is in `data`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is the command's own, 2 if it was refused."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _import_the_kit()
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    from parakit.cli.options import find_command

    name, rest = (words[0], words[1:]) if words else ("--help", [])
    command = find_command(name)
    try:
        if command is not None and command.packages is not None:
            return _run(name, command.packages, rest)
        if name in _clone_commands() and rest[:1] not in (["-h"], ["--help"]):
            return _make(name, rest)
    except ValueError as error:
        print(error, file=sys.stderr)
        return REFUSED
    _overview().parse_args(words or ["--help"])
    return 0


def __getattr__(name: str) -> Any:
    """`from parakit import capture`, without torch where nobody asks for it."""
    if name != "capture":
        raise AttributeError(name)
    _import_the_kit()
    from parakit.capturing.plain import capture

    return capture


def _clone_commands() -> dict[str, str]:
    """Commands that need a clone, by name: the make target of each, with room for the first word."""
    from parakit.cli.commands import COMMANDS, INTERNAL

    targets = {
        one.name.removesuffix("-*"): one.name.replace("*", "{}")
        for one in COMMANDS
        if one.packages is None and one not in INTERNAL
    }
    return {**targets, "make": "{}"}


def kit_folder() -> Path:
    """Where `tools`, `megatron_patches` and `examples` are: in the wheel, or the clone of this file."""
    here = Path(__file__).resolve()
    wheel = here.with_name("kit")
    return wheel if wheel.is_dir() else here.parents[2]


def clone_around(folder: Path) -> Path | None:
    """The nearest clone at or above a folder; None outside of one."""
    for place in (folder, *folder.parents):
        if (place / "Makefile").is_file() and (place / "src/parakit/cli/__main__.py").is_file():
            return place
    return None


def _import_the_kit() -> None:
    folder = str(kit_folder())
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)


def _run(name: str, packages: Sequence[str], words: list[str]) -> int:
    from parakit.cli.main import from_words

    try:
        for package in packages:
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(name=package)
        return from_words(name, words, f"parakit {name}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing in ("tools", "megatron_patches", "examples", ""):
            raise
        raise ValueError(
            f"'parakit {name}' needs {missing}, which is not installed: "
            f"pip install 'parakit[{EXTRAS.get(missing, 'data')}]', or use a clone and make."
        ) from None


def _make(name: str, words: list[str]) -> int:
    clone = clone_around(Path.cwd())
    if clone is None:
        raise ValueError(
            f"'parakit {name}' trains or looks at runs, which takes a clone of the kit, and "
            f"{Path.cwd()} is in none: change into one, or use plan, report and the others of "
            "'parakit --help'."
        )
    pattern = _clone_commands()[name]
    if "{}" in pattern:
        if not words:
            raise ValueError(f"Name what, for example: parakit {name} {_EXAMPLES[name]}")
        pattern, words = pattern.format(words[0]), words[1:]
    from parakit.cli.options import check_target_name, find_command, variable_words

    check_target_name(pattern)
    if (found := find_command(pattern)) is not None:
        words = variable_words(words, found)
    assignments = (
        word.replace("$", "$$") for word in words
    )  # Make would expand a single dollar sign.
    command = ("make", "--no-print-directory", "-C", str(clone), pattern, *assignments)
    sys.stdout.flush()
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        raise ValueError("There is no make on PATH; install GNU make.") from None


_EXAMPLES = {
    "train": "tp2-gpt2-tiny-2cpu",
    "train-auto": "gpt2-tiny-2cpu",
    "trace": "tp2-gpt2-tiny-2cpu",
    "verify": "sp2-gpt2-tiny-2cpu",
    "make": "compare-zero",
}


def _overview() -> ArgumentParser:
    parser = ArgumentParser(
        prog="parakit",
        description="What each way of splitting a model costs: plan, read logs, train, verify.",
        epilog="'parakit COMMAND --help' lists a command's options. Tab completion: "
        'eval "$(register-python-argcomplete parakit)".',
    )
    parser.add_argument("--version", action="version", version=f"parakit {_version()}")
    from parakit.cli.commands import COMMANDS
    from parakit.cli.options import find_command, in_options, option_of

    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for one in COMMANDS:
        if one.packages is not None:
            commands.add_parser(one.name, help=in_options(one.help, one))
    for name, target in _clone_commands().items():
        help_text, epilog = "any target of the Makefile", "'make help-all' lists their variables."
        if found := find_command(target.format("tp2-gpt2-tiny-2cpu")):
            help_text = in_options(found.help, found)
            used = (f"  {option_of(v):<18}  {in_options(v.help, found)}" for v in found.variables)
            epilog = "\n".join(("of the run:", *used))
        made = commands.add_parser(
            name,
            help=f"{help_text} (in a clone)",
            epilog=epilog,
            formatter_class=RawDescriptionHelpFormatter,
        )
        if "{}" in target:
            made.add_argument("name", help=f"such as {_EXAMPLES[name]}")
        made.add_argument(
            "options", nargs="*", metavar="--OPTION VALUE", help="or NAME=VALUE, as for make"
        )
    return parser


def _version() -> str:
    project = kit_folder() / "pyproject.toml"
    if project.is_file():
        return str(tomllib.loads(project.read_text())["project"]["version"])
    return importlib.metadata.version("parakit")


def _complete() -> None:
    """Answer the shell's Tab: with a command's own options once its name is complete."""
    import argcomplete

    from parakit.cli.options import find_command, parser_of

    line = os.environ["COMP_LINE"]
    typed = line.split(" ")
    command = find_command(typed[1]) if len(typed) > 2 else None
    if command is None or command.packages is None:
        argcomplete.autocomplete(_overview())
        return
    changed = " ".join((typed[0], *typed[2:]))
    os.environ["COMP_LINE"] = changed
    os.environ["COMP_POINT"] = str(int(os.environ["COMP_POINT"]) + len(changed) - len(line))
    argcomplete.autocomplete(parser_of(command, typed[1]))


if __name__ == "__main__":
    sys.exit(main())
