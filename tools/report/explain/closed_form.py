"""A run as the planner's closed forms see it: the same shape, split, batch and choices."""

from __future__ import annotations

from dataclasses import dataclass

from tools.plan.collectives.call import LATEST, Megatron
from tools.report.read.runs import Run
from tools.spec.run import DeviceKind, Recompute, RunSpec, TokenDispatcher

_BACKEND = "megatron"
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
    setup = run.setup
    if setup.backend != _BACKEND:
        raise NoClosedFormError(
            f"the closed forms describe Megatron, this run's backend is {setup.backend or 'unknown'}"
        )
    if setup.shape is None or setup.parallelism is None or setup.batch is None:
        raise NoClosedFormError("shape, split or batch of the run are not known")
    # Megatron's own layers, for hosts without Transformer Engine, keep the scores of attention; their
    # context parallelism gathers K and V (megatron_patches/no_te/attention.py).
    local = setup.device == "cpu" or _argument(run, "transformer_impl") == "local"
    return RunSpec(
        shape=setup.shape,
        parallelism=setup.parallelism,
        batch=setup.batch,
        dtype=setup.dtype or "fp32",
        dropout=setup.dropout or 0.0,
        recompute=_recompute(setup.recompute),
        fused_attention=not local or setup.parallelism.context > 1,
        cp_comm_type="all_gather" if local else _cp_comm_type(run),
        device=DeviceKind.CPU if setup.device == "cpu" else DeviceKind.GPU,
        token_dispatcher=TokenDispatcher(
            _argument(run, "moe_token_dispatcher_type") or TokenDispatcher.ALL_GATHER
        ),
    )


def kernels_of_run(run: Run) -> Kernels:
    """Which of the kernels that save memory the run had; CPU ranks have torch's plain Adam."""
    arguments = run.setup.arguments
    unfused = "--no-gradient-accumulation-fusion" in arguments
    printed = arguments.get("gradient_accumulation_fusion")
    return Kernels(
        fused_gradients=not unfused and printed != "False", fused_adam=run.setup.device != "cpu"
    )


def megatron_of_run(run: Run) -> Megatron:
    """The version whose calls the run makes; the newest where that is not known."""
    return Megatron.F4FA7D6B if run.setup.megatron.startswith(_OLD) else LATEST


def pipeline_rank(configuration: RunSpec, rank: int) -> int:
    """The pipeline stage of a global rank; Megatron numbers stages outermost."""
    split = configuration.parallelism
    return rank // (split.world_size // split.pipeline)


def known_ranks(configuration: RunSpec, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Those ranks that the split has; a ledger of another run's ranks must not break the report."""
    return tuple(rank for rank in ranks if 0 <= rank < configuration.parallelism.world_size)


def _recompute(name: str) -> Recompute:
    return Recompute(name) if name in {"selective", "full"} else Recompute.NONE


def _cp_comm_type(run: Run) -> str:
    value = _argument(run, "cp_comm_type").strip("[]' ")
    return value if value in {"p2p", "all_gather", "a2a"} else "p2p"


def _argument(run: Run, name: str) -> str:
    arguments = run.setup.arguments
    return arguments.get(name) or arguments.get("--" + name.replace("_", "-"), "")
