"""Is a checkpoint of this model? Decided from the shapes in its `.metadata`, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tools.launch.checkpoints.readable import METADATA, MetadataReader
from tools.launch.checkpoints.stored import finished_iteration
from tools.spec.model import ModelShape

Shape = tuple[int, ...]

_EMBEDDING = "embedding.word_embeddings.weight"


def other_model_problem(folder: Path, shape: ModelShape, model: str) -> str | None:
    """Why a checkpoint cannot be loaded into a model, in one sentence; None if nothing says so.

    Layers are stacked in Megatron's distributed format: a weight of all of them is one tensor. What is
    in no such format, or cannot be read, is left to those who load it.
    """
    iteration = finished_iteration(folder)
    if iteration is None:
        return None
    stored = read_shapes(folder / f"iter_{iteration:07d}")
    for name, wanted in _wanted(shape):
        found = stored.get(name)
        if found is not None and found != wanted:
            return (
                f"{folder} is a checkpoint of another model: its {name} is {list(found)}, and {model} "
                f"as it is asked for here has {list(wanted)}; name another checkpoint, or the model "
                "that was saved."
            )
    width = stored.get(_EMBEDDING, (0, shape.hidden))[-1]
    if width != shape.hidden:
        return (
            f"{folder} is a checkpoint of another model: it is {width} wide and {model} "
            f"{shape.hidden}; name another checkpoint, or the model that was saved."
        )
    return None


def read_shapes(checkpoint: Path) -> Mapping[str, Shape]:
    """Shapes of a checkpoint's whole tensors by Megatron's names; empty if they cannot be read."""
    try:
        with (checkpoint / METADATA).open("rb") as file:
            described = _Reader(file).load().state_dict_metadata
        sizes = {str(name): getattr(entry, "size", None) for name, entry in described.items()}
    except Exception:  # A damaged pickle raises anything.
        return {}
    return {name: size for name, size in sizes.items() if isinstance(size, tuple)}


def _wanted(shape: ModelShape) -> Iterator[tuple[str, Shape]]:
    layers, hidden = shape.layers, shape.hidden
    if shape.positions:
        yield "embedding.position_embeddings.weight", (shape.positions, hidden)
    rows = shape.head_width * (shape.heads + 2 * shape.query_groups)
    yield "decoder.layers.self_attention.linear_qkv.weight", (layers, rows, hidden)
    if not shape.experts:
        columns = shape.ffn_hidden * (2 if shape.gated else 1)
        yield "decoder.layers.mlp.linear_fc1.weight", (layers, columns, hidden)


class _Reader(MetadataReader):
    """Reads `torch.Size` as the tuple that it is."""

    def find_class(self, module: str, name: str) -> Any:
        return tuple if (module, name) == ("torch", "Size") else super().find_class(module, name)
