"""Calls over tensor-parallel ranks: activations, the vocabulary, and the batch."""

from __future__ import annotations

from collections.abc import Iterator

from parakit.config.groups import Group
from parakit.config.model import EXPERTS, MLP, MTP, ModelShape
from parakit.config.peft import Lora
from parakit.config.run import RunSpec
from parakit.costs.adapters import list_adapted_linears
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
_ADAPTER = "megatron/bridge/peft/utils.py: ParallelLinearAdapter"


def tensor_collectives(
    spec: RunSpec, pipeline_rank: int, megatron: MegatronVersion
) -> Iterator[CollectiveCall]:
    """Yield the calls over TP of one pipeline rank in one iteration."""
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
    """Yield the calls inside the layers of one pipeline rank, over all micro batches.

    There is one all-reduce after each row-parallel matrix, and one for the input gradient of each
    column-parallel matrix. Under SP a reduce-scatter and an all-gather replace each all-reduce, and backward
    gathers the inputs a second time, unless weights are frozen. Calls of backward overlap with the computation of
    weight gradients. Only the gather of the output gradients does not overlap. With LoRA the calls of adapters
    follow. Nothing is yielded if TP is 1.
    """
    if spec.parallelism.tensor == 1:
        return
    if len(spec.shape.blocks) > 1:
        for times, kind in spec.block_specs:
            yield from _repeat_calls(times, layer_collectives(kind))
        return
    if spec.shape.blocks == MTP:
        yield from _mtp_joining_calls(spec)
        return
    rows = [
        (_REDUCE, _FORWARD, "partial sums of row-parallel outputs", _REDUCING),
        (_REDUCE, _BACKWARD, "input gradients of column-parallel matrices", _LINEAR + ".backward"),
    ]
    if spec.parallelism.sequence_parallel:
        again = (_GATHER, _BACKWARD, "the same inputs again, for weights", _LINEAR + ".backward")
        rows = [
            (_GATHER, _FORWARD, "inputs of column-parallel matrices", _LINEAR + ".forward"),
            (_SCATTER, _FORWARD, "row-parallel outputs", f"{_MAPPINGS}: _ReduceScatter"),
            *(() if spec.lora else (again,)),
            (_SCATTER, _BACKWARD, "their gradients", _LINEAR + ".backward"),
            (_GATHER, _BACKWARD, "gradients of row-parallel outputs", f"{_MAPPINGS}: _Gather"),
        ]
    pairs = [layer_passes(spec, *modules) for modules in _matrix_pairs(spec.shape)]
    if not pairs:
        return
    forwards, backwards = (sum(passes) for passes in zip(*pairs, strict=True))
    for operation, phase, description, source in rows:
        calls = forwards if phase is _FORWARD else backwards
        beside = phase is _BACKWARD and source.startswith(_LINEAR)
        yield _call(spec, operation, phase, description, calls, hidden_bytes(spec), source, beside)
    if spec.lora:
        yield from _adapter_calls(spec, spec.lora)


def _adapter_calls(spec: RunSpec, lora: Lora) -> Iterator[CollectiveCall]:
    """Yield the calls of adapters inside the layers of one pipeline rank, over all micro batches.

    The output of A, with as many columns as the rank, is gathered or summed in forward, and its gradient is summed in
    backward. The output of B is gathered for row-parallel layers. Under SP each rank keeps only its own tokens of
    that output, so backward gathers the output's gradient. Without SP backward sums the input gradients of adapters
    of column-parallel layers (`megatron/bridge/peft/utils.py: ParallelLinearAdapter`). Adapters of experts are left
    out, because experts are rarely split over TP.
    """
    is_sequence_parallel = spec.parallelism.sequence_parallel
    tokens = spec.element_bytes * spec.micro_batch_tokens
    for linear in list_adapted_linears(spec.shape, lora):
        if linear.component == "experts" or not linear.is_split:
            continue
        modules = ("mlp",) if linear.component == "dense_mlp" and not spec.shape.experts else ()
        forwards, backwards = layer_passes(spec, *modules)
        name, narrow = f"adapter of {linear.name}", tokens * lora.rank
        inner = _REDUCE if linear.is_row_parallel else _GATHER
        yield _call(spec, inner, _FORWARD, f"{name}: A's output", forwards, narrow, _ADAPTER)
        inner_gradient = f"{name}: gradient of A's output"
        yield _call(spec, _REDUCE, _BACKWARD, inner_gradient, backwards, narrow, _ADAPTER)
        if linear.is_row_parallel:
            outputs = tokens * linear.outputs
            yield _call(spec, _GATHER, _FORWARD, f"{name}: B's output", forwards, outputs, _ADAPTER)
            if is_sequence_parallel:
                gradient = f"{name}: gradient of B's output"
                yield _call(spec, _GATHER, _BACKWARD, gradient, backwards, outputs, _ADAPTER)
        elif not is_sequence_parallel:
            inputs, gradient = tokens * linear.inputs, f"{name}: input gradient"
            yield _call(spec, _REDUCE, _BACKWARD, gradient, backwards, inputs, _ADAPTER)


def mtp_collectives(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Yield the calls of multi-token prediction on the last stage: embeddings and joining of each
    layer.
    """
    yield from _repeat_calls(spec.shape.total_mtp_layers, embedding_collectives(spec))
    if spec.shape.mtp_layers:
        yield from _repeat_calls(spec.shape.mtp_layers, layer_collectives(spec.mtp_joining_spec))


def _mtp_joining_calls(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Yield the calls of the projection that joins hidden states with the embeddings of following
    tokens, in multi-token prediction.

    The projection is column-parallel, and its input is twice as wide as the hidden states. Forward gathers the
    columns of the output. Backward all-reduces the input gradients. Under SP it reduce-scatters them instead, and
    both passes also gather the input. Under SP a rank stores only its own tokens of the output, so backward also
    gathers the gradients of the output (`multi_token_prediction.py: _concat_embeddings`).
    """
    forwards, backwards = layer_passes(spec)
    whole = hidden_bytes(spec)
    reduced, description = _REDUCE, "input gradients of the projection of tokens ahead"
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
    yield _call(spec, reduced, _BACKWARD, description, backwards, 2 * whole, _LINEAR, True)


def _repeat_calls(times: int, calls: Iterator[CollectiveCall]) -> Iterator[CollectiveCall]:
    """Return the calls, each `times` times as often."""
    return (call._replace(calls=times * call.calls) for call in calls)


def _matrix_pairs(shape: ModelShape) -> Iterator[tuple[str, ...]]:
    """Yield one tuple per pair of a column-parallel and a row-parallel matrix of the layer.

    A tuple has the modules whose recomputation repeats the pair's forward. The tuple is empty for attention or a
    mixer. The other pairs are an MLP or a shared expert.
    """
    if shape.blocks not in (MLP, EXPERTS):
        yield ()
    if shape.shared_expert_ffn and shape.blocks in ("", EXPERTS):
        yield "moe", "shared_experts"
    elif not shape.experts and shape.blocks in ("", MLP):
        yield ("mlp",)


def embedding_collectives(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Yield the calls of the word embedding, one per micro batch.

    Without SP the embeddings are all-reduced. Under SP they are reduce-scattered, and backward gathers their
    gradients. Learned positions can only be added to full embeddings. For models with learned positions the
    embeddings are therefore all-reduced and split afterwards, even under SP.
    """
    sequence_parallel = spec.parallelism.sequence_parallel
    operation = _SCATTER if sequence_parallel and not spec.shape.positions else _REDUCE
    source = "tensor_parallel/layers.py: VocabParallelEmbedding.forward"
    calls, whole = spec.microbatches, hidden_bytes(spec)
    yield _call(spec, operation, _FORWARD, "word embeddings", calls, whole, source)
    if sequence_parallel:
        source = f"{_MAPPINGS}: _ScatterToSequenceParallelRegion.backward"
        description = "gradients of the embeddings"
        yield _call(spec, _GATHER, _BACKWARD, description, calls, whole, source)


def head_collectives(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Yield the calls of the output layer and of the loss on the last pipeline rank.

    The output layer reduces its input's gradient and, under SP, gathers its input. The loss all-reduces three
    numbers per token. With multi-token prediction, each MTP layer repeats all these calls. It also gathers the
    largest logit of each rank, from which correct predictions are counted.
    """
    rows = [(_REDUCE, _BACKWARD, "input gradients of the output layer")]
    if spec.parallelism.sequence_parallel:
        rows = [
            (_GATHER, _FORWARD, "input of the output layer"),
            *(() if spec.lora else ((_GATHER, _BACKWARD, "input of the output layer again"),)),
            (_SCATTER, _BACKWARD, "input gradients of the output layer"),
        ]
    calls, depths = spec.microbatches * spec.shape.predicted_tokens, spec.shape.total_mtp_layers
    for operation, phase, description in rows:
        beside = phase is _BACKWARD
        yield _call(spec, operation, phase, description, calls, hidden_bytes(spec), _LINEAR, beside)
    # Maximum, target's logit and sum of exponentials: three fp32 numbers per token.
    source = "tensor_parallel/cross_entropy.py: _VocabParallelCrossEntropy.forward"
    description, payload = "vocabulary-parallel cross entropy", _FP32 * spec.micro_batch_tokens
    yield _call(spec, _REDUCE, _FORWARD, description, 3 * calls, payload, source)
    if not depths:
        return
    source = "transformer/multi_token_prediction.py: _vocab_parallel_argmax"
    calls_per_mtp_layer, guesses = (
        spec.microbatches * depths,
        spec.parallelism.tensor * spec.micro_batch_tokens,
    )
    for description, width in (("largest logits", spec.element_bytes), ("their tokens", _INT64)):
        yield _call(
            spec, _GATHER, _FORWARD, description, calls_per_mtp_layer, width * guesses, source
        )


def batch_collectives(
    spec: RunSpec, first: bool, last: bool, megatron: MegatronVersion
) -> Iterator[CollectiveCall]:
    """Yield the broadcasts by which TP rank 0 sends the batch to the other TP ranks.

    Full sequences are sent, because CP splits them afterwards. Megatron 0.19 broadcasts once per micro batch.
    Megatron f4fa7d6b broadcasts once per micro batch and virtual stage. Only the first and the last pipeline
    rank get a batch. The last one gets the tokens too if the model predicts several tokens.

    Args:
        spec: The run.
        first: True for the first pipeline rank.
        last: True for the last pipeline rank.
        megatron: Version of Megatron.
    """
    if not first and not last:
        return
    calls = spec.microbatches
    if megatron is MegatronVersion.F4FA7D6B:
        calls *= spec.parallelism.virtual_stages
    length = spec.shape.seq_length
    tokens = length * spec.batch.micro_batch_size
    payload_by_tensor = {"attention mask": _BOOL * tokens * length}
    if first or spec.shape.mtp_layers:
        payload_by_tensor |= {"tokens": _INT64 * tokens, "position ids": _INT64 * tokens}
    if last:
        payload_by_tensor |= {"labels": _INT64 * tokens, "loss mask": _FP32 * tokens}
    for tensor, payload in payload_by_tensor.items():
        yield _call(
            spec,
            Operation.BROADCAST,
            Phase.DATA,
            f"batch: {tensor}",
            calls,
            payload,
            "get_batch_on_this_tp_rank",
        )


def partial_gradient_collectives(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """Yield the all-reduce of gradients of norms, row-parallel biases and routers.

    Under SP each TP rank has only a partial sum of these gradients. Nothing is yielded without SP, and if these
    weights are frozen.
    """
    if not spec.parallelism.sequence_parallel or spec.lora:
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
    """Return the bytes of the hidden states of one micro batch on one CP rank, not split over TP."""
    return spec.element_bytes * spec.micro_batch_tokens * spec.shape.hidden


def _call(
    spec: RunSpec,
    operation: Operation,
    phase: Phase,
    description: str,
    calls: int,
    payload: int,
    source: str,
    overlappable: bool = False,
) -> CollectiveCall:
    """Return an entry for `calls` equal calls over the TP group of the run."""
    group = Group.TENSOR
    return collective(
        spec,
        group,
        operation,
        phase,
        description,
        calls,
        payload,
        source,
        overlappable=overlappable,
    )
