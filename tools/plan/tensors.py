"""The parameter tensors of each model chunk on a rank: what buffers and buckets are made of."""

from __future__ import annotations

from dataclasses import dataclass

from tools.plan.configuration import Configuration
from tools.plan.parameters import norm_parameters
from tools.recipe.model import ModelShape


@dataclass(frozen=True, slots=True)
class ChunkTensors:
    """Sizes in elements of one virtual stage's tensors, by the buffer they are in."""

    shared_without_tied: tuple[int, ...]
    tied: tuple[int, ...]
    """The embedding that the first and the last of several stages share."""
    experts: tuple[int, ...]

    @property
    def shared(self) -> tuple[int, ...]:
        """Everything but the experts."""
        return self.shared_without_tied + self.tied


def chunk_tensors(configuration: Configuration, pipeline_rank: int) -> list[ChunkTensors]:
    """Tensors of every virtual stage of a pipeline rank, first to last."""
    parallelism, shape = configuration.parallelism, configuration.trained_shape
    virtual = parallelism.virtual_stages
    layers = configuration.layers_a_stage // virtual
    shared = _layer_tensors(shape, parallelism.tensor) * layers
    experts = _expert_tensors(shape, parallelism.tensor, parallelism.expert) * layers
    if parallelism.expert == 1:  # then experts are like any other weight
        shared, experts = shared + experts, ()
    chunks = []
    for stage in range(virtual):
        first = pipeline_rank == 0 and stage == 0
        last = pipeline_rank == parallelism.pipeline - 1 and stage == virtual - 1
        ends, tied = _end_tensors(configuration, first, last)
        chunks.append(ChunkTensors(shared + ends, tied, experts))
    return chunks


def _end_tensors(
    configuration: Configuration, first: bool, last: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Embedding, positions, last norm and output layer; the tied embedding apart."""
    shape, parallelism = configuration.trained_shape, configuration.parallelism
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
