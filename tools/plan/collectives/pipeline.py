"""Messages between pipeline stages, and the tied embedding that two of them hold."""

from __future__ import annotations

from collections.abc import Iterator

from tools.plan.collectives.call import CollectiveCall
from tools.plan.memory import PRECISIONS, residual_bytes
from tools.records.measurements import Operation, Phase
from tools.spec.groups import Group
from tools.spec.run import RunSpec

_P2P = "pipeline_parallel/p2p_communication.py: P2PCommunicator"


def pipeline_collectives(spec: RunSpec, pipeline_rank: int) -> Iterator[CollectiveCall]:
    """Messages of one pipeline rank; with virtual stages the last one also sends to the first."""
    parallelism = spec.parallelism
    pipeline, virtual = parallelism.pipeline, parallelism.virtual_stages
    if pipeline == 1:
        return
    chunks = spec.microbatches * virtual
    ends = spec.microbatches
    forward = chunks - (ends if pipeline_rank == pipeline - 1 else 0)
    backward = chunks - (ends if pipeline_rank == 0 else 0)
    message = residual_bytes(spec)
    for phase, what, calls in (
        (Phase.FORWARD, "activations to the next stage", forward),
        (Phase.BACKWARD, "gradients to the stage before", backward),
    ):
        yield CollectiveCall(
            Group.PIPELINE, pipeline, Operation.SEND, phase, what, calls, message, _P2P
        )
    if spec.trained_shape.tied_embeddings and pipeline_rank in {0, pipeline - 1}:
        yield _tied_embedding(spec)


def _tied_embedding(spec: RunSpec) -> CollectiveCall:
    shape, tensor = spec.shape, spec.parallelism.tensor
    elements = shape.padded_vocabulary(tensor) * shape.hidden // tensor
    return CollectiveCall(
        Group.EMBEDDING,
        2,
        Operation.ALL_REDUCE,
        Phase.GRADIENT_SYNC,
        "gradients of the tied embedding",
        1,
        PRECISIONS[spec.dtype].gradients * elements,
        "distributed/finalize_model_grads.py: _allreduce_word_embedding_grads",
    )
