"""A rank's peak by category, as the ledger saw it, beside the component model."""

from __future__ import annotations

from collections.abc import Iterator

from tools.plan.memory import memory_of_rank
from tools.records.measurements import DeviceMemory, MemoryCategory, RankMemory
from tools.report.explain.closed_form import pipeline_rank
from tools.report.explain.predicted_moments import Kernels, fullest_moment
from tools.report.explain.residual import Compared
from tools.spec.run import RunSpec
from tools.text.units import amount

_ADAM_STEP_BYTES = 4


def compare_memory(
    configuration: RunSpec, rank: RankMemory, kernels: Kernels
) -> Iterator[Compared]:
    """Components in the order they are allocated, then their sum."""
    stage = pipeline_rank(configuration, rank.rank)
    model = memory_of_rank(configuration, stage)
    moment = fullest_moment(configuration, stage, kernels)
    held = {category: rank.categories.get(category, 0) for category in MemoryCategory}
    temporaries = held[MemoryCategory.LOGITS] + held[MemoryCategory.TEMPORARY]
    optimizer = model.main_parameters + model.optimizer_state
    peak = model.state + moment.total + model.communication
    where = f"predicted at {moment.name}; measured in {rank.peak_phase.value}"
    for component, measured, predicted, note in (
        ("weights", held[MemoryCategory.WEIGHTS], model.weights, ""),
        ("gradients", held[MemoryCategory.GRADIENTS], model.gradients, ""),
        _optimizer(held[MemoryCategory.OPTIMIZER_STATE], optimizer),
        ("activations", held[MemoryCategory.ACTIVATIONS], moment.activations, ""),
        ("logits and temporaries", temporaries, moment.temporaries, ""),
        _buffers(held[MemoryCategory.COMMUNICATION], model.communication),
        ("peak of live tensors", rank.peak_bytes, peak, where),
    ):
        yield Compared(rank.rank, component, measured, predicted, note)
    if rank.device is not None:
        yield from _on_device(rank.rank, rank.device, peak, model.allocator)


def _on_device(rank: int, device: DeviceMemory, peak: int, allocator: int) -> Iterator[Compared]:
    rounding = "live blocks, rounded up; the most since the start"
    yield Compared(rank, "allocated", device.allocated_peak_bytes, peak, rounding)
    parts = (
        f"reserved {amount(device.reserved_peak_bytes)}, of it the allocator's slack "
        f"{amount(device.slack_bytes)}; the rest is context, libraries and other processes"
    )
    yield Compared(rank, "the device's own reading", device.used_bytes, peak + allocator, parts)


def _buffers(measured: int, predicted: int) -> tuple[str, int, int, str]:
    note = ""
    if predicted and not measured:
        note = "a received message counts as the activation it has become"
    elif measured and not predicted:
        # GlobalMemoryBuffer "mpu": layers.py gathers into it, dot_product_attention.py multiplies in it.
        note = (
            "SP gathers into one buffer of Megatron's, as large as the largest thing it ever held"
        )
    return "communication buffers", measured, predicted, note


def _optimizer(measured: int, predicted: int) -> tuple[str, int, int, str]:
    extra = measured - predicted
    steps, remainder = divmod(extra, _ADAM_STEP_BYTES)
    plausible = 0 < steps < 100_000 and not remainder
    note = f"Adam's step counts, {_ADAM_STEP_BYTES} bytes a tensor: {steps}" if plausible else ""
    return "optimizer state", measured, predicted, note
