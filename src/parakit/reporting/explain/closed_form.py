"""A run as the planner's closed forms describe it, and its peak memory compared with the model's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from parakit.artifacts.measurements import MemoryCategory, RankMemory
from parakit.config.run import Backend, RunSpec
from parakit.costs import (
    LATEST_MEGATRON,
    MegatronVersion,
    communication_bytes,
    estimate_rank_memory,
    held_parameters,
    logits_bytes,
    rank_parameters,
)
from parakit.formatting.units import amount
from parakit.logs import Run

_OLD = ("0.14", "0.15")
"""Versions whose calls are those of f4fa7d6b."""
_FP32_BYTES = 4
_ADAM_STEP_BYTES = 4


@dataclass(frozen=True)
class Kernels:
    """What a run computes with."""

    fused_gradients: bool = True
    """Weight gradients are accumulated by the kernel that makes them."""
    fused_adam: bool = True


@dataclass(frozen=True)
class ComponentResidual:
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
    def is_exact(self) -> bool:
        """Whether nothing is left over."""
        return self.measured == self.predicted


class NoClosedFormError(ValueError):
    """The closed forms do not apply to this run; the message gives the reason."""


@dataclass(frozen=True)
class PeakCandidate:
    """A point of the iteration that may be the peak."""

    name: str
    activations: int
    temporaries: int
    """Logits included."""

    @property
    def total(self) -> int:
        """Bytes beside weights, gradients and optimizer state."""
        return self.activations + self.temporaries


def require_closed_form_spec(run: Run) -> RunSpec:
    """The planner's configuration of a run.

    Raises:
        NoClosedFormError: The run is not Megatron's, its split or batch is not known, or it has linear
            attention.
    """
    spec = run.spec
    if spec is None:
        raise NoClosedFormError("shape, split or batch of the run are not known")
    if spec.backend != Backend.MEGATRON:
        reason = f"the closed forms describe Megatron, this run's backend is {spec.backend}"
        raise NoClosedFormError(reason)
    if not spec.microbatches:
        raise NoClosedFormError("the run's micro batch is not known")
    if not spec.shape.vocabulary:
        raise NoClosedFormError("the run's vocabulary is not known")
    if spec.shape.linear:
        raise NoClosedFormError("of linear attention only parameters and FLOPs have a closed form")
    return spec


def detect_kernels(run: Run) -> Kernels:
    """Which of the kernels that save memory the run had; CPU ranks have torch's plain Adam."""
    fused = run.arguments.get("gradient_accumulation_fusion") != "False"
    fused = fused and "--no-gradient-accumulation-fusion" not in run.arguments
    return Kernels(fused_gradients=fused, fused_adam=run.device != "cpu")


def find_peak_candidate(configuration: RunSpec, stage: int, kernels: Kernels) -> PeakCandidate:
    """The moment that holds most."""
    return max(_candidates(configuration, stage, kernels), key=lambda candidate: candidate.total)


def detect_megatron_version(run: Run) -> MegatronVersion:
    """The version whose calls the run makes; the newest where that is not known."""
    return MegatronVersion.F4FA7D6B if run.megatron.startswith(_OLD) else LATEST_MEGATRON


def compare_memory(
    configuration: RunSpec, rank: RankMemory, kernels: Kernels
) -> Iterator[ComponentResidual]:
    """Components in the order they are allocated, then their sum."""
    stage = configuration.parallelism.pipeline_rank(rank.rank)
    model = estimate_rank_memory(configuration, stage)
    candidate = find_peak_candidate(configuration, stage, kernels)
    held = {category: rank.categories.get(category, 0) for category in MemoryCategory}
    temporaries = held[MemoryCategory.LOGITS] + held[MemoryCategory.TEMPORARY]
    optimizer = model.main_parameters + model.optimizer_state
    steps, remainder = divmod(held[MemoryCategory.OPTIMIZER_STATE] - optimizer, _ADAM_STEP_BYTES)
    adam = f"Adam's step counts, {_ADAM_STEP_BYTES} bytes a tensor: {steps}"
    adam = adam if 0 < steps < 100_000 and not remainder else ""
    buffers, foreseen = held[MemoryCategory.COMMUNICATION], model.communication
    sent = ""
    if foreseen and not buffers:
        sent = "a received message counts as the activation it has become"
    elif buffers and not foreseen:
        # GlobalMemoryBuffer "mpu": layers.py gathers into it, dot_product_attention.py multiplies in it.
        sent = (
            "SP gathers into one buffer of Megatron's, as large as the largest thing it ever held"
        )
    peak = model.state + candidate.total + foreseen
    where = f"predicted at {candidate.name}; measured in {rank.peak_phase.value}"
    rows: list[tuple[str, int, int, str]] = [
        ("weights", held[MemoryCategory.WEIGHTS], model.weights, ""),
        ("gradients", held[MemoryCategory.GRADIENTS], model.gradients, ""),
        ("optimizer state", held[MemoryCategory.OPTIMIZER_STATE], optimizer, adam),
        ("activations", held[MemoryCategory.ACTIVATIONS], candidate.activations, ""),
        ("logits and temporaries", temporaries, candidate.temporaries, ""),
        ("communication buffers", buffers, foreseen, sent),
        ("peak of live tensors", rank.peak_bytes, peak, where),
    ]
    if device := rank.device:
        rounding = "live blocks, rounded up; the most since the start"
        parts = (
            f"reserved {amount(device.reserved_peak_bytes)}, of it the allocator's slack "
            f"{amount(device.slack_bytes)}; the rest is context, libraries and other processes"
        )
        whole = peak + model.allocator
        rows.append(("allocated", device.allocated_peak_bytes, peak, rounding))
        rows.append(("the device's own reading", device.used_bytes, whole, parts))
    for row in rows:
        yield ComponentResidual(rank.rank, *row)


def _candidates(configuration: RunSpec, stage: int, kernels: Kernels) -> Iterator[PeakCandidate]:
    model, split = estimate_rank_memory(configuration, stage), configuration.parallelism
    last = stage == split.pipeline - 1
    yield PeakCandidate("the loss" if last else "backward", model.activations, model.temporaries)
    held = rank_parameters(configuration, stage)
    table = max(held.word_embedding, held.output_layer)
    gradient = configuration.element_bytes * table
    if last and not kernels.fused_gradients:
        name = "the output layer's backward: the logits' gradient and its weight's, not yet added"
        _, output_layer = communication_bytes(configuration)
        whole = logits_bytes(configuration) + gradient + output_layer
        yield PeakCandidate(name, model.activations, whole)
        if split.pipeline == 1 and configuration.trained_shape.tied_embeddings:
            name = "the embedding's backward: its gradient, the tied output layer's, and their sum"
            yield PeakCandidate(name, 0, 3 * gradient)
    if not kernels.fused_adam:
        largest = min(table, held_parameters(configuration, stage)[0])
        name = "Adam's step on the largest tensor: a square root and a quotient"
        yield PeakCandidate(name, 0, 2 * _FP32_BYTES * largest)
