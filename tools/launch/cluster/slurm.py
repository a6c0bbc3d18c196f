"""What Slurm is asked for: `LAUNCHER=slurm NODES=2`, and variables or a site file for the rest."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.launch.errors import LaunchError
from tools.spec.files import ROOT

SITE_FILE = "site.slurm"
"""Of the repository's root; taken if it is there. `SLURM_SITE=` names another."""

RESOURCES = {
    "SLURM_PARTITION": "partition",
    "SLURM_ACCOUNT": "account",
    "SLURM_QOS": "qos",
    "SLURM_TIME": "time",
}
"""Variables of ours, and sbatch's options."""

_VALUE = re.compile(r"[\w.,:+@/=-]+")
_SPECIAL = re.compile(r"""[\s"'\\#]""")
_DIRECTIVE = "#SBATCH"


@dataclass(frozen=True)
class Slurm:
    """How jobs are asked for."""

    nodes: int = 1
    directives: tuple[str, ...] = ()
    """As `#SBATCH` takes them, quoted; the site's lines first, so that a variable overrides them."""
    setup: tuple[str, ...] = ()
    """Lines of shell from the site file, run on the first node: modules, variables of the fabric."""
    image: str | None = None
    """For Pyxis: a squash file, or whatever else `--container-image` takes."""


def slurm_from_environment(environment: Mapping[str, str]) -> Slurm | None:
    """LAUNCHER=slurm with NODES=, SLURM_PARTITION= and its like; None if Slurm was not asked for.

    Raises:
        LaunchError: A value is not of its kind, or the site file cannot be read.
    """
    launcher = environment.get("LAUNCHER") or "torchrun"
    if launcher not in ("torchrun", "slurm"):
        raise LaunchError(f"LAUNCHER={launcher} is not torchrun or slurm.")
    if launcher == "torchrun":
        return None
    site, setup = _read_site(environment.get("SLURM_SITE"))
    own = tuple(
        f"--{option}={_checked(name, environment[name])}"
        for name, option in RESOURCES.items()
        if environment.get(name)
    )
    return Slurm(
        nodes=_nodes(environment.get("NODES") or "1"),
        directives=(*site, *own, *_lines(environment.get("SLURM_LINES", ""))),
        setup=setup,
        image=environment.get("SLURM_IMAGE") or None,
    )


def words_of(directives: Sequence[str]) -> tuple[str, ...]:
    """Lines of `#SBATCH` as words of a command.

    Raises:
        ValueError: Quotes do not end.
    """
    return tuple(word for line in directives for word in shlex.split(line, comments=True))


def _nodes(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise LaunchError(f"NODES={text} is not a whole number above 0.")
    return int(text)


def _checked(name: str, value: str) -> str:
    if _VALUE.fullmatch(value) is None:
        raise LaunchError(f"{name}={value} is not a word that sbatch takes.")
    return value


def _lines(text: str) -> tuple[str, ...]:
    try:
        words = shlex.split(text)
    except ValueError:
        words = [""]
    for word in words:
        if not word.startswith("--") or "\n" in word:
            raise LaunchError(
                f"SLURM_LINES={text} is not a list of sbatch's long options, such as "
                "'--exclusive --constraint=h200'."
            )
    return tuple(map(_as_directive, words))


def _as_directive(word: str) -> str:
    """As a line of `#SBATCH`: a backslash escapes in any quotes there, and `#` begins a comment."""
    if _SPECIAL.search(word) is None:
        return word
    escaped = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _read_site(named: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    path = Path(named).expanduser() if named else ROOT / SITE_FILE
    if not named and not path.exists():
        return (), ()
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"SLURM_SITE={path} cannot be read ({error}).") from None
    directives = tuple(
        line.removeprefix(_DIRECTIVE).strip() for line in lines if line.startswith(_DIRECTIVE)
    )
    try:
        words_of(directives)
    except ValueError as error:
        raise LaunchError(f"SLURM_SITE={path} has a wrong #SBATCH line ({error}).") from None
    setup = tuple(line for line in lines if line and not line.startswith(("#!", _DIRECTIVE)))
    return directives, setup
