"""What a plan is asked for: make's variables of `plan`, by their names in small letters;
and what every command of the planner refuses with."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, fields
from pathlib import Path

from parakit.config.recompute import Recompute


class RequestError(ValueError):
    """A request that contradicts itself or asks for what is not there; the message says which."""


@dataclass(frozen=True)
class PlanOptions:
    """None is "not given"."""

    model: str = ""
    gpu: str = "h200"
    gpus: int | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    intra: str | None = None
    inter: str | None = None
    nics: int | None = None
    """Network ports of a node; without it a port a device."""
    oversubscription: float | None = None
    imbalance: float | None = None
    """Tokens of the busiest rank of experts, for the mean."""
    global_batch: int | None = None
    micro_batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    calibration: Path | None = None
    calibrate: str | None = None
    """Rates of matrix products that the devices reach, not yet read."""
    extra: str | None = None
    """Megatron's flags, not yet split into words."""
    readings: Path | None = None
    tokens: float | None = None
    recipe: str | None = None
    """Of a search: `defaults`, `tuned` or `all` (`recipes.py`)."""
    recompute: Recompute | None = None
    strategy: str | None = None
    what_if: str | None = None
    verify: int = 0
    alpa: bool = False
    largest: bool = False
    svg: Path | None = None
    json: bool = False


def plan_options(given: Namespace) -> PlanOptions:
    """Of what a command was given."""
    known = vars(given)
    return PlanOptions(**{f.name: known[f.name] for f in fields(PlanOptions) if f.name in known})
