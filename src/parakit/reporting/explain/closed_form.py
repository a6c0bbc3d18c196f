"""Compare a run with the planner's closed forms: which configuration they describe, and its memory.

A closed form is a formula for a quantity of one rank, such as its parameters or its peak memory. The
result of a comparison is a `ComponentResidual` per component: measured, predicted and the difference.
"""

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

_OLD_VERSIONS = ("0.14", "0.15")
"""Megatron versions that make the same calls as commit f4fa7d6b."""
_FP32_BYTES = 4
_ADAM_STEP_BYTES = 4
_MAX_ADAM_STEPS = 100_000
"""Number of tensors below which extra optimizer bytes are taken for Adam's step counts."""


@dataclass(frozen=True)
class Kernels:
    """Fused kernels of a run that need less temporary memory than the plain ones."""

    fused_gradients: bool = True
    """True if the kernel that computes weight gradients also accumulates them."""
    fused_adam: bool = True


@dataclass(frozen=True)
class ComponentResidual:
    """Measured value and predicted value of one component of a rank, in bytes, in elements or as a fraction."""

    rank: int
    component: str
    measured: float
    predicted: float
    note: str = ""
    """Explanation of the residual; empty if there is none."""

    @property
    def residual(self) -> float:
        """Measured minus predicted value."""
        return self.measured - self.predicted

    @property
    def is_exact(self) -> bool:
        """True if measured and predicted value are equal."""
        return self.measured == self.predicted


class NoClosedFormError(ValueError):
    """Error that no closed form describes a run; the message gives the reason."""


@dataclass(frozen=True)
class PeakCandidate:
    """Moment of the iteration at which a rank's memory may peak."""

    name: str
    activations: int
    temporaries: int
    """Bytes of temporary tensors, logits included."""

    @property
    def total(self) -> int:
        """Bytes in addition to weights, gradients and optimizer state."""
        return self.activations + self.temporaries


def require_closed_form_spec(run: Run) -> RunSpec:
    """Return the run's configuration if the planner's formulas (closed forms) describe it.

    Raises:
        NoClosedFormError: The backend is not Megatron, the shape, split, batch or vocabulary is
            unknown, or the model has linear attention.
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
    """Return which fused kernels the run had; CPU ranks have torch's unfused Adam."""
    is_fused = run.arguments.get("gradient_accumulation_fusion") != "False"
    is_fused = is_fused and "--no-gradient-accumulation-fusion" not in run.arguments
    return Kernels(fused_gradients=is_fused, fused_adam=run.device != "cpu")


def find_peak_candidate(configuration: RunSpec, stage: int, kernels: Kernels) -> PeakCandidate:
    """Return the moment at which a rank of this stage is predicted to hold most memory."""
    candidates = _list_peak_candidates(configuration, stage, kernels)
    return max(candidates, key=lambda candidate: candidate.total)


def detect_megatron_version(run: Run) -> MegatronVersion:
    """Return the Megatron version whose calls the run makes; the newest one if it is unknown."""
    return MegatronVersion.F4FA7D6B if run.megatron.startswith(_OLD_VERSIONS) else LATEST_MEGATRON


def compare_memory(
    configuration: RunSpec, rank: RankMemory, kernels: Kernels
) -> Iterator[ComponentResidual]:
    """Yield measured and predicted bytes of one rank: six memory components, then the peak of all live tensors.

    A GPU rank yields two more values, which include this peak: the peak of the allocator's bytes, and the used
    bytes that the device reports.
    """
    stage = configuration.parallelism.pipeline_rank(rank.rank)
    prediction = estimate_rank_memory(configuration, stage)
    candidate = find_peak_candidate(configuration, stage, kernels)
    measured = {category: rank.categories.get(category, 0) for category in MemoryCategory}
    temporaries = measured[MemoryCategory.LOGITS] + measured[MemoryCategory.TEMPORARY]
    optimizer_state = measured[MemoryCategory.OPTIMIZER_STATE]
    optimizer = prediction.main_parameters + prediction.optimizer_state
    buffers = measured[MemoryCategory.COMMUNICATION]
    peak = prediction.state + candidate.total + prediction.communication
    moments = f"predicted at {candidate.name}; measured in {rank.peak_phase.value}"

    def compare(
        component: str, measured_bytes: int, predicted: int, note: str = ""
    ) -> ComponentResidual:
        return ComponentResidual(rank.rank, component, measured_bytes, predicted, note)

    yield compare("weights", measured[MemoryCategory.WEIGHTS], prediction.weights)
    yield compare("gradients", measured[MemoryCategory.GRADIENTS], prediction.gradients)
    adam_note = _note_adam_steps(optimizer_state - optimizer)
    yield compare("optimizer state", optimizer_state, optimizer, adam_note)
    yield compare("activations", measured[MemoryCategory.ACTIVATIONS], candidate.activations)
    yield compare("logits and temporaries", temporaries, candidate.temporaries)
    buffer_note = _note_buffers(buffers, prediction.communication)
    yield compare("communication buffers", buffers, prediction.communication, buffer_note)
    yield compare("peak of live tensors", rank.peak_bytes, peak, moments)
    device = rank.device
    if device is None:
        return
    rounding = "the allocator's live blocks, rounded up: their maximum since the start"
    yield compare("allocated", device.allocated_peak_bytes, peak, rounding)
    parts = (
        f"reserved {amount(device.reserved_peak_bytes)}, of which the allocator's slack is "
        f"{amount(device.slack_bytes)}; the remainder is context, libraries and other processes"
    )
    device_peak = peak + prediction.allocator
    yield compare("the device's own reading", device.used_bytes, device_peak, parts)


def _note_adam_steps(extra_bytes: int) -> str:
    """Return that extra optimizer bytes are Adam's step counts; empty if they cannot be."""
    steps, remainder = divmod(extra_bytes, _ADAM_STEP_BYTES)
    if not 0 < steps < _MAX_ADAM_STEPS or remainder:
        return ""
    return f"Adam's step counts, {_ADAM_STEP_BYTES} bytes per tensor: {steps}"


def _note_buffers(measured: int, predicted: int) -> str:
    """Return why communication buffers exist only in the measurement or only in the prediction; otherwise empty."""
    if predicted and not measured:
        return "a received message counts as the activation that it becomes"
    if measured and not predicted:
        # GlobalMemoryBuffer "mpu": layers.py gathers into it, dot_product_attention.py multiplies in it.
        return "SP gathers into one buffer of Megatron's, which keeps the largest size it ever had"
    return ""


def _list_peak_candidates(
    configuration: RunSpec, stage: int, kernels: Kernels
) -> Iterator[PeakCandidate]:
    """Yield the moments of an iteration at which the memory of a pipeline stage may peak.

    The first moment is the one that the planner predicts. Up to three more moments follow if Megatron's fused
    kernels for gradients, or a fused Adam, are missing.
    """
    prediction, split = estimate_rank_memory(configuration, stage), configuration.parallelism
    is_last_stage = stage == split.pipeline - 1
    yield PeakCandidate(
        "the loss" if is_last_stage else "backward", prediction.activations, prediction.temporaries
    )
    parameters = rank_parameters(configuration, stage)
    vocabulary_parameters = max(parameters.word_embedding, parameters.output_layer)
    gradient_bytes = configuration.element_bytes * vocabulary_parameters
    if is_last_stage and not kernels.fused_gradients:
        name = "the output layer's backward: the logits' gradient and its weight's, not yet added"
        _, output_layer = communication_bytes(configuration)
        temporaries = logits_bytes(configuration) + gradient_bytes + output_layer
        yield PeakCandidate(name, prediction.activations, temporaries)
        if split.pipeline == 1 and configuration.trained_shape.tied_embeddings:
            name = "the embedding's backward: its gradient, the tied output layer's, and their sum"
            yield PeakCandidate(name, activations=0, temporaries=3 * gradient_bytes)
    if not kernels.fused_adam:
        largest_tensor = min(vocabulary_parameters, held_parameters(configuration, stage)[0])
        name = "Adam's step on the largest tensor: a square root and a quotient"
        yield PeakCandidate(name, activations=0, temporaries=2 * _FP32_BYTES * largest_tensor)
