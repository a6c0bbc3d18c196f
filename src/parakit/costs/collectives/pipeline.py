"""Messages between pipeline stages, and the gradients of an embedding that two stages hold."""

from __future__ import annotations

from collections.abc import Iterator

from parakit.config.groups import Group
from parakit.config.run import RunSpec
from parakit.costs.activations import residual_bytes
from parakit.costs.collectives.call import CollectiveCall, collective
from parakit.costs.memory import bytes_per_parameter
from parakit.costs.operations import Operation, Phase

_P2P = "pipeline_parallel/p2p_communication.py: P2PCommunicator"


def pipeline_collectives(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """Yield the messages that one pipeline rank sends: activations forward, gradients backward.

    The first and the last rank also all-reduce a tied embedding. With virtual stages the last rank also sends
    activations to the first. Nothing is yielded for a single pipeline stage.
    """
    pipeline, ends = spec.parallelism.pipeline, spec.microbatches
    if pipeline == 1:
        return
    chunks = spec.microbatches * spec.parallelism.virtual_stages
    forward = chunks - (ends if pipeline_rank == pipeline - 1 else 0)
    backward = chunks - (ends if pipeline_rank == 0 else 0)
    for phase, description, calls in (
        (Phase.FORWARD, "activations to the next stage", forward),
        (Phase.BACKWARD, "gradients to the stage before", backward),
    ):
        send, payload = Operation.SEND, residual_bytes(spec)
        yield collective(spec, Group.PIPELINE, send, phase, description, calls, payload, _P2P)
    if pipeline_rank in {0, pipeline - 1}:
        yield from tied_embedding_collectives(spec)


def tied_embedding_collectives(spec: RunSpec) -> Iterator[CollectiveCall]:
    """Yield the all-reduce of the embedding's gradients between the first and the last stage.

    Nothing is yielded unless both stages hold a copy of the embedding and train it.
    """
    if not spec.shares_embedding_across_stages or spec.lora:
        return
    elements = spec.padded_vocabulary * spec.shape.hidden // spec.parallelism.tensor
    yield collective(
        spec,
        Group.EMBEDDING,
        Operation.ALL_REDUCE,
        Phase.GRADIENT_SYNC,
        "gradients of the tied embedding",
        1,
        bytes_per_parameter(spec).gradients * elements,
        "distributed/finalize_model_grads.py: _allreduce_word_embedding_grads",
    )
