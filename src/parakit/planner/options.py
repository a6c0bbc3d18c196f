"""Options of `plan`, which are the variables of `make plan`, and the error of all commands of the planner."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, fields
from pathlib import Path

from parakit.config import settings
from parakit.config.recompute import Recompute
from parakit.config.variable_groups import PLAN_GPU


class RequestError(ValueError):
    """Error of a request that contradicts itself or names what does not exist; the message is one sentence."""


@dataclass(frozen=True)
class PlanOptions:
    """Options of the command `plan`: one field per variable of make in `PLAN`, with its name in lower case.

    None means that the variable is not set.
    """

    model: str = ""
    gpu: str = PLAN_GPU.default
    gpus: int | None = None
    nodes: int | None = None
    gpus_per_node: int | None = None
    intra: str | None = None
    inter: str | None = None
    nics: int | None = None
    """Network ports per node; None is one port per device."""
    oversubscription: float | None = None
    imbalance: float | None = None
    """Tokens of the busiest expert-parallel rank over the average rank's."""
    global_batch: int | None = None
    micro_batch: int | None = None
    seq: int | None = None
    dtype: str | None = None
    calibration: Path | None = None
    calibrate: str | None = None
    """Text with rates of matrix products that the devices reach, not yet parsed."""
    extra: str | None = None
    """Text with Megatron's flags, not yet split into arguments."""
    readings: Path | None = None
    tokens: float | None = None
    recipe: str | None = None
    """Recipe of a search: `defaults`, `tuned` or `all` (`recipes.py`)."""
    recompute: Recompute | None = None
    peft: str | None = None
    """Text with the adapters of a fine-tuning, not yet parsed (`parakit/config/peft.py`)."""
    document_length: int | None = None
    """Mean tokens of the documents that a sample packs; None if a sample is one document."""
    strategy: str | None = None
    what_if: str | None = None
    verify: int = settings.VERIFY.default
    alpa: bool = settings.ALPA.default
    largest: bool = settings.LARGEST.default
    svg: Path | None = None
    json: bool = settings.JSON.default


def plan_options(arguments: Namespace) -> PlanOptions:
    """Return the options of `plan` among a command's parsed arguments; missing ones take their defaults.

    Of several numbers of devices, the first one is taken.
    """
    values = dict(vars(arguments))
    if isinstance(values.get("gpus"), tuple):
        values["gpus"] = values["gpus"][0]
    names = [field.name for field in fields(PlanOptions) if field.name in values]
    return PlanOptions(**{name: values[name] for name in names})
