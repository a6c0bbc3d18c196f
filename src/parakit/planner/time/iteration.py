"""Seconds of one iteration by component, on the ranks that decide its length.

`iteration_seconds` takes a run and a cluster. It adds up the time of a micro batch's parts (layers, embedding, output
layer), the pipeline bubble, messages between stages, gradient communication and the optimizer. Communication counts
as far as it is exposed, which means that computation waits for it. The host launches kernels ahead of the device
(`host.py`) and counts as far as the device waits for it. The time of a part depends on few choices and is
cached, so that a search over pipeline and data parallelism only adds up known parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from math import log
from operator import add, attrgetter
from typing import NamedTuple

from parakit.config.groups import Group
from parakit.config.recompute import Recompute
from parakit.config.replacing import replace, replace_cached
from parakit.config.run import RunSpec
from parakit.config.strategy import Batch
from parakit.costs import (
    FP8_RECIPE_BYTES,
    LATEST_MEGATRON,
    CollectiveCall,
    Operation,
    Phase,
    batch_collectives,
    context_collectives,
    control_collectives,
    distinct_ranks,
    embedding_collectives,
    expert_collectives,
    gradient_collectives,
    head_collectives,
    keeps_quantised_weights,
    layer_collectives,
    middle_ranks,
    partial_gradient_collectives,
    pipeline_collectives,
    rank_tensors,
    trained_parameters,
)
from parakit.planner.time.cluster import Cluster, find_route
from parakit.planner.time.compute import (
    LayerSeconds,
    embedding_seconds,
    head_seconds,
    layer_seconds,
    optimizer_seconds,
)
from parakit.planner.time.host import (
    NO_HOST_SECONDS,
    HostSeconds,
    context_launch_seconds,
    iteration_host_seconds,
    launch_seconds,
    micro_batch_host_seconds,
    split_launch_seconds,
    unhidden_launch_seconds,
)
from parakit.planner.time.offload import attention_mask_copy_seconds, exposed_copy_seconds
from parakit.planner.time.rates import DeviceRates, compute_device_rates


@dataclass(frozen=True)
class MicroBatchSeconds:
    """Seconds of one micro batch, or of a part of it, on one rank, by component.

    Only exposed communication is included.
    """

    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    """Norms, dropouts, activations and the loss."""
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    expert_parallel: float = 0.0
    host_copies: float = 0.0
    """Waiting for offloaded activations to reach the host or to come back."""
    host_launches: float = 0.0
    """Waiting for the host, which launches kernels and runs the training loop."""

    @cached_property
    def total(self) -> float:
        """Seconds of forward and backward together."""
        return sum(_get_components(self))

    def __add__(self, other: MicroBatchSeconds) -> MicroBatchSeconds:
        return MicroBatchSeconds(*map(add, _get_components(self), _get_components(other)))

    def __mul__(self, times: float) -> MicroBatchSeconds:
        return MicroBatchSeconds(*[times * seconds for seconds in _get_components(self)])


_get_components: Callable[[MicroBatchSeconds], tuple[float, ...]] = attrgetter(
    *(field.name for field in fields(MicroBatchSeconds))
)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Times per micro batch of a piece of a model, such as one layer."""

    device: MicroBatchSeconds
    """Seconds of the device, with those launches of the host that nothing hides."""
    forward: float = 0.0
    """Seconds of `device` in forward."""
    host: HostSeconds = NO_HOST_SECONDS
    """Seconds in which the host launches the piece."""

    def __add__(self, other: _Piece) -> _Piece:
        return _Piece(
            self.device + other.device, self.forward + other.forward, self.host + other.host
        )

    def __mul__(self, times: int) -> _Piece:
        return _Piece(self.device * times, self.forward * times, self.host * times)


_NOTHING = _Piece(MicroBatchSeconds())
"""Piece that takes no time."""


_Parts = Sequence[tuple[int, _Piece]]
"""Pieces of a stage, each with the number of times that the stage has it."""


@dataclass(frozen=True)
class IterationSeconds(MicroBatchSeconds):
    """Seconds of one iteration by component: of all its micro batches, of the pipeline and of the update."""

    pipeline_messages: float = 0.0
    bubble: float = 0.0
    """Waiting for other stages. With stages of unequal work this includes the wait for the slowest stage."""
    gradient_sync: float = 0.0
    optimizer: float = 0.0
    stragglers: float = 0.0
    """Waiting for the slowest of all devices, whose times vary by chance."""

    @cached_property
    def total(self) -> float:
        """Seconds of the iteration."""
        return sum(_get_all_components(self))


TIME_COMPONENTS = tuple(field.name for field in fields(IterationSeconds))
_get_all_components: Callable[[IterationSeconds], tuple[float, ...]] = attrgetter(*TIME_COMPONENTS)

ASSUMPTIONS = (
    "Gradients are reduced after the last backward, as without --overlap-grad-reduce; ZeRO-2, "
    "ZeRO-3 and FSDP2 overlap theirs.",
    "Backward's tensor-parallel calls hide behind the weights' gradients, the context ring behind "
    "attention (CUDA_DEVICE_MAX_CONNECTIONS=1).",
    "Copies of activations to the host and back run beside the same layers' arithmetic, at its link's "
    "rate.",
    "Data loading, logging, evaluation and checkpoints take no time.",
)

_BACKWARD_FRACTION = 2 / 3
"""Fraction of a micro batch's time that is backward."""
_FORWARD_FRACTION = 1 - _BACKWARD_FRACTION
_BUCKET_ELEMENTS = 40_000_000
"""Elements per gradient bucket: Megatron's default of `--ddp-bucket-size`. A million per data-parallel rank is taken
where that is more (`training.py: resolve_ddp_bucket_size` of 0.19)."""
_COLLECTIVE_KERNEL_SECONDS = 5e-6
"""Start and end of a collective's kernel, and of the event that other streams wait for (an estimate)."""
_UNFUSED_PASSES = 5
"""Passes over gradients that no product adds up: each micro batch writes them, copies them to a bucket (read and
write) and adds them there (read and write)."""
_COPY_OUT_PASSES = 2
"""Passes over gathered weights: they are read from the flat buffer and written to where layers read them
(`torch.distributed.fsdp: all_gather_copy_out`)."""


def iteration_seconds(spec: RunSpec, cluster: Cluster) -> IterationSeconds:
    """Return the seconds of one iteration by component.

    Let stage i take T_i seconds per micro batch. 1F1B with m micro batches and v virtual stages then takes
    m·max(T) + (ΣT − max T)/v seconds. The second term is the bubble: the slowest stage waits while a micro batch passes
    through the other stages at the start and at the end (arXiv:2104.04473 §2.2).

    Raises:
        NoPeakError: The device has no matrix rate in the run's dtype.
    """
    slowest, all_stages_seconds = pipeline_seconds(spec, cluster)
    working = spec.microbatches * slowest.total
    virtual_stages = spec.parallelism.virtual_stages
    exposed_sync, optimizer = synchronisation_seconds(spec, cluster, slowest.total)
    layerwise_sync = layerwise_sync_seconds(spec, cluster, working)
    messages = message_seconds(spec, cluster)
    bubble = (all_stages_seconds - slowest.total) / virtual_stages
    without_stragglers = working + messages + bubble + exposed_sync + layerwise_sync + optimizer
    host = MicroBatchSeconds(host_launches=iteration_host_seconds(spec, cluster, optimizer))
    return IterationSeconds(
        **asdict(slowest * spec.microbatches + host),
        pipeline_messages=messages,
        bubble=bubble,
        gradient_sync=exposed_sync + layerwise_sync,
        optimizer=optimizer,
        stragglers=straggler_fraction(cluster) * without_stragglers,
    )


def straggler_fraction(cluster: Cluster) -> float:
    """Return the fraction of an iteration by which the slowest of all devices is expected to be late.

    The expected maximum of n normal variables lies about sqrt(2 ln n) standard deviations above their mean.
    """
    deviations = float((2 * log(max(1.0, cluster.devices * cluster.core_fraction))) ** 0.5)
    return cluster.constants.jitter * deviations


def message_seconds(spec: RunSpec, cluster: Cluster) -> float:
    """Return the exposed seconds of messages between pipeline stages in one iteration.

    1F1B exposes all messages. The interleaved schedule overlaps messages with computation, so that only their
    contention with computation remains.
    """
    calls = _select_calls_in_group(pipeline_collectives(spec, 0), Group.PIPELINE)
    messages = _call_seconds(spec, cluster, calls)
    if cluster.execution.scatter_gather:
        messages /= spec.parallelism.tensor // spec.sequence_shards
    is_interleaved = spec.parallelism.virtual_stages > 1
    return messages * (cluster.constants.contention if is_interleaved else 1)


def pipeline_seconds(spec: RunSpec, cluster: Cluster) -> tuple[MicroBatchSeconds, float]:
    """Return the time of one micro batch on the slowest stage, and the seconds of one micro batch through all stages.

    CPU ranks may share cores. A waiting stage then leaves its cores to the other stages, and both results include
    this. The time of m micro batches is at least the work of all stages on all cores. It is also at least the work of
    the slowest stage plus one pass through the other stages.
    """
    stages = predict_stage_times(spec, cluster)
    slowest = _micro_batch_seconds(stages.slowest_parts)
    if spec.parallelism.pipeline == 1:
        return slowest, slowest.total
    if cluster.core_fraction == 1 or not stages.slowest_seconds:
        return slowest, stages.all_stages_seconds
    return slowest * (stages.slowest_seconds / slowest.total), stages.all_stages_seconds


class PredictedStageTimes(NamedTuple):
    """Times per micro batch of the slowest pipeline stage and of all stages.

    If CPU ranks share cores, both seconds include the sharing. The times of the parts do not include it.
    """

    slowest_parts: _Parts
    """Parts of the slowest stage."""
    slowest_seconds: float
    all_stages_seconds: float
    """Seconds in which one micro batch passes through all stages."""
    waits_for_host: bool
    """True if the device of some stage waits for the host, beyond the launches that nothing hides."""


def predict_stage_times(spec: RunSpec, cluster: Cluster) -> PredictedStageTimes:
    """Return the times of the pipeline's stages."""
    pipeline, pieces = spec.parallelism.pipeline, _find_stage_pieces(spec, cluster)
    # Identical stages are computed once: the first, the last, and the distinct ones of the middle.
    num_stages_by_rank = {0: 1, pipeline - 1: 1} | (middle_ranks(spec) if pipeline > 1 else {})
    parts: _Parts = ()
    slowest = all_stages = 0.0
    waits_for_host = False
    for rank, num_stages in num_stages_by_rank.items():
        stage = _list_stage_parts(spec, cluster, rank, pieces)
        device = sum([times * piece.device.total for times, piece in stage])
        waiting = _host_wait_seconds(stage, device)
        waits_for_host = waits_for_host or waiting > 0
        seconds = device + waiting
        all_stages += num_stages * seconds
        if seconds > slowest:
            parts, slowest = stage, seconds
    core_fraction = cluster.core_fraction
    if core_fraction == 1 or pipeline == 1:
        return PredictedStageTimes(parts, slowest, all_stages, waits_for_host)
    shared = max(all_stages / pipeline, core_fraction * slowest)
    alone = core_fraction * ((spec.microbatches - 1) * slowest + all_stages)
    passing = shared + max(0.0, alone - spec.microbatches * shared)
    return PredictedStageTimes(parts, shared, passing, waits_for_host)


def stage_seconds(spec: RunSpec, cluster: Cluster, pipeline_rank: int) -> tuple[float, float]:
    """Return two times of a pipeline rank: the seconds per micro batch, and the seconds after its last backward.

    The second number is the time of communicating gradients and updated weights, and of the optimizer, without overlap.
    """
    single_batch = replace(spec, batch=Batch(1, spec.parallelism.data))
    pieces = _find_stage_pieces(spec, cluster)
    parts = _list_stage_parts(spec, cluster, pipeline_rank, pieces)
    return _micro_batch_seconds(parts).total, sum(
        _seconds_after_backward(single_batch, cluster, pipeline_rank)
    )


def _find_stage_pieces(spec: RunSpec, cluster: Cluster) -> tuple[_Pieces, _Pieces]:
    """Return the times of a model's pieces twice: for layers that are recomputed, and for layers that are not.

    Both results are equal unless only some of the layers are recomputed.
    """
    pieces = _compute_pieces(spec.one_layer_per_stage, cluster)
    if not spec.recompute.is_block_method:
        return pieces, pieces
    return pieces, _compute_pieces(spec.without_recompute.one_layer_per_stage, cluster)


def _list_stage_parts(
    spec: RunSpec, cluster: Cluster, pipeline_rank: int, pieces: tuple[_Pieces, _Pieces]
) -> _Parts:
    """Return the parts of one micro batch on a pipeline rank.

    A part is a number of equal pieces and the time of one piece. Parts are recomputed layers, other layers, waits for
    offloaded activations, the embedding on the first stage, and the output layer with the loss on the last stage.

    Args:
        pieces: Result of `_find_stage_pieces`.
    """
    recomputed, stored = pieces
    layers = spec.num_layers_on_stage(pipeline_rank)
    dense = sum(spec.dense_layers_per_chunk(pipeline_rank))
    num_recomputed, num_dense_recomputed = layers, dense
    if spec.recompute.is_block_method:
        num_recomputed = spec.num_recomputed_layers(pipeline_rank)
        _, num_dense_recomputed = spec.count_dense_layers(pipeline_rank)
    parts: list[tuple[int, _Piece]] = [(num_recomputed - num_dense_recomputed, recomputed.layer)]
    if num_recomputed < layers:
        num_stored = layers - num_recomputed
        parts.append((num_stored - (dense - num_dense_recomputed), stored.layer))
    if dense:
        parts.append((num_dense_recomputed, recomputed.dense))
        parts.append((dense - num_dense_recomputed, stored.dense))
    if spec.offload:
        layers_seconds, host = (
            _micro_batch_seconds(parts).total,
            _get_rates(spec, cluster).known_host,
        )
        forward = layers_seconds * recomputed.forward_fraction
        backward = layers_seconds * (1 - recomputed.forward_fraction)
        copies = exposed_copy_seconds(spec, pipeline_rank, (forward, backward), host)
        parts.append((1, _Piece(MicroBatchSeconds(host_copies=copies))))
    is_end = pipeline_rank in (0, spec.parallelism.pipeline - 1)
    if cluster.execution.copies_attention_mask and is_end:
        copy = attention_mask_copy_seconds(spec, _get_rates(spec, cluster).host)
        parts.append((1, _Piece(MicroBatchSeconds(host_copies=copy), forward=copy)))
    if pipeline_rank == 0:
        parts.append((1, recomputed.embedding))
    if pipeline_rank == spec.parallelism.pipeline - 1:
        parts.append((1, recomputed.head))
    outside_layers = micro_batch_host_seconds(spec, cluster)
    parts.append((1, _Piece(MicroBatchSeconds(), host=outside_layers)))
    return parts


def _micro_batch_seconds(parts: _Parts) -> MicroBatchSeconds:
    """Return the seconds of one micro batch on a stage with these parts, by component."""
    multiplied = [
        [times * value for value in _get_components(piece.device)] for times, piece in parts
    ]
    device = MicroBatchSeconds(*map(sum, zip(*multiplied, strict=True)))
    waiting = _host_wait_seconds(parts, device.total)
    return replace(device, host_launches=device.host_launches + waiting)


def _host_wait_seconds(parts: _Parts, device_seconds: float) -> float:
    """Return the seconds per micro batch in which a stage's device waits for a host that launches too slowly.

    The host launches all kernels of a pass one after another, and each kernel runs as soon as it is launched and the
    kernel before it has ended. Forward and backward therefore each take as long as the slower of host and device.

    Args:
        parts: Parts of the stage.
        device_seconds: Seconds of the device for all parts.
    """
    forward = sum([times * piece.forward for times, piece in parts])
    host_forward = sum([times * piece.host.forward for times, piece in parts])
    host_backward = sum([times * piece.host.backward for times, piece in parts])
    backward = device_seconds - forward
    return max(0.0, host_forward - forward) + max(0.0, host_backward - backward)


def exposed_seconds(seconds: float, compute_seconds: float, contention: float) -> float:
    """Return the exposed part of `seconds` of communication that overlap with computation.

    The overlapped part slows the computation down by the fraction `contention` of its own time.
    """
    overlapped = min(seconds, compute_seconds)
    return seconds - overlapped + contention * overlapped


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Times per micro batch of the pieces of a model: a layer, the embedding, and the output layer with the loss."""

    layer: _Piece
    dense: _Piece
    """A dense layer of a model with experts; zero if the model has none."""
    embedding: _Piece
    head: _Piece
    """Output layer and loss, and the joining of tokens and hidden states for multi-token prediction (MTP). The
    layers of MTP belong to the last stage."""
    forward_fraction: float
    """Fraction of a layer's computation that is forward."""


def _get_rates(spec: RunSpec, cluster: Cluster) -> DeviceRates:
    """Return the rates that the cluster's device achieves in the run's dtype."""
    return compute_device_rates(cluster, spec.dtype, spec.fp8_recipe)


@lru_cache(maxsize=65536)
def _compute_pieces(spec: RunSpec, cluster: Cluster) -> _Pieces:
    """Return the times per micro batch of a layer, a dense layer, the embedding and the output layer with the loss."""
    kinds = [(times, *_layer_time(kind, cluster)) for times, kind in spec.block_specs]
    forward = sum(times * arithmetic.forward for times, _, arithmetic in kinds)
    backward = sum(times * arithmetic.backward for times, _, arithmetic in kinds)
    layers = (piece * times for times, piece, _ in kinds)
    parallelism, shape = spec.parallelism, spec.shape
    if parallelism.expert > 1:
        # Embedding and head do not depend on how experts are split. Without that split they are computed once.
        samples = spec.batch.micro_batch_size
        unsplit = replace_cached(parallelism, data=1, expert=1)
        spec = replace(spec, parallelism=unsplit, batch=Batch(samples, samples))
    plain = replace(spec, recompute=Recompute.NONE, cp_comm_type="p2p")
    embedding, head = _embedding_and_head_time(plain, cluster)
    if shape.mtp_layers:
        head += _layer_time(spec.mtp_joining_spec, cluster)[0] * shape.mtp_layers
    return _Pieces(
        layer=sum(layers, start=_NOTHING),
        dense=_layer_time(spec.with_dense_layers, cluster)[0] if shape.dense_layers else _NOTHING,
        forward_fraction=forward / (forward + backward) if forward else 0.0,
        embedding=embedding,
        head=head,
    )


@lru_cache(maxsize=65536)
def _embedding_and_head_time(spec: RunSpec, cluster: Cluster) -> tuple[_Piece, _Piece]:
    """Return the times per micro batch of the embedding, and of the output layer with the loss.

    Both include their collectives. The host's time for them is in `micro_batch_host_seconds`. The second also includes
    the embeddings of multi-token prediction.
    """
    rate = _get_rates(spec, cluster)
    head_matmul, head_memory = head_seconds(spec, rate)
    batch = _call_seconds(spec, cluster, batch_collectives(spec, False, True, LATEST_MEGATRON))
    embedding_calls = _call_seconds(spec, cluster, embedding_collectives(spec))
    # A third of the head's products computes the weights' gradients, with which calls overlap.
    weight_gradients = 0.0 if spec.lora else head_matmul / 3
    head_calls = _exposed_call_seconds(spec, cluster, head_collectives(spec), weight_gradients)
    embedding = MicroBatchSeconds(
        memory_bound=embedding_seconds(spec, rate), tensor_parallel=embedding_calls
    )
    head = MicroBatchSeconds(
        matmul=head_matmul, memory_bound=head_memory, tensor_parallel=head_calls + batch
    )
    head += embedding * spec.shape.total_mtp_layers
    embedding += MicroBatchSeconds(tensor_parallel=batch)
    return (
        _Piece(embedding, embedding.total * _FORWARD_FRACTION),
        _Piece(head, head.total * _FORWARD_FRACTION),
    )


@lru_cache(maxsize=65536)
def _layer_time(spec: RunSpec, cluster: Cluster) -> tuple[_Piece, LayerSeconds]:
    """Return two times of one layer per micro batch: with communication and launches, and of computation alone.

    Launches that nothing hides are part of the device's seconds. All launches are the host's seconds, which the stage
    compares with the device's.
    """
    layer = layer_seconds(spec, _get_rates(spec, cluster))
    calls = _layer_call_seconds(spec.without_cp_comm_type, cluster)
    matmul = _overlappable_matmul_seconds(layer) + layer.weight_gradients
    attention = layer.forward_attention + layer.attention_recompute + layer.backward_attention
    memory_bound = layer.forward_memory + layer.memory_recompute + layer.backward_memory
    context_parallel = _context_seconds(spec, cluster, layer)
    busy = matmul + attention + memory_bound + calls.tensor_parallel + context_parallel
    launches = calls.launches + context_launch_seconds(spec, cluster)
    host = split_launch_seconds(spec, launches)
    waiting = unhidden_launch_seconds(spec, cluster, launches, calls.expert_parallel)
    if cluster.execution.summed_profiles:
        waiting = max(waiting, launches - busy)
    if waiting >= launches or cluster.execution.summed_profiles:
        # Nothing is left that could hide behind other layers.
        host = NO_HOST_SECONDS
    expert_parallel = calls.expert_parallel
    if cluster.execution.overlap_experts:
        contention = cluster.constants.contention
        expert_parallel = exposed_seconds(expert_parallel, busy + waiting, contention)
    seconds = MicroBatchSeconds(
        matmul=matmul,
        attention=attention,
        memory_bound=memory_bound,
        tensor_parallel=calls.tensor_parallel,
        context_parallel=context_parallel,
        expert_parallel=expert_parallel,
        host_launches=waiting,
    )
    computing = layer.forward + layer.backward
    forward = seconds.total * (layer.forward / computing if computing else 0.0)
    return _Piece(seconds, forward, host), layer


class _LayerCallSeconds(NamedTuple):
    """Seconds of a layer's collectives and launches. Context parallelism is not included."""

    tensor_parallel: float
    """Exposed tensor-parallel communication."""
    launches: float
    """Launches of all kernels of the layer by the host."""
    expert_parallel: float
    """Communication between experts, if nothing overlaps with it."""


@lru_cache(maxsize=65536)
def _layer_call_seconds(spec: RunSpec, cluster: Cluster) -> _LayerCallSeconds:
    """Return three times of a layer per micro batch: of tensor-parallel calls, of expert-parallel calls, and of
    launches by the host.

    The time of tensor-parallel calls is the exposed part.
    """
    layer = layer_seconds(spec, _get_rates(spec, cluster))
    tensor_calls, expert_calls = list(layer_collectives(spec)), list(expert_collectives(spec))
    overlapped_compute = layer.weight_gradients
    if cluster.execution.overlap_tensor and spec.parallelism.sequence_parallel:
        overlapped_compute += _overlappable_matmul_seconds(layer)
        tensor_calls = [call._replace(overlappable=True) for call in tensor_calls]
    calls = (*tensor_calls, *expert_calls)
    launches = launch_seconds(spec, cluster, calls) / cluster.core_fraction
    expert_parallel = _call_seconds(spec, cluster, expert_calls)
    if expert_calls and cluster.execution.deduplicated:
        # A token travels once to each rank that has any of its experts, or over the network once to each such node.
        nodes = -(-spec.parallelism.expert // cluster.per_node)
        destinations = nodes if nodes > 1 else spec.parallelism.expert
        copies = spec.expert_load.expected_destinations(spec.shape, destinations)
        expert_parallel *= min(1.0, copies / spec.shape.experts_per_token)
    tensor_parallel = _exposed_call_seconds(spec, cluster, tensor_calls, overlapped_compute)
    return _LayerCallSeconds(tensor_parallel, launches, expert_parallel)


def _overlappable_matmul_seconds(layer: LayerSeconds) -> float:
    """Return the seconds of a layer's matrix products without those of the weights' gradients."""
    return layer.forward_matmul + layer.matmul_recompute + layer.input_gradients


def _exposed_call_seconds(
    spec: RunSpec, cluster: Cluster, calls: Iterable[CollectiveCall], compute_seconds: float
) -> float:
    """Return the exposed seconds of calls.

    Overlappable calls run concurrently with computation of `compute_seconds`, so that only the rest of their time and
    the contention are exposed. All other calls are exposed in full.
    """
    calls = list(calls)
    overlappable = _call_seconds(spec, cluster, (call for call in calls if call.overlappable))
    exposed = _call_seconds(spec, cluster, (call for call in calls if not call.overlappable))
    contention = cluster.constants.contention
    return exposed + exposed_seconds(overlappable, compute_seconds, contention)


def _context_seconds(spec: RunSpec, cluster: Cluster, layer: LayerSeconds) -> float:
    """Return the exposed seconds of a layer's context-parallel communication.

    Messages of the ring overlap with attention on the keys that have arrived. The communication of other algorithms is
    fully exposed.
    """
    calls = list(context_collectives(spec))
    seconds = _call_seconds(spec, cluster, calls)
    is_ring = bool(calls) and calls[0].overlappable
    if not is_ring:
        return seconds
    context = spec.parallelism.context
    attention = layer.forward_attention + layer.backward_attention
    compute_seconds = attention * (context - 1) / context
    return exposed_seconds(seconds, compute_seconds, cluster.constants.contention)


def _select_calls_in_group(calls: Iterable[CollectiveCall], group: Group) -> list[CollectiveCall]:
    """Return the calls of one process group."""
    return [call for call in calls if call.group is group]


def _select_calls_in_phase(calls: Iterable[CollectiveCall], phase: Phase) -> list[CollectiveCall]:
    """Return the calls of one phase of the iteration."""
    return [call for call in calls if call.phase is phase]


def synchronisation_seconds(
    spec: RunSpec, cluster: Cluster, micro_batch_seconds: float
) -> tuple[float, float]:
    """Return two times per iteration: the exposed communication of gradients and weights, and the optimizer's update.

    Both times are of the pipeline rank with the slowest update. If the run overlaps this communication, gradients move
    during backward and weights during forward (`_exposed_sync_seconds`). With LoRA only adapters are communicated and
    updated.

    Args:
        spec: The run.
        cluster: The cluster.
        micro_batch_seconds: Time of one micro batch on the slowest stage.
    """
    # Virtual stages, recomputation and the algorithm of context parallelism change nothing here. Dropping them lets
    # the cache below serve more configurations.
    parallelism = spec.parallelism
    if not spec.stages.layout:
        parallelism = replace_cached(parallelism, virtual_stages=1)
    is_overlapped = parallelism.sharding.overlaps_by_default
    samples = (spec.microbatches if is_overlapped else 1) * parallelism.data
    plain = replace(
        spec,
        parallelism=parallelism,
        batch=Batch(1, samples),
        recompute=Recompute.NONE,
        cp_comm_type="p2p",
    )
    bucket_fraction, update = _find_slowest_update(plain, cluster)
    execution = cluster.execution
    reduced, gathered = update.reduced, update.gathered
    if execution.overlap_gradients:
        backward = micro_batch_seconds * _BACKWARD_FRACTION
        reduced = _exposed_sync_seconds(spec, cluster, reduced, bucket_fraction, backward)
    if execution.overlap_parameters:
        forward = micro_batch_seconds * (1 - _BACKWARD_FRACTION)
        gathered = _exposed_sync_seconds(spec, cluster, gathered, bucket_fraction, forward)
    return reduced + gathered + update.other_reductions, update.optimizer


def _exposed_sync_seconds(
    spec: RunSpec, cluster: Cluster, seconds: float, bucket_fraction: float, pass_seconds: float
) -> float:
    """Return the exposed seconds of gradient reductions that overlap with backward, or of gathers with forward.

    Without virtual stages, the communication overlaps with the pass of one micro batch, but for the last bucket of
    gradients or the first of weights. A virtual stage ends its backward while the earlier virtual stages still have
    theirs to do, for as many micro batches as there are stages. Its reduction overlaps with these. The reduction of the
    first virtual stage starts after its last backward and is exposed (`schedules.py: backward_step_helper_postprocess`,
    with `--align-grad-reduce`, Megatron's default). Gathers are the mirror image.

    Args:
        spec: The run.
        cluster: The cluster.
        seconds: Seconds of the communication of all virtual stages of a rank.
        bucket_fraction: Fraction of a rank's gradients that one bucket holds.
        pass_seconds: Seconds of the pass of one micro batch through all virtual stages of a rank.
    """
    virtual_stages = spec.parallelism.virtual_stages
    always_exposed, overlapped = bucket_fraction * seconds, pass_seconds
    if virtual_stages > 1:
        always_exposed = seconds / virtual_stages
        overlapped = spec.parallelism.pipeline * pass_seconds * (1 - 1 / virtual_stages)
    contention = cluster.constants.contention
    return always_exposed + exposed_seconds(seconds - always_exposed, overlapped, contention)


class _UpdateSeconds(NamedTuple):
    """Seconds between the last backward and the next forward on one rank, without overlap."""

    reduced: float
    """Gradients over the data-parallel ranks."""
    gathered: float
    """Updated weights over the data-parallel ranks."""
    other_reductions: float
    """Gradients of shared embeddings and other partial gradients."""
    optimizer: float
    """The optimizer with its own reductions."""


@lru_cache(maxsize=65536)
def _find_slowest_update(spec: RunSpec, cluster: Cluster) -> tuple[float, _UpdateSeconds]:
    """Return two results: the fraction of a rank's gradients that one bucket holds, and the times after the last
    backward.

    The times are of the pipeline rank for which their sum is largest.
    """
    ranks = spec.parallelism.data * spec.parallelism.context
    bucket_elements = max(_BUCKET_ELEMENTS, 1_000_000 * ranks)
    bucket_fraction = min(1.0, bucket_elements / max(1, trained_parameters(spec).total))
    ranks_to_compare = distinct_ranks(spec)
    updates = (_seconds_after_backward(spec, cluster, rank) for rank in ranks_to_compare)
    return bucket_fraction, max(updates, key=sum)


def _seconds_after_backward(spec: RunSpec, cluster: Cluster, rank: int) -> _UpdateSeconds:
    """Return the seconds that a pipeline rank takes after its last backward, if nothing overlaps.

    For ZeRO-2, ZeRO-3 and FSDP2 the communication of gradients and weights is left out, because
    `layerwise_sync_seconds` estimates it.
    """
    sync = _select_calls_in_group(pipeline_collectives(spec, rank), Group.EMBEDDING)
    sync += partial_gradient_collectives(spec, rank)
    is_overlapped = spec.parallelism.sharding.overlaps_by_default
    calls = [] if is_overlapped else list(gradient_collectives(spec, rank))
    gradient_calls = (call for call in calls if call.phase is not Phase.OPTIMIZER)
    reduced = _call_seconds(spec, cluster, gradient_calls)
    weight_calls = _select_calls_in_phase(calls, Phase.OPTIMIZER)
    gathered = _moved_weight_fraction(spec) * _call_seconds(spec, cluster, weight_calls)
    if cluster.execution.broadcast_parameters:
        # A rank broadcasts its tensors to the data-parallel ranks, one after another.
        num_calls = min(spec.parallelism.data, len(rank_tensors(spec, rank)))
        route = find_route(cluster, spec.parallelism, Group.DATA_CONTEXT)
        gathered += num_calls * (route.ring_seconds + _COLLECTIVE_KERNEL_SECONDS)
    reductions = _call_seconds(spec, cluster, control_collectives(spec, rank, LATEST_MEGATRON))
    update = optimizer_seconds(spec, _get_rates(spec, cluster), rank)
    other_reductions = _call_seconds(spec, cluster, sync)
    return _UpdateSeconds(reduced, gathered, other_reductions, reductions + update)


def _moved_weight_fraction(spec: RunSpec) -> float:
    """Return the moved bytes of weights, as a fraction of their bytes in the run's dtype.

    The fraction is below 1 if weights are kept and moved in fp8 or fewer bits.
    """
    fraction = FP8_RECIPE_BYTES[spec.fp8_recipe] / spec.element_bytes
    return fraction if keeps_quantised_weights(spec) else 1.0


def layerwise_sync_seconds(spec: RunSpec, cluster: Cluster, compute_seconds: float) -> float:
    """Return the exposed seconds per iteration of ZeRO-2, ZeRO-3 and FSDP2, which communicate layer by layer.

    The result is 0 for other shardings. It is the sum of:

    - the exposed part of all-gathers and reduce-scatters, which overlap with `compute_seconds` of forward and backward;
    - the gather of the first layer and the reduction of the last layer, which are fully exposed;
    - collectives in the optimizer step, which are fully exposed;
    - kernels that copy weights out of buffers and add up unfused gradients.
    """
    if not spec.parallelism.sharding.overlaps_by_default:
        return 0.0
    # Recomputation and the algorithm of context parallelism change nothing here. Dropping them lets the cache below
    # serve more configurations.
    plain = replace(spec, recompute=Recompute.NONE, cp_comm_type="p2p")
    sync = _layerwise_sync(plain, cluster)
    # The first layer that is gathered and the last that is reduced have no computation to overlap with.
    end_seconds = sync.layers / max(1, spec.shape.layers + spec.shape.mtp_layers)
    middle_seconds = exposed_seconds(
        sync.layers - end_seconds, compute_seconds, cluster.constants.contention
    )
    return sync.optimizer + sync.copies + end_seconds + middle_seconds


class _LayerwiseSync(NamedTuple):
    """Seconds per iteration that ZeRO-2, ZeRO-3 and FSDP2 communicate and copy, if nothing overlaps."""

    layers: float
    """All-gathers and reduce-scatters in forward and backward."""
    copies: float
    """Kernels that copy weights out of buffers and add up unfused gradients."""
    optimizer: float
    """Collectives in the optimizer step."""


@lru_cache(maxsize=65536)
def _layerwise_sync(spec: RunSpec, cluster: Cluster) -> _LayerwiseSync:
    """Return the seconds that a run with ZeRO-2, ZeRO-3 or FSDP2 communicates and copies, if nothing overlaps."""
    calls, weight_fraction = list(gradient_collectives(spec, 0)), _moved_weight_fraction(spec)
    reductions = _select_calls_in_phase(calls, Phase.BACKWARD)
    gathers = _select_calls_in_phase(calls, Phase.FORWARD)
    optimizer_calls = _select_calls_in_phase(calls, Phase.OPTIMIZER)
    gradient_bytes = sum(call.total_payload_bytes for call in reductions)
    weight_bytes = weight_fraction * sum(call.total_payload_bytes for call in gathers)
    copied_bytes = _UNFUSED_PASSES * gradient_bytes + _COPY_OUT_PASSES * weight_bytes
    layers = _call_seconds(spec, cluster, reductions)
    layers += weight_fraction * _call_seconds(spec, cluster, gathers)
    return _LayerwiseSync(
        layers,
        copies=copied_bytes / _get_rates(spec, cluster).bytes_per_second,
        optimizer=weight_fraction * _call_seconds(spec, cluster, optimizer_calls),
    )


def _call_seconds(spec: RunSpec, cluster: Cluster, calls: Iterable[CollectiveCall]) -> float:
    """Return the sum of the seconds of all calls, without overlap. Each call has its link for itself.

    Calls in groups of one rank and calls without bytes take no time.
    """
    times = []
    for call in calls:
        if call.ranks == 1 or not call.payload_bytes:
            continue
        route = find_route(cluster, spec.parallelism, call.group)
        rate, latency = route.bytes_per_second, min(route.ring_seconds, route.tree_seconds)
        if call.operation is Operation.ALL_TO_ALL:
            rate, latency = route.pairwise_bytes_per_second, route.tree_seconds
        elif call.operation is Operation.SEND:
            latency = route.ring_seconds / max(1, call.ranks - 1)
        else:
            is_all_reduce = call.operation is Operation.ALL_REDUCE
            rounds = route.all_reduce_rounds if is_all_reduce else 1
            latency = rounds * latency + _COLLECTIVE_KERNEL_SECONDS
        rate *= cluster.calibration.link_fraction(call.operation)
        times.append(call.wire_bytes / rate + call.calls * latency)
    return sum(times, start=0.0)
