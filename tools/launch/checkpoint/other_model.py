"""Whether a checkpoint is of the model that is to be trained, by the shapes of what it holds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tools.records.torch_dist import (
    DamagedCheckpointError,
    Shape,
    finished_iteration,
    read_metadata,
)
from tools.spec.model import ModelShape

_EMBEDDING = "embedding.word_embeddings.weight"


def other_model_problem(folder: Path, shape: ModelShape, model: str) -> str | None:
    """Why a checkpoint cannot be loaded into a model, in one sentence; None if nothing says so.

    Layers are stacked in Megatron's distributed format: a weight of all of them is one tensor. What is
    in no such format, or cannot be read, is left to those who load it.
    """
    iteration = finished_iteration(folder)
    if iteration is None:
        return None
    try:
        stored = read_metadata(folder / f"iter_{iteration:07d}").tensors
    except DamagedCheckpointError:
        return None
    for name, wanted in _wanted(shape):
        if name in stored and (found := stored[name].shape) != wanted:
            return (
                f"{folder} is a checkpoint of another model: its {name} is {list(found)}, and {model} "
                f"as it is asked for here has {list(wanted)}; name another checkpoint, or the model "
                "that was saved."
            )
    width = stored[_EMBEDDING].shape[-1] if _EMBEDDING in stored else shape.hidden
    if width != shape.hidden:
        return (
            f"{folder} is a checkpoint of another model: it is {width} wide and {model} "
            f"{shape.hidden}; name another checkpoint, or the model that was saved."
        )
    return None


def _wanted(shape: ModelShape) -> Iterator[tuple[str, Shape]]:
    layers, hidden = shape.layers, shape.hidden
    if shape.positions:
        yield "embedding.position_embeddings.weight", (shape.positions, hidden)
    rows = shape.head_width * (shape.heads + 2 * shape.query_groups)
    yield "decoder.layers.self_attention.linear_qkv.weight", (layers, rows, hidden)
    if not shape.experts:
        columns = shape.ffn_hidden * (2 if shape.gated else 1)
        yield "decoder.layers.mlp.linear_fc1.weight", (layers, columns, hidden)
