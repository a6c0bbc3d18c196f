"""Which tensors of Hugging Face's make which tensor of Megatron's: `families.csv`, a line a tensor.

Keys are those of Megatron's checkpoints, where layers of one kind are stacked in one tensor and a norm
has the name of the linear layer that follows it, with or without Transformer Engine. A `Form` is a pure
reshaping with its inverse; it fits weights, gradients and optimizer states alike.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parakit.artifacts.torch_dist import NORMS, OUTPUT, Shape
from parakit.config.model import ModelShape

HEAD = "lm_head.weight"
"""The only tensor without a family's prefix."""


@dataclass(frozen=True)
class Reshaping:
    """How one tensor of Megatron's is made of Hugging Face's, and how it is taken apart."""

    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class TensorPair:
    """One tensor of Megatron's, of one layer, and what it is made of."""

    key: str
    layer: int | None
    shape: Shape
    """Of this layer, without padding of the vocabulary."""
    names: tuple[str, ...]
    """Hugging Face's, with the family's prefix."""
    form: Reshaping

    @property
    def parameter(self) -> str:
        """The name of Megatron's parameter, with the layer's number from 0."""
        if self.layer is None:
            return self.key
        rest = self.key.removeprefix("decoder.layers.")
        for norm, module in NORMS.items():
            rest = rest.replace(norm, module)
        return f"decoder.layers.{self.layer}.{rest}"

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Of Hugging Face's tensors."""
        parts = self.form.split(torch.empty(self.shape, device="meta"))
        return tuple(tuple(part.shape) for part in parts)


def detect_prefix(family: str, names: Collection[str]) -> str:
    """What a file's names begin with: nothing in files of a bare model, such as GPT-2's on the hub."""
    first = next(row for row in _TABLE if row["family"] == family)
    return "" if first["names"] in names else _PREFIXES[family]


def list_tensor_pairs(
    family: str, shape: ModelShape, prefix: str | None = None
) -> tuple[TensorPair, ...]:
    """Every tensor of a model, outside of the layers first, then layer by layer, then the output.

    Hugging Face's names begin with the prefix, by default the family's own.
    """
    prefix = _PREFIXES[family] if prefix is None else prefix
    sizes = {
        "hidden": shape.hidden,
        "vocabulary": shape.vocabulary,
        "positions": shape.positions,
        "heads": shape.heads * shape.head_width,
        "qkv": (shape.heads + 2 * shape.query_groups) * shape.head_width,
        "ffn": shape.ffn_hidden,
        "gated": 2 * shape.ffn_hidden,
    }

    def pair(row: Mapping[str, str], layer: int | None = None) -> TensorPair:
        names = (name if name == HEAD else prefix + name for name in row["names"].split())
        numbered = tuple(name.format(layer) for name in names)
        own = tuple(sizes[name] for name in row["sizes"].split())
        return TensorPair(row["key"], layer, own, numbered, _form(row["form"], shape))

    rows = [row for row in _TABLE if row["family"] == family]
    inside = [row for row in rows if "{}" in row["names"]]
    first = [row for row in rows if row["key"].startswith("embedding.")]
    last = [row for row in rows if row not in (*inside, *first)]
    return (
        *map(pair, first),
        *(pair(row, layer) for layer in range(shape.layers) for row in inside),
        *(pair(row) for row in last if row["key"] != OUTPUT or not shape.tied_embeddings),
    )


def is_buffer(name: str) -> bool:
    """Whether older files hold a tensor that no model needs: masks, and angles of rotary positions."""
    return name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))


def _form(name: str, shape: ModelShape) -> Reshaping:
    """What the table calls a reshaping."""
    match name:
        case "transposed":  # GPT-2's Conv1D has the inputs first.
            return Reshaping(lambda parts: parts[0].t(), lambda whole: (whole.t(),))
        case "halves":  # Gate and value of a gated MLP, one after the other.
            return Reshaping(lambda parts: torch.cat(list(parts)), lambda whole: whole.chunk(2))
        case "by_group":
            return _by_group(shape)
        case "fused_by_group":
            return _fused_by_group(shape)
        case _:
            return Reshaping(lambda parts: parts[0], lambda whole: (whole,))


def _by_group(shape: ModelShape) -> Reshaping:
    """Rows of queries, keys and values: group by group, its queries, its key, its value."""
    groups, width = shape.query_groups, shape.head_width
    rows = shape.heads // groups * width

    def join(parts: Sequence[Tensor]) -> Tensor:
        grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, 1).flatten(0, 1)

    def split(whole: Tensor) -> Sequence[Tensor]:
        grouped = whole.reshape(groups, rows + 2 * width, *whole.shape[1:])
        return [part.flatten(0, 1) for part in torch.split(grouped, [rows, width, width], 1)]

    return Reshaping(join, split)


def _fused_by_group(shape: ModelShape) -> Reshaping:
    """The same of one tensor with all queries, all keys, all values; a matrix is a Conv1D's."""
    grouped = _by_group(shape)

    def turned(tensor: Tensor) -> Tensor:
        return tensor.t() if tensor.ndim > 1 else tensor

    return Reshaping(
        lambda parts: grouped.join(turned(parts[0]).chunk(3)),
        lambda whole: (turned(torch.cat(list(grouped.split(whole)))),),
    )


_PREFIXES = {"gpt2": "transformer.", "llama": "model."}
_TABLE = tuple(csv.DictReader(Path(__file__).with_name("families.csv").read_text().splitlines()))
"""A line a tensor; `{}` in a name is the layer's number."""
