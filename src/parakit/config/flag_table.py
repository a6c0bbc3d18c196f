"""Every flag that the kit knows, a line of `flags.csv` each: Megatron's, and the few of its own.

What a flag is stands there once. Sets of flags are queries of it (`of_role`, `planned`); readers take
kinds, defaults and fields from it (`src/parakit/config/flags.py`). A test holds it against Megatron's parser.

`kind` is `on` or `off` (a switch that makes something true or false), `whole`, `decimal`, `text`,
`texts`, `numbers` or `backend`, `default` that of Megatron 0.19. `only_with` names flags, one of which
it needs to say anything: `--fp16|--bf16`, `--optimizer=muon`. `recipe` is the fields of Megatron-Bridge
that mean the same (`!` before one that holds the opposite), `joint` where several flags say them
together, or the flag that it is another name of. `of_device` marks what is chosen for the devices at
hand: what CPU ranks need says nothing about a GPU. `since` and `until` are the first and the last of
0.14, 0.15 (at f4fa7d6b) and 0.16 to 0.19 that have it; empty where no other does.

`field` is what the flag sets of `RunSpec` (`run.seed`) or of a part of it (`shape.layers`), by its own
kind: such fields are read and written in one loop.

`role` is one of
    shape         which tensors a model has, and their values at the start
    precision     the type that its products are computed in
    architecture  what else its layers compute, and what a strategy changes of its tensors
    parallelism   what a strategy's name says: degrees, virtual stages, sharding
    stages        how layers are laid on pipeline stages
    recompute     what is computed again in backward
    offload       which activations wait on the host
    overlap       what is sent beside arithmetic, and by which algorithm
    kernel        how devices compute and send
    batch         samples of a pass and of an update
    schedule      learning rates and weight decay, and the iterations that they are made for
    optimizer     the update, and the types of its states
    data          which samples in which order, and what of them the loss counts
    tokenizer     what made them
    logging       what is printed and evaluated
    start         which weights and states training begins with
    attempt       what one attempt of a run has for itself: where it writes and how, and when it ends
    checkpoint    what else concerns saving and loading
    system        processes, time limits, profiles, garbage collection
    kit           no flag of Megatron: the native backend's own

Flags of Megatron that the kit has nothing to say of are names alone, `other_flags.csv`: all that a
parser of 0.14 to 0.20 has. What is in neither is no flag of Megatron.

`planned` says what the planner makes of it: `counted`; `one strategy`, counted where one is given and
chosen by a search; `parameters`, which alone are counted; `neither`, it changes neither time nor memory;
`MICRO_BATCH=` and the like, which says the same; empty where no formula has it.

`native` is what the native backend, which refuses flags that it does not implement, makes of one:
`ignored`, it chooses kernels or output; `imported`, an imported model's config says it; or those of its
values that the backend has, `cosine|linear`. An empty one says nothing: what is implemented is the
fields of `parakit.native.settings`.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

type Default = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class KnownFlag:
    """One row of `flags.csv`; the module's docstring explains the columns."""

    name: str
    kind: str
    default: Default
    """Megatron's default; None if there is no default or Megatron derives the value."""
    unit: str
    only_with: tuple[str, ...]
    """Flags, or flags with a value (`--optimizer=muon`), at least one of which must be present for
    this flag to have an effect. Empty means no condition.
    """
    recipe: tuple[str, ...]
    of_device: bool
    role: str
    group: str
    """Object whose field the flag sets: `shape`, `parallelism`, `stages`, `execution`, …; empty
    without a field.
    """
    field: str
    planned: str
    since: str
    until: str
    native: str
    """Treatment of the flag by the native backend if none of the backend's settings holds it, or
    the values that the backend implements.
    """

    def exists_in(self, version: tuple[int, int]) -> bool:
        """Return True if Megatron of this major and minor version has the flag."""
        newer = bool(self.since) and version < parse_release(self.since)
        return not newer and not (self.until and version > parse_release(self.until))


def _read_table() -> dict[str, KnownFlag]:
    with (Path(__file__).parent / "flags.csv").open(newline="") as file:
        return {line["name"]: _parse_row(line) for line in csv.DictReader(file, restval="")}


def _parse_row(line: dict[str, str]) -> KnownFlag:
    group, _, field = line["field"].partition(".")
    read: dict[str, Any] = {
        "default": _parse_default(line["kind"], line["default"]),
        "only_with": tuple(filter(None, line["only_with"].split("|"))),
        "recipe": tuple(line["recipe"].split()),
        "of_device": bool(line["of_device"]),
        "group": group,
        "field": field,
    }
    return KnownFlag(**(line | read))


def _parse_default(kind: str, text: str) -> Default:
    if not text:
        return None
    if kind in ("on", "off"):
        return text == "true"
    return int(text) if kind == "whole" else float(text) if kind == "decimal" else text


def parse_release(version: str) -> tuple[int, int]:
    """Return major and minor of a version such as Megatron's `0.15.0rc2` or torch's `2.11.0+cu130`."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


FLAGS: Mapping[str, KnownFlag] = _read_table()
"""The rows of `flags.csv` by flag name, in the file's order."""

FLAGS_WITHOUT_ROW = frozenset(Path(__file__).with_name("other_flags.csv").read_text().split()[1:])
"""Megatron's flags that `flags.csv` has no row for (`other_flags.csv`)."""


@cache
def flags_with_role(*roles: str) -> frozenset[str]:
    """Return the names of the flags with one of these roles."""
    return frozenset(name for name, flag in FLAGS.items() if flag.role in roles)


@cache
def flags_planned_as(*ways: str) -> frozenset[str]:
    """Return the names of the flags whose column `planned` has one of these values."""
    return frozenset(name for name, flag in FLAGS.items() if flag.planned in ways)


@cache
def flags_in_group(*groups: str) -> tuple[KnownFlag, ...]:
    """Return the flags that set a field of one of these objects, in the file's order."""
    return tuple(flag for flag in FLAGS.values() if flag.group in groups)


def flags_for_native(way: str) -> frozenset[str]:
    """Return the names of the flags whose column `native` has this value."""
    return frozenset(name for name, flag in FLAGS.items() if flag.native == way)


def argument_names(flags: Iterable[str]) -> frozenset[str]:
    """Return the flags' names as Megatron prints its arguments: `--num-layers` becomes
    `num_layers`.
    """
    return frozenset(name.removeprefix("--").replace("-", "_") for name in flags)
