"""Calls in the tensor-parallel group: activations, the vocabulary, and the batch itself."""

from __future__ import annotations

from collections.abc import Iterator

from tools.plan.collectives.call import CollectiveCall, Megatron
from tools.plan.memory import PRECISIONS
from tools.plan.tensors import norm_parameters
from tools.records.measurements import Operation, Phase
from tools.spec.groups import Group
from tools.spec.run import Recompute, RunSpec

_INT64, _FP32, _BOOL = 8, 4, 1

_LAYERS = "tensor_parallel/layers.py"
_MAPPINGS = "tensor_parallel/mappings.py"


def tensor_collectives(
    spec: RunSpec, pipeline_rank: int, megatron: Megatron
) -> Iterator[CollectiveCall]:
    """Calls over TP of one pipeline rank in one iteration."""
    pipeline = spec.parallelism.pipeline
    first, last = pipeline_rank == 0, pipeline_rank == pipeline - 1
    yield from batch_collectives(spec, first, last, megatron)
    if first:
        yield from embedding_collectives(spec)
    yield from layer_collectives(spec)
    if last:
        yield from head_collectives(spec)
    yield from replicated_gradients(spec, pipeline_rank)


def layer_collectives(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Calls inside the layers of one pipeline rank, all micro batches."""
    if spec.parallelism.sequence_parallel:
        yield from _layers_with_sequence_parallelism(spec)
    else:
        yield from _layers(spec)


def replicated_gradients(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """SP leaves norms, row-parallel biases and routers with partial gradients: one all-reduce."""
    parallelism, shape = spec.parallelism, spec.shape
    if parallelism.tensor == 1 or not parallelism.sequence_parallel:
        return
    last = pipeline_rank == parallelism.pipeline - 1
    row_biases = (1 if shape.experts else 2) * shape.hidden if shape.bias else 0
    router = shape.experts * shape.hidden
    layer = 2 * norm_parameters(shape) + row_biases + router
    elements = spec.layers_a_stage * layer + (norm_parameters(shape) if last else 0)
    yield _call(
        spec,
        Operation.ALL_REDUCE,
        Phase.GRADIENT_SYNC,
        "gradients of norms, row-parallel biases and routers",
        1,
        PRECISIONS[spec.dtype].gradients * elements,
        "distributed/finalize_model_grads.py: _allreduce_non_tensor_model_parallel_grads",
    )


def hidden_bytes(spec: RunSpec) -> int:
    """U: the hidden states of one micro batch on one CP rank, whole over TP."""
    return spec.element_bytes * spec.tokens * spec.shape.hidden


def _call(
    spec: RunSpec,
    operation: Operation,
    phase: Phase,
    what: str,
    calls: int,
    payload: int,
    source: str,
    hideable: bool = False,
) -> CollectiveCall:
    ranks = spec.parallelism.tensor
    return CollectiveCall(
        Group.TENSOR, ranks, operation, phase, what, calls, payload, source, hideable
    )


def _split_blocks(spec: RunSpec) -> int:
    """Pairs of column- and row-parallel matrices a layer: attention, and the MLP unless experts."""
    return 1 if spec.shape.experts else 2


def _forwards(spec: RunSpec) -> int:
    """Times a layer runs forward for each backward."""
    return 2 if spec.recompute is Recompute.FULL else 1


def _layers(spec: RunSpec) -> Iterator[CollectiveCall]:
    """One all-reduce behind each row-parallel matrix, and one for each column-parallel input."""
    blocks = _split_blocks(spec) * spec.layers_a_stage
    blocks *= spec.microbatches
    whole = hidden_bytes(spec)
    reduce = Operation.ALL_REDUCE
    yield _call(
        spec,
        reduce,
        Phase.FORWARD,
        "partial sums of row-parallel outputs",
        blocks * _forwards(spec),
        whole,
        f"{_MAPPINGS}: _ReduceFromModelParallelRegion",
    )
    yield _call(
        spec,
        reduce,
        Phase.BACKWARD,
        "input gradients of column-parallel matrices",
        blocks,
        whole,
        f"{_LAYERS}: LinearWithGradAccumulationAndAsyncCommunication.backward",
        hideable=True,
    )


def _layers_with_sequence_parallelism(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Each all-reduce becomes a reduce-scatter and an all-gather; backward gathers inputs again."""
    blocks = _split_blocks(spec) * spec.layers_a_stage
    blocks *= spec.microbatches
    forwards = blocks * _forwards(spec)
    whole = hidden_bytes(spec)
    linear = f"{_LAYERS}: LinearWithGradAccumulationAndAsyncCommunication"
    gather, scatter = Operation.ALL_GATHER, Operation.REDUCE_SCATTER
    forward, backward = Phase.FORWARD, Phase.BACKWARD
    for operation, phase, what, calls, source in (
        (gather, forward, "inputs of column-parallel matrices", forwards, f"{linear}.forward"),
        (scatter, forward, "row-parallel outputs", forwards, f"{_MAPPINGS}: _ReduceScatter"),
        (gather, backward, "the same inputs again, for weights", blocks, f"{linear}.backward"),
        (scatter, backward, "their gradients", blocks, f"{linear}.backward"),
        (gather, backward, "gradients of row-parallel outputs", blocks, f"{_MAPPINGS}: _Gather"),
    ):
        beside = phase is backward and source.startswith(linear)
        yield _call(spec, operation, phase, what, calls, whole, source, beside)


def embedding_collectives(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Learned positions are added after the reduction, so SP all-reduces here and then splits."""
    sequence_parallel = spec.parallelism.sequence_parallel
    scatters = sequence_parallel and not spec.shape.positions
    calls, whole = spec.microbatches, hidden_bytes(spec)
    yield _call(
        spec,
        Operation.REDUCE_SCATTER if scatters else Operation.ALL_REDUCE,
        Phase.FORWARD,
        "word embeddings",
        calls,
        whole,
        f"{_LAYERS}: VocabParallelEmbedding.forward",
    )
    if sequence_parallel:
        yield _call(
            spec,
            Operation.ALL_GATHER,
            Phase.BACKWARD,
            "gradients of the embeddings",
            calls,
            whole,
            f"{_MAPPINGS}: _ScatterToSequenceParallelRegion.backward",
        )


def head_collectives(spec: RunSpec) -> Iterator[CollectiveCall]:
    """The output layer's input and its gradient, and three numbers a token for the loss."""
    calls, whole = spec.microbatches, hidden_bytes(spec)
    gather, scatter = Operation.ALL_GATHER, Operation.REDUCE_SCATTER
    source = f"{_LAYERS}: LinearWithGradAccumulationAndAsyncCommunication"
    moves: tuple[tuple[Operation, Phase, str], ...] = (
        (Operation.ALL_REDUCE, Phase.BACKWARD, "input gradients of the output layer"),
    )
    if spec.parallelism.sequence_parallel:
        moves = (
            (gather, Phase.FORWARD, "input of the output layer"),
            (gather, Phase.BACKWARD, "input of the output layer again"),
            (scatter, Phase.BACKWARD, "input gradients of the output layer"),
        )
    for operation, phase, what in moves:
        beside = phase is Phase.BACKWARD
        yield _call(spec, operation, phase, what, calls, whole, source, beside)
    yield _cross_entropy(spec)


def _cross_entropy(spec: RunSpec) -> CollectiveCall:
    """Maximum, target's logit and sum of exponentials: three fp32 numbers a token."""
    return _call(
        spec,
        Operation.ALL_REDUCE,
        Phase.FORWARD,
        "vocabulary-parallel cross entropy",
        3 * spec.microbatches,
        _FP32 * spec.tokens,
        "tensor_parallel/cross_entropy.py: _VocabParallelCrossEntropy.forward",
    )


def batch_collectives(
    spec: RunSpec, first: bool, last: bool, megatron: Megatron
) -> Iterator[CollectiveCall]:
    """TP rank 0 reads the data and broadcasts it, before CP cuts the sequence.

    0.19 reads once a micro batch; f4fa7d6b reads for every virtual stage of the end ranks.
    """
    if not (first or last):
        return
    reads = spec.microbatches
    if megatron is Megatron.F4FA7D6B:
        reads *= spec.parallelism.virtual_stages
    length, samples = spec.shape.seq_length, spec.batch.micro_batch_size
    tokens = length * samples
    tensors = [("attention mask", _BOOL * tokens * length)]
    if first:
        tensors += [("tokens", _INT64 * tokens), ("position ids", _INT64 * tokens)]
    if last:
        tensors += [("labels", _INT64 * tokens), ("loss mask", _FP32 * tokens)]
    for what, payload in tensors:
        yield _call(
            spec,
            Operation.BROADCAST,
            Phase.DATA,
            f"batch: {what}",
            reads,
            payload,
            "get_batch_on_this_tp_rank",
        )
