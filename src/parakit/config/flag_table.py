"""The table of every flag that the kit knows (`flags.csv`, one row per flag): Megatron's, and a few of
the kit's own.

Other modules ask this table for a flag's kind, default and field, and for sets of flags by role. A
test compares the table with Megatron's parser. Megatron's flags that need no row are names in
`other_flags.csv`: all flags of 0.14 to 0.20. A name in neither file is no flag of Megatron.

The columns:

- `name`, `unit`: The flag, and the unit of its value.
- `kind`: Type of the value: `on` or `off` (a switch that makes something true or false), `whole`,
  `decimal`, `text`, `texts`, `numbers` or `backend`.
- `default`: The default of Megatron 0.19.
- `only_with`: Flags of which at least one must be present for this flag to have an effect:
  `--fp16|--bf16`, `--optimizer=muon`.
- `recipe`: Fields of Megatron-Bridge with the same meaning. `!` precedes a field with the opposite
  value. `joint` means that several flags together set the field. A flag's name means that this flag
  is another name of that flag.
- `of_device`: Marks flags that are chosen for the devices in use. Their value for CPU ranks does
  not carry over to a GPU.
- `since`, `until`: First and last Megatron version with the flag, of 0.14, 0.15 (at f4fa7d6b) and
  0.16 to 0.19; empty means no limit.
- `field`: Field of `RunSpec` (`run.seed`) or of one of its parts (`shape.layers`) that the flag
  sets. Such fields are read and written in one loop.
- `planned`: The planner's treatment. `counted`: formulas use the flag. `one strategy`: formulas use
  the flag for a given strategy, and a search chooses the value. `parameters`: only parameter counts
  use the flag. `neither`: the flag changes neither time nor memory. `MICRO_BATCH=` and the like:
  the variable of make that states the same. Empty: no formula uses the flag.
- `native`: The native backend's treatment. `ignored`: the flag chooses kernels or output.
  `imported`: the config of an imported model states the value. A list such as `cosine|linear`: the
  values that are implemented. Empty: the backend refuses the flag unless a field of
  `parakit.native.settings` implements it.
- `role`: One of these:

    shape         which tensors a model has, and their initial values
    precision     type in which matrix products are computed
    architecture  what else layers compute, and how a strategy changes their tensors
    parallelism   what a strategy's name states: degrees, virtual stages, sharding
    stages        placement of layers on pipeline stages
    recompute     what backward recomputes
    offload       which activations are offloaded to the host
    overlap       which communication overlaps with computation, and its algorithm
    kernel        how devices compute and communicate
    batch         samples per forward pass and per update
    schedule      learning rate, weight decay, and the number of iterations that they are planned for
    optimizer     the update, and the types of optimizer state
    data          which samples, in which order, and which of their tokens the loss counts
    tokenizer     the tokenizer that made the data
    logging       what is printed and evaluated
    start         initial weights and optimizer states
    attempt       what differs between attempts of one run: where and how to save, and when to end
    checkpoint    other flags of saving and loading
    system        processes, time limits, profiles, garbage collection
    kit           flags of the native backend that Megatron does not have
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
    """Flag of Megatron or of the kit, as one row of `flags.csv` describes it.

    The docstring of the module explains the columns.
    """

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
        if self.since and version < parse_release(self.since):
            return False
        return not self.until or version <= parse_release(self.until)


def _read_table() -> dict[str, KnownFlag]:
    """Return the rows of `flags.csv` by flag name."""
    with (Path(__file__).parent / "flags.csv").open(newline="") as file:
        return {row["name"]: _parse_row(row) for row in csv.DictReader(file, restval="")}


def _parse_row(row: dict[str, str]) -> KnownFlag:
    """Return the flag that one row of `flags.csv` describes."""
    group, _, field = row["field"].partition(".")
    parsed_columns: dict[str, Any] = {
        "default": _parse_default(row["kind"], row["default"]),
        "only_with": tuple(filter(None, row["only_with"].split("|"))),
        "recipe": tuple(row["recipe"].split()),
        "of_device": bool(row["of_device"]),
        "group": group,
        "field": field,
    }
    return KnownFlag(**(row | parsed_columns))


def _parse_default(kind: str, text: str) -> Default:
    """Return a flag's default value, converted from text to the Python type of the flag's kind.

    Kinds `on` and `off` give a bool, `whole` an int, `decimal` a float, and all other kinds a text. An empty text
    gives None.
    """
    if not text:
        return None
    match kind:
        case "on" | "off":
            return text == "true"
        case "whole":
            return int(text)
        case "decimal":
            return float(text)
    return text


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
