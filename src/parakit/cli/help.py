"""Print `make help` and `make help-all` from the table of commands, with any Python from 3.6 on.

usage: python -m parakit.cli.help [all]
"""

import sys
from itertools import groupby

from parakit.cli.commands import BENCHES, COMMANDS, INTERNAL, SECTIONS, Command
from parakit.config import variable_groups
from parakit.config.settings import SETTINGS

HEADINGS = {
    "ITERS": "what is trained",
    "FEATURES": "the parity matrix",
    "DRY_RUN": "where and how it is trained",
    "SAVE_EVERY": "checkpoints",
    "NNODES": "several machines without Slurm",
    "LAUNCHER": "Slurm",
    "MODELS": "several runs",
    "MODEL": "planning",
    "HF": "weights from and to Hugging Face, recipes",
    "LOGS": "reports and data",
    "ARGS": "further options",
}
"""Headings in the list of variables, by the name of the first variable below each."""


def short_help() -> str:
    """Return the text of `make help`: the most used commands, and the variables that they take most often."""
    usual = (command for command in COMMANDS if command.is_usual)
    lines = [f"  {_target_name(command):<11} {command.help}" for command in usual]
    lines.append("  help-all    list every target and every variable")
    lines.append("Example: make train-tp2-gpt2-tiny-2cpu ITERS=50")
    return "\n".join(lines)


def full_help() -> str:
    """Return the text of `make help-all`: every command, bench and variable."""
    lines = []
    for title, section in SECTIONS.items():
        lines.append(title)
        lines += [f"  {_target_name(command):<27} {command.help}" for command in section]
    lines.append("Benches")
    lines += [f"  {bench.name:<27} {bench.help}" for bench in BENCHES]
    for names, meaning in list_variables():
        lines += ["Variables: " + HEADINGS[name] for name in names if name in HEADINGS]
        lines.append("  {:<15}  {}".format(" ".join(names), meaning))
    return "\n".join(lines)


def _target_name(command: Command) -> str:
    """Return the name of a command as a make target, where `%` stands for any text."""
    return command.name.replace("*", "%")


def list_variables() -> "list[tuple[list[str], str]]":
    """Return the entries of the list of make variables: each the names of variables, and their help text.

    The help text ends with the commands that take the variables, in brackets. Neighbours in SETTINGS with the
    same help text share an entry. A variable whose help text depends on the command has one entry per text.
    Variables that no public command takes are left out.
    """
    commands_by_use = {}  # type: dict[tuple[str, str], list[str]]
    for setting in SETTINGS:
        commands_by_use[setting.name, setting.meaning] = []
    for command in (*COMMANDS, *BENCHES):
        for setting in command.variables:
            # A setting with an equivalent is an option of the program alone, not a make variable.
            if not setting.make_equivalent:
                use = (setting.name, setting.meaning)
                commands_by_use.setdefault(use, []).append(command.name)
    order = [setting.name for setting in SETTINGS]
    uses = []
    for (name, help_text), command_names in commands_by_use.items():
        takers = _summarise_commands(command_names)
        if takers:
            uses.append((name, f"{help_text} [{takers}]"))
    uses.sort(key=lambda use: order.index(use[0]))
    variables = []
    for help_text, equal_uses in groupby(uses, key=lambda use: use[1]):
        variables.append(([name for name, _ in equal_uses], help_text))
    return variables


_GROUPS = (
    (variable_groups.LASTING, "whatever trains"),
    (variable_groups.TRAINING, "whatever trains but bench NAME=soak and compare-pipelines"),
    (variable_groups.ONE_RUN, "whatever trains one run"),
)
"""Groups of variables, and the name of the commands that take all variables of the group."""


def _summarise_commands(names: "list[str]") -> str:
    """Return the names of commands as text. Commands that take a common group of variables share one name.

    Commands that only scripts call are left out.
    """
    internal = [command.name for command in INTERNAL]
    public_names = [name for name in names if name not in internal]
    for variables, title in _GROUPS:
        group_names = []
        for command in (*COMMANDS, *BENCHES):
            takes_all = set(variables) <= set(command.variables)
            if takes_all and command.name not in internal:
                group_names.append(command.name)
        if set(group_names) <= set(public_names):
            other_names = [name for name in public_names if name not in group_names]
            return ", ".join(filter(None, (title, " ".join(other_names))))
    return " ".join(public_names)


if __name__ == "__main__":
    print(full_help() if sys.argv[1:] == ["all"] else short_help())
