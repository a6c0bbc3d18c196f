"""How many parameters a model has, and how many of them each rank holds.

Counts are exactly what Megatron prints as "number of parameters on (tensor, pipeline) model
parallel rank" (`megatron/training/training.py: get_model`, at f4fa7d6b and core_v0.19.0).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from tools.spec.model import ModelShape
from tools.spec.run import RunSpec
from tools.spec.strategy import Parallelism


@dataclass(frozen=True)
class Parameters:
    """Elements by component, of a whole model or of one rank."""

    word_embedding: int = 0
    position_embedding: int = 0
    attention: int = 0
    dense_mlp: int = 0
    router: int = 0
    experts: int = 0
    norms: int = 0
    output_layer: int = 0
    """A matrix of its own: untied, or the last pipeline stage's copy of a tied one."""

    @property
    def total(self) -> int:
        """All elements."""
        return self.shared + self.experts

    @property
    def shared(self) -> int:
        """Elements whose gradients are reduced over all of DP×CP: everything but the experts."""
        embeddings = self.word_embedding + self.position_embedding + self.output_layer
        return embeddings + self.attention + self.dense_mlp + self.router + self.norms


class UnevenSplitError(ValueError):
    """A degree that does not divide what it splits."""


def parameters_total(shape: ModelShape, tensor: int = 1) -> int:
    """Distinct parameters of the model, with the vocabulary padded for `tensor` ranks."""
    layers = layer_parameters(shape, shape.layers)
    vocabulary = shape.padded_vocabulary(tensor) * shape.hidden
    return layers.total + vocabulary_and_ends(shape, vocabulary)


def active_parameters(shape: ModelShape, tensor: int = 1) -> int:
    """Parameters that one token meets: of the experts only those it is routed to."""
    total = parameters_total(shape, tensor)
    if not shape.experts:
        return total
    idle = shape.experts - shape.experts_per_token
    return total - shape.layers * idle * _expert_parameters(shape, 1)


def rank_parameters(spec: RunSpec, pipeline_rank: int = 0) -> Parameters:
    """Components on each TP rank of a pipeline rank, over all its virtual stages.

    A tied output embedding is a second copy on the last of several pipeline ranks
    (`LanguageModule.setup_embeddings_and_output_layer`).

    Raises:
        UnevenSplitError: A degree does not divide what it splits; the message names both.
        IndexError: There is no such rank.
    """
    parallelism = spec.parallelism
    if not 0 <= pipeline_rank < parallelism.pipeline:
        raise IndexError(f"PP {parallelism.pipeline} has no rank {pipeline_rank}.")
    _refuse_uneven(spec.shape, parallelism)
    first, last = pipeline_rank == 0, pipeline_rank == parallelism.pipeline - 1
    split = (parallelism.tensor, parallelism.pipeline, parallelism.expert)
    return _stage_parameters(spec.trained_shape, (*split, parallelism.expert_tensor), first, last)


def layer_parameters(
    shape: ModelShape, layers: int, tensor: int = 1, expert: int = 1, expert_tensor: int = 0
) -> Parameters:
    """Components of `layers` transformer layers on one rank of TP `tensor` and EP `expert`.

    Experts are split over ETP `expert_tensor`, or over TP where that is 0. Column-parallel matrices
    are split with their biases; row-parallel ones keep the bias whole
    (`megatron/core/tensor_parallel/layers.py`).
    """
    moe = shape.experts > 0
    return Parameters(
        attention=layers * _attention_parameters(shape, tensor),
        dense_mlp=0 if moe else layers * _mlp_parameters(shape, shape.ffn_hidden, tensor),
        router=layers * _router_parameters(shape),
        experts=layers
        * (shape.experts // expert)
        * _expert_parameters(shape, expert_tensor or tensor),
        norms=layers * 2 * norm_parameters(shape),
    )


def norm_parameters(shape: ModelShape) -> int:
    """Elements of one normalisation: weight, and bias unless RMSNorm."""
    return shape.hidden * (1 if shape.rms_norm else 2)


def vocabulary_and_ends(shape: ModelShape, vocabulary: int) -> int:
    """Embeddings, the last norm and the output layer of a model on one pipeline stage."""
    tables = vocabulary * (1 if shape.tied_embeddings else 2)
    return tables + shape.positions * shape.hidden + norm_parameters(shape)


@lru_cache(maxsize=1024)
def _stage_parameters(
    shape: ModelShape, split: tuple[int, int, int, int], first: bool, last: bool
) -> Parameters:
    tensor, pipeline, expert, expert_tensor = split
    vocabulary = shape.padded_vocabulary(tensor) * shape.hidden // tensor
    layers = layer_parameters(shape, shape.layers // pipeline, tensor, expert, expert_tensor)
    own_output = last and (not shape.tied_embeddings or pipeline > 1)
    return replace(
        layers,
        word_embedding=vocabulary if first else 0,
        position_embedding=shape.positions * shape.hidden if first else 0,
        norms=layers.norms + (norm_parameters(shape) if last else 0),
        output_layer=vocabulary if own_output else 0,
    )


def _attention_parameters(shape: ModelShape, tensor: int) -> int:
    width = shape.heads * shape.head_width // tensor
    qkv_width = (shape.heads + 2 * shape.query_groups) * shape.head_width // tensor
    qkv_bias = qkv_width if shape.bias or shape.qkv_bias else 0
    projection_bias = shape.hidden if shape.bias else 0
    return shape.hidden * qkv_width + qkv_bias + width * shape.hidden + projection_bias


def _mlp_parameters(shape: ModelShape, ffn: int, tensor: int) -> int:
    first_width = ffn * (2 if shape.gated else 1) // tensor
    biases = first_width + shape.hidden if shape.bias else 0
    return shape.hidden * first_width + ffn // tensor * shape.hidden + biases


def _expert_parameters(shape: ModelShape, tensor: int) -> int:
    return _mlp_parameters(shape, shape.expert_ffn_hidden, tensor) if shape.experts else 0


def _router_parameters(shape: ModelShape) -> int:
    bias = shape.experts if shape.bias else 0
    return shape.experts * shape.hidden + bias


def _refuse_uneven(shape: ModelShape, parallelism: Parallelism) -> None:
    splits = (
        ("attention heads", shape.heads, "TP", parallelism.tensor),
        ("query groups", shape.query_groups, "TP", parallelism.tensor),
        ("MLP columns", shape.ffn_hidden, "TP", parallelism.tensor),
        ("layers", shape.layers, "PP x virtual stages", _stages(parallelism)),
        ("experts", shape.experts, "EP", parallelism.expert),
        ("columns of experts", shape.expert_ffn_hidden, "ETP", parallelism.tensor_of_experts),
    )
    for what, value, degree, size in splits:
        if value % size:
            raise UnevenSplitError(f"{value} {what} cannot be split evenly over {degree} {size}.")


def _stages(parallelism: Parallelism) -> int:
    return parallelism.pipeline * parallelism.virtual_stages


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


def chunk_buffers(spec: RunSpec, pipeline_rank: int) -> list[ChunkBuffers]:
    """Buffers of every virtual stage of a pipeline rank, first to last."""
    parallelism, shape = spec.parallelism, spec.trained_shape
    virtual = parallelism.virtual_stages
    layers = spec.layers_a_stage // virtual
    split = (parallelism.tensor, parallelism.expert, parallelism.tensor_of_experts)
    shared, experts = _layer_buffers(shape, *split)
    chunks = []
    for stage in range(virtual):
        first = pipeline_rank == 0 and stage == 0
        last = pipeline_rank == parallelism.pipeline - 1 and stage == virtual - 1
        ends, tied = _end_tensors(spec, shape, first, last)
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
    spec: RunSpec, shape: ModelShape, first: bool, last: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Embedding, positions, last norm and output layer; the tied embedding apart."""
    parallelism = spec.parallelism
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
