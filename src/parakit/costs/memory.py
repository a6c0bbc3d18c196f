"""What one rank holds at its fullest, by component, and what that figure assumes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import ceil, inf

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
    layer_parameters,
    rank_parameters,
)
from parakit.formatting.units import MIB

_FP32_BYTES = 4


def embedding_bytes(spec: RunSpec) -> int:
    """Kept by the embedding: its dropout's mask, one byte an element."""
    return (
        spec.micro_batch_tokens * spec.shape.hidden // spec.sequence_shards if spec.dropout else 0
    )


def head_bytes(spec: RunSpec) -> int:
    """Kept by the final norm and the output layer: the input of each."""
    return (norm_steps(spec) + 1) * residual_bytes(spec)


def logit_elements(spec: RunSpec) -> int:
    """Logits of one micro batch on one rank of the last stage; the vocabulary is split over TP."""
    return spec.micro_batch_tokens * spec.padded_vocabulary // spec.parallelism.tensor


def logits_bytes(spec: RunSpec) -> int:
    """Live at the loss: the logits, and their fp32 copy that becomes softmax and then gradient.

    `VocabParallelCrossEntropy` works in place on that copy; fp32 logits are not copied, nor those that
    their gradient is written over (Transformer Engine, `pytorch/cross_entropy.py`). Losses of tokens
    ahead come before it and keep theirs (`multi_token_prediction.py: process_mtp_loss`).
    """
    overwritten = (spec.fused_loss and spec.loss_impl == "te") or "cross_entropy" in spec.fused
    copied = spec.dtype != "fp32" and not overwritten
    kept = (_FP32_BYTES if copied else spec.element_bytes) * spec.shape.predicted_tokens
    return (kept + (spec.element_bytes if copied else 0)) * logit_elements(spec)


def head_backward_bytes(spec: RunSpec) -> int:
    """Live while the output layer is differentiated: gradients of logits and of hidden states, which
    TP's ranks have whole and then reduce (`tensor_parallel/layers.py`)."""
    whole = spec.element_bytes * spec.micro_batch_tokens * spec.shape.hidden
    scattered = residual_bytes(spec) if spec.sequence_shards > 1 else 0
    return spec.element_bytes * logit_elements(spec) + whole + scattered


def layers_in_flight(spec: RunSpec, pipeline_rank: int) -> int:
    """Layers' worth of micro batches that a rank holds at its fullest.

    1F1B: (L/p)·min(p − rank, m). Interleaved: arXiv:2104.04473 §2.2 and `get_pp_rank_microbatches`,
    2(p − rank − 1) + (v − 1)p warm-up chunks and the one in work, which is L(1 + (p−1)/(pv)) on
    rank 0.
    """
    return _bytes_in_flight(spec, pipeline_rank, spec.layers_per_chunk(pipeline_rank))


def _bytes_in_flight(spec: RunSpec, pipeline_rank: int, each: tuple[int, ...]) -> int:
    """The same of anything that a micro batch leaves on each virtual stage until its backward."""
    chunks = chunks_in_flight(spec, pipeline_rank)
    if len(set(each)) == 1:
        return chunks * each[0]
    # What is begun and ended repeats after a group of micro batches.
    steps = min(spec.microbatches * len(each), chunks + spec.parallelism.pipeline * len(each))
    return _most_held(each, spec.parallelism.pipeline, chunks, steps)


@lru_cache(maxsize=4096)
def _most_held(each: tuple[int, ...], pipeline: int, chunks: int, steps: int) -> int:
    """The same where virtual stages are unequal: forward and backward take turns after warm-up.

    Megatron runs PP micro batches through a virtual stage, then through the next; backward begins with
    the last (`get_schedule_table`).
    """
    forwards = [each[step // pipeline % len(each)] for step in range(steps)]
    held = most = sum(forwards[:chunks])
    backwards = (each[-1 - step // pipeline % len(each)] for step in range(steps))
    for begun, ended in zip(forwards[chunks:], backwards, strict=False):
        held += begun - ended
        most = max(most, held)
    return most


def chunks_in_flight(spec: RunSpec, pipeline_rank: int) -> int:
    """Micro batches, of a virtual stage each, between forward and backward on a rank at its fullest."""
    parallelism, microbatches = spec.parallelism, spec.microbatches
    pipeline, virtual = parallelism.pipeline, parallelism.virtual_stages
    warmup = pipeline - pipeline_rank - 1
    if virtual > 1:
        warmup = 2 * warmup + (virtual - 1) * pipeline
    return min(warmup + 1, microbatches * virtual)


DEVICE_BASE_BYTES = 3870 * MIB
"""Fitted once, over all eight published measurements: CUDA context, cuBLAS and cuDNN workspaces, NCCL
buffers and the allocator's unusable remainders on a GPU."""

LOGIT_SLACK_BYTES = 2
"""Fitted once, over the same readings, a logit on the rank: a block of the half-precision logits'
size that the caching allocator cannot reuse once Adam's state sits among the activations' blocks
(inferred)."""

_WORKSPACE_BYTES = {"hopper": 32 * MIB, "blackwell": 32 * MIB}
_OLDER_WORKSPACE_BYTES, _OLDER_FUSED_BYTES = 8_519_680, 4 * MIB
_FIXED_WORKSPACE_BYTES = 32 * MIB
_HANDLES, _GROUPED_STREAMS = 2, 4


def workspace_bytes(generation: str, deterministic: bool, grouped: bool) -> int:
    """What matrix products hold in the allocator between iterations.

    cuBLAS has a workspace for each thread that launches products, forward's and backward's
    (`aten/src/ATen/cuda/CublasHandlePool.cpp`: 32 MiB from Hopper on, 8.1 MiB before;
    `CUBLAS_WORKSPACE_CONFIG=:4096:8`, which determinism wants, 32 MiB). Transformer Engine has its own
    (`get_cublas_workspace_size_bytes`: 32 MiB from Hopper on, 4 MiB before), four more for grouped ones.
    """
    usual = _WORKSPACE_BYTES.get(generation, _OLDER_WORKSPACE_BYTES)
    handle = _FIXED_WORKSPACE_BYTES if deterministic else usual
    fused = _WORKSPACE_BYTES.get(generation, _OLDER_FUSED_BYTES)
    return _HANDLES * handle + (1 + (_GROUPED_STREAMS if grouped else 0)) * fused


CPU_PROCESS_BYTES = 900 * MIB
"""Resident size of a CPU rank before it builds a model: Python, torch, Megatron."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes a parameter, by what they hold."""

    weights: int
    gradients: int
    main_parameters: int
    gradient_copies: int
    """fp32 copies of half-precision gradients, alive from the optimizer step to the next zero_grad;
    their blocks stay reserved."""
    adam: int = 8


PRECISIONS = {
    "fp16": Precision(weights=2, gradients=2, main_parameters=4, gradient_copies=4),
    "bf16": Precision(weights=2, gradients=4, main_parameters=4, gradient_copies=0),
    "fp32": Precision(weights=4, gradients=4, main_parameters=0, gradient_copies=0),
}
"""`Float16OptimizerWithFloat16Params` and `FP32Optimizer` (`megatron/core/optimizer/optimizer.py`):
20, 18 and 16 bytes a parameter. bf16 accumulates gradients in fp32 unless a flag says otherwise."""


_USUAL_TYPES = StateTypes()
_TYPE_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}


def bytes_per_parameter(spec: RunSpec) -> Precision:
    """The dtype's, but for what the run's flags store otherwise.

    Gradients in bf16 are copied to fp32 for the update unless the optimizer reads them as they are. That
    one (`--use-precision-aware-optimizer`, with a distributed optimizer alone) keeps 16 bits of an fp32
    weight beside its bf16 one (`store_param_remainders`), but not under fp8 or Megatron-FSDP, which keep
    fp32 weights themselves (`megatron/core/optimizer/__init__.py`). What an offload leaves here is
    updated in fp32, whatever the flags say (`hybrid_optimizer.py`: `param_update_in_fp32`).
    """
    usual, types = PRECISIONS[spec.dtype], spec.state_types
    if types == _USUAL_TYPES or spec.dtype != "bf16":
        return usual
    gradients = _TYPE_BYTES[types.gradients or "fp32"]
    if not types.precision_aware or not spec.parallelism.sharding or types.offloaded_fraction:
        return replace(usual, gradients=gradients, gradient_copies=4 if gradients < 4 else 0)
    own_adam = not spec.parallelism.sharding.wraps_modules
    remainders = own_adam and not types.main_parameters and not spec.fp8_recipe
    return replace(
        usual,
        gradients=gradients,
        main_parameters=2 if remainders else _TYPE_BYTES[types.main_parameters or "fp32"],
        adam=sum(_TYPE_BYTES[each or "fp32"] for each in (types.first_moment, types.second_moment)),
    )


@dataclass(frozen=True, slots=True)
class PredictedMemory:
    """Bytes of one rank at its peak, by component."""

    weights: int
    gradients: int
    main_parameters: int
    optimizer_state: int
    activations: int
    """Of all layers and micro batches in flight, the embedding and the head."""
    temporaries: int
    """The larger of the loss's logits and one layer's gradients of activations; under ZeRO-3 the whole
    output layer beside them."""
    communication: int
    """Pipeline messages, gathered units of ZeRO-3 and FSDP2, gradient buckets of ZeRO-2."""
    allocator: int
    """Context, workspaces, dispatchers' buffers, and blocks reserved but not usable; see the
    assumptions."""
    reclaimable: int = 0
    """Of the allocator's, what it gives back before it runs out: blocks that nothing is in."""

    @property
    def total(self) -> int:
        """Bytes as the device itself reports them."""
        return self.live + self.allocator

    @property
    def needed(self) -> int:
        """Bytes without which it runs out of memory."""
        return self.total - self.reclaimable

    @property
    def live(self) -> int:
        """Bytes of live tensors: what a memory ledger sees."""
        return self.state + self.activations + self.temporaries + self.communication

    @property
    def state(self) -> int:
        """Weights, gradients and optimizer."""
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
    """Peak of one pipeline rank (all its TP, CP and DP ranks are alike).

    Raises:
        UnevenSplitError: A degree does not divide what it splits.
    """
    found = _memory_within(spec, pipeline_rank, inf)
    assert found is not None
    return found


def _memory_within(spec: RunSpec, pipeline_rank: int, limit: float) -> PredictedMemory | None:
    """Return the peak of one pipeline rank, or None if it holds more than `limit` bytes.

    Its first parts often say so.
    """
    parameters, precision = rank_parameters(spec, pipeline_rank), bytes_per_parameter(spec)
    updated = _updated_here(parameters, spec)
    state = _state_bytes(spec, parameters, precision, updated)
    last = pipeline_rank == spec.parallelism.pipeline - 1
    base, blocks = _allocator_bytes(spec, precision.gradient_copies * updated, last)
    room = limit - sum(state) - base - blocks
    if room < 0 or (activations := activation_bytes(spec, pipeline_rank)) > room:
        return None
    communication, whole = communication_bytes(spec)
    temporaries = max(
        _temporary_bytes(spec, pipeline_rank) + whole, _update_bytes(spec, updated) - activations
    )
    temporaries += placeholder_bytes(spec, pipeline_rank)
    if activations + temporaries + communication > room:
        return None
    return PredictedMemory(
        *state, activations, temporaries, communication, base + blocks, reclaimable=blocks
    )


def _state_bytes(
    spec: RunSpec, parameters: Parameters, precision: Precision, updated: int
) -> tuple[int, int, int, int]:
    """Weights, gradients, main parameters and optimizer state."""
    sharding = spec.parallelism.sharding
    weights = precision.weights * _held(parameters, spec, sharding.shards_weights)
    weights += _quantised_weight_bytes(spec, parameters, precision.weights)
    gradients = precision.gradients * _held(parameters, spec, sharding.shards_gradients)
    # Megatron-FSDP's optimizer updates an fp32 copy of the weights also where they are fp32
    # (`param_and_grad_buffer.py: main_weight_buffer`).
    main_parameters = precision.main_parameters or 4 * sharding.is_megatron_fsdp
    return weights, gradients, main_parameters * updated, precision.adam * updated


def keeps_quantised_weights(spec: RunSpec) -> bool:
    """Whether linear layers have their weights in eight bits alone (`--fp8-param-gather`: Transformer
    Engine's `quantized_model_init`, as `megatron/core/fp8_utils.py: get_fp8_context` enters it)."""
    return spec.quantised_weights and spec.fp8_recipe not in (Fp8Recipe.NONE, Fp8Recipe.NVFP4)


def _quantised_weight_bytes(spec: RunSpec, parameters: Parameters, whole: int) -> int:
    """Of linear layers' weights in fewer bits, as forward and as backward reads them (row by row and
    transposed): each module keeps its own over an iteration's micro batches (biases are counted with
    them), beside those in `whole` bytes or in their place. Of weights that are gathered as they are
    needed nothing stays (`--keep-fp8-transpose-cache` is off by default)."""
    if not spec.fp8_recipe or spec.parallelism.sharding.shards_weights:
        return 0
    linear = parameters.attention + parameters.dense_mlp + parameters.experts
    beside = 0 if keeps_quantised_weights(spec) else whole
    return int((2 * FP8_RECIPE_BYTES[spec.fp8_recipe] - whole + beside) * linear)


def activation_bytes(spec: RunSpec, pipeline_rank: int = 0) -> int:
    """Kept for backward at the fullest moment of a pipeline rank."""
    chunks = spec.layers_per_chunk(pipeline_rank)
    kinds = tuple(zip(chunks, spec.dense_layers_per_chunk(pipeline_rank), strict=True))
    each = {kind: chunk_activation_bytes(spec, *kind) for kind in set(kinds)}
    kept = _bytes_in_flight(spec, pipeline_rank, tuple(each[kind] for kind in kinds))
    if spec.offload:
        kept += _not_yet_gone(spec, pipeline_rank)
    flights = max(1, layers_in_flight(spec, pipeline_rank) // max(1, sum(chunks)))
    if pipeline_rank == 0:
        kept += flights * embedding_bytes(spec)
    if pipeline_rank == spec.parallelism.pipeline - 1:
        kept += head_bytes(spec) + spec.shape.total_mtp_layers * embedding_bytes(spec)
        if spec.shape.mtp_layers:
            kept += spec.shape.mtp_layers * layer_activation_bytes(spec.mtp_joining_spec)
    return kept


def _not_yet_gone(spec: RunSpec, pipeline_rank: int) -> int:
    """Of what is offloaded, what a rank still has when backward begins: the last group of each module,
    in whose place come those that backward reads next, and what later stages keep."""
    chunks = spec.layers_per_chunk(pipeline_rank)
    last = next((layers for layers in reversed(chunks) if layers), 0)
    begun = offloaded_bytes(spec, last).freed - offloaded_bytes(spec, last, first=True).freed
    asked = pipeline_rank * spec.offload.kept_bytes_per_stage
    if not asked:
        return begun
    gone = tuple(offloaded_bytes(spec, layers).freed for layers in chunks)
    return begun + min(asked, _bytes_in_flight(spec, pipeline_rank, gone) - begun)


_HOST_STATE_BYTES = 4 + 4 + 8
"""A parameter that the host updates: weight, gradient and both moments in fp32."""


def host_bytes(spec: RunSpec, pipeline_rank: int = 0) -> int:
    """What a rank keeps on its host at its fullest: activations of the micro batches in flight, and the
    offloaded part of the optimizer."""
    held, _ = held_parameters(spec, pipeline_rank)
    found = _HOST_STATE_BYTES * offloaded_parameters(spec, held)
    if not spec.offload:
        return found
    chunks = spec.layers_per_chunk(pipeline_rank)
    copies = tuple(offloaded_bytes(spec, layers).copied for layers in chunks)
    return found + _bytes_in_flight(spec, pipeline_rank, copies)


def find_peak_rank(spec: RunSpec) -> tuple[int, PredictedMemory]:
    """The pipeline rank with the highest peak: the first, or the last with its logits.

    Where stages are unequal one between may hold more.
    """
    found = find_peak_rank_within(spec, inf)
    assert found is not None
    return found


def find_peak_rank_within(spec: RunSpec, limit: float) -> tuple[int, PredictedMemory] | None:
    """Return the fullest pipeline rank and its peak, or None if a rank holds more than `limit` bytes."""
    by_rank = {}
    for rank in distinct_ranks(spec):
        if not (memory := _memory_within(spec, rank, limit)):
            return None
        by_rank[rank] = memory
    return max(by_rank.items(), key=lambda item: item[1].needed)


def distinct_ranks(spec: RunSpec) -> set[int]:
    """The ends of a pipeline and, where stages are unequal, the ranks that stand for those between."""
    ends = {0, spec.parallelism.pipeline - 1}
    alike = spec.stages == EVEN_SPLIT and not spec.shape.dense_layers
    return ends if alike else ends | middle_ranks(spec).keys()


def middle_ranks(spec: RunSpec) -> dict[int, int]:
    """Of the pipeline ranks between the ends the first with each number of layers, and of dense ones
    among them, and how many have it: one, unless a layout says otherwise or layers are of two kinds."""
    between = range(1, spec.parallelism.pipeline - 1)
    if not (spec.stages.layout or spec.shape.dense_layers):
        return {1: len(between)} if between else {}
    return _unlike_ranks(spec.stage_layout_spec)


@lru_cache(maxsize=4096)
def _unlike_ranks(spec: RunSpec) -> dict[int, int]:
    between = range(1, spec.parallelism.pipeline - 1)
    layers = [
        (spec.num_layers_on_stage(rank), sum(spec.dense_layers_per_chunk(rank))) for rank in between
    ]
    return {1 + layers.index(number): times for number, times in Counter(layers).items()}


def held_parameters(spec: RunSpec, pipeline_rank: int = 0) -> tuple[int, int]:
    """Parameters whose optimizer state a rank holds, and those whose gradients it holds."""
    parameters, sharding = rank_parameters(spec, pipeline_rank), spec.parallelism.sharding
    gradients = _held(parameters, spec, sharding.shards_gradients)
    return _held(parameters, spec, bool(sharding)), gradients


def offloaded_parameters(spec: RunSpec, held: int) -> int:
    """Of so many parameters whose state a rank holds, those that its host holds and updates.

    Megatron offloads whole tensors until it has the share, so up to one tensor more; of CPU ranks
    nothing.
    """
    return 0 if spec.device is DeviceKind.CPU else ceil(spec.state_types.offloaded_fraction * held)


def _updated_here(parameters: Parameters, spec: RunSpec) -> int:
    held = _held(parameters, spec, bool(spec.parallelism.sharding))
    return held - offloaded_parameters(spec, held)


def _update_bytes(spec: RunSpec, updated: int) -> int:
    """fp32 copies of what is kept of each parameter in fewer bits, all alive in the update (Transformer
    Engine, `pytorch/optimizers/fused_adam.py: get_unscaled_state`)."""
    types = spec.state_types
    if not types.precision_aware or not spec.parallelism.sharding or types.offloaded_fraction:
        return 0
    kept = (types.main_parameters, types.first_moment, types.second_moment)
    return _FP32_BYTES * sum(each not in ("", "fp32") for each in kept) * updated


def _held(parameters: Parameters, spec: RunSpec, sharded: bool) -> int:
    """Elements a rank holds; Megatron shards over DP×CP, and experts over what EP leaves of it, in each
    instance of the distributed optimizer."""
    if not sharded:
        return parameters.total
    parallelism, instances = spec.parallelism, spec.optimizer_instances
    ranks = max(1, parallelism.data * parallelism.context // instances)
    copies = max(1, parallelism.expert_data // instances)
    return -(-parameters.shared // ranks) + -(-parameters.experts // copies)


def _temporary_bytes(spec: RunSpec, pipeline_rank: int) -> int:
    """Alive while a layer is differentiated, gradients of its MLP's wide tensors and what is computed
    again, or at the loss and the output layer behind it."""
    shape, element = spec.shape, spec.element_bytes
    ffn = shape.ffn_hidden
    if shape.experts:
        ffn = round(shape.experts_per_token * shape.expert_ffn_hidden * spec.expert_receive_ratio)
    width = ffn * (3 if shape.gated else 2) // spec.parallelism.tensor
    again = max(
        recomputed_bytes(spec, layers) for layers in set(spec.layers_per_chunk(pipeline_rank))
    )
    most = element * spec.micro_batch_tokens * width + again
    if pipeline_rank == spec.parallelism.pipeline - 1:
        most = max(most, logits_bytes(spec))
        if spec.fused_norms:  # Without, what a dry run holds is exact so.
            most = max(most, head_backward_bytes(spec))
            # Where the output layer gathers its input under SP, kept for good.
            most += (
                element * spec.micro_batch_tokens * shape.hidden if spec.sequence_shards > 1 else 0
            )
    return most


def placeholder_bytes(spec: RunSpec, pipeline_rank: int) -> int:
    """What backward returns for gradients that products add to Megatron's own: an empty tensor for each
    shape of weight, made once and never freed (Transformer Engine, `pytorch/module/base.py:
    get_dummy_wgrad`, which Megatron's output layer takes too)."""
    fused = spec.fused_norms and not spec.parallelism.sharding.is_torch_fsdp
    if spec.device is DeviceKind.CPU or not fused:
        return 0
    return spec.element_bytes * distinct_weight_elements(spec, pipeline_rank)


def communication_bytes(spec: RunSpec) -> tuple[int, int]:
    """Of messages between stages and of layers whose shards are put together; beyond those the output
    layer and its gradient at the loss.

    None of those layers is whole then. Megatron-FSDP gathers the weights once an iteration
    (`collectives/data.py: _fully_sharded`).
    """
    parallelism, sharding = spec.parallelism, spec.parallelism.sharding
    pipeline = 2 * residual_bytes(spec) if parallelism.pipeline > 1 else 0
    if not sharding.wraps_modules:
        return pipeline, 0
    precision, layer = (
        bytes_per_parameter(spec),
        max(layer_parameters(k).total for _, k in spec.block_specs),
    )
    if not sharding.shards_weights:
        return pipeline + precision.gradients * layer, 0
    layers = pipeline + 2 * layer * (precision.weights + precision.gradients)
    table = spec.padded_vocabulary // parallelism.tensor * spec.shape.hidden
    weights, gradient = precision.weights * table, precision.gradients * table
    if sharding.is_torch_fsdp:
        return layers, max(0, weights + gradient - layers)
    return layers, weights + max(0, gradient - layers)


def _allocator_bytes(spec: RunSpec, copies: int, last: bool) -> tuple[int, int]:
    """What is never given back, and blocks that are free at the peak: those of the update's `copies` of
    gradients and of the logits. The caching allocator returns them to the device before it runs out
    (`c10/cuda/CUDACachingAllocator.cpp: release_cached_blocks`)."""
    if spec.device is DeviceKind.CPU:
        return CPU_PROCESS_BYTES, 0
    logits = LOGIT_SLACK_BYTES * logit_elements(spec) if last else 0
    return DEVICE_BASE_BYTES + dispatcher_bytes(spec), copies + logits
