"""Calls over the tensor-parallel ranks: activations, the vocabulary, and the batch itself."""

from __future__ import annotations

from collections.abc import Iterator

from parakit.config.groups import Group
from parakit.config.model import EXPERTS, MLP, MTP, ModelShape
from parakit.config.run import RunSpec
from parakit.costs.collectives.call import CollectiveCall, MegatronVersion, collective, layer_passes
from parakit.costs.memory import bytes_per_parameter
from parakit.costs.operations import Operation, Phase
from parakit.costs.tensors import partial_gradient_elements

_INT64, _FP32, _BOOL = 8, 4, 1

_MAPPINGS = "tensor_parallel/mappings.py"
_LINEAR = "tensor_parallel/layers.py: LinearWithGradAccumulationAndAsyncCommunication"

_REDUCING = f"{_MAPPINGS}: _ReduceFromModelParallelRegion"
_REDUCE, _GATHER = Operation.ALL_REDUCE, Operation.ALL_GATHER
_SCATTER = Operation.REDUCE_SCATTER
_FORWARD, _BACKWARD = Phase.FORWARD, Phase.BACKWARD


def tensor_collectives(
    spec: RunSpec, pipeline_rank: int, megatron: MegatronVersion
) -> Iterator[CollectiveCall]:
    """Calls over TP of one pipeline rank in one iteration."""
    first, last = pipeline_rank == 0, pipeline_rank == spec.parallelism.pipeline - 1
    yield from batch_collectives(spec, first, last, megatron)
    if first:
        yield from embedding_collectives(spec)
    for run in spec.uniform_stage_specs(pipeline_rank):
        yield from layer_collectives(run)
    if last:
        yield from mtp_collectives(spec)
        yield from head_collectives(spec)
    yield from partial_gradient_collectives(spec, pipeline_rank)


def layer_collectives(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Calls inside the layers of one pipeline rank, all micro batches.

    One all-reduce behind each row-parallel matrix, and one for each column-parallel input. Under SP
    each becomes a reduce-scatter and an all-gather, and backward gathers the inputs again. What
    backward sends runs beside the weights' gradients, but for the last gather.
    """
    if spec.parallelism.tensor == 1:
        return
    if len(spec.shape.blocks) > 1:
        for times, kind in spec.block_specs:
            yield from _times(times, layer_collectives(kind))
        return
    if spec.shape.blocks == MTP:
        yield from _joining(spec)
        return
    rows = [
        (_REDUCE, _FORWARD, "partial sums of row-parallel outputs", _REDUCING),
        (_REDUCE, _BACKWARD, "input gradients of column-parallel matrices", _LINEAR + ".backward"),
    ]
    if spec.parallelism.sequence_parallel:
        rows = [
            (_GATHER, _FORWARD, "inputs of column-parallel matrices", _LINEAR + ".forward"),
            (_SCATTER, _FORWARD, "row-parallel outputs", f"{_MAPPINGS}: _ReduceScatter"),
            (_GATHER, _BACKWARD, "the same inputs again, for weights", _LINEAR + ".backward"),
            (_SCATTER, _BACKWARD, "their gradients", _LINEAR + ".backward"),
            (_GATHER, _BACKWARD, "gradients of row-parallel outputs", f"{_MAPPINGS}: _Gather"),
        ]
    pairs = [layer_passes(spec, *modules) for modules in _matrix_pairs(spec.shape)]
    if not pairs:
        return
    forwards, backwards = (sum(passes) for passes in zip(*pairs, strict=True))
    for operation, phase, what, source in rows:
        calls = forwards if phase is _FORWARD else backwards
        beside = phase is _BACKWARD and source.startswith(_LINEAR)
        yield _call(spec, operation, phase, what, calls, hidden_bytes(spec), source, beside)


def mtp_collectives(spec: RunSpec) -> Iterator[CollectiveCall]:
    """What multi-token prediction adds to the last stage's layers: each depth embeds the tokens ahead
    and joins them with the hidden states."""
    yield from _times(spec.shape.total_mtp_layers, embedding_collectives(spec))
    if spec.shape.mtp_layers:
        yield from _times(spec.shape.mtp_layers, layer_collectives(spec.mtp_joining_spec))


def _joining(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Of the projection that a depth of multi-token prediction begins with: column-parallel, of a tensor
    twice as wide; its output is gathered by columns, and under SP split by tokens, which backward
    gathers (`multi_token_prediction.py: _concat_embeddings`)."""
    forwards, backwards = layer_passes(spec)
    whole = hidden_bytes(spec)
    reduced, what = _REDUCE, "input gradients of the projection of tokens ahead"
    if spec.parallelism.sequence_parallel:
        reduced, source = _SCATTER, f"{_MAPPINGS}: _ScatterToSequenceParallelRegion.backward"
        joined = "hidden states joined with tokens ahead"
        yield _call(spec, _GATHER, _FORWARD, joined, forwards, 2 * whole, _LINEAR)
        again = f"{joined}, again"
        yield _call(spec, _GATHER, _BACKWARD, again, backwards, 2 * whole, _LINEAR, True)
        split = "gradients of their projection's output"
        yield _call(spec, _GATHER, _BACKWARD, split, backwards, whole, source)
    gathered = "columns of the projection of tokens ahead"
    yield _call(
        spec,
        _GATHER,
        _FORWARD,
        gathered,
        forwards,
        whole,
        f"{_MAPPINGS}: _GatherFromModelParallelRegion",
    )
    yield _call(spec, reduced, _BACKWARD, what, backwards, 2 * whole, _LINEAR, True)


def _times(times: int, calls: Iterator[CollectiveCall]) -> Iterator[CollectiveCall]:
    return (call._replace(calls=times * call.calls) for call in calls)


def _matrix_pairs(shape: ModelShape) -> Iterator[tuple[str, ...]]:
    """For each column-parallel matrix with a row-parallel one behind it (attention, a mixer, an MLP, the
    expert that every token passes) the modules that it is recomputed with."""
    if shape.blocks not in (MLP, EXPERTS):
        yield ()
    if shape.shared_expert_ffn and shape.blocks in ("", EXPERTS):
        yield "moe", "shared_experts"
    elif not shape.experts and shape.blocks in ("", MLP):
        yield ("mlp",)


def embedding_collectives(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Learned positions are added after the reduction, so SP all-reduces here and then splits."""
    sequence_parallel = spec.parallelism.sequence_parallel
    operation = _SCATTER if sequence_parallel and not spec.shape.positions else _REDUCE
    source = "tensor_parallel/layers.py: VocabParallelEmbedding.forward"
    calls, whole = spec.microbatches, hidden_bytes(spec)
    yield _call(spec, operation, _FORWARD, "word embeddings", calls, whole, source)
    if sequence_parallel:
        source = f"{_MAPPINGS}: _ScatterToSequenceParallelRegion.backward"
        what = "gradients of the embeddings"
        yield _call(spec, _GATHER, _BACKWARD, what, calls, whole, source)


def head_collectives(spec: RunSpec) -> Iterator[CollectiveCall]:
    """The output layer's input and its gradient, and three numbers a token for the loss; with tokens
    ahead once for each depth, and each rank's best guess, to count those that were right."""
    rows = [(_REDUCE, _BACKWARD, "input gradients of the output layer")]
    if spec.parallelism.sequence_parallel:
        rows = [
            (_GATHER, _FORWARD, "input of the output layer"),
            (_GATHER, _BACKWARD, "input of the output layer again"),
            (_SCATTER, _BACKWARD, "input gradients of the output layer"),
        ]
    calls, depths = spec.microbatches * spec.shape.predicted_tokens, spec.shape.total_mtp_layers
    for operation, phase, what in rows:
        beside = phase is _BACKWARD
        yield _call(spec, operation, phase, what, calls, hidden_bytes(spec), _LINEAR, beside)
    # Maximum, target's logit and sum of exponentials: three fp32 numbers a token.
    source = "tensor_parallel/cross_entropy.py: _VocabParallelCrossEntropy.forward"
    what, payload = "vocabulary-parallel cross entropy", _FP32 * spec.micro_batch_tokens
    yield _call(spec, _REDUCE, _FORWARD, what, 3 * calls, payload, source)
    if not depths:
        return
    source = "transformer/multi_token_prediction.py: _vocab_parallel_argmax"
    each, guesses = spec.microbatches * depths, spec.parallelism.tensor * spec.micro_batch_tokens
    for what, width in (("largest logits", spec.element_bytes), ("their tokens", _INT64)):
        yield _call(spec, _GATHER, _FORWARD, what, each, width * guesses, source)


def batch_collectives(
    spec: RunSpec, first: bool, last: bool, megatron: MegatronVersion
) -> Iterator[CollectiveCall]:
    """TP rank 0 reads the data and broadcasts it, before CP cuts the sequence.

    0.19 reads once a micro batch; f4fa7d6b reads for every virtual stage of the end ranks. Who predicts
    tokens ahead needs the tokens themselves.
    """
    virtual = spec.parallelism.virtual_stages if megatron is MegatronVersion.F4FA7D6B else 1
    length = spec.shape.seq_length
    tokens = length * spec.batch.micro_batch_size
    tensors = [("attention mask", _BOOL * tokens * length)] if first or last else []
    if first or (last and spec.shape.mtp_layers):
        tensors += [("tokens", _INT64 * tokens), ("position ids", _INT64 * tokens)]
    if last:
        tensors += [("labels", _INT64 * tokens), ("loss mask", _FP32 * tokens)]
    for what, payload in tensors:
        calls, source = virtual * spec.microbatches, "get_batch_on_this_tp_rank"
        broadcast, moved = Operation.BROADCAST, f"batch: {what}"
        yield _call(spec, broadcast, Phase.DATA, moved, calls, payload, source)


def partial_gradient_collectives(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """SP leaves norms, row-parallel biases and routers with partial gradients: one all-reduce."""
    if not spec.parallelism.sequence_parallel:
        return
    elements = partial_gradient_elements(spec, pipeline_rank)
    yield _call(
        spec,
        _REDUCE,
        Phase.GRADIENT_SYNC,
        "gradients of norms, row-parallel biases and routers",
        1,
        bytes_per_parameter(spec).gradients * elements,
        "distributed/finalize_model_grads.py: _allreduce_non_tensor_model_parallel_grads",
    )


def hidden_bytes(spec: RunSpec) -> int:
    """U: the hidden states of one micro batch on one CP rank, whole over TP."""
    return spec.element_bytes * spec.micro_batch_tokens * spec.shape.hidden


def _call(
    spec: RunSpec,
    operation: Operation,
    phase: Phase,
    what: str,
    calls: int,
    payload: int,
    source: str,
    overlappable: bool = False,
) -> CollectiveCall:
    group = Group.TENSOR
    return collective(
        spec, group, operation, phase, what, calls, payload, source, overlappable=overlappable
    )
