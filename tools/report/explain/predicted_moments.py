"""When a rank is fullest, and what it holds then: the planner's moment, and those of unfused layers.

Fused kernels add a weight's gradient where it belongs and update Adam in place. Without them the
gradient of the word embedding, the largest matrix of a small model, exists beside its buffer, and
torch's Adam makes two temporaries of each tensor. The planner's model is of fused kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tools.plan.activations import logits_bytes
from tools.plan.memory import held_parameters, memory_of_rank
from tools.plan.parameters import rank_parameters
from tools.spec.run import RunSpec

_FP32_BYTES = 4


@dataclass(frozen=True)
class Moment:
    """A point of the iteration that may be the peak."""

    name: str
    activations: int
    temporaries: int
    """Logits included."""

    @property
    def total(self) -> int:
        """Bytes beside weights, gradients and optimizer state."""
        return self.activations + self.temporaries


@dataclass(frozen=True)
class Kernels:
    """What a run computes with."""

    fused_gradients: bool = True
    """Weight gradients are accumulated by the kernel that makes them."""
    fused_adam: bool = True


def fullest_moment(configuration: RunSpec, stage: int, kernels: Kernels) -> Moment:
    """The moment that holds most."""
    return max(_moments(configuration, stage, kernels), key=lambda moment: moment.total)


def _moments(configuration: RunSpec, stage: int, kernels: Kernels) -> Iterator[Moment]:
    model = memory_of_rank(configuration, stage)
    split = configuration.parallelism
    last = stage == split.pipeline - 1
    yield Moment("the loss" if last else "backward", model.activations, model.temporaries)
    held = rank_parameters(configuration.shape, split, stage)
    table = max(held.word_embedding, held.output_layer)
    gradient = configuration.element_bytes * table
    if last and not kernels.fused_gradients:
        yield Moment(
            "the output layer's backward: the logits' gradient and its weight's, not yet added",
            model.activations,
            logits_bytes(configuration) + gradient,
        )
        if split.pipeline == 1 and configuration.trained_shape.tied_embeddings:
            yield Moment(
                "the embedding's backward: its gradient, the tied output layer's, and their sum",
                0,
                3 * gradient,
            )
    if not kernels.fused_adam:
        largest = min(table, held_parameters(configuration, stage)[0])
        yield Moment(
            "Adam's step on the largest tensor: a square root and a quotient",
            0,
            2 * _FP32_BYTES * largest,
        )
