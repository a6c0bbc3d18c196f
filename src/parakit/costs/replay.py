"""Memory of a device with the gaps of PyTorch's caching allocator, from a replay of a rank's allocations.

The closed forms of `memory.py` count live tensors. The allocator reserves more: the first update places Adam's
moments in blocks that the first iteration's activations have left, and the remainders of these blocks are too small
for the next iteration's activations and logits. How much is lost depends on all sizes together, so no closed form
has it. The replay allocates and frees the tensors of a rank in Megatron's order and lets `CachingAllocator` place
them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby
from math import inf

from parakit.config.recompute import Recompute
from parakit.config.run import DeviceKind, RunSpec, StateTypes
from parakit.config.strategy import Sharding
from parakit.costs.activations import residual_bytes
from parakit.costs.caching_allocator import (
    AllocationRecorder,
    AllocationTrace,
    CachingAllocator,
    OutOfDeviceMemoryError,
)
from parakit.costs.memory import (
    DEVICE_BASE_BYTES,
    Precision,
    PredictedMemory,
    bytes_per_parameter,
    chunks_in_flight,
    embedding_bytes,
    estimate_rank_memory,
    find_peak_rank,
    find_peak_rank_within,
    held_parameters,
    logit_elements,
    placeholder_bytes,
)
from parakit.costs.tensors import rank_tensors

_FP32_BYTES = 4
_STATISTICS_PER_NORM = 2
"""Numbers in fp32 per token that a layer norm stores: mean and deviation. A root mean square norm stores one."""
_DTYPES = ("fp16", "bf16")
_USUAL_TYPES = StateTypes()


@dataclass(frozen=True)
class ReplayedMemory:
    """Bytes of PyTorch's allocator after the replay of four iterations and two evaluations."""

    reserved: int
    """Bytes of all segments. If the replay ran out of memory, the bytes of all segments that could not be given back
    and of the one that was missing."""
    peak_live: int
    """Largest number of bytes in live tensors."""
    is_out_of_memory: bool


def find_peak_device_memory(
    spec: RunSpec, device_bytes: float = inf
) -> tuple[int, PredictedMemory]:
    """Return the pipeline rank with the peak memory, and its memory as the device reports it.

    The rank is that of the closed form (`find_peak_rank`). Its memory is that of `estimate_device_memory`. Other ranks
    are not replayed. In 37 of 769 random pipelines, the replay of another rank needs more memory, by up to 3.6%.

    Args:
        spec: The run.
        device_bytes: Memory of the device.
    """
    rank, _ = find_peak_rank(spec)
    return rank, estimate_device_memory(spec, rank, device_bytes)


def estimate_device_memory(
    spec: RunSpec, pipeline_rank: int, device_bytes: float = inf
) -> PredictedMemory:
    """Return the memory of a pipeline rank as the device reports it.

    The allocator's bytes are replayed if the run is of a kind that the replay knows (`supports_replay`). Otherwise
    they are those of the closed form.

    Args:
        spec: The run.
        pipeline_rank: The pipeline rank.
        device_bytes: Memory of the device. The replay gives empty segments back when the device is full. If that is
            not enough, the returned memory exceeds `device_bytes`.
    """
    memory = estimate_rank_memory(spec, pipeline_rank)
    if not supports_replay(spec):
        return memory
    replayed = replay_rank(spec, pipeline_rank, device_bytes - DEVICE_BASE_BYTES)
    total = DEVICE_BASE_BYTES + max(replayed.reserved, memory.live)
    return replace(memory, allocator=total - memory.live, reclaimable=0)


def find_peak_rank_that_may_fit(spec: RunSpec, limit: float) -> tuple[int, PredictedMemory] | None:
    """Return the pipeline rank with the peak memory, and the closed form of its memory.

    The result is None only if the memory of `find_peak_device_memory` exceeds `limit` bytes. For a run that is
    replayed, the closed form is a lower bound without its reclaimable bytes: the allocator reserves at least the live
    tensors, beside the bytes of the device's base. A replayed run may still exceed the limit by its gaps.
    """
    return find_peak_rank_within(spec, limit, counts_reclaimable=not supports_replay(spec))


def supports_replay(spec: RunSpec) -> bool:
    """Return True if the replay knows all allocations of a run.

    It knows dense transformers in 16 bits with Transformer Engine's layers on GPUs: with DP, TP, SP, CP and pipelines,
    with and without the distributed optimizer. It knows no recomputation, offloading, FP8 and adapters. Under virtual
    stages the number of micro batches is a multiple of the stages.
    """
    shape, sharding = spec.shape, spec.parallelism.sharding
    has_known_layers = not (
        shape.blocks
        or shape.experts
        or shape.latent
        or shape.mamba
        or shape.total_mtp_layers
        or shape.window
        or shape.dense_layers
    )
    has_known_state = (
        spec.dtype in _DTYPES
        and not spec.fp8_recipe
        and spec.state_types == _USUAL_TYPES
        and spec.optimizer == "adam"
        and not spec.lora
        and sharding in (Sharding.NONE, Sharding.ZERO1)
    )
    has_known_kernels = (
        spec.device is DeviceKind.GPU
        and spec.fused_attention
        and spec.fused_norms
        and not spec.fused
        and not spec.fused_loss
    )
    keeps_activations = spec.recompute == Recompute.NONE and not spec.offload
    split = spec.parallelism
    has_full_groups = split.virtual_stages == 1 or spec.microbatches % split.pipeline == 0
    return (
        has_known_layers
        and has_known_state
        and has_known_kernels
        and keeps_activations
        and has_full_groups
    )


def replay_rank(spec: RunSpec, pipeline_rank: int = 0, limit: float = inf) -> ReplayedMemory:
    """Return the allocator's memory after four training iterations on a pipeline rank.

    Adam's moments are allocated by the first update, so the second iteration has the peak of live tensors. An
    evaluation comes before the third and the fourth iteration, because Megatron's runs evaluate from time to time.

    Args:
        spec: A run that `supports_replay`.
        pipeline_rank: The pipeline rank.
        limit: Bytes that the allocator may reserve.
    """
    return _replay_iterations(_describe_rank(spec, pipeline_rank), limit)


@dataclass(frozen=True)
class _TensorSizes:
    """Bytes of the tensors of one layer, of the embedding and of the loss, of one micro batch on one rank."""

    hidden: int
    """A hidden state. Sequence parallelism splits it."""
    full_hidden: int
    """A hidden state of all tokens of the sequence."""
    queries: int
    keys: int
    norm_statistics: int
    softmax_statistics: int
    dropout_mask: int
    wide_output: int
    wide_input: int
    logits: int
    fp32_logits: int
    table: int
    embedding_mask: int
    query_gradient: int
    """Workspace of attention's backward, which adds up the gradient of the queries in fp32."""


def _compute_sizes(spec: RunSpec) -> _TensorSizes:
    """Return the bytes of the tensors of one micro batch."""
    shape, tensor = spec.shape, spec.parallelism.tensor
    tokens, element = spec.micro_batch_tokens, spec.element_bytes
    hidden = residual_bytes(spec)
    queries = element * tokens * shape.heads * shape.head_width // tensor
    statistics = 1 if shape.rms_norm else _STATISTICS_PER_NORM
    wide_output = element * tokens * shape.ffn_hidden // tensor
    return _TensorSizes(
        hidden=hidden,
        full_hidden=element * tokens * shape.hidden,
        queries=queries,
        keys=element * tokens * shape.query_groups * shape.head_width // tensor,
        norm_statistics=statistics * _FP32_BYTES * tokens // spec.sequence_shards,
        softmax_statistics=_FP32_BYTES * tokens * shape.heads // tensor,
        dropout_mask=hidden // element if spec.dropout else 0,
        wide_output=wide_output,
        wide_input=wide_output * (2 if shape.gated else 1),
        logits=element * logit_elements(spec),
        fp32_logits=_FP32_BYTES * logit_elements(spec),
        table=element * spec.padded_vocabulary * shape.hidden // tensor,
        embedding_mask=embedding_bytes(spec),
        query_gradient=_FP32_BYTES * queries // element,
    )


@dataclass(frozen=True)
class _RankDescription:
    """Everything of a run that decides the allocations of one pipeline rank.

    Strategies that differ only in how they spread replicas and sequences over ranks often have equal descriptions, so
    that one replay serves all of them.
    """

    sizes: _TensorSizes
    precision: Precision
    tensors: tuple[int, ...]
    """Elements of the weights, in the order in which they are allocated."""
    updated_tensors: tuple[int, ...]
    """Elements of the weights that the rank updates."""
    shards_optimizer: bool
    placeholder_bytes: int
    is_first: bool
    """True for the first pipeline rank, which has the embedding."""
    is_last: bool
    """True for the last pipeline rank, which has the loss."""
    pipeline: int
    layers_per_chunk: tuple[int, ...]
    warmup: int
    """Forwards of chunks until the first backward, with the forward before it."""
    steps: int
    """Forwards of chunks in an iteration."""
    splits_sequence: bool
    splits_heads: bool
    is_rotary: bool


def _describe_rank(spec: RunSpec, pipeline_rank: int) -> _RankDescription:
    """Return what decides the allocations of a pipeline rank."""
    split = spec.parallelism
    layers_per_chunk = spec.layers_per_chunk(pipeline_rank)
    elements = rank_tensors(spec, pipeline_rank)
    tensors = _order_by_layer(elements, spec.num_layers_on_stage(pipeline_rank))
    shards_optimizer = split.sharding is Sharding.ZERO1
    updated_tensors = tensors
    if shards_optimizer:
        updated, _ = held_parameters(spec, pipeline_rank)
        updated_tensors = _first_elements(tensors[::-1], updated)
    # After warm-up, forward and backward alternate in the same way for every group of micro batches, so that one group
    # more than the warm-up needs is enough.
    chunks, warmup = len(layers_per_chunk), chunks_in_flight(spec, pipeline_rank)
    steps_per_group = split.pipeline * chunks
    enough_groups = -(-warmup // steps_per_group) + 1
    return _RankDescription(
        sizes=_compute_sizes(spec),
        precision=bytes_per_parameter(spec),
        tensors=tuple(tensors),
        updated_tensors=tuple(updated_tensors),
        shards_optimizer=shards_optimizer,
        placeholder_bytes=placeholder_bytes(spec, pipeline_rank),
        is_first=pipeline_rank == 0,
        is_last=pipeline_rank == split.pipeline - 1,
        pipeline=split.pipeline,
        layers_per_chunk=layers_per_chunk,
        warmup=warmup,
        steps=min(spec.microbatches * chunks, enough_groups * steps_per_group),
        splits_sequence=spec.sequence_shards > 1,
        splits_heads=split.context > 1 and spec.cp_comm_type == "a2a",
        is_rotary=not spec.shape.positions,
    )


@lru_cache(maxsize=4096)
def _replay_iterations(description: _RankDescription, limit: float) -> ReplayedMemory:
    """Return the allocator's memory after four training iterations, as `replay_rank` describes them."""
    rank = _RankTraces(description)
    allocator = CachingAllocator(limit)
    try:
        allocator.replay(rank.trace_model())
        run_micro_batches = rank.trace_micro_batches()
        copy_gradients, free_copies = rank.trace_gradient_copies()
        for trace in (run_micro_batches, copy_gradients, rank.trace_moments()):
            allocator.replay(trace)
        iteration = (free_copies, run_micro_batches, copy_gradients)
        for trace in iteration:
            allocator.replay(trace)
        evaluate = rank.trace_evaluation()
        for _ in range(2):
            state = allocator.snapshot()
            for trace in (evaluate, *iteration):
                allocator.replay(trace)
            if allocator.snapshot() == state:
                # A further iteration would start in the state of this one, so it would end in it too.
                break
    except OutOfDeviceMemoryError as error:
        return ReplayedMemory(error.needed_bytes, allocator.peak_live_bytes, True)
    return ReplayedMemory(allocator.reserved_bytes, allocator.peak_live_bytes, False)


class _RankTraces:
    """Allocations of one pipeline rank, in Megatron's order.

    Tensors are numbers of `AllocationRecorder`.
    """

    def __init__(self, description: _RankDescription) -> None:
        self._described = description
        self._sizes = description.sizes
        recorder = AllocationRecorder()
        self._allocate = recorder.allocate
        self._free = recorder.free
        self._take_trace = recorder.take_trace

    def trace_model(self) -> AllocationTrace:
        """Return the allocations of weights, gradients, fp32 weights and the placeholders of weight gradients.

        The distributed optimizer copies the weights into one buffer, and the first copies are freed
        (`param_and_grad_buffer.py`).
        """
        described, precision = self._described, self._described.precision
        elements = sum(described.tensors)
        weights = [self._allocate(precision.weights * size) for size in described.tensors]
        if described.shards_optimizer:
            self._allocate(precision.weights * elements)
            self._free(*weights)
        self._allocate(precision.gradients * elements)
        for size in described.updated_tensors:
            self._allocate(precision.main_parameters * size)
        self._allocate(described.placeholder_bytes)
        return self._take_trace()

    def trace_micro_batches(self) -> AllocationTrace:
        """Return the allocations of forward and backward of all micro batches, in the order of the schedule."""
        pipeline, chunks = self._described.pipeline, len(self._described.layers_per_chunk)
        waiting: list[deque[_Pass]] = [deque() for _ in range(chunks)]
        warmup, steps = self._described.warmup, self._described.steps
        for step in range(steps + warmup):
            if step < steps:
                chunk = step // pipeline % chunks
                waiting[chunk].append(self._forward(chunk))
            if step >= warmup - 1 and step - warmup + 1 < steps:
                chunk = chunks - 1 - (step - warmup + 1) // pipeline % chunks
                self._backward(chunk, waiting[chunk].popleft())
        return self._take_trace()

    def trace_gradient_copies(self) -> tuple[AllocationTrace, AllocationTrace]:
        """Return the allocations of fp32 copies of gradients in 16 bits, and their frees.

        The update allocates the copies, and the next forward frees them. Both traces are empty if gradients are in
        fp32.
        """
        bytes_per_element = self._described.precision.gradient_copies
        sizes = self._described.updated_tensors if bytes_per_element else ()
        copies = [self._allocate(bytes_per_element * size) for size in sizes]
        allocations = self._take_trace()
        self._free(*copies)
        return allocations, self._take_trace()

    def trace_moments(self) -> AllocationTrace:
        """Return the allocations of Adam's two moments, which the first update makes."""
        bytes_per_element = self._described.precision.adam // 2
        for size in self._described.updated_tensors:
            self._allocate(bytes_per_element * size)
            self._allocate(bytes_per_element * size)
        return self._take_trace()

    def trace_evaluation(self) -> AllocationTrace:
        """Return the allocations of forward of one micro batch, which stores nothing for a backward."""
        for chunk in range(len(self._described.layers_per_chunk)):
            computed = self._forward(chunk, stores=False)
            self._free(*computed.head, *computed.embedding, computed.output)
        return self._take_trace()

    def _forward(self, chunk: int, stores: bool = True) -> _Pass:
        """Run forward of one micro batch through a chunk, and return what it stored.

        Args:
            chunk: Index of the chunk.
            stores: False for an evaluation, in which each tensor is freed when the next layer has its input.
        """
        embedding: list[int] = []
        if self._described.is_first and chunk == 0:
            hidden, embedding = self._embed()
        else:
            hidden = self._allocate(self._sizes.hidden)
        layers: list[dict[str, int]] = []
        for _ in range(self._described.layers_per_chunk[chunk]):
            stored, output = self._forward_layer()
            stored["input"] = hidden
            if stores:
                layers.append(stored)
            else:
                self._free(*stored.values())
            hidden = output
        head: list[int] = []
        if self._described.is_last and chunk == len(self._described.layers_per_chunk) - 1:
            head = self._compute_loss()
        return _Pass(embedding, layers, hidden, head)

    def _embed(self) -> tuple[int, list[int]]:
        """Return the hidden state that enters the first layer, and the stored mask of the embedding's dropout."""
        sizes = self._sizes
        tokens, summed = self._allocate(sizes.full_hidden), self._allocate(sizes.full_hidden)
        self._free(tokens)
        transposed = self._allocate(sizes.full_hidden)
        self._free(summed)
        if not sizes.embedding_mask:
            return transposed, []
        mask, hidden = self._allocate(sizes.embedding_mask), self._allocate(sizes.hidden)
        self._free(transposed)
        return hidden, [mask]

    def _forward_layer(self) -> tuple[dict[str, int], int]:
        """Return the tensors that a layer stores for backward, without its input, and its output."""
        sizes, stored = self._sizes, dict[str, int]()
        self._norm("attention", stored)
        gathered = self._gather()
        projection = self._allocate(sizes.queries + 2 * sizes.keys)
        self._free(*gathered)
        if self._described.is_rotary:
            # Rotated queries and keys, and a contiguous copy of the values, replace the projection.
            stored["queries"] = self._allocate(sizes.queries)
            stored["keys"] = self._allocate(sizes.keys)
            stored["values"] = self._allocate(sizes.keys)
            self._free(projection)
        else:
            stored["projection"] = projection
        stored["attention"] = self._allocate(sizes.queries)
        if self._described.splits_heads:
            # The second all-to-all splits the output by tokens again. Both forms are stored.
            stored["attention_by_tokens"] = self._allocate(sizes.queries)
        stored["softmax_statistics"] = self._allocate(sizes.softmax_statistics)
        stored["residual"] = self._project_and_add("attention_mask", stored)
        self._norm("mlp", stored)
        gathered = self._gather()
        stored["wide_input"] = self._allocate(sizes.wide_input)
        self._free(*gathered)
        stored["wide_output"] = self._allocate(sizes.wide_output)
        return stored, self._project_and_add("mlp_mask", stored)

    def _norm(self, name: str, stored: dict[str, int]) -> None:
        """Store the output of a norm and its statistics."""
        stored[f"{name}_norm"] = self._allocate(self._sizes.hidden)
        stored[f"{name}_statistics"] = self._allocate(self._sizes.norm_statistics)

    def _gather(self) -> list[int]:
        """Return the tensor that sequence parallelism gathers, in a list; an empty list without it."""
        return [self._allocate(self._sizes.full_hidden)] if self._described.splits_sequence else []

    def _project_and_add(self, mask_name: str, stored: dict[str, int]) -> int:
        """Return the sum of the residual and a row-parallel product, whose dropout mask is stored."""
        product = self._allocate(self._sizes.full_hidden)
        if self._described.splits_sequence:
            reduced = self._allocate(self._sizes.hidden)
            self._free(product)
            product = reduced
        if self._sizes.dropout_mask:
            stored[mask_name] = self._allocate(self._sizes.dropout_mask)
        total = self._allocate(self._sizes.hidden)
        self._free(product)
        return total

    def _compute_loss(self) -> list[int]:
        """Return the output of the final norm, its gathered copy under SP, and the fp32 softmax."""
        head = [self._allocate(self._sizes.hidden), *self._gather()]
        logits = self._allocate(self._sizes.logits)
        softmax = self._allocate(self._sizes.fp32_logits)
        self._free(logits)
        return [softmax, *head]

    def _backward(self, chunk: int, computed: _Pass) -> None:
        """Run backward of one micro batch through a chunk, and free what forward stored."""
        sizes = self._sizes
        if computed.head:
            softmax, *normed = computed.head
            logit_gradient = self._allocate(sizes.logits)
            self._free(softmax)
            gradient = self._reduce(self._allocate(sizes.full_hidden))
            self._free(logit_gradient, *normed)
            input_gradient = self._allocate(sizes.hidden)
            self._free(gradient)
            gradient = input_gradient
        else:
            gradient = self._allocate(sizes.hidden)
        self._free(computed.output)
        for stored in reversed(computed.layers):
            gradient = self._backward_layer(stored, gradient)
        if self._described.is_first and chunk == 0:
            # The dense gradient of the embedding's table.
            self._free(self._allocate(sizes.table))
        self._free(gradient, *computed.embedding)

    def _backward_layer(self, stored: dict[str, int], gradient: int) -> int:
        """Free what a layer stored, and return the gradient of its input."""
        sizes = self._sizes
        masked = self._mask_gradient("mlp_mask", stored)
        gathered = self._gather()
        wide_gradient = self._allocate(sizes.wide_output)
        self._free(stored["wide_output"], *gathered, masked)
        input_gradient = self._allocate(sizes.wide_input)
        self._free(stored["wide_input"], wide_gradient)
        gradient = self._backward_norm("mlp", stored, input_gradient, gradient)
        self._free(stored["residual"])
        masked = self._mask_gradient("attention_mask", stored)
        gathered = self._gather()
        attention_gradient = self._allocate(sizes.queries)
        self._free(masked, *gathered)
        projection_gradient = self._allocate(sizes.queries + 2 * sizes.keys)
        self._free(self._allocate(sizes.query_gradient))
        self._free(attention_gradient, stored["attention"], stored["softmax_statistics"])
        for name in ("projection", "queries", "keys", "values", "attention_by_tokens"):
            if name in stored:
                self._free(stored[name])
        gradient = self._backward_norm("attention", stored, projection_gradient, gradient)
        self._free(stored["input"])
        return gradient

    def _mask_gradient(self, mask_name: str, stored: dict[str, int]) -> int:
        """Return the gradient before a dropout, whose mask is freed."""
        masked = self._allocate(self._sizes.hidden)
        if mask_name in stored:
            self._free(stored[mask_name])
        return masked

    def _backward_norm(
        self,
        name: str,
        stored: dict[str, int],
        output_gradient: int,
        residual_gradient: int,
    ) -> int:
        """Return the gradient of a norm's input with the residual's added, behind a column-parallel product.

        Args:
            name: Name of the norm.
            stored: Stored tensors of the layer, of which those of the norm are freed.
            output_gradient: Gradient of the product's output, which is freed.
            residual_gradient: Gradient of the residual, which is freed.
        """
        gathered = self._gather()
        normed_gradient = self._reduce(self._allocate(self._sizes.full_hidden))
        self._free(*gathered, output_gradient)
        gradient = self._allocate(self._sizes.hidden)
        self._free(stored[f"{name}_norm"], stored[f"{name}_statistics"], normed_gradient)
        total = self._allocate(self._sizes.hidden)
        self._free(residual_gradient, gradient)
        return total

    def _reduce(self, gradient: int) -> int:
        """Return a gradient, of which sequence parallelism keeps one part and frees the full tensor."""
        if not self._described.splits_sequence:
            return gradient
        part = self._allocate(self._sizes.hidden)
        self._free(gradient)
        return part


@dataclass(frozen=True)
class _Pass:
    """Tensors that forward of one micro batch through one chunk has stored."""

    embedding: list[int]
    layers: list[dict[str, int]]
    output: int
    head: list[int]


def _order_by_layer(tensors: list[int], layers: int) -> list[int]:
    """Return the elements of all tensors, layer by layer, after those that belong to no layer.

    Args:
        tensors: Elements of the tensors, with the tensors of equal purpose side by side.
        layers: Number of layers.
    """
    outside: list[int] = []
    per_layer: list[int] = []
    for elements, equal_tensors in groupby(tensors):
        times, remainder = divmod(len(list(equal_tensors)), max(1, layers))
        outside += [elements] * remainder
        per_layer += [elements] * times
    return outside + per_layer * layers


def _first_elements(tensors: list[int], count: int) -> list[int]:
    """Return the tensors that hold the first `count` elements; the last tensor may be cut."""
    parts: list[int] = []
    for elements in tensors:
        if count <= 0:
            break
        parts.append(min(elements, count))
        count -= elements
    return parts
