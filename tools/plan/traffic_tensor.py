"""Calls in the tensor-parallel group: activations, the vocabulary, and the batch itself."""

from __future__ import annotations

from collections.abc import Iterator

from tools.plan.megatron import Megatron
from tools.plan.memory import PRECISIONS
from tools.plan.parameters import norm_parameters
from tools.plan.wire import Traffic
from tools.records.measurements import Operation, Phase
from tools.spec.groups import Group
from tools.spec.run import Recompute, RunSpec

_INT64, _FP32, _BOOL = 8, 4, 1

_LAYERS = "tensor_parallel/layers.py"
_MAPPINGS = "tensor_parallel/mappings.py"


def tensor_traffic(
    configuration: RunSpec, pipeline_rank: int, megatron: Megatron
) -> Iterator[Traffic]:
    """Calls over TP of one pipeline rank in one iteration."""
    pipeline = configuration.parallelism.pipeline
    first, last = pipeline_rank == 0, pipeline_rank == pipeline - 1
    yield from batch_traffic(configuration, first, last, megatron)
    if first:
        yield from embedding_traffic(configuration)
    yield from layers_traffic(configuration)
    if last:
        yield from head_traffic(configuration)
    yield from replicated_gradients(configuration, pipeline_rank)


def layers_traffic(configuration: RunSpec) -> Iterator[Traffic]:
    """Calls inside the layers of one pipeline rank, all micro batches."""
    if configuration.parallelism.sequence_parallel:
        yield from _layers_with_sequence_parallelism(configuration)
    else:
        yield from _layers(configuration)


def replicated_gradients(configuration: RunSpec, pipeline_rank: int) -> Iterator[Traffic]:
    """SP leaves norms, row-parallel biases and routers with partial gradients: one all-reduce."""
    parallelism, shape = configuration.parallelism, configuration.shape
    if parallelism.tensor == 1 or not parallelism.sequence_parallel:
        return
    last = pipeline_rank == parallelism.pipeline - 1
    row_biases = (1 if shape.experts else 2) * shape.hidden if shape.bias else 0
    router = shape.experts * shape.hidden
    layer = 2 * norm_parameters(shape) + row_biases + router
    elements = configuration.layers_a_stage * layer + (norm_parameters(shape) if last else 0)
    yield _call(
        configuration,
        Operation.ALL_REDUCE,
        Phase.GRADIENT_SYNC,
        "gradients of norms, row-parallel biases and routers",
        1,
        PRECISIONS[configuration.dtype].gradients * elements,
        "distributed/finalize_model_grads.py: _allreduce_non_tensor_model_parallel_grads",
    )


def hidden_bytes(configuration: RunSpec) -> int:
    """U: the hidden states of one micro batch on one CP rank, whole over TP."""
    return configuration.element_bytes * configuration.tokens * configuration.shape.hidden


def _call(
    configuration: RunSpec,
    operation: Operation,
    phase: Phase,
    what: str,
    calls: int,
    payload: int,
    source: str,
    hideable: bool = False,
) -> Traffic:
    ranks = configuration.parallelism.tensor
    return Traffic(Group.TENSOR, ranks, operation, phase, what, calls, payload, source, hideable)


def _split_blocks(configuration: RunSpec) -> int:
    """Pairs of column- and row-parallel matrices a layer: attention, and the MLP unless experts."""
    return 1 if configuration.shape.experts else 2


def _forwards(configuration: RunSpec) -> int:
    """Times a layer runs forward for each backward."""
    return 2 if configuration.recompute is Recompute.FULL else 1


def _layers(configuration: RunSpec) -> Iterator[Traffic]:
    """One all-reduce behind each row-parallel matrix, and one for each column-parallel input."""
    blocks = _split_blocks(configuration) * configuration.layers_a_stage
    blocks *= configuration.microbatches
    whole = hidden_bytes(configuration)
    reduce = Operation.ALL_REDUCE
    yield _call(
        configuration,
        reduce,
        Phase.FORWARD,
        "partial sums of row-parallel outputs",
        blocks * _forwards(configuration),
        whole,
        f"{_MAPPINGS}: _ReduceFromModelParallelRegion",
    )
    yield _call(
        configuration,
        reduce,
        Phase.BACKWARD,
        "input gradients of column-parallel matrices",
        blocks,
        whole,
        f"{_LAYERS}: LinearWithGradAccumulationAndAsyncCommunication.backward",
        hideable=True,
    )


def _layers_with_sequence_parallelism(configuration: RunSpec) -> Iterator[Traffic]:
    """Each all-reduce becomes a reduce-scatter and an all-gather; backward gathers inputs again."""
    blocks = _split_blocks(configuration) * configuration.layers_a_stage
    blocks *= configuration.microbatches
    forwards = blocks * _forwards(configuration)
    whole = hidden_bytes(configuration)
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
        yield _call(configuration, operation, phase, what, calls, whole, source, beside)


def embedding_traffic(configuration: RunSpec) -> Iterator[Traffic]:
    """Learned positions are added after the reduction, so SP all-reduces here and then splits."""
    sequence_parallel = configuration.parallelism.sequence_parallel
    scatters = sequence_parallel and not configuration.shape.positions
    calls, whole = configuration.microbatches, hidden_bytes(configuration)
    yield _call(
        configuration,
        Operation.REDUCE_SCATTER if scatters else Operation.ALL_REDUCE,
        Phase.FORWARD,
        "word embeddings",
        calls,
        whole,
        f"{_LAYERS}: VocabParallelEmbedding.forward",
    )
    if sequence_parallel:
        yield _call(
            configuration,
            Operation.ALL_GATHER,
            Phase.BACKWARD,
            "gradients of the embeddings",
            calls,
            whole,
            f"{_MAPPINGS}: _ScatterToSequenceParallelRegion.backward",
        )


def head_traffic(configuration: RunSpec) -> Iterator[Traffic]:
    """The output layer's input and its gradient, and three numbers a token for the loss."""
    calls, whole = configuration.microbatches, hidden_bytes(configuration)
    gather, scatter = Operation.ALL_GATHER, Operation.REDUCE_SCATTER
    source = f"{_LAYERS}: LinearWithGradAccumulationAndAsyncCommunication"
    moves: tuple[tuple[Operation, Phase, str], ...] = (
        (Operation.ALL_REDUCE, Phase.BACKWARD, "input gradients of the output layer"),
    )
    if configuration.parallelism.sequence_parallel:
        moves = (
            (gather, Phase.FORWARD, "input of the output layer"),
            (gather, Phase.BACKWARD, "input of the output layer again"),
            (scatter, Phase.BACKWARD, "input gradients of the output layer"),
        )
    for operation, phase, what in moves:
        beside = phase is Phase.BACKWARD
        yield _call(configuration, operation, phase, what, calls, whole, source, beside)
    yield _cross_entropy(configuration)


def _cross_entropy(configuration: RunSpec) -> Traffic:
    """Maximum, target's logit and sum of exponentials: three fp32 numbers a token."""
    return _call(
        configuration,
        Operation.ALL_REDUCE,
        Phase.FORWARD,
        "vocabulary-parallel cross entropy",
        3 * configuration.microbatches,
        _FP32 * configuration.tokens,
        "tensor_parallel/cross_entropy.py: _VocabParallelCrossEntropy.forward",
    )


def batch_traffic(
    configuration: RunSpec, first: bool, last: bool, megatron: Megatron
) -> Iterator[Traffic]:
    """TP rank 0 reads the data and broadcasts it, before CP cuts the sequence.

    0.19 reads once a micro batch; f4fa7d6b reads for every virtual stage of the end ranks.
    """
    if not (first or last):
        return
    reads = configuration.microbatches
    if megatron is Megatron.F4FA7D6B:
        reads *= configuration.parallelism.virtual_stages
    length, samples = configuration.shape.seq_length, configuration.batch.micro_batch_size
    tokens = length * samples
    tensors = [("attention mask", _BOOL * tokens * length)]
    if first:
        tensors += [("tokens", _INT64 * tokens), ("position ids", _INT64 * tokens)]
    if last:
        tensors += [("labels", _INT64 * tokens), ("loss mask", _FP32 * tokens)]
    for what, payload in tensors:
        yield _call(
            configuration,
            Operation.BROADCAST,
            Phase.DATA,
            f"batch: {what}",
            reads,
            payload,
            "get_batch_on_this_tp_rank",
        )
