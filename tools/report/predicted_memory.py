"""A rank's peak by category, as the ledger saw it, beside the component model."""

from __future__ import annotations

from collections.abc import Iterator

from tools.measurements import MemoryCategory, RankMemory
from tools.plan.configuration import Configuration
from tools.plan.memory import memory_of_rank
from tools.report.closed_form import pipeline_rank
from tools.report.compared import Compared

_ADAM_STEP_BYTES = 4


def compare_memory(configuration: Configuration, rank: RankMemory) -> Iterator[Compared]:
    """Components in the order they are allocated, then their sum.

    The model's peak is the sum of each component's own; the ledger's is one moment. So the sum may
    be predicted too high although every component is right.
    """
    model = memory_of_rank(configuration, pipeline_rank(configuration, rank.rank))
    held = {category: rank.categories.get(category, 0) for category in MemoryCategory}
    temporaries = held[MemoryCategory.LOGITS] + held[MemoryCategory.TEMPORARY]
    optimizer = model.main_parameters + model.optimizer_state
    extra = held[MemoryCategory.OPTIMIZER_STATE] - optimizer
    yield Compared(rank.rank, "weights", held[MemoryCategory.WEIGHTS], model.weights)
    yield Compared(rank.rank, "gradients", held[MemoryCategory.GRADIENTS], model.gradients)
    yield Compared(
        rank.rank,
        "optimizer state",
        held[MemoryCategory.OPTIMIZER_STATE],
        optimizer,
        _adam_note(extra),
    )
    yield Compared(
        rank.rank,
        "activations",
        held[MemoryCategory.ACTIVATIONS],
        model.activations,
        f"kept for backward at the peak, in {rank.peak_phase.value}",
    )
    yield Compared(
        rank.rank,
        "logits and temporaries",
        temporaries,
        model.temporaries,
        "the model counts the larger of the loss and one layer's gradients",
    )
    yield Compared(
        rank.rank,
        "communication buffers",
        held[MemoryCategory.COMMUNICATION],
        model.communication,
    )
    yield Compared(rank.rank, "peak of live tensors", rank.peak_bytes, model.live)


def _adam_note(extra: int) -> str:
    if 0 < extra < 1000 * _ADAM_STEP_BYTES and extra % _ADAM_STEP_BYTES == 0:
        return f"Adam's step counts: {extra // _ADAM_STEP_BYTES} tensors, 4 bytes each"
    return ""
