"""Weights & Biases: what WANDB=1 adds to a run. The key never passes through here, only its presence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.spec import settings

PROJECT = "megatron-parallelism"


@dataclass(frozen=True)
class Wandb:
    """A run that is logged to W&B as well."""

    project: str = PROJECT
    entity: str | None = None
    mode: str = "offline"
    """`online` or `offline`; `wandb sync` uploads an offline run later."""

    @property
    def flags(self) -> tuple[str, ...]:
        """Megatron's flags but for those that name the run (`folder_flags`)."""
        entity = ("--wandb-entity", self.entity) if self.entity else ()
        return ("--wandb-project", self.project, *entity)

    @property
    def environment(self) -> dict[str, str]:
        """For the ranks; the client reads the mode from here."""
        return {"WANDB_MODE": self.mode}


def wandb_from_environment(environment: Mapping[str, str]) -> Wandb:
    """WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE; online only where a key is in the environment."""
    mode = "online" if environment.get("WANDB_API_KEY") else "offline"
    return Wandb(
        project=settings.WANDB_PROJECT.value(environment) or PROJECT,
        entity=settings.WANDB_ENTITY.value(environment),
        mode=settings.WANDB_MODE.value(environment) or mode,
    )


def folder_flags(flags: Sequence[str], run_folder: str) -> tuple[str, ...]:
    """The run's name and place for a run that is logged to W&B, else nothing.

    The client makes its own `wandb` folder in the place it is given.
    """
    if "--wandb-project" not in flags:
        return ()
    return ("--wandb-exp-name", Path(run_folder).name, "--wandb-save-dir", run_folder)
