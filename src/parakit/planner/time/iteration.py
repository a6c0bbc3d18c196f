"""Seconds of one iteration, by component, on the ranks that decide it.

Built from a micro batch's layer, embedding and head, each of which depends on few choices and is
computed once: a search over pipeline and data parallelism only adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property, lru_cache
from math import log
from operator import add, attrgetter

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
    rank_parameters,
    rank_tensors,
)
from parakit.planner.time.cluster import Cluster, find_route
from parakit.planner.time.compute import (
    LayerSeconds,
    embedding_seconds,
    head_seconds,
    layer_seconds,
    optimizer_seconds,
)
from parakit.planner.time.host import iteration_host_seconds, launch_seconds, runs_ahead
from parakit.planner.time.offload import exposed_copy_seconds
from parakit.planner.time.rates import DeviceRates, compute_device_rates


@dataclass(frozen=True)
class MicroBatchSeconds:
    """Part of one micro batch on one rank; communication is what arithmetic does not hide."""

    matmul: float = 0.0
    attention: float = 0.0
    memory_bound: float = 0.0
    """Norms, dropouts, activations, the loss, and waiting for the host to launch kernels."""
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    expert_parallel: float = 0.0
    host_copies: float = 0.0
    """Waiting for activations on their way to the host and back."""

    @cached_property
    def total(self) -> float:
        """Forward and backward."""
        return sum(_in_order(self))

    def __add__(self, other: MicroBatchSeconds) -> MicroBatchSeconds:
        return MicroBatchSeconds(*map(add, _in_order(self), _in_order(other)))

    def __mul__(self, times: float) -> MicroBatchSeconds:
        return MicroBatchSeconds(*[times * part for part in _in_order(self)])


_Parts = Sequence[tuple[int, MicroBatchSeconds]]
"""What a stage is made of, with how many of each."""
_in_order: Callable[[MicroBatchSeconds], tuple[float, ...]] = attrgetter(
    *(field.name for field in fields(MicroBatchSeconds))
)


@dataclass(frozen=True)
class IterationSeconds(MicroBatchSeconds):
    """Where an iteration's time goes: all its micro batches, and what is beside them."""

    pipeline_messages: float = 0.0
    bubble: float = 0.0
    """Waiting for other stages; with stages of unequal work also the wait for the slowest."""
    gradient_sync: float = 0.0
    optimizer: float = 0.0
    stragglers: float = 0.0
    """Waiting for the slowest of all devices that work at once, whose times differ by chance."""

    @cached_property
    def total(self) -> float:
        """Seconds of an iteration."""
        return sum(_all_in_order(self))


TIME_COMPONENTS = tuple(field.name for field in fields(IterationSeconds))
_all_in_order: Callable[[IterationSeconds], tuple[float, ...]] = attrgetter(*TIME_COMPONENTS)

ASSUMPTIONS = (
    "Gradients are reduced after the last backward, as without --overlap-grad-reduce; ZeRO-2, "
    "ZeRO-3 and FSDP2 overlap theirs.",
    "Backward's tensor-parallel calls hide behind the weights' gradients, the context ring behind "
    "attention (CUDA_DEVICE_MAX_CONNECTIONS=1).",
    "Copies of activations to the host and back run beside the same layers' arithmetic, at its link's "
    "rate.",
    "Data loading, logging, evaluation and checkpoints take no time.",
)

_BACKWARD_SHARE = 2 / 3
_BUCKET_ELEMENTS = 40_000_000
"""Megatron's `--ddp-bucket-size` by default, or a million a rank that gradients are reduced over if that
is more (`resolve_ddp_bucket_size` in 0.19's `training.py`)."""
_COLLECTIVE_KERNEL_SECONDS = 5e-6
"""Start and end of a collective's kernel, and of the event that others wait for (an estimate)."""
_UNFUSED_PASSES = 5
_COPIED_OUT = 2
"""Gathered weights are read from the flat buffer and written to where layers read them
(`torch.distributed.fsdp: all_gather_copy_out`)."""


def iteration_seconds(spec: RunSpec, cluster: Cluster) -> IterationSeconds:
    """Time of one iteration.

    1F1B over stages that take T_i a micro batch lasts m·max(T) + (ΣT − max T)/v: all but the
    slowest stage's work is passed through once at start and end (arXiv:2104.04473 §2.2, with v
    virtual stages).

    Raises:
        NoPeakError: The device has no matrix rate in the run's dtype.
    """
    slowest, through = pipeline_seconds(spec, cluster)
    working, virtual = spec.microbatches * slowest.total, spec.parallelism.virtual_stages
    sync, optimizer = synchronisation_seconds(spec, cluster, slowest.total)
    beside = _overlapped_sync_seconds(spec, cluster, working)
    messages = message_seconds(spec, cluster)
    bubble = (through - slowest.total) / virtual
    steady = working + messages + bubble + sync + beside + optimizer
    host = MicroBatchSeconds(memory_bound=iteration_host_seconds(spec, cluster))
    return IterationSeconds(
        **asdict(slowest * spec.microbatches + host),
        pipeline_messages=messages,
        bubble=bubble,
        gradient_sync=sync + beside,
        optimizer=optimizer,
        stragglers=straggler_fraction(cluster) * steady,
    )


def straggler_fraction(cluster: Cluster) -> float:
    """Share of an iteration by which the slowest of all devices is expected to be late."""
    spread = float((2 * log(max(1.0, cluster.devices * cluster.core_fraction))) ** 0.5)
    return cluster.constants.jitter * spread


def message_seconds(spec: RunSpec, cluster: Cluster) -> float:
    """Stage to stage: 1F1B hides nothing, the interleaved schedule overlaps its messages."""
    messages = _seconds(
        spec, cluster, _calls_in_group(pipeline_collectives(spec, 0), Group.PIPELINE)
    )
    if cluster.execution.scatter_gather:
        messages /= spec.parallelism.tensor // spec.sequence_shards
    return messages * (cluster.constants.contention if spec.parallelism.virtual_stages > 1 else 1)


def pipeline_seconds(spec: RunSpec, cluster: Cluster) -> tuple[MicroBatchSeconds, float]:
    """One micro batch on the slowest stage, and its whole way through all stages.

    Where ranks share cores, those of a stage that waits are the others': m micro batches then take no
    less than the work of all stages on all cores, nor than the slowest stage and the way through alone.
    """
    parts, slowest, through = slowest_stage(spec, cluster)
    found = _added(parts)
    if spec.parallelism.pipeline == 1:
        return found, found.total
    alone = cluster.core_fraction == 1 or not slowest
    return found if alone else found * (slowest / found.total), through


def slowest_stage(spec: RunSpec, cluster: Cluster) -> tuple[_Parts, float, float]:
    """What the slowest stage is made of, one micro batch on it in seconds, and its way through all."""
    pipeline, pieces = spec.parallelism.pipeline, _stage_pieces(spec, cluster)
    alike = {0: 1, pipeline - 1: 1} | (middle_ranks(spec) if pipeline > 1 else {})
    parts: _Parts = ()
    slowest = through = 0.0
    for rank, times in alike.items():
        stage = _stage(spec, cluster, rank, pieces)
        seconds = sum([count * piece.total for count, piece in stage])
        through += times * seconds
        if seconds > slowest:
            parts, slowest = stage, seconds
    share = cluster.core_fraction
    if share == 1 or pipeline == 1:
        return parts, slowest, through
    least = max(through / pipeline, share * slowest)
    whole = share * ((spec.microbatches - 1) * slowest + through)
    return parts, least, least + max(0.0, whole - spec.microbatches * least)


def stage_seconds(spec: RunSpec, cluster: Cluster, pipeline_rank: int) -> tuple[float, float]:
    """One micro batch on a pipeline rank, and what follows its last: gradients, weights, update."""
    once = replace(spec, batch=Batch(1, spec.parallelism.data))
    found = _stage(spec, cluster, pipeline_rank, _stage_pieces(spec, cluster))
    return _added(found).total, sum(_after_backward(once, cluster, pipeline_rank))


def _stage_pieces(spec: RunSpec, cluster: Cluster) -> tuple[_Pieces, _Pieces]:
    """What all stages are made of, and the same where layers are not computed again."""
    pieces = _pieces(spec.one_layer_per_stage, cluster)
    if not spec.recompute.is_block_method:
        return pieces, pieces
    return pieces, _pieces(spec.without_recompute.one_layer_per_stage, cluster)


def _stage(
    spec: RunSpec, cluster: Cluster, pipeline_rank: int, made_of: tuple[_Pieces, _Pieces]
) -> _Parts:
    """One micro batch on a pipeline rank: its layers, some computed again, and what the ends have."""
    (pieces, kept), layers = made_of, spec.num_layers_on_stage(pipeline_rank)
    dense = sum(spec.dense_layers_per_chunk(pipeline_rank))
    again, dense_again = layers, dense
    if spec.recompute.is_block_method:
        again = spec.num_recomputed_layers(pipeline_rank)
        _, dense_again = spec.count_dense_layers(pipeline_rank)
    parts: list[tuple[int, MicroBatchSeconds]] = [(again - dense_again, pieces.layer)]
    if again < layers:
        parts.append((layers - again - dense + dense_again, kept.layer))
    if dense:
        parts += [(dense_again, pieces.dense), (dense - dense_again, kept.dense)]
    if spec.offload:
        alone, host = _added(parts).total, _rates(spec, cluster).known_host
        passes = alone * pieces.forward_share, alone * (1 - pieces.forward_share)
        copies = exposed_copy_seconds(spec, pipeline_rank, passes, host)
        parts.append((1, MicroBatchSeconds(host_copies=copies)))
    if pipeline_rank == 0:
        parts.append((1, pieces.embedding))
    if pipeline_rank == spec.parallelism.pipeline - 1:
        parts.append((1, pieces.head))
    return parts


def _added(parts: _Parts) -> MicroBatchSeconds:
    taken = [[times * value for value in _in_order(each)] for times, each in parts]
    return MicroBatchSeconds(*map(sum, zip(*taken, strict=True)))


def exposed_seconds(seconds: float, behind: float, contention: float) -> float:
    """What is left of communication that runs beside `behind` seconds of arithmetic."""
    hidden = min(seconds, behind)
    return seconds - hidden + contention * hidden


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What the stages of a model are made of."""

    layer: MicroBatchSeconds
    dense: MicroBatchSeconds
    """One that is dense among those of experts; nothing where none is."""
    embedding: MicroBatchSeconds
    head: MicroBatchSeconds
    """With what joins tokens ahead to the hidden states; their layers are the last stage's."""
    forward_share: float
    """Of a layer's time, that of forward: its share of the arithmetic."""


def _rates(spec: RunSpec, cluster: Cluster) -> DeviceRates:
    return compute_device_rates(cluster, spec.dtype, spec.fp8_recipe)


@lru_cache(maxsize=65536)
def _pieces(spec: RunSpec, cluster: Cluster) -> _Pieces:
    kinds = [(times, *_layer(kind, cluster)) for times, kind in spec.block_specs]
    forward = sum(times * layer.forward for times, _, layer in kinds)
    backward = sum(times * layer.backward for times, _, layer in kinds)
    layers = (seconds * times for times, seconds, _ in kinds)
    own, shape = spec.parallelism, spec.shape
    if own.expert > 1:  # The rest does not depend on how experts are split.
        samples, alone = spec.batch.micro_batch_size, replace_cached(own, data=1, expert=1)
        spec = replace(spec, parallelism=alone, batch=Batch(samples, samples))
    embedding, head = _ends(replace(spec, recompute=Recompute.NONE, cp_comm_type="p2p"), cluster)
    if shape.mtp_layers:
        head += _layer(spec.mtp_joining_spec, cluster)[0] * shape.mtp_layers
    return _Pieces(
        layer=sum(layers, start=MicroBatchSeconds()),
        dense=_layer(spec.with_dense_layers, cluster)[0]
        if shape.dense_layers
        else MicroBatchSeconds(),
        forward_share=forward / (forward + backward) if forward else 0.0,
        embedding=embedding,
        head=head,
    )


@lru_cache(maxsize=65536)
def _ends(spec: RunSpec, cluster: Cluster) -> tuple[MicroBatchSeconds, MicroBatchSeconds]:
    """The embedding, and the output layer with the loss."""
    rate = _rates(spec, cluster)
    head_matmul, head_memory = head_seconds(spec, rate)
    batch = _seconds(spec, cluster, batch_collectives(spec, False, True, LATEST_MEGATRON))
    embedding = _seconds(spec, cluster, embedding_collectives(spec))
    head = _tensor_seconds(spec, cluster, head_collectives(spec), head_matmul / 3)
    embedded = MicroBatchSeconds(0.0, 0.0, embedding_seconds(spec, rate), embedding)
    own = MicroBatchSeconds(head_matmul, 0.0, head_memory, head + batch)
    own += embedded * spec.shape.total_mtp_layers
    return embedded + MicroBatchSeconds(tensor_parallel=batch), own


@lru_cache(maxsize=65536)
def _layer(spec: RunSpec, cluster: Cluster) -> tuple[MicroBatchSeconds, LayerSeconds]:
    """One layer, never faster than the host launches its kernels, and its arithmetic alone; where the
    host does not run ahead of the device, its time adds."""
    layer = layer_seconds(spec, _rates(spec, cluster), cluster.execution.frozen)
    tensor_parallel, launches, exchanged = _layer_calls(spec.without_cp_comm_type, cluster)
    matmul = _products(layer) + layer.weight_gradients
    attention = layer.forward_attention + layer.attention_recompute + layer.backward_attention
    memory_bound = layer.forward_memory + layer.memory_recompute + layer.backward_memory
    context_parallel = _context_seconds(spec, cluster, layer)
    beside = matmul + attention + memory_bound + tensor_parallel + context_parallel
    waiting = max(0.0, launches - beside) if runs_ahead(spec, cluster) else launches
    if cluster.execution.overlap_experts:
        exchanged = exposed_seconds(exchanged, beside + waiting, cluster.constants.contention)
    memory_bound += waiting
    parts = (matmul, attention, memory_bound, tensor_parallel, context_parallel, exchanged)
    return MicroBatchSeconds(*parts), layer


@lru_cache(maxsize=65536)
def _layer_calls(spec: RunSpec, cluster: Cluster) -> tuple[float, float, float]:
    """Of a layer's collectives but context parallelism's, tensor-parallel ones that are waited for, the
    host's launches with all kernels, and exchanges between experts alone on their links."""
    layer = layer_seconds(spec, _rates(spec, cluster), cluster.execution.frozen)
    tensor_calls, expert_calls = list(layer_collectives(spec)), list(expert_collectives(spec))
    hides = layer.weight_gradients
    if cluster.execution.overlap_tensor and spec.parallelism.sequence_parallel:
        hides += _products(layer)
        tensor_calls = [call._replace(overlappable=True) for call in tensor_calls]
    launches = launch_seconds(spec, cluster, (*tensor_calls, *expert_calls)) / cluster.core_fraction
    exchanged = _seconds(spec, cluster, expert_calls)
    if expert_calls and cluster.execution.deduplicated:
        # A token goes once to a rank, or once over the network to a node, that has any of its experts.
        nodes = -(-spec.parallelism.expert // cluster.per_node)
        places = nodes if nodes > 1 else spec.parallelism.expert
        reached = spec.expert_load.expected_destinations(spec.shape, places)
        exchanged *= min(1.0, reached / spec.shape.experts_per_token)
    return _tensor_seconds(spec, cluster, tensor_calls, hides), launches, exchanged


def _products(layer: LayerSeconds) -> float:
    return layer.forward_matmul + layer.matmul_recompute + layer.input_gradients


def _tensor_seconds(
    spec: RunSpec, cluster: Cluster, calls: Iterable[CollectiveCall], beside: float
) -> float:
    """Forward's calls are waited for; backward's run beside the weights' gradients."""
    calls = list(calls)
    overlappable = _seconds(spec, cluster, (call for call in calls if call.overlappable))
    visible = _seconds(spec, cluster, (call for call in calls if not call.overlappable))
    return visible + exposed_seconds(overlappable, beside, cluster.constants.contention)


def _context_seconds(spec: RunSpec, cluster: Cluster, layer: LayerSeconds) -> float:
    """The ring's messages run beside attention on what has arrived; other algorithms wait."""
    calls = list(context_collectives(spec))
    seconds = _seconds(spec, cluster, calls)
    if not (calls and calls[0].overlappable):
        return seconds
    context = spec.parallelism.context
    attention = layer.forward_attention + layer.backward_attention
    beside = attention * (context - 1) / context
    return exposed_seconds(seconds, beside, cluster.constants.contention)


def _calls_in_group(calls: Iterable[CollectiveCall], group: Group) -> list[CollectiveCall]:
    return [call for call in calls if call.group is group]


def _calls_in_phase(calls: Iterable[CollectiveCall], phase: Phase) -> list[CollectiveCall]:
    return [call for call in calls if call.phase is phase]


def synchronisation_seconds(
    spec: RunSpec, cluster: Cluster, micro_batch: float
) -> tuple[float, float]:
    """Gradient synchronisation and optimizer of the rank where they take longest.

    `micro_batch` is one's time on the slowest stage. Overlapped, gradients move beside the last
    backward and weights beside the first forward, all but one bucket of each.
    """
    if cluster.execution.frozen:
        return 0.0, 0.0
    # Virtual stages, recomputation and context parallelism's algorithm change nothing here, and without
    # them fewer layouts are looked at.
    parallelism = spec.parallelism
    if not spec.stages.layout:
        parallelism = replace_cached(parallelism, virtual_stages=1)
    overlapped = parallelism.sharding.overlaps_by_default
    samples = (spec.microbatches if overlapped else 1) * parallelism.data
    plain = replace(
        spec,
        parallelism=parallelism,
        batch=Batch(1, samples),
        recompute=Recompute.NONE,
        cp_comm_type="p2p",
    )
    bucket, reduced, gathered, rest, update = _slowest_update(plain, cluster)
    execution, contention = cluster.execution, cluster.constants.contention
    if execution.overlap_gradients:
        alone, behind = bucket * reduced, micro_batch * _BACKWARD_SHARE
        reduced = alone + exposed_seconds(reduced - alone, behind, contention)
    if execution.overlap_parameters:
        alone, behind = bucket * gathered, micro_batch * (1 - _BACKWARD_SHARE)
        gathered = alone + exposed_seconds(gathered - alone, behind, contention)
    return reduced + gathered + rest, update


@lru_cache(maxsize=65536)
def _slowest_update(spec: RunSpec, cluster: Cluster) -> tuple[float, float, float, float, float]:
    """Of a rank's gradients the share in the bucket that is ready last, and what follows backward."""
    ranks = spec.parallelism.data * spec.parallelism.context
    bucket = max(_BUCKET_ELEMENTS, 1_000_000 * ranks)
    share = min(1.0, bucket / max(1, rank_parameters(spec).total))
    ends = distinct_ranks(spec)
    return share, *max((_after_backward(spec, cluster, rank) for rank in ends), key=sum)


def _after_backward(
    spec: RunSpec, cluster: Cluster, rank: int
) -> tuple[float, float, float, float]:
    """Gradients over the data-parallel ranks, updated weights over them, what else is reduced after
    backward, and the optimizer with its reductions."""
    sync = _calls_in_group(pipeline_collectives(spec, rank), Group.EMBEDDING)
    sync += partial_gradient_collectives(spec, rank)
    moved = (
        []
        if spec.parallelism.sharding.overlaps_by_default
        else list(gradient_collectives(spec, rank))
    )
    reduced = _seconds(spec, cluster, (c for c in moved if c.phase is not Phase.OPTIMIZER))
    gathered = _weights_moved(spec) * _seconds(
        spec, cluster, _calls_in_phase(moved, Phase.OPTIMIZER)
    )
    if cluster.execution.broadcast_parameters:
        # A rank's tensors over the data-parallel ranks, one after another.
        calls = min(spec.parallelism.data, len(rank_tensors(spec, rank)))
        way = find_route(cluster, spec.parallelism, Group.DATA_CONTEXT)
        gathered += calls * (way.ring_seconds + _COLLECTIVE_KERNEL_SECONDS)
    reductions = _seconds(spec, cluster, control_collectives(spec, rank, LATEST_MEGATRON))
    update = optimizer_seconds(spec, _rates(spec, cluster), rank)
    return reduced, gathered, _seconds(spec, cluster, sync), reductions + update


def _weights_moved(spec: RunSpec) -> float:
    """Of the bytes of weights in the run's own precision, those that are moved."""
    width = FP8_RECIPE_BYTES[spec.fp8_recipe] / spec.element_bytes
    return width if keeps_quantised_weights(spec) else 1.0


def _overlapped_sync_seconds(spec: RunSpec, cluster: Cluster, compute: float) -> float:
    """ZeRO-2, ZeRO-3 and FSDP2 move layers beside arithmetic; what is moved once is waited for.

    They add unfused gradients: each micro batch writes them, copies them to a bucket and adds it.
    """
    if not spec.parallelism.sharding.overlaps_by_default:
        return 0.0
    calls, of_weights = list(gradient_collectives(spec, 0)), _weights_moved(spec)
    reduced, gathered = (
        _calls_in_phase(calls, Phase.BACKWARD),
        _calls_in_phase(calls, Phase.FORWARD),
    )
    waited = _calls_in_phase(calls, Phase.OPTIMIZER)
    gradients = sum(call.total_payload_bytes for call in reduced)
    weights = of_weights * sum(call.total_payload_bytes for call in gathered)
    copied = _UNFUSED_PASSES * gradients + _COPIED_OUT * weights
    copying = copied / _rates(spec, cluster).bytes_per_second
    moving = _seconds(spec, cluster, reduced) + of_weights * _seconds(spec, cluster, gathered)
    # The first unit that is gathered and the last that is reduced have nothing beside them.
    alone = moving / max(1, spec.shape.layers + spec.shape.mtp_layers)
    hidden = exposed_seconds(moving - alone, compute, cluster.constants.contention)
    return of_weights * _seconds(spec, cluster, waited) + copying + alone + hidden


def _seconds(spec: RunSpec, cluster: Cluster, calls: Iterable[CollectiveCall]) -> float:
    """Time of calls alone on their links, one after another; none over one rank or of no bytes."""
    times = []
    for call in calls:
        if call.ranks == 1 or not call.payload_bytes:
            continue
        way = find_route(cluster, spec.parallelism, call.group)
        rate, latency = way.bytes_per_second, min(way.ring_seconds, way.tree_seconds)
        if call.operation is Operation.ALL_TO_ALL:
            rate, latency = way.pairwise_bytes_per_second, way.tree_seconds
        elif call.operation is Operation.SEND:
            latency = way.ring_seconds / max(1, call.ranks - 1)
        else:
            rings = way.all_reduce_ways if call.operation is Operation.ALL_REDUCE else 1
            latency = rings * latency + _COLLECTIVE_KERNEL_SECONDS
        rate *= cluster.calibration.link_fraction(call.operation)
        times.append(call.wire_bytes / rate + call.calls * latency)
    return sum(times, start=0.0)
