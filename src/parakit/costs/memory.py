"""Predicted memory of one rank at its peak, by component, and the assumptions of the prediction.

"In flight" means between forward and backward. A chunk is one virtual stage of a pipeline rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import ceil, inf

from parakit.config.peft import NF4_BITS
from parakit.config.run import DeviceKind, Fp8Recipe, RunSpec, StateTypes
from parakit.config.stages import EVEN_SPLIT
from parakit.costs.activations import (
    FP8_RECIPE_BYTES,
    chunk_activation_bytes,
    layer_activation_bytes,
    norm_steps,
    offloaded_bytes,
    recomputed_bytes,
    residual_bytes,
)
from parakit.costs.dispatchers import dispatcher_bytes
from parakit.costs.tensors import (
    Parameters,
    distinct_weight_elements,
    largest_linear_elements,
    layer_parameters,
    rank_parameters,
    trained_layer_parameters,
    trained_parameters,
)
from parakit.formatting.units import MIB

_FP32_BYTES = 4


def embedding_bytes(spec: RunSpec) -> int:
    """Return the bytes that the embedding stores: its dropout's mask, one byte per element."""
    if not spec.dropout:
        return 0
    return spec.micro_batch_tokens * spec.shape.hidden // spec.sequence_shards


def head_bytes(spec: RunSpec) -> int:
    """Return the bytes that the final norm and the output layer store: their inputs."""
    return (norm_steps(spec) + 1) * residual_bytes(spec)


def logit_elements(spec: RunSpec) -> int:
    """Return the logits of one micro batch on one rank of the last stage; TP splits the vocabulary."""
    return spec.micro_batch_tokens * spec.padded_vocabulary // spec.parallelism.tensor


def logits_bytes(spec: RunSpec) -> int:
    """Return the bytes of logits, and of their fp32 copies, that are live at the loss.

    `VocabParallelCrossEntropy` turns the fp32 copy in place into the softmax and then into the gradient. There
    is no copy of fp32 logits. There is no copy either if the gradient overwrites the logits (Transformer Engine,
    `pytorch/cross_entropy.py`). With multi-token prediction, the copies of all predicted tokens are live
    together (`multi_token_prediction.py: process_mtp_loss`).
    """
    overwritten = (spec.fused_loss and spec.loss_impl == "te") or "cross_entropy" in spec.fused
    if spec.dtype == "fp32" or overwritten:
        bytes_per_logit = spec.element_bytes * spec.shape.predicted_tokens
    else:
        # The fp32 copies of all predicted tokens are live, and the half-precision logits of one.
        bytes_per_logit = _FP32_BYTES * spec.shape.predicted_tokens + spec.element_bytes
    return bytes_per_logit * logit_elements(spec)


def head_backward_bytes(spec: RunSpec) -> int:
    """Return the live bytes in the output layer's backward: gradients of logits and of hidden
    states.

    Each TP rank holds the full gradient of the hidden states and then reduces it
    (`tensor_parallel/layers.py`).
    """
    logit_gradients = spec.element_bytes * logit_elements(spec)
    hidden_gradients = spec.element_bytes * spec.micro_batch_tokens * spec.shape.hidden
    reduced_gradients = residual_bytes(spec) if spec.sequence_shards > 1 else 0
    return logit_gradients + hidden_gradients + reduced_gradients


def layers_in_flight(spec: RunSpec, pipeline_rank: int) -> int:
    """Return the peak number of layers in flight on a rank, summed over micro batches.

    A layer is in flight for a micro batch from its forward until its backward. With L layers, p stages and m
    micro batches, 1F1B has (L/p)·min(p − rank, m). The interleaved schedule has v chunks of L/(pv) layers per
    rank. It holds 2(p − rank − 1) + (v − 1)p warm-up chunks and the chunk being computed, at most mv chunks.
    On rank 0 this is L(1 + (p−1)/(pv)) layers (arXiv:2104.04473 §2.2 and `get_pp_rank_microbatches`).
    """
    return _bytes_in_flight(spec, pipeline_rank, spec.layers_per_chunk(pipeline_rank))


def _bytes_in_flight(spec: RunSpec, pipeline_rank: int, bytes_per_chunk: tuple[int, ...]) -> int:
    """Return the peak of the bytes in flight on a rank, summed over chunks and micro batches.

    Args:
        bytes_per_chunk: The bytes that each chunk of the rank holds per micro batch, in the order of forward.
    """
    chunks = chunks_in_flight(spec, pipeline_rank)
    if len(set(bytes_per_chunk)) == 1:
        return chunks * bytes_per_chunk[0]
    # After warm-up, the chunks that forward and backward pass through repeat with every group of PP
    # micro batches. One group after warm-up therefore has the peak.
    pipeline, chunks_per_rank = spec.parallelism.pipeline, len(bytes_per_chunk)
    all_steps = spec.microbatches * chunks_per_rank
    steps = min(all_steps, chunks + pipeline * chunks_per_rank)
    return _peak_bytes_in_flight(bytes_per_chunk, pipeline, chunks, steps)


@lru_cache(maxsize=4096)
def _peak_bytes_in_flight(
    bytes_per_chunk: tuple[int, ...], pipeline: int, chunks: int, steps: int
) -> int:
    """Return the peak of the bytes in flight on a rank whose chunks hold unequal bytes.

    Megatron runs PP micro batches through one chunk and then through the next. Backward begins with the last
    chunk (`get_schedule_table`). After warm-up, forward and backward alternate.

    Args:
        bytes_per_chunk: The bytes that each chunk holds per micro batch.
        pipeline: Number of pipeline stages.
        chunks: Forwards before the first backward.
        steps: Number of forwards that are simulated.
    """
    chunk_by_step = [step // pipeline % len(bytes_per_chunk) for step in range(steps)]
    stored_by_forward = [bytes_per_chunk[chunk] for chunk in chunk_by_step]
    freed_by_backward = (bytes_per_chunk[-1 - chunk] for chunk in chunk_by_step)
    current = peak = sum(stored_by_forward[:chunks])
    for stored, freed in zip(stored_by_forward[chunks:], freed_by_backward, strict=False):
        current += stored - freed
        peak = max(peak, current)
    return peak


def chunks_in_flight(spec: RunSpec, pipeline_rank: int) -> int:
    """Return the peak number of chunks in flight on a rank.

    A chunk is a virtual stage with one micro batch. It is in flight from its forward until its backward.
    """
    parallelism, microbatches = spec.parallelism, spec.microbatches
    pipeline, virtual = parallelism.pipeline, parallelism.virtual_stages
    warmup = pipeline - pipeline_rank - 1
    if virtual > 1:
        warmup = 2 * warmup + (virtual - 1) * pipeline
    return min(warmup + 1, microbatches * virtual)


DEVICE_BASE_BYTES = 3870 * MIB
"""CUDA context, cuBLAS and cuDNN workspaces, NCCL buffers and unusable remainders of the allocator
on a GPU. Fitted once, over all eight published measurements.
"""

LOGIT_SLACK_BYTES = 2
"""Bytes per logit on the rank: a block of the half-precision logits' size that the caching
allocator cannot reuse after Adam's state lies among the activations' blocks (inferred). Fitted
once, over the same published measurements.
"""

_WORKSPACE_BYTES = {"hopper": 32 * MIB, "blackwell": 32 * MIB}
"""Bytes of one workspace of cuBLAS and of one of Transformer Engine, by generation of the GPU."""
_OLDER_CUBLAS_BYTES, _OLDER_TRANSFORMER_ENGINE_BYTES = 8_519_680, 4 * MIB
"""Bytes of the same two workspaces on GPUs before Hopper."""
_DETERMINISTIC_CUBLAS_BYTES = 32 * MIB
_CUBLAS_HANDLES, _GROUPED_STREAMS = 2, 4


def workspace_bytes(generation: str, deterministic: bool, grouped: bool) -> int:
    """Return the bytes of workspaces that matrix products hold in the allocator between iterations.

    cuBLAS has two workspaces, one for the thread that runs forward and one for the thread that runs backward
    (`aten/src/ATen/cuda/CublasHandlePool.cpp`: 32 MiB from Hopper on, 8.1 MiB before). Deterministic runs need
    `CUBLAS_WORKSPACE_CONFIG=:4096:8`, which is 32 MiB. Transformer Engine has one workspace itself
    (`get_cublas_workspace_size_bytes`: 32 MiB from Hopper on, 4 MiB before), and four more for grouped products.

    Args:
        generation: Name of the GPU's generation.
        grouped: True if the model has grouped products, as experts do.
    """
    cublas_workspace = _WORKSPACE_BYTES.get(generation, _OLDER_CUBLAS_BYTES)
    if deterministic:
        cublas_workspace = _DETERMINISTIC_CUBLAS_BYTES
    fused_workspace = _WORKSPACE_BYTES.get(generation, _OLDER_TRANSFORMER_ENGINE_BYTES)
    fused_workspaces = 1 + (_GROUPED_STREAMS if grouped else 0)
    return _CUBLAS_HANDLES * cublas_workspace + fused_workspaces * fused_workspace


CPU_PROCESS_BYTES = 900 * MIB
"""Resident bytes of a CPU rank before it builds a model: Python, torch, Megatron."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes per parameter, by content."""

    weights: int
    gradients: int
    main_parameters: int
    gradient_copies: int
    """fp32 copies of half-precision gradients, live from the optimizer step to the next zero_grad.
    Their blocks stay reserved.
    """
    adam: int = 8


PRECISIONS = {
    "fp16": Precision(weights=2, gradients=2, main_parameters=4, gradient_copies=4),
    "bf16": Precision(weights=2, gradients=4, main_parameters=4, gradient_copies=0),
    "fp32": Precision(weights=4, gradients=4, main_parameters=0, gradient_copies=0),
}
"""Bytes per parameter by dtype: 20, 18 and 16 in all (`Float16OptimizerWithFloat16Params` and
`FP32Optimizer` in `megatron/core/optimizer/optimizer.py`). bf16 accumulates gradients in fp32
unless a flag changes it.
"""


_USUAL_TYPES = StateTypes()
_TYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def bytes_per_parameter(spec: RunSpec) -> Precision:
    """Return the bytes per parameter of the run's dtype, changed by the run's flags.

    bf16 gradients are copied to fp32 for the update. Only the precision-aware optimizer reads bf16 gradients
    directly (`--use-precision-aware-optimizer`, only with a distributed optimizer). This optimizer stores only the
    16 bits of an fp32 weight that the bf16 weight lacks (`store_param_remainders`). Under fp8 or Megatron-FSDP
    it stores fp32 weights instead (`megatron/core/optimizer/__init__.py`). If a part of the optimizer is
    offloaded, the device updates the other part in fp32 (`hybrid_optimizer.py`: `param_update_in_fp32`).
    """
    usual, types = PRECISIONS[spec.dtype], spec.state_types
    if types == _USUAL_TYPES or spec.dtype != "bf16":
        return usual
    sharding = spec.parallelism.sharding
    gradients = _TYPE_BYTES[types.gradients or "fp32"]
    reads_gradients_directly = (
        types.precision_aware and bool(sharding) and not types.offloaded_fraction
    )
    if not reads_gradients_directly:
        gradient_copies = 4 if gradients < 4 else 0
        return replace(usual, gradients=gradients, gradient_copies=gradient_copies)
    main_parameters = _TYPE_BYTES[types.main_parameters or "fp32"]
    is_megatron_fsdp = sharding.wraps_modules
    if not is_megatron_fsdp and not types.main_parameters and not spec.fp8_recipe:
        main_parameters = 2  # Only the remainders.
    first_moment = _TYPE_BYTES[types.first_moment or "fp32"]
    second_moment = _TYPE_BYTES[types.second_moment or "fp32"]
    return replace(
        usual,
        gradients=gradients,
        main_parameters=main_parameters,
        adam=first_moment + second_moment,
    )


@dataclass(frozen=True, slots=True)
class PredictedMemory:
    """Bytes of one rank at its peak, by component."""

    weights: int
    gradients: int
    main_parameters: int
    optimizer_state: int
    activations: int
    """Activations of all layers and micro batches in flight, of the embedding and of the head."""
    temporaries: int
    """The larger of the loss's logits and one layer's gradients of activations; with ZeRO-3 also
    the full output layer.
    """
    communication: int
    """Pipeline messages, gathered units of ZeRO-3 and FSDP2, gradient buckets of ZeRO-2."""
    allocator: int
    """Context, workspaces, dispatchers' buffers, and reserved blocks that cannot be used; see the
    assumptions.
    """
    reclaimable: int = 0
    """Part of `allocator` in empty blocks, which the allocator returns before it runs out of
    memory.
    """

    @property
    def total(self) -> int:
        """Bytes as the device reports them."""
        return self.live + self.allocator

    @property
    def needed(self) -> int:
        """Bytes without which the rank runs out of memory."""
        return self.total - self.reclaimable

    @property
    def live(self) -> int:
        """Bytes of live tensors, as the memory accounting measures them."""
        return self.state + self.activations + self.temporaries + self.communication

    @property
    def state(self) -> int:
        """Bytes of weights, gradients and optimizer."""
        return self.weights + self.gradients + self.main_parameters + self.optimizer_state


COMPONENTS = tuple(field.name for field in fields(PredictedMemory) if field.name != "reclaimable")

MEMORY_ASSUMPTIONS = (
    "Activations are arXiv:2205.05198's, tensor by tensor; kernels' workspaces are not counted.",
    "The peak is at the loss, at the first layer's backward, after Adam's state exists, or where Adam "
    "updates moments that are kept in fewer bits.",
    "The two constants of the allocator component were chosen after seeing the eight published "
    "H200 measurements, once for all of them; other devices may differ by a gigabyte or two.",
    "Experts are loaded evenly, but for what IMBALANCE= and a capacity factor say.",
    "ZeRO-3 and FSDP2 hold two unsharded layers at a time, or the output layer's gradient if that is "
    "more, and ZeRO-3 the output layer's weights; "
    "ZeRO-2 one layer's gradients.",
    "What is offloaded has left the device when the next module runs, and comes back a module ahead.",
)


def estimate_rank_memory(spec: RunSpec, pipeline_rank: int = 0) -> PredictedMemory:
    """Return the predicted bytes of one pipeline rank at its peak, by component.

    All TP, CP and DP ranks of this pipeline rank have the same peak memory.

    Raises:
        UnevenSplitError: A parallel size does not divide the dimension that it splits.
    """
    memory = _memory_within(spec, pipeline_rank, inf)
    assert memory is not None
    return memory


def _memory_within(
    spec: RunSpec, pipeline_rank: int, limit: float, *, counts_reclaimable: bool = True
) -> PredictedMemory | None:
    """Return the peak memory of one pipeline rank, or None if it exceeds `limit` bytes.

    Model state and allocator are computed first. If they exceed the limit, activations are not computed. Without
    `counts_reclaimable`, reclaimable bytes are not compared with the limit.
    """
    parameters, precision = rank_parameters(spec, pipeline_rank), bytes_per_parameter(spec)
    trained = trained_parameters(spec, pipeline_rank)
    updated = _count_updated_parameters(trained, spec)
    state = _state_bytes(spec, parameters, trained, precision, updated)
    is_last = pipeline_rank == spec.parallelism.pipeline - 1
    fixed, reclaimable = _allocator_bytes(spec, precision.gradient_copies * updated, is_last)
    allocator = fixed + reclaimable
    available = limit - sum(state) - (allocator if counts_reclaimable else fixed)
    if available < 0:
        return None
    activations = activation_bytes(spec, pipeline_rank)
    if activations > available:
        return None
    communication, output_layer = communication_bytes(spec)
    # The update begins when all activations are free again, so it adds to the peak only what
    # exceeds them.
    backward_temporaries = _temporary_bytes(spec, pipeline_rank) + output_layer
    update_temporaries = _update_bytes(spec, updated) - activations
    temporaries = max(backward_temporaries, update_temporaries)
    temporaries += placeholder_bytes(spec, pipeline_rank)
    if activations + temporaries + communication > available:
        return None
    return PredictedMemory(
        *state, activations, temporaries, communication, allocator, reclaimable=reclaimable
    )


def _state_bytes(
    spec: RunSpec, parameters: Parameters, trained: Parameters, precision: Precision, updated: int
) -> tuple[int, int, int, int]:
    """Return the bytes of weights, gradients, main parameters and optimizer state.

    Args:
        spec: The run.
        parameters: The model's parameters on the rank.
        trained: Trained parameters on the rank. With LoRA these are the adapters, which are stored in addition.
        precision: Bytes per trained parameter.
        updated: Number of parameters that the rank's device updates.
    """
    sharding = spec.parallelism.sharding
    weights = precision.weights * _count_stored_elements(parameters, spec, sharding.shards_weights)
    weights += _quantised_weight_bytes(spec, parameters, precision.weights)
    if spec.lora:
        weights += precision.weights * _count_stored_elements(
            trained, spec, sharding.shards_weights
        )
        if spec.lora.has_nf4_weights:
            weights -= int((precision.weights - NF4_BITS / 8) * _linear_weights(parameters))
    gradients = precision.gradients * _count_stored_elements(
        trained, spec, sharding.shards_gradients
    )
    # Megatron-FSDP's optimizer updates an fp32 copy of the weights also where they are fp32
    # (`param_and_grad_buffer.py: main_weight_buffer`).
    main_parameters = precision.main_parameters or 4 * sharding.is_megatron_fsdp
    return weights, gradients, main_parameters * updated, precision.adam * updated


def _linear_weights(parameters: Parameters) -> int:
    """Return the parameters of linear layers outside the embeddings and the output layer, their biases included."""
    return parameters.attention + parameters.dense_mlp + parameters.experts


def keeps_quantised_weights(spec: RunSpec) -> bool:
    """Return True if linear layers store their weights in eight bits only (`--fp8-param-gather`).

    Megatron then enters Transformer Engine's `quantized_model_init` (`megatron/core/fp8_utils.py:
    get_fp8_context`).
    """
    return spec.quantised_weights and spec.fp8_recipe not in (Fp8Recipe.NONE, Fp8Recipe.NVFP4)


def _quantised_weight_bytes(spec: RunSpec, parameters: Parameters, unquantised_bytes: int) -> int:
    """Return the bytes of quantised linear weights, minus the bytes of the weights that they replace.

    During an iteration each module stores two quantised copies of its weights: row by row for forward, and
    transposed for backward. Biases are counted too. The quantised copies are stored in addition to weights of
    `unquantised_bytes` bytes per parameter, or replace these weights. The result is 0 without FP8. It is also 0 if
    weights are sharded, because then no quantised copy stays (`--keep-fp8-transpose-cache` is off by default).
    """
    if not spec.fp8_recipe or spec.parallelism.sharding.shards_weights:
        return 0
    bytes_per_weight = 2 * FP8_RECIPE_BYTES[spec.fp8_recipe]
    if keeps_quantised_weights(spec):
        bytes_per_weight -= unquantised_bytes
    return int(bytes_per_weight * _linear_weights(parameters))


def activation_bytes(spec: RunSpec, pipeline_rank: int = 0) -> int:
    """Return the peak of the activation bytes that a pipeline rank stores for backward."""
    layers_per_chunk = spec.layers_per_chunk(pipeline_rank)
    # Layers and dense layers of each chunk. Chunks with the same numbers store equally much.
    chunks = tuple(zip(layers_per_chunk, spec.dense_layers_per_chunk(pipeline_rank), strict=True))
    bytes_by_chunk = {chunk: chunk_activation_bytes(spec, *chunk) for chunk in set(chunks)}
    stored = _bytes_in_flight(spec, pipeline_rank, tuple(bytes_by_chunk[chunk] for chunk in chunks))
    if spec.offload:
        stored += _bytes_still_on_device(spec, pipeline_rank)
    if pipeline_rank == 0:
        layers = max(1, sum(layers_per_chunk))
        microbatches_in_flight = max(1, layers_in_flight(spec, pipeline_rank) // layers)
        stored += microbatches_in_flight * embedding_bytes(spec)
    if pipeline_rank == spec.parallelism.pipeline - 1:
        stored += head_bytes(spec) + spec.shape.total_mtp_layers * embedding_bytes(spec)
        if spec.shape.mtp_layers:
            stored += spec.shape.mtp_layers * layer_activation_bytes(spec.mtp_joining_spec)
    return stored


def _bytes_still_on_device(spec: RunSpec, pipeline_rank: int) -> int:
    """Return the bytes of offloaded tensors that are still on the device when backward begins.

    Each module leaves its last group of activations on the device. Later pipeline stages keep more bytes there if
    the offload's `kept_bytes_per_stage` asks for that. A stage keeps at most as many bytes as would be offloaded.
    """
    layers_per_chunk = spec.layers_per_chunk(pipeline_rank)
    last_group_bytes = _last_group_bytes(spec, layers_per_chunk)
    # `kept_bytes_per_stage` counts once for each stage before this one.
    requested_bytes = pipeline_rank * spec.offload.kept_bytes_per_stage
    if not requested_bytes:
        return last_group_bytes
    freed_per_chunk = tuple(offloaded_bytes(spec, layers).freed for layers in layers_per_chunk)
    freed_bytes = _bytes_in_flight(spec, pipeline_rank, freed_per_chunk)
    on_host_bytes = freed_bytes - last_group_bytes
    return last_group_bytes + min(requested_bytes, on_host_bytes)


def _last_group_bytes(spec: RunSpec, layers_per_chunk: Sequence[int]) -> int:
    """Return the bytes of the last group of each module in the chunk with which backward begins; 0 without layers.

    Backward begins with the last chunk that has layers, and needs the last groups of this chunk first. So these groups
    stay on the device.
    """
    chunks_with_layers = [layers for layers in layers_per_chunk if layers]
    if not chunks_with_layers:
        return 0
    layers = chunks_with_layers[-1]
    freed_in_other_microbatches = offloaded_bytes(spec, layers).freed
    freed_before_backward = offloaded_bytes(spec, layers, first=True).freed
    return freed_in_other_microbatches - freed_before_backward


_HOST_STATE_BYTES = 4 + 4 + 8
"""Bytes per parameter that the host updates: weight, gradient and both moments in fp32."""


def host_bytes(spec: RunSpec, pipeline_rank: int = 0) -> int:
    """Return the peak bytes that a rank needs in its host's memory.

    The host's memory holds offloaded activations and the offloaded part of the optimizer. The result is 0 without
    offloading.
    """
    held, _ = held_parameters(spec, pipeline_rank)
    optimizer_bytes = _HOST_STATE_BYTES * offloaded_parameters(spec, held)
    if not spec.offload:
        return optimizer_bytes
    chunks = spec.layers_per_chunk(pipeline_rank)
    copies = tuple(offloaded_bytes(spec, layers).copied for layers in chunks)
    return optimizer_bytes + _bytes_in_flight(spec, pipeline_rank, copies)


def find_peak_rank(spec: RunSpec) -> tuple[int, PredictedMemory]:
    """Return the pipeline rank with the peak memory, and its memory.

    The peak rank is usually the first rank, or the last rank, which holds the logits. With unequal stages it may
    be a rank between them.
    """
    peak = find_peak_rank_within(spec, inf)
    assert peak is not None
    return peak


def find_peak_rank_within(
    spec: RunSpec, limit: float, *, counts_reclaimable: bool = True
) -> tuple[int, PredictedMemory] | None:
    """Return the pipeline rank with the peak memory, and its memory.

    The result is None if the memory of any rank exceeds `limit` bytes.

    Args:
        spec: The run.
        limit: The limit in bytes.
        counts_reclaimable: False to compare only the bytes with the limit that the allocator cannot return.
    """
    memory_by_rank = {}
    for rank in distinct_ranks(spec):
        memory = _memory_within(spec, rank, limit, counts_reclaimable=counts_reclaimable)
        if memory is None:
            return None
        memory_by_rank[rank] = memory
    return max(memory_by_rank.items(), key=lambda rank_and_memory: rank_and_memory[1].needed)


def distinct_ranks(spec: RunSpec) -> set[int]:
    """Return the pipeline ranks whose memory has to be computed to find the peak.

    These are the first and the last rank. With unequal stages, the first rank of each kind between them is
    added.
    """
    ends = {0, spec.parallelism.pipeline - 1}
    if spec.stages == EVEN_SPLIT and not spec.shape.dense_layers:
        # Ranks between the ends then have the same layers as the first one, and fewer in flight.
        return ends
    return ends | middle_ranks(spec).keys()


def middle_ranks(spec: RunSpec) -> dict[int, int]:
    """Return the number of pipeline ranks of each kind between the first and the last rank.

    The key is the first rank of the kind. Ranks are of one kind if they have equally many layers and equally
    many dense layers. All are of one kind if the stages have no explicit layout and the model does not mix dense
    layers with layers of experts. The result is empty for fewer than three ranks.
    """
    if spec.stages.layout or spec.shape.dense_layers:
        return _find_distinct_ranks(spec.stage_layout_spec)
    num_ranks = spec.parallelism.pipeline - 2
    return {1: num_ranks} if num_ranks > 0 else {}


@lru_cache(maxsize=4096)
def _find_distinct_ranks(spec: RunSpec) -> dict[int, int]:
    """Return the number of ranks of each kind between both ends, by the first rank of the kind.

    Ranks of one kind have equally many layers and equally many dense layers.
    """
    layers_by_rank = [
        (spec.num_layers_on_stage(rank), sum(spec.dense_layers_per_chunk(rank)))
        for rank in range(1, spec.parallelism.pipeline - 1)
    ]
    return {
        1 + layers_by_rank.index(layers): num_ranks
        for layers, num_ranks in Counter(layers_by_rank).items()
    }


def held_parameters(spec: RunSpec, pipeline_rank: int = 0) -> tuple[int, int]:
    """Return the numbers of trained parameters whose optimizer state and whose gradients a rank stores."""
    parameters, sharding = trained_parameters(spec, pipeline_rank), spec.parallelism.sharding
    gradients = _count_stored_elements(parameters, spec, sharding.shards_gradients)
    return _count_stored_elements(parameters, spec, bool(sharding)), gradients


def offloaded_parameters(spec: RunSpec, held: int) -> int:
    """Return how many of `held` parameters the host stores and updates; 0 for CPU ranks.

    Megatron offloads full tensors until the fraction is reached, so up to one tensor more.
    """
    return 0 if spec.device is DeviceKind.CPU else ceil(spec.state_types.offloaded_fraction * held)


def _count_updated_parameters(trained: Parameters, spec: RunSpec) -> int:
    """Return the number of trained parameters that the rank's device updates."""
    held = _count_stored_elements(trained, spec, bool(spec.parallelism.sharding))
    return held - offloaded_parameters(spec, held)


def _update_bytes(spec: RunSpec, updated: int) -> int:
    """Return the bytes of fp32 copies that the update makes of optimizer state stored in fewer bits.

    The result is 0 without the precision-aware optimizer.

    Source: Transformer Engine, `pytorch/optimizers/fused_adam.py: get_unscaled_state`.
    """
    types = spec.state_types
    if not types.precision_aware or not spec.parallelism.sharding or types.offloaded_fraction:
        return 0
    stored_types = (types.main_parameters, types.first_moment, types.second_moment)
    num_copies = sum(state_type not in ("", "fp32") for state_type in stored_types)
    return num_copies * _FP32_BYTES * updated


def _count_stored_elements(parameters: Parameters, spec: RunSpec, sharded: bool) -> int:
    """Return the number of elements that a rank stores: its shard if `sharded`, else all parameters.

    Megatron shards experts over their expert-data-parallel ranks and all other parameters over DP×CP. With
    several instances of the distributed optimizer, it shards within each instance. Shards are rounded up.
    """
    if not sharded:
        return parameters.total
    parallelism, instances = spec.parallelism, spec.optimizer_instances
    ranks = max(1, parallelism.data * parallelism.context // instances)
    copies = max(1, parallelism.expert_data // instances)
    return -(-parameters.shared // ranks) + -(-parameters.experts // copies)


def _temporary_bytes(spec: RunSpec, pipeline_rank: int) -> int:
    """Return the bytes of temporary tensors at their peak.

    On most ranks the peak is in a layer's backward. On the last pipeline rank it may also be in the loss or in the
    output layer's backward. Without Transformer Engine, the output layer's backward is not counted, because a dry
    run does not measure it.
    """
    peak = _layer_backward_bytes(spec, pipeline_rank)
    if pipeline_rank < spec.parallelism.pipeline - 1:
        return peak
    peak = max(peak, logits_bytes(spec))
    if not spec.fused_norms:
        # A dry run, which has Megatron's own layers, measures exactly this peak.
        return peak
    peak = max(peak, head_backward_bytes(spec))
    if spec.sequence_shards > 1:
        # Under SP the output layer gathers its input into a buffer that is never freed.
        peak += spec.element_bytes * spec.micro_batch_tokens * spec.shape.hidden
    return peak


def _layer_backward_bytes(spec: RunSpec, pipeline_rank: int) -> int:
    """Return the bytes of temporary tensors in the backward of a layer.

    These are the gradients of the MLP's wide tensors, and the activations that backward recomputes.
    """
    shape = spec.shape
    columns = shape.ffn_hidden
    if shape.experts:
        columns_per_token = shape.experts_per_token * shape.expert_ffn_hidden
        columns = round(columns_per_token * spec.expert_receive_ratio)
    # A gated activation has an input of twice as many columns, and an output.
    wide_columns = columns * (3 if shape.gated else 2) // spec.parallelism.tensor
    gradients = spec.element_bytes * spec.micro_batch_tokens * wide_columns
    if spec.lora and spec.lora.has_nf4_weights:
        # A weight in NF4 is converted to half precision for its product, and the copy is freed afterwards.
        gradients += spec.element_bytes * largest_linear_elements(spec)
    distinct_layers = set(spec.layers_per_chunk(pipeline_rank))
    return gradients + max(recomputed_bytes(spec, layers) for layers in distinct_layers)


def placeholder_bytes(spec: RunSpec, pipeline_rank: int) -> int:
    """Return the bytes of placeholder tensors for weight gradients on a pipeline rank.

    Matrix products add weight gradients directly to Megatron's gradient buffers. Autograd gets an empty tensor
    instead, one per shape of weight, which is made once and never freed (Transformer Engine,
    `pytorch/module/base.py: get_dummy_wgrad`; Megatron's output layer uses this too). The result is 0 on CPU
    and without this fusion, as under FSDP2. It is 0 with LoRA too, because frozen weights have no gradients and
    the gradients of adapters are small.
    """
    fused = spec.fused_norms and not spec.parallelism.sharding.is_torch_fsdp
    if spec.device is DeviceKind.CPU or not fused or spec.lora:
        return 0
    return spec.element_bytes * distinct_weight_elements(spec, pipeline_rank)


def communication_bytes(spec: RunSpec) -> tuple[int, int]:
    """Return two byte counts of communication buffers: in layers, and the additional bytes at the loss.

    The first count is of pipeline messages and gathered layers. At the loss no layer is gathered, so its bytes are
    free for the output layer and the output layer's gradient. The second count has the bytes that these two need
    beyond the free bytes. It is 0 unless weights are sharded. Megatron-FSDP gathers the output layer's weights once
    per iteration, so these weights count in full (`collectives/data.py: _fsdp_calls`).
    """
    parallelism, sharding = spec.parallelism, spec.parallelism.sharding
    messages = 2 * residual_bytes(spec) if parallelism.pipeline > 1 else 0
    if not sharding.wraps_modules:
        return messages, 0
    precision = bytes_per_parameter(spec)
    layer_elements = max(layer_parameters(kind).total for _, kind in spec.block_specs)
    trained_elements = max(trained_layer_parameters(kind).total for _, kind in spec.block_specs)
    if not sharding.shards_weights:
        return messages + precision.gradients * trained_elements, 0
    two_layers = 2 * (precision.weights * layer_elements + precision.gradients * trained_elements)
    in_layers = messages + two_layers
    output_elements = spec.padded_vocabulary // parallelism.tensor * spec.shape.hidden
    weights = precision.weights * output_elements
    gradient = 0 if spec.lora else precision.gradients * output_elements
    # The bytes for messages and layers are free at the loss. They hold the output layer first.
    if sharding.is_torch_fsdp:
        return in_layers, max(0, weights + gradient - in_layers)
    # Megatron-FSDP gathers the output layer's weights once per iteration, so they stay.
    return in_layers, weights + max(0, gradient - in_layers)


def _allocator_bytes(spec: RunSpec, gradient_copies: int, is_last: bool) -> tuple[int, int]:
    """Return two byte counts: memory that is never returned to the device, and reclaimable memory.

    Reclaimable memory is in blocks that are empty at the peak. They held the update's copies of gradients
    (`gradient_copies` bytes) and, on the last pipeline rank, the logits. The caching allocator returns these
    blocks to the device before it runs out of memory (`c10/cuda/CUDACachingAllocator.cpp:
    release_cached_blocks`). On CPU nothing is reclaimable.
    """
    if spec.device is DeviceKind.CPU:
        return CPU_PROCESS_BYTES, 0
    empty_blocks = gradient_copies
    if is_last:
        empty_blocks += LOGIT_SLACK_BYTES * logit_elements(spec)
    return DEVICE_BASE_BYTES + dispatcher_bytes(spec), empty_blocks
