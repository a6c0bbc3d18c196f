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
from itertools import groupby
from math import inf

from parakit.config.recompute import Recompute
from parakit.config.run import DeviceKind, RunSpec, StateTypes
from parakit.config.strategy import Sharding
from parakit.costs.activations import residual_bytes
from parakit.costs.caching_allocator import CachingAllocator, MemoryBlock, OutOfDeviceMemoryError
from parakit.costs.memory import (
    DEVICE_BASE_BYTES,
    PredictedMemory,
    bytes_per_parameter,
    chunks_in_flight,
    embedding_bytes,
    find_peak_rank,
    held_parameters,
    logit_elements,
    placeholder_bytes,
)
from parakit.costs.tensors import rank_tensors

_FP32_BYTES = 4
_STATISTICS_PER_NORM = 2
"""Numbers in fp32 per token that a layer norm stores: mean and deviation. A root mean square norm stores one."""
_DTYPES = ("fp16", "bf16")


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

    The allocator's bytes are replayed if the run is of a kind that the replay knows (`supports_replay`). Otherwise
    they are those of the closed form.

    Args:
        spec: The run.
        device_bytes: Memory of the device. The replay gives empty segments back when the device is full. If that is
            not enough, the returned memory exceeds `device_bytes`.
    """
    rank, memory = find_peak_rank(spec)
    if not supports_replay(spec):
        return rank, memory
    replayed = replay_rank(spec, rank, device_bytes - DEVICE_BASE_BYTES)
    total = DEVICE_BASE_BYTES + max(replayed.reserved, memory.live)
    return rank, replace(memory, allocator=total - memory.live, reclaimable=0)


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
        and spec.state_types == StateTypes()
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
    replayed = _RankReplay(spec, pipeline_rank, limit)
    allocator = replayed.allocator
    try:
        replayed.allocate_model()
        for evaluates in (False, False, True, True):
            if evaluates:
                replayed.evaluate()
            replayed.run_micro_batches()
            replayed.update()
    except OutOfDeviceMemoryError as error:
        return ReplayedMemory(error.needed_bytes, allocator.peak_live_bytes, True)
    return ReplayedMemory(allocator.reserved_bytes, allocator.peak_live_bytes, False)


class _TensorSizes:
    """Bytes of the tensors of one layer, of the embedding and of the loss, of one micro batch on one rank."""

    def __init__(self, spec: RunSpec) -> None:
        shape, tensor = spec.shape, spec.parallelism.tensor
        tokens, element = spec.micro_batch_tokens, spec.element_bytes
        self.hidden = residual_bytes(spec)
        """A hidden state. Sequence parallelism splits it."""
        self.full_hidden = element * tokens * shape.hidden
        """A hidden state of all tokens of the sequence."""
        self.queries = element * tokens * shape.heads * shape.head_width // tensor
        self.keys = element * tokens * shape.query_groups * shape.head_width // tensor
        statistics = 1 if shape.rms_norm else _STATISTICS_PER_NORM
        self.norm_statistics = statistics * _FP32_BYTES * tokens // spec.sequence_shards
        self.softmax_statistics = _FP32_BYTES * tokens * shape.heads // tensor
        self.dropout_mask = self.hidden // element if spec.dropout else 0
        self.wide_output = element * tokens * shape.ffn_hidden // tensor
        self.wide_input = self.wide_output * (2 if shape.gated else 1)
        self.logits = element * logit_elements(spec)
        self.fp32_logits = _FP32_BYTES * logit_elements(spec)
        self.table = element * spec.padded_vocabulary * shape.hidden // tensor
        self.embedding_mask = embedding_bytes(spec)
        self.query_gradient = _FP32_BYTES * self.queries // element
        """Workspace of attention's backward, which adds up the gradient of the queries in fp32."""


class _RankReplay:
    """Allocations of one pipeline rank, in Megatron's order."""

    def __init__(self, spec: RunSpec, pipeline_rank: int, limit: float) -> None:
        pipeline = spec.parallelism.pipeline
        self.allocator = CachingAllocator(limit)
        self._spec = spec
        self._rank = pipeline_rank
        self._is_first = pipeline_rank == 0
        self._is_last = pipeline_rank == pipeline - 1
        self._layers_per_chunk = spec.layers_per_chunk(pipeline_rank)
        self._sizes = _TensorSizes(spec)
        self._splits_sequence = spec.sequence_shards > 1
        self._splits_heads = spec.parallelism.context > 1 and spec.cp_comm_type == "a2a"
        self._is_rotary = not spec.shape.positions
        self._tensors = _order_by_layer(
            rank_tensors(spec, pipeline_rank), spec.num_layers_on_stage(pipeline_rank)
        )
        self._updated_tensors = self._tensors
        if spec.parallelism.sharding is Sharding.ZERO1:
            updated, _ = held_parameters(spec, pipeline_rank)
            self._updated_tensors = _first_elements(self._tensors[::-1], updated)
        self._gradient_copies: list[MemoryBlock] = []
        self._has_moments = False

    def allocate_model(self) -> None:
        """Allocate weights, gradients, fp32 weights and the placeholders of weight gradients.

        The distributed optimizer copies the weights into one buffer, and the first copies are freed
        (`param_and_grad_buffer.py`).
        """
        precision = bytes_per_parameter(self._spec)
        elements = sum(self._tensors)
        weights = [self._allocate(precision.weights * size) for size in self._tensors]
        if self._spec.parallelism.sharding is Sharding.ZERO1:
            self._allocate(precision.weights * elements)
            self._free(*weights)
        self._allocate(precision.gradients * elements)
        for size in self._updated_tensors:
            self._allocate(precision.main_parameters * size)
        self._allocate(placeholder_bytes(self._spec, self._rank))

    def run_micro_batches(self) -> None:
        """Run forward and backward of all micro batches in the order of the pipeline's schedule."""
        self._free(*self._gradient_copies)
        self._gradient_copies = []
        pipeline, chunks = self._spec.parallelism.pipeline, len(self._layers_per_chunk)
        waiting: list[deque[_Pass]] = [deque() for _ in range(chunks)]
        warmup = chunks_in_flight(self._spec, self._rank)
        # After warm-up, forward and backward alternate in the same way for every group of micro batches, so that one
        # group more than the warm-up needs is enough.
        steps_per_group = pipeline * chunks
        enough_groups = -(-warmup // steps_per_group) + 1
        steps = min(self._spec.microbatches * chunks, enough_groups * steps_per_group)
        for step in range(steps + warmup):
            if step < steps:
                chunk = step // pipeline % chunks
                waiting[chunk].append(self._forward(chunk))
            if step >= warmup - 1 and step - warmup + 1 < steps:
                chunk = chunks - 1 - (step - warmup + 1) // pipeline % chunks
                self._backward(chunk, waiting[chunk].popleft())

    def update(self) -> None:
        """Copy gradients in 16 bits to fp32, and allocate Adam's two moments in the first update.

        The copies are live until the next forward.
        """
        precision = bytes_per_parameter(self._spec)
        if precision.gradient_copies:
            self._gradient_copies = [
                self._allocate(precision.gradient_copies * size) for size in self._updated_tensors
            ]
        if self._has_moments:
            return
        for size in self._updated_tensors:
            self._allocate(precision.adam // 2 * size)
            self._allocate(precision.adam // 2 * size)
        self._has_moments = True

    def evaluate(self) -> None:
        """Run forward of one micro batch, which stores nothing for a backward."""
        for chunk in range(len(self._layers_per_chunk)):
            computed = self._forward(chunk, stores=False)
            self._free(*computed.head, *computed.embedding, computed.output)

    def _allocate(self, size: int) -> MemoryBlock:
        return self.allocator.allocate(size)

    def _free(self, *blocks: MemoryBlock) -> None:
        for block in blocks:
            self.allocator.free(block)

    def _forward(self, chunk: int, stores: bool = True) -> _Pass:
        """Run forward of one micro batch through a chunk, and return what it stored.

        Args:
            chunk: Index of the chunk.
            stores: False for an evaluation, in which each tensor is freed when the next layer has its input.
        """
        embedding: list[MemoryBlock] = []
        if self._is_first and chunk == 0:
            hidden, embedding = self._embed()
        else:
            hidden = self._allocate(self._sizes.hidden)
        layers: list[dict[str, MemoryBlock]] = []
        for _ in range(self._layers_per_chunk[chunk]):
            stored, output = self._forward_layer()
            stored["input"] = hidden
            if stores:
                layers.append(stored)
            else:
                self._free(*stored.values())
            hidden = output
        head: list[MemoryBlock] = []
        if self._is_last and chunk == len(self._layers_per_chunk) - 1:
            head = self._compute_loss()
        return _Pass(embedding, layers, hidden, head)

    def _embed(self) -> tuple[MemoryBlock, list[MemoryBlock]]:
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

    def _forward_layer(self) -> tuple[dict[str, MemoryBlock], MemoryBlock]:
        """Return the tensors that a layer stores for backward, without its input, and its output."""
        sizes, stored = self._sizes, dict[str, MemoryBlock]()
        self._norm("attention", stored)
        gathered = self._gather()
        projection = self._allocate(sizes.queries + 2 * sizes.keys)
        self._free(*gathered)
        if self._is_rotary:
            # Rotated queries and keys, and a contiguous copy of the values, replace the projection.
            stored["queries"] = self._allocate(sizes.queries)
            stored["keys"] = self._allocate(sizes.keys)
            stored["values"] = self._allocate(sizes.keys)
            self._free(projection)
        else:
            stored["projection"] = projection
        stored["attention"] = self._allocate(sizes.queries)
        if self._splits_heads:
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

    def _norm(self, name: str, stored: dict[str, MemoryBlock]) -> None:
        """Store the output of a norm and its statistics."""
        stored[f"{name}_norm"] = self._allocate(self._sizes.hidden)
        stored[f"{name}_statistics"] = self._allocate(self._sizes.norm_statistics)

    def _gather(self) -> list[MemoryBlock]:
        """Return the tensor that sequence parallelism gathers, in a list; an empty list without it."""
        return [self._allocate(self._sizes.full_hidden)] if self._splits_sequence else []

    def _project_and_add(self, mask_name: str, stored: dict[str, MemoryBlock]) -> MemoryBlock:
        """Return the sum of the residual and a row-parallel product, whose dropout mask is stored."""
        product = self._allocate(self._sizes.full_hidden)
        if self._splits_sequence:
            reduced = self._allocate(self._sizes.hidden)
            self._free(product)
            product = reduced
        if self._sizes.dropout_mask:
            stored[mask_name] = self._allocate(self._sizes.dropout_mask)
        total = self._allocate(self._sizes.hidden)
        self._free(product)
        return total

    def _compute_loss(self) -> list[MemoryBlock]:
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
        if self._is_first and chunk == 0:
            # The dense gradient of the embedding's table.
            self._free(self._allocate(sizes.table))
        self._free(gradient, *computed.embedding)

    def _backward_layer(self, stored: dict[str, MemoryBlock], gradient: MemoryBlock) -> MemoryBlock:
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

    def _mask_gradient(self, mask_name: str, stored: dict[str, MemoryBlock]) -> MemoryBlock:
        """Return the gradient before a dropout, whose mask is freed."""
        masked = self._allocate(self._sizes.hidden)
        if mask_name in stored:
            self._free(stored[mask_name])
        return masked

    def _backward_norm(
        self,
        name: str,
        stored: dict[str, MemoryBlock],
        output_gradient: MemoryBlock,
        residual_gradient: MemoryBlock,
    ) -> MemoryBlock:
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

    def _reduce(self, gradient: MemoryBlock) -> MemoryBlock:
        """Return a gradient, of which sequence parallelism keeps one part and frees the full tensor."""
        if not self._splits_sequence:
            return gradient
        part = self._allocate(self._sizes.hidden)
        self._free(gradient)
        return part


@dataclass(frozen=True)
class _Pass:
    """Tensors that forward of one micro batch through one chunk has stored."""

    embedding: list[MemoryBlock]
    layers: list[dict[str, MemoryBlock]]
    output: MemoryBlock
    head: list[MemoryBlock]


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
