"""`parakit`: the kit's one command, from a wheel or a clone.

A wheel holds the kit in its folder `parakit/kit`, which is put before everything else that Python
imports, because `tools` is too common a name to install. What reads and predicts runs from any folder;
what trains runs in a clone, through the clone's own Makefile, which sets up what it needs.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

REFUSED = 2


@dataclass(frozen=True)
class Command:
    """A command that needs no clone: the module whose `main` and `command_line` it is."""

    module: str
    words: tuple[str, ...]
    help: str
    needs: tuple[str, ...] = ()
    """Packages beyond the wheel's base without which it cannot begin."""


EXTRAS = {"matplotlib": "charts", "torch": "train", "megatron": "train"}
"""The wheel's extra that brings a package; every other optional one is in `data`."""


TOOLS = {
    "plan": Command("tools.plan.__main__", (), "every layout of a model on devices, ranked"),
    "advise": Command(
        "tools.plan.advise.command", (), "what to use, what second, what to avoid, and why"
    ),
    "schedules": Command("tools.plan.schedules.command", (), "pipeline schedules and bubbles"),
    "dryrun": Command(
        "tools.plan.dryrun.command", (), "Megatron's iteration, no devices", ("torch", "megatron")
    ),
    "report": Command("tools.report.cli", ("build",), "a report of runs or of anybody's logs"),
    "scrape": Command("tools.report.cli", ("scrape",), "what logs say, as text or JSON"),
    "explain": Command("tools.report.cli", ("explain",), "what a strategy costs, from its ledgers"),
    "audit": Command("examples.studies.audit", (), "what a table of figures contradicts in itself"),
    "validate": Command("tools.plan.readings.command", (), "public readings, predicted and missed"),
    "prepare": Command("tools.preprocess.cli", (), "text to Megatron's .bin/.idx", ("gigatoken",)),
}
TARGETS = {
    "train": ("train-{}", "train a strategy, such as tp2-gpt2-tiny-2cpu"),
    "verify": ("verify-{}", "the first wrong tensor of a strategy, such as sp2-gpt2-tiny-2cpu"),
    "make": ("{}", "any target of the Makefile, such as compare-zero"),
    "demo": ("demo", "six strategies on CPU ranks, and a report"),
    "parity": ("parity", "the demo as a check of the losses"),
    "status": ("status", "runs of the clone: queued, running, ended"),
    "doctor": ("doctor", "what this machine can do, and fixes"),
}
"""Commands that need a clone: the make target of each, with room for the first word."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is the command's own, 2 if it was refused."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    _import_the_kit()
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    name, rest = (words[0], words[1:]) if words else ("--help", [])
    if name in TOOLS:
        return _run(name, TOOLS[name], rest)
    if name in TARGETS and rest[:1] not in (["-h"], ["--help"]):
        return _make(name, rest)
    _overview().parse_args(words or ["--help"])
    return 0


def kit_folder() -> Path:
    """Where `tools`, `megatron_patches` and `examples` are: in the wheel, or the clone of this file."""
    here = Path(__file__).resolve()
    wheel = here.with_name("kit")
    return wheel if wheel.is_dir() else here.parents[1]


def clone_around(folder: Path) -> Path | None:
    """The nearest clone at or above a folder; None outside of one."""
    for place in (folder, *folder.parents):
        if (place / "Makefile").is_file() and (place / "tools/launch/__main__.py").is_file():
            return place
    return None


def _import_the_kit() -> None:
    folder = str(kit_folder())
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)


def _run(name: str, tool: Command, words: list[str]) -> int:
    from tools.spec import variables

    os.environ[variables.COMMAND] = f"parakit {name}"
    try:
        for package in tool.needs:
            if importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(name=package)
        main_of = importlib.import_module(tool.module).main
        code: int = main_of([*tool.words, *words])
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("tools", "megatron_patches", "examples", ""):
            raise
        print(
            f"'parakit {name}' needs {package}, which is not installed: "
            f"pip install 'parakit[{EXTRAS.get(package, 'data')}]', or use a clone and make.",
            file=sys.stderr,
        )
        return REFUSED
    return code


def _make(name: str, words: list[str]) -> int:
    clone = clone_around(Path.cwd())
    if clone is None:
        print(
            f"'parakit {name}' trains or looks at runs, which takes a clone of the kit, and "
            f"{Path.cwd()} is in none: change into one, or use plan, report and the others of "
            "'parakit --help'.",
            file=sys.stderr,
        )
        return REFUSED
    pattern = TARGETS[name][0]
    if "{}" in pattern:
        if not words:
            print(f"Say what: parakit {name} {TARGETS[name][1].split()[-1]}", file=sys.stderr)
            return REFUSED
        pattern, words = pattern.format(words[0]), words[1:]
    command = ("make", "--no-print-directory", "-C", str(clone), pattern, *words)
    sys.stdout.flush()
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        print("There is no make on PATH; install GNU make.", file=sys.stderr)
        return REFUSED


def _overview() -> ArgumentParser:
    parser = ArgumentParser(
        prog="parakit",
        description="What each way of splitting a model costs: plan, read logs, train, verify.",
        epilog="'parakit COMMAND --help' lists a command's options. Tab completion: "
        'eval "$(register-python-argcomplete parakit)".',
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, tool in TOOLS.items():
        commands.add_parser(name, help=tool.help)
    for name, (target, help_) in TARGETS.items():
        made = commands.add_parser(
            name,
            help=f"{help_} (in a clone)",
            description=help_,
            epilog=_variables(target),
            formatter_class=RawDescriptionHelpFormatter,
        )
        if "{}" in target:
            made.add_argument("name", help="as in the example")
        made.add_argument("variables", nargs="*", metavar="NAME=VALUE", help="variables of make")
    return parser


def _variables(target: str) -> str:
    """What a make target takes, a line each."""
    from tools.spec.settings import SETTINGS

    name = target.format("tp2-gpt2-tiny-2cpu")
    used = [f"  {each.name:<15}  {each.help}" for each in SETTINGS if each.used_by(name)]
    return "\n".join(("variables:", *used)) if used else "'make help-all' lists their variables."


def _complete() -> None:
    """Answer the shell's Tab: with a tool's own command line once its name is complete."""
    import argcomplete

    line = os.environ["COMP_LINE"]
    typed = line.split(" ")
    tool = TOOLS.get(typed[1]) if len(typed) > 2 else None
    if tool is None:
        argcomplete.autocomplete(_overview())
        return
    changed = " ".join((typed[0], *tool.words, *typed[2:]))
    os.environ["COMP_LINE"] = changed
    os.environ["COMP_POINT"] = str(int(os.environ["COMP_POINT"]) + len(changed) - len(line))
    argcomplete.autocomplete(importlib.import_module(tool.module).command_line())


if __name__ == "__main__":
    sys.exit(main())
