"""The parameter tensors of each model chunk on a rank: what buffers and buckets are made of."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tools.plan.parameters import norm_parameters
from tools.spec.model import ModelShape
from tools.spec.run import RunSpec

ALIGNMENT = 64
"""The distributed optimizer starts every tensor at a multiple of this many elements."""


@dataclass(frozen=True, slots=True)
class Buffer:
    """Some tensors, one behind another."""

    elements: int = 0
    aligned_elements: int = 0
    """With every tensor started at a multiple of `ALIGNMENT`."""

    def __add__(self, other: Buffer) -> Buffer:
        return Buffer(
            self.elements + other.elements, self.aligned_elements + other.aligned_elements
        )

    def __mul__(self, times: int) -> Buffer:
        return Buffer(self.elements * times, self.aligned_elements * times)


@dataclass(frozen=True, slots=True)
class ChunkBuffers:
    """One virtual stage's tensors, by the buffer they are in."""

    untied: Buffer
    """Everything that is in neither of the others."""
    tied: Buffer
    """The embedding that the first and the last of several stages share."""
    experts: Buffer
    """Under expert parallelism; without it experts are like any other weight."""


def buffer_of(sizes: tuple[int, ...]) -> Buffer:
    """Tensors of these sizes."""
    aligned = sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)
    return Buffer(sum(sizes), aligned)


def chunk_buffers(configuration: RunSpec, pipeline_rank: int) -> list[ChunkBuffers]:
    """Buffers of every virtual stage of a pipeline rank, first to last."""
    parallelism, shape = configuration.parallelism, configuration.trained_shape
    virtual = parallelism.virtual_stages
    layers = configuration.layers_a_stage // virtual
    split = (parallelism.tensor, parallelism.expert, parallelism.tensor_of_experts)
    shared, experts = _layer_buffers(shape, *split)
    chunks = []
    for stage in range(virtual):
        first = pipeline_rank == 0 and stage == 0
        last = pipeline_rank == parallelism.pipeline - 1 and stage == virtual - 1
        ends, tied = _end_tensors(configuration, shape, first, last)
        untied = shared * layers + buffer_of(ends)
        chunks.append(ChunkBuffers(untied, buffer_of(tied), experts * layers))
    return chunks


@lru_cache(maxsize=256)
def _layer_buffers(
    shape: ModelShape, tensor: int, expert: int, expert_tensor: int
) -> tuple[Buffer, Buffer]:
    """One layer's tensors without and with expert parallelism."""
    shared = buffer_of(_layer_tensors(shape, tensor))
    experts = buffer_of(_expert_tensors(shape, expert_tensor, expert))
    return (shared + experts, Buffer()) if expert == 1 else (shared, experts)


def _end_tensors(
    configuration: RunSpec, shape: ModelShape, first: bool, last: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Embedding, positions, last norm and output layer; the tied embedding apart."""
    parallelism = configuration.parallelism
    table = (shape.padded_vocabulary(parallelism.tensor) * shape.hidden // parallelism.tensor,)
    split = shape.tied_embeddings and parallelism.pipeline > 1
    ends: tuple[int, ...] = ()
    tied = table if split and (first or last) else ()
    if first:
        ends += () if split else table
        ends += (shape.positions * shape.hidden,) if shape.positions else ()
    if last:
        ends += _norm_tensors(shape)
        ends += () if shape.tied_embeddings else table
    return ends, tied


def _norm_tensors(shape: ModelShape) -> tuple[int, ...]:
    return (shape.hidden,) * (norm_parameters(shape) // shape.hidden)


def _layer_tensors(shape: ModelShape, tensor: int) -> tuple[int, ...]:
    qkv = (shape.heads + 2 * shape.query_groups) * shape.head_width // tensor
    projection = shape.heads * shape.head_width // tensor
    tensors = (*_norm_tensors(shape) * 2, shape.hidden * qkv, projection * shape.hidden)
    tensors += (qkv,) if shape.bias or shape.qkv_bias else ()
    tensors += (shape.hidden,) if shape.bias else ()
    if shape.experts:
        tensors += (shape.experts * shape.hidden,)
        return tensors + ((shape.experts,) if shape.bias else ())
    return tensors + _mlp_tensors(shape, shape.ffn_hidden, tensor)


def _mlp_tensors(shape: ModelShape, ffn: int, tensor: int) -> tuple[int, ...]:
    first = ffn * (2 if shape.gated else 1) // tensor
    matrices = (shape.hidden * first, ffn // tensor * shape.hidden)
    return matrices + ((first, shape.hidden) if shape.bias else ())


def _expert_tensors(shape: ModelShape, tensor: int, expert: int) -> tuple[int, ...]:
    if not shape.experts:
        return ()
    return _mlp_tensors(shape, shape.expert_ffn_hidden, tensor) * (shape.experts // expert)
