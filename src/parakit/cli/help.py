"""`make help` and `make help-all`, from the table, with any Python from 3.6 on.

python -m parakit.cli.help [all]
"""

import sys
from itertools import groupby

from parakit.cli import commands
from parakit.cli.commands import BENCHES, COMMANDS, SECTIONS
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
"""Headings of the variables, by the first below each."""


def short_help() -> str:
    """The commands that matter, with the variables that they take most often."""
    usual = (one for one in COMMANDS if one.is_usual)
    lines = ["  {:<11} {}".format(one.name.replace("*", "%"), one.help) for one in usual]
    lines.append("  help-all    every target and every variable")
    lines.append("Such as: make train-tp2-gpt2-tiny-2cpu ITERS=50")
    return "\n".join(lines)


def full_help() -> str:
    """Every command and every variable."""
    lines = []
    for title, section in SECTIONS.items():
        lines.append(title)
        lines += ["  {:<27} {}".format(one.name.replace("*", "%"), one.help) for one in section]
    lines.append("Benches")
    lines += [f"  {bench.name:<27} {bench.help}" for bench in BENCHES]
    for names, what in list_variables():
        lines += ["Variables: " + HEADINGS[name] for name in names if name in HEADINGS]
        lines.append("  {:<15}  {}".format(" ".join(names), what))
    return "\n".join(lines)


def list_variables() -> "list[tuple[list[str], str]]":
    """The names that share a meaning, and it, with the commands that take them so."""
    meanings = {}  # type: dict[tuple[str, str], list[str]]
    for name, text in ((one.name, one.help) for one in SETTINGS):
        meanings[name, text] = []
    for command in (*COMMANDS, *BENCHES):
        for setting in command.variables:
            if setting.make_equivalent:
                continue
            meanings.setdefault((setting.name, setting.help), []).append(command.name)
    order = [one.name for one in SETTINGS]
    used = sorted(
        ((name, text, _shortened(takers)) for (name, text), takers in meanings.items()),
        key=lambda one: order.index(one[0]),
    )
    return [
        ([one[0] for one in same], f"{text} [{takers}]")
        for (text, takers), same in groupby(used, key=lambda one: one[1:])
        if takers
    ]


_GROUPS = (
    (commands.LASTING, "whatever trains"),
    (commands.TRAINING, "whatever trains but bench NAME=soak and compare-pipelines"),
    (commands.ONE_RUN, "whatever trains one run"),
)


def _shortened(takers: "list[str]") -> str:
    """The commands, those that take all of a group by its name."""
    internal = [one.name for one in commands.INTERNAL]
    rest = [name for name in takers if name not in internal]
    for group, title in _GROUPS:
        whole = [one.name for one in (*COMMANDS, *BENCHES) if set(group) <= set(one.variables)]
        whole = [name for name in whole if name not in internal]
        if set(whole) <= set(rest):
            others = " ".join(name for name in rest if name not in whole)
            return ", ".join(filter(None, (title, others)))
    return " ".join(rest)


if __name__ == "__main__":
    print(full_help() if sys.argv[1:] == ["all"] else short_help())
