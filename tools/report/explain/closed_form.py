"""A run as the planner's closed forms see it: the same shape, split, batch and choices."""

from __future__ import annotations

from dataclasses import dataclass

from tools.plan.collectives.call import LATEST, Megatron
from tools.report.read.runs import Run
from tools.spec.run import Backend, RunSpec

_OLD = ("0.14", "0.15")
"""Versions whose calls are those of f4fa7d6b."""


@dataclass(frozen=True)
class Kernels:
    """What a run computes with."""

    fused_gradients: bool = True
    """Weight gradients are accumulated by the kernel that makes them."""
    fused_adam: bool = True


@dataclass(frozen=True)
class Residual:
    """A component of one rank; bytes or elements are whole numbers, shares are not."""

    rank: int
    component: str
    measured: float
    predicted: float
    note: str = ""
    """What the residual is, or why the two are not the same thing."""

    @property
    def residual(self) -> float:
        """Measured minus predicted."""
        return self.measured - self.predicted

    @property
    def exact(self) -> bool:
        """Whether nothing is left over."""
        return self.measured == self.predicted


class NoClosedFormError(ValueError):
    """The closed forms say nothing of this run; the message says why."""


def configuration_of_run(run: Run) -> RunSpec:
    """The planner's configuration of a run.

    Raises:
        NoClosedFormError: The run is not Megatron's, or its split or batch is not known.
    """
    spec = run.spec
    if spec is None:
        raise NoClosedFormError("shape, split or batch of the run are not known")
    if spec.backend != Backend.MEGATRON:
        raise NoClosedFormError(
            f"the closed forms describe Megatron, this run's backend is {spec.backend}"
        )
    return spec


def kernels_of_run(run: Run) -> Kernels:
    """Which of the kernels that save memory the run had; CPU ranks have torch's plain Adam."""
    arguments = run.arguments
    unfused = "--no-gradient-accumulation-fusion" in arguments
    printed = arguments.get("gradient_accumulation_fusion")
    return Kernels(
        fused_gradients=not unfused and printed != "False", fused_adam=run.device != "cpu"
    )


def megatron_of_run(run: Run) -> Megatron:
    """The version whose calls the run makes; the newest where that is not known."""
    return Megatron.F4FA7D6B if run.megatron.startswith(_OLD) else LATEST


def pipeline_rank(configuration: RunSpec, rank: int) -> int:
    """The pipeline stage of a global rank; Megatron numbers stages outermost."""
    split = configuration.parallelism
    return rank // (split.world_size // split.pipeline)


def known_ranks(configuration: RunSpec, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Those ranks that the split has; a ledger of another run's ranks must not break the report."""
    return tuple(rank for rank in ranks if 0 <= rank < configuration.parallelism.world_size)
