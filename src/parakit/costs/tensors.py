"""The parameter tensors of a model and of each rank, from which all parameter counts are summed.

Counts equal Megatron's printed "number of parameters on (tensor, pipeline) model parallel rank"
(`megatron/training/training.py: get_model`, at f4fa7d6b and core_v0.19.0). Column-parallel matrices
are split with their biases; row-parallel ones keep a full bias
(`megatron/core/tensor_parallel/layers.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from parakit.config.model import (
    EXPERTS,
    LINEAR,
    MAMBA,
    MLP,
    MTP,
    LatentAttention,
    LinearAttention,
    Mamba,
    ModelShape,
    round_up,
)
from parakit.config.peft import Lora
from parakit.config.run import RunSpec
from parakit.costs.adapters import list_adapted_linears

ALIGNMENT = 64
"""Elements: the distributed optimizer starts every tensor at a multiple of this number."""


class UnevenSplitError(ValueError):
    """A degree that does not divide the dimension it splits."""


@dataclass(frozen=True)
class Parameters:
    """Number of elements by component, of a model or of one rank."""

    word_embedding: int = 0
    position_embedding: int = 0
    attention: int = 0
    """Projections of attention, of linear attention and of Mamba-2 mixers."""
    dense_mlp: int = 0
    router: int = 0
    experts: int = 0
    norms: int = 0
    output_layer: int = 0
    """The output layer's own matrix: untied, or the last pipeline stage's copy of a tied one."""

    @property
    def total(self) -> int:
        """Elements of all components."""
        return self.shared + self.experts

    @property
    def shared(self) -> int:
        """Elements whose gradients are reduced over all of DP×CP: all but the experts."""
        embeddings = self.word_embedding + self.position_embedding + self.output_layer
        return embeddings + self.attention + self.dense_mlp + self.router + self.norms


@dataclass(frozen=True, slots=True)
class Buffer:
    """Consecutive tensors in one buffer."""

    elements: int = 0
    aligned_elements: int = 0
    """Elements if every tensor starts at a multiple of `ALIGNMENT`."""

    def __add__(self, other: Buffer) -> Buffer:
        return Buffer(
            self.elements + other.elements, self.aligned_elements + other.aligned_elements
        )

    def __mul__(self, times: int) -> Buffer:
        return Buffer(self.elements * times, self.aligned_elements * times)


@dataclass(frozen=True, slots=True)
class ChunkBuffers:
    """The tensors of one virtual stage by buffer."""

    untied: Buffer
    """All tensors that are in neither of the other buffers."""
    tied: Buffer
    """The embedding that the first and the last of several stages share."""
    experts: Buffer
    """Experts under expert parallelism; without it, experts are in `untied`."""


def total_parameters(shape: ModelShape, tensor: int = 1) -> int:
    """Return the number of parameters of the model. A tied embedding counts once.

    The vocabulary is padded for `tensor` tensor-parallel ranks.
    """
    table = shape.padded_vocabulary(tensor) * shape.hidden
    ends = _parameters(_end_tensors(shape, table, 1, 1, True, True))
    return ends.total + sum(
        count * _parameters(_layer_tensors(kind, 1, 1, 1)).total
        for count, kind in shape.count_layers_by_kind(shape.stored_mtp_layers)
    )


def explain_vocabulary_change(shape: ModelShape, trained: int, tensor: int = 1) -> str:
    """Return sentences on how the data's vocabulary changes the number of parameters.

    The text is empty if both vocabularies give the same number of parameters. This is so if their sizes are equal
    or are padded to the same size.

    Args:
        shape: The shape with the model's own vocabulary.
        trained: Number of entries of the vocabulary of the training data.
        tensor: Tensor-parallel ranks for which the vocabulary is padded.
    """
    planned = total_parameters(shape, tensor)
    actual = total_parameters(replace(shape, vocabulary=trained), tensor)
    if actual == planned:
        return ""
    return (
        f"Not the same model: the kit's data have GPT-2's tokens, so the trained vocabulary is {trained:,} instead "
        f"of {shape.vocabulary:,}. The trained model has {actual:,} parameters, {abs(actual - planned):,} "
        f"{'more' if actual > planned else 'fewer'} than {planned:,}. To train the model itself, set DATA= to "
        "tokens of its tokenizer."
    )


def adapter_parameters(shape: ModelShape, lora: Lora) -> int:
    """Return the number of parameters of all adapters of a model: rank × (inputs + outputs) per linear layer.

    All experts of a layer share one adapter per linear layer, as in Megatron-Bridge.
    """
    return sum(
        count * _parameters(_adapter_tensors(kind, lora, 1, 1)).total
        for count, kind in shape.count_layers_by_kind(shape.stored_mtp_layers)
    )


def active_parameters(shape: ModelShape, tensor: int = 1) -> int:
    """Return the number of parameters that one token uses.

    Of the routed experts, only those to which a token is routed count. The vocabulary is padded for `tensor`
    tensor-parallel ranks.
    """
    if not shape.experts:
        return total_parameters(shape, tensor)
    idle_experts = shape.experts - shape.experts_per_token
    expert = _parameters(_mlp_tensors(_routed(shape), "experts", shape.expert_ffn_hidden, 1))
    expert_layers = 0
    for count, layer in shape.count_layers_by_kind(shape.stored_mtp_layers):
        for times, block in layer.block_shapes:
            if block.experts:
                expert_layers += count * times
    return total_parameters(shape, tensor) - expert_layers * idle_experts * expert.total


def rank_parameters(spec: RunSpec, pipeline_rank: int = 0) -> Parameters:
    """Return the number of parameters on one pipeline rank, by component.

    All virtual stages of the rank are counted, and of each tensor only the part that one TP rank holds. The last
    of several pipeline ranks holds a second copy of a tied embedding
    (`LanguageModule.setup_embeddings_and_output_layer`).

    Raises:
        UnevenSplitError: A parallel size does not divide the dimension that it splits. The message names both.
        IndexError: There is no such rank.
    """
    pipeline = spec.parallelism.pipeline
    if not 0 <= pipeline_rank < pipeline:
        raise IndexError(f"PP {pipeline} has no rank {pipeline_rank}.")
    _refuse_uneven(spec)
    return _stage(spec, pipeline_rank).parameters


def trained_parameters(spec: RunSpec, pipeline_rank: int = 0) -> Parameters:
    """Return the number of trained parameters on one pipeline rank, by the component that they belong to.

    These are the adapters of a run with LoRA, and all parameters of any other run.

    Raises:
        UnevenSplitError: A parallel size does not divide the dimension that it splits. The message names both.
        IndexError: There is no such rank.
    """
    if spec.lora is None:
        return rank_parameters(spec, pipeline_rank)
    tensors: list[_Tensor] = []
    counts_by_kind = _held_layers(spec.stage_layout_spec, pipeline_rank)
    for counts, (kind, _) in zip(counts_by_kind, spec.trained_shape.layer_kinds, strict=True):
        tensors += [
            item._replace(copies=sum(counts) * item.copies)
            for item in _trained_layer_tensors(kind, *_degrees(spec), spec.lora)
        ]
    return _parameters(tensors)


def rank_tensors(spec: RunSpec, pipeline_rank: int = 0) -> list[int]:
    """Return the number of elements of each tensor on each TP rank of a pipeline rank."""
    tensors = _stage(spec, pipeline_rank).tensors
    return [tensor.elements for tensor in tensors for _ in range(tensor.copies)]


def layer_parameters(spec: RunSpec) -> Parameters:
    """Return the parameters of one transformer layer on a rank by component."""
    return _parameters(_layer_tensors(spec.shape, *_degrees(spec)))


def trained_layer_parameters(spec: RunSpec) -> Parameters:
    """Return the trained parameters of one transformer layer on a rank by component; with LoRA, the adapters."""
    return _parameters(_trained_layer_tensors(spec.shape, *_degrees(spec), spec.lora))


def largest_linear_elements(spec: RunSpec) -> int:
    """Return the elements of the largest linear weight of a layer on a rank; of experts, all weights of one kind."""
    return max(
        (
            item.copies * item.elements
            for kind, _ in spec.trained_shape.layer_kinds
            for item in _layer_tensors(kind, *_degrees(spec))
            if item.component in _LINEAR
        ),
        default=0,
    )


def partial_gradient_elements(spec: RunSpec, pipeline_rank: int) -> int:
    """Return the elements of trained tensors that every TP rank holds in full and that have partial
    gradients under SP.

    Under SP each rank computes such a gradient from its own tokens only.
    """
    return _stage(spec, pipeline_rank).partial_elements


def distinct_weight_elements(spec: RunSpec, pipeline_rank: int) -> int:
    """Return the number of elements of a rank's linear weights, in which each distinct shape counts once.

    Biases and the output layer are counted too.
    """
    shape, is_last = spec.trained_shape, pipeline_rank == spec.parallelism.pipeline - 1
    counts_by_kind = _held_layers(spec.stage_layout_spec, pipeline_rank)
    blocks: list[ModelShape] = []
    for counts, (layer, _) in zip(counts_by_kind, shape.layer_kinds, strict=True):
        if any(counts):
            blocks += [block for _, block in layer.block_shapes]
    if is_last and shape.mtp_layers:
        blocks.append(shape.with_only_block(MTP))
    elements = _distinct_elements(tuple(blocks), _degrees(spec))
    if is_last:
        # The last rank holds the output layer.
        elements += spec.padded_vocabulary * shape.hidden // spec.parallelism.tensor
    return elements


@lru_cache(maxsize=256)
def _distinct_elements(blocks: tuple[ModelShape, ...], degrees: tuple[int, int, int]) -> int:
    """Return the number of elements of the linear layers of these blocks.

    Each distinct tensor counts once, even if several blocks have it. If a block has several tensors of one size,
    all of them count.

    Args:
        blocks: Shapes of the blocks.
        degrees: Sizes of TP, EP and ETP.
    """
    distinct: Counter[tuple[str, int]] = Counter()
    for block in blocks:
        tensors = _layer_tensors(block, *degrees)
        # The union of two counters has the larger of both counts.
        distinct |= Counter(
            (item.component, item.elements) for item in tensors if item.component in _LINEAR
        )
    return sum(elements * times for (_, elements), times in distinct.items())


_LINEAR = ("attention", "dense_mlp", "experts")


def chunk_buffers(spec: RunSpec, pipeline_rank: int) -> list[ChunkBuffers]:
    """Return the buffers of every virtual stage of a pipeline rank, first to last.

    With LoRA the buffers hold only the adapters, because Megatron has no gradients of frozen weights.
    """
    split, shape = spec.parallelism, spec.trained_shape
    degrees = _degrees(spec)
    table = spec.padded_vocabulary * shape.hidden // split.tensor
    tables = _shared_tables(spec)
    chunks = []
    held = zip(*_held_layers(spec.stage_layout_spec, pipeline_rank), strict=True)
    for stage, counts in enumerate(held):
        first = pipeline_rank == 0 and stage == 0
        last = pipeline_rank == split.pipeline - 1 and stage == split.virtual_stages - 1
        untied_sizes: list[int] = []
        tied_sizes: list[int] = []
        ends = _end_tensors(shape, table, split.tensor, split.pipeline, first, last)
        for end in () if spec.lora else ends:
            sizes = tied_sizes if end.component in tables else untied_sizes
            sizes.append(end.elements)
        untied, experts = build_buffer(untied_sizes), Buffer()
        for count, (kind, _) in zip(counts, shape.layer_kinds, strict=True):
            layer_buffer, expert_buffer = _layer_buffers(kind, *degrees, spec.lora)
            untied += layer_buffer * count
            experts += expert_buffer * count
        chunks.append(ChunkBuffers(untied, build_buffer(tied_sizes), experts))
    return chunks


def build_buffer(sizes: Iterable[int]) -> Buffer:
    """Return the buffer of tensors with these sizes."""
    sizes = tuple(sizes)
    return Buffer(sum(sizes), sum(round_up(size, ALIGNMENT) for size in sizes))


def _degrees(spec: RunSpec) -> tuple[int, int, int]:
    """Return TP, EP and ETP of a run."""
    split = spec.parallelism
    return split.tensor, split.expert, split.effective_expert_tensor


class _Tensor(NamedTuple):
    """One parameter, or `copies` equal parameters."""

    component: str
    """Name of a field of `Parameters`."""
    elements: int
    copies: int = 1
    partial: bool = False
    """True if Megatron marks the parameter `sequence_parallel`; see `partial_gradient_elements`."""


def _shared_tables(spec: RunSpec) -> tuple[str, ...]:
    """Return the components that the first and the last stage both hold and whose gradients they add up.

    The result is empty if the stages do not share an embedding. With multi-token prediction both stages hold
    a word embedding. The output layer of a tied model is then stored but unused, so it is left out.
    """
    if not spec.shares_embedding_across_stages:
        return ()
    return ("word_embedding",) if spec.shape.mtp_layers else ("word_embedding", "output_layer")


def _end_tensors(
    shape: ModelShape, table: int, tensor: int, stages: int, first: bool, last: bool
) -> Iterator[_Tensor]:
    """Yield the parameter tensors of a pipeline stage, or of the full model, outside transformer layers.

    The first stage has the embeddings. The last stage has the final norm and the output layer. With one stage and
    tied embeddings, the output layer has no tensor of its own. With multi-token prediction (MTP), the last stage
    also has the blocks that join tokens and hidden states. If it is not the first stage too, it then has a copy of
    the embeddings.

    Args:
        shape: The model.
        table: Elements of the word embedding, which the output layer has, too.
        tensor: Tensor-parallel size.
        stages: Number of pipeline stages.
        first: True for the first stage, and for the full model.
        last: True for the last stage, and for the full model.
    """
    if first or (last and shape.mtp_layers):
        yield _Tensor("word_embedding", table)
        if shape.positions:
            yield _Tensor("position_embedding", shape.positions * shape.hidden)
    if last:
        yield from (_Tensor("norms", size, partial=True) for size in _norm(shape))
        if shape.mtp_layers:
            yield from (
                _layer_tensors(shape.with_only_block(MTP), tensor, 1, 1) * shape.stored_mtp_layers
            )
        if stages > 1 or not shape.tied_embeddings:
            yield _Tensor("output_layer", table)


@lru_cache(maxsize=256)
def _layer_tensors(
    shape: ModelShape, tensor: int, expert: int, expert_tensor: int
) -> tuple[_Tensor, ...]:
    """Return the parameter tensors of one layer on one rank.

    Args:
        shape: The shape of a layer, which may consist of several kinds of blocks.
        tensor: Tensor-parallel size.
        expert: Expert-parallel size.
        expert_tensor: Expert-tensor-parallel size.
    """
    tensors: list[_Tensor] = []
    if len(shape.blocks) > 1:
        for times, block in shape.block_shapes:
            block_tensors = _layer_tensors(block, tensor, expert, expert_tensor)
            tensors += [item for item in block_tensors if item.elements] * times
        return tuple(tensors)
    for size in _norm(shape) * shape.norms_per_layer:
        tensors.append(_Tensor("norms", size, partial=True))
    if shape.blocks == MAMBA and shape.mamba:
        tensors += _mamba_tensors(shape, shape.mamba, tensor)
    elif shape.blocks == LINEAR and shape.linear:
        tensors += _linear_tensors(shape, shape.linear, tensor)
    elif shape.blocks == MTP:
        tensors.append(_Tensor("attention", 2 * shape.hidden * shape.hidden // tensor))
    elif shape.blocks not in (MLP, EXPERTS):
        tensors += _attention_tensors(shape, tensor)
    if shape.blocks in ("", EXPERTS) and shape.experts:
        tensors += _expert_tensors(shape, tensor, expert, expert_tensor)
    elif shape.blocks in ("", MLP):
        tensors += _mlp_tensors(shape, "dense_mlp", shape.ffn_hidden, tensor)
    return tuple(tensors)


def _trained_layer_tensors(
    shape: ModelShape, tensor: int, expert: int, expert_tensor: int, lora: Lora | None
) -> tuple[_Tensor, ...]:
    """Return the trained parameter tensors of one layer on one rank: the adapters, or without LoRA all tensors."""
    if lora is None:
        return _layer_tensors(shape, tensor, expert, expert_tensor)
    return _adapter_tensors(shape, lora, tensor, expert_tensor)


@lru_cache(maxsize=256)
def _adapter_tensors(
    shape: ModelShape, lora: Lora, tensor: int, expert_tensor: int
) -> tuple[_Tensor, ...]:
    """Return the two matrices of each adapter of one layer on one rank."""
    tensors: list[_Tensor] = []
    for linear in list_adapted_linears(shape, lora):
        ranks = expert_tensor if linear.component == "experts" else tensor
        for elements in linear.elements_per_matrix(lora.rank, ranks):
            tensors.append(_Tensor(linear.component, elements))
    return tuple(tensors)


def _attention_tensors(shape: ModelShape, tensor: int) -> Iterator[_Tensor]:
    """Yield the tensors of attention on one TP rank."""
    if shape.latent:
        yield from _latent_tensors(shape, shape.latent, tensor)
    else:
        queries = shape.heads * (2 if shape.output_gate else 1)
        qkv = (queries + 2 * shape.query_groups) * shape.head_width // tensor
        width = shape.heads * shape.head_width // tensor
        yield _Tensor("attention", shape.hidden * qkv)
        yield _Tensor("attention", width * shape.hidden)
        if shape.bias or shape.qkv_bias:
            yield _Tensor("attention", qkv)
        if shape.qk_norm and shape.heads:
            yield from (_Tensor("norms", size) for size in _norm(shape, shape.head_width) * 2)
    if shape.sink and shape.heads:
        yield _Tensor("attention", shape.heads // tensor)
    if shape.bias:
        yield _Tensor("attention", shape.hidden, partial=True)


def _expert_tensors(
    shape: ModelShape, tensor: int, expert: int, expert_tensor: int
) -> Iterator[_Tensor]:
    """Yield the tensors of a layer's router, shared expert and routed experts on one rank.

    `tensor` splits the shared expert, `expert` divides the number of routed experts, and
    `expert_tensor` splits each routed expert. The router and the shared expert's gate are replicated.
    """
    yield _Tensor("router", shape.experts * shape.hidden, partial=True)
    if shape.bias:
        yield _Tensor("router", shape.experts, partial=True)
    if shape.shared_expert_ffn:
        yield from _mlp_tensors(shape, "dense_mlp", shape.shared_expert_ffn, tensor)
        if shape.shared_expert_gate:
            yield _Tensor("dense_mlp", shape.hidden, partial=True)
    if shape.latent_experts:
        yield from [_Tensor("router", shape.hidden * shape.latent_experts, partial=True)] * 2
    experts_per_rank, ffn = shape.experts // expert, shape.expert_ffn_hidden
    yield from _mlp_tensors(_routed(shape), "experts", ffn, expert_tensor, experts_per_rank)


def _routed(shape: ModelShape) -> ModelShape:
    """Return the shape with the width that tokens have when they are routed to experts."""
    return replace(shape, hidden=shape.latent_experts) if shape.latent_experts else shape


_CONVOLUTION = 4
"""Tokens that the short convolution of a Mamba-2 mixer covers (`mamba_mixer.py: d_conv`)."""


def _mamba_tensors(shape: ModelShape, mamba: Mamba, tensor: int) -> Iterator[_Tensor]:
    """Yield the tensors of a Mamba-2 mixer on one TP rank (`megatron/core/ssm/mamba_mixer.py`).

    All tensors are split by heads or groups. Only the convolution has a bias.
    """
    yield _Tensor("attention", shape.hidden * mamba.projected_columns // tensor)
    yield _Tensor("norms", _CONVOLUTION * mamba.convolved_channels // tensor)
    yield _Tensor("norms", mamba.convolved_channels // tensor)
    for _ in ("dt_bias", "A_log", "D"):
        yield _Tensor("norms", mamba.heads // tensor)
    yield _Tensor("norms", mamba.width // tensor)
    yield _Tensor("attention", mamba.width * shape.hidden // tensor)


def _linear_tensors(shape: ModelShape, linear: LinearAttention, tensor: int) -> Iterator[_Tensor]:
    """Yield the tensors of linear attention on one TP rank (`megatron/core/ssm/gated_delta_net`).

    All tensors but the norm of the output are split by heads. Linear attention has no biases, even if other
    layers of the model have biases.
    """
    yield _Tensor("attention", shape.hidden * linear.projected_columns // tensor)
    yield _Tensor("norms", linear.kernel * linear.convolved_channels // tensor)
    for _ in ("dt_bias", "A_log"):
        yield _Tensor("norms", linear.value_heads // tensor)
    yield from (_Tensor("norms", size, partial=True) for size in _norm(shape, linear.value_width))
    yield _Tensor("attention", linear.value_channels * shape.hidden // tensor)


def _latent_tensors(shape: ModelShape, latent: LatentAttention, tensor: int) -> Iterator[_Tensor]:
    """Yield the tensors of latent attention on one TP rank.

    Up-projections and the output projection are split. Down-projections are split only if
    `latent.splits_down_projections` is set. A norm follows each down-projection if the model has QK norms.
    """
    heads, hidden = shape.heads // tensor, shape.hidden
    queries = heads * (latent.head_width + latent.rotary_width)
    keys_and_values = heads * (latent.head_width + latent.value_width)
    down = tensor if latent.splits_down_projections else 1
    norm_tensors = 0
    if shape.qk_norm:
        norm_tensors = 1 if shape.rms_norm else 2
    if latent.query_rank:
        yield _Tensor("attention", hidden * latent.query_rank // down)
        yield from (_Tensor("norms", latent.query_rank),) * norm_tensors
    yield _Tensor("attention", (latent.query_rank or hidden) * queries)
    yield _Tensor("attention", hidden * (latent.key_value_rank + latent.rotary_width) // down)
    yield from (_Tensor("norms", latent.key_value_rank),) * norm_tensors
    yield _Tensor("attention", latent.key_value_rank * keys_and_values)
    yield _Tensor("attention", heads * latent.value_width * hidden)


def _mlp_tensors(
    shape: ModelShape, component: str, ffn: int, tensor: int, copies: int = 1
) -> Iterator[_Tensor]:
    """Yield the parameter tensors of an MLP with `ffn` columns on one of `tensor` ranks.

    Args:
        component: Component of `Parameters` that the tensors count for.
        copies: Number of identical MLPs on the rank, such as its experts.
    """
    first = ffn * (2 if shape.gated else 1) // tensor
    yield _Tensor(component, shape.hidden * first, copies)
    yield _Tensor(component, ffn // tensor * shape.hidden, copies)
    if shape.bias:
        yield _Tensor(component, first, copies)
        yield _Tensor(component, shape.hidden, copies, partial=component == "dense_mlp")


def _norm(shape: ModelShape, width: int = 0) -> tuple[int, ...]:
    """Return the sizes of a norm's tensors: weight, and bias unless RMSNorm. 0 means the hidden
    state's width.
    """
    return (width or shape.hidden,) * (1 if shape.rms_norm else 2)


@lru_cache(maxsize=4096)
def _held_layers(spec: RunSpec, pipeline_rank: int) -> tuple[tuple[int, ...], ...]:
    """Return the number of layers on a pipeline rank: one tuple per kind of layer, with one number per
    virtual stage.

    Layers of multi-token prediction are counted in the last virtual stage of the last rank.
    """
    shape = spec.shape
    held = [
        list(spec.count_layers_per_chunk(layers, pipeline_rank)) for _, layers in shape.layer_kinds
    ]
    if pipeline_rank == spec.parallelism.pipeline - 1:
        held[shape.mtp_is_dense][-1] += shape.stored_mtp_layers
    return tuple(map(tuple, held))


def _parameters(tensors: Iterable[_Tensor]) -> Parameters:
    """Return the sum of the tensors' elements by component."""
    totals: Counter[str] = Counter()
    for tensor in tensors:
        totals[tensor.component] += tensor.copies * tensor.elements
    return Parameters(**totals)


class _Stage(NamedTuple):
    """The tensors that each TP rank of a pipeline rank holds, with their sums."""

    tensors: tuple[_Tensor, ...]
    parameters: Parameters
    partial_elements: int


def _stage(spec: RunSpec, pipeline_rank: int) -> _Stage:
    """Return the tensors of a pipeline rank."""
    split = spec.parallelism
    degrees = (*_degrees(spec), split.pipeline)
    first, last = pipeline_rank == 0, pipeline_rank == split.pipeline - 1
    held = tuple(map(sum, _held_layers(spec.stage_layout_spec, pipeline_rank)))
    return _stage_of(spec.trained_shape, degrees, held, first, last)


@lru_cache(maxsize=1024)
def _stage_of(
    shape: ModelShape,
    degrees: tuple[int, int, int, int],
    held: tuple[int, ...],
    first: bool,
    last: bool,
) -> _Stage:
    """Return the parameter tensors of a pipeline stage.

    Results are cached by the arguments.

    Args:
        shape: Shape of the model.
        degrees: Sizes of TP, EP, ETP and PP.
        held: Number of layers of each kind on the stage.
        first: True for the first stage.
        last: True for the last stage.
    """
    tensor, expert, expert_tensor, pipeline = degrees
    table = shape.padded_vocabulary(tensor) * shape.hidden // tensor
    tensors = list(_end_tensors(shape, table, tensor, pipeline, first, last))
    for count, (kind, _) in zip(held, shape.layer_kinds, strict=True):
        tensors += [
            item._replace(copies=count * item.copies)
            for item in _layer_tensors(kind, tensor, expert, expert_tensor)
        ]
    partial_elements = sum(item.copies * item.elements for item in tensors if item.partial)
    return _Stage(tuple(tensors), _parameters(tensors), partial_elements)


@lru_cache(maxsize=256)
def _layer_buffers(
    shape: ModelShape, tensor: int, expert: int, expert_tensor: int, lora: Lora | None
) -> tuple[Buffer, Buffer]:
    """Return two buffers of one layer's trained parameters: of tensors outside experts, and of experts.

    Without expert parallelism the experts are in the first buffer, and the second is empty.
    """
    other_sizes: list[int] = []
    expert_sizes: list[int] = []
    for item in _trained_layer_tensors(shape, tensor, expert, expert_tensor, lora):
        if expert > 1 and item.component == "experts":
            expert_sizes += [item.elements] * item.copies
        else:
            other_sizes += [item.elements] * item.copies
    return build_buffer(other_sizes), build_buffer(expert_sizes)


def _refuse_uneven(spec: RunSpec) -> None:
    """Raise an UnevenSplitError if a parallel size does not divide a dimension. The error names the first such
    dimension.
    """
    shape, split = spec.shape, spec.parallelism
    stages = split.pipeline * split.virtual_stages
    # If several TP ranks share a query group, its rows are split like those of any matrix, so the
    # number of groups need not be divisible.
    groups = 0 if split.tensor % shape.query_groups == 0 else shape.query_groups
    if spec.stages.find_problem(shape.layers, split.pipeline, split.virtual_stages):
        raise UnevenSplitError(
            f"{shape.layers} layers cannot be split evenly over PP x virtual stages {stages}."
        )
    for dimension, value, degree, size in (
        ("attention heads", shape.heads, "TP", split.tensor),
        ("query groups", groups, "TP", split.tensor),
        ("MLP columns", shape.ffn_hidden, "TP", split.tensor),
        ("experts", shape.experts, "EP", split.expert),
        ("columns of experts", shape.expert_ffn_hidden, "ETP", split.effective_expert_tensor),
        ("Mamba groups", shape.mamba.groups if shape.mamba else 0, "TP", split.tensor),
        ("heads of keys", shape.linear.key_heads if shape.linear else 0, "TP", split.tensor),
    ):
        if value % size:
            raise UnevenSplitError(
                f"{value} {dimension} cannot be split evenly over {degree} {size}."
            )
