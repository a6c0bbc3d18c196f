"""List which tensors of Hugging Face make which tensor of Megatron, per family of models.

The table is `families.csv`, one line per tensor. A family has the lines of the family that it extends
(`_BASES`) too. A line replaces the line of the same key there, and a line without names removes it. Keys are the names
in Megatron's checkpoints. There the layers of one kind are stacked in one tensor. A norm has the name of the linear
layer that follows it, with or without Transformer Engine. Where the name of a norm depends on Transformer Engine, a
line has both keys. A `Reshaping` only moves elements and has an inverse, so it fits weights, gradients and optimizer
states alike.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from parakit.artifacts.torch_dist import NORMS, OUTPUT, Shape
from parakit.config.model import ModelShape

HEAD = "lm_head.weight"
"""The output layer, the only tensor of Hugging Face without its family's prefix."""


@dataclass(frozen=True)
class Reshaping:
    """A function that makes one tensor of Megatron from tensors of Hugging Face, and its inverse."""

    join: Callable[[Sequence[Tensor]], Tensor]
    split: Callable[[Tensor], Sequence[Tensor]]


@dataclass(frozen=True)
class TensorPair:
    """A pair of one tensor of Megatron in one layer, and the tensors of Hugging Face that it is made of."""

    keys: tuple[str, ...]
    """Names in Megatron's checkpoints, without the number of the layer. The first is that of local layers."""
    layer: int | None
    """Number of the layer from 0; None outside of the layers."""
    shape: Shape
    """Shape in one layer, without padding of the vocabulary."""
    names: tuple[str, ...]
    """Names in Hugging Face's files, with the prefix."""
    form: Reshaping
    loaded_names: tuple[str, ...]
    """Names of the parameters that `transformers` makes of these tensors when it loads them."""
    loaded_form: Reshaping
    """The reshaping of those parameters."""

    @property
    def key(self) -> str:
        """Name in the checkpoints of Megatron's local layers, without the number of the layer."""
        return self.keys[0]

    @property
    def parameter(self) -> str:
        """Name of Megatron's parameter, with the number of the layer from 0."""
        if self.layer is None:
            return self.key
        name = self.key.removeprefix("decoder.layers.")
        for norm, module in NORMS.items():
            name = name.replace(norm, module)
        return f"decoder.layers.{self.layer}.{name}"

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of Hugging Face's tensors, in the order of `names`."""
        parts = self.form.split(torch.empty(self.shape, device="meta"))
        return tuple(tuple(part.shape) for part in parts)


def detect_prefix(family: str, names: Collection[str]) -> str:
    """Return what the tensors' names in a folder begin with.

    The prefix is empty for files of a bare model, such as those of GPT-2 on the hub.
    """
    first_row = _list_rows(family)[0]
    return "" if first_row["names"] in names else _usual_prefix(family)


def _usual_prefix(family: str) -> str:
    """Return what the names of a family's tensors begin with in files of `save_pretrained`."""
    return "transformer." if family == "gpt2" else "model."


def list_tensor_pairs(
    family: str, shape: ModelShape, prefix: str | None = None
) -> tuple[TensorPair, ...]:
    """Return every tensor of a model: the embeddings, then layer by layer, then the final norm and output.

    Each tensor is paired with its tensors in Hugging Face's format, whose names begin with `prefix`. None takes
    the family's usual prefix. A model with tied embeddings has no output tensor.
    """
    if prefix is None:
        prefix = _usual_prefix(family)
    first_rows, layer_rows, last_rows = [], [], []
    for row in _list_rows(family):
        # In names of layers, {} stands for the number of the layer.
        if "{}" in row["names"]:
            layer_rows.append(row)
        elif row["key"].startswith("embedding."):
            first_rows.append(row)
        elif row["key"] != OUTPUT or not shape.tied_embeddings:
            last_rows.append(row)
    pairs = [_make_pair(row, shape, prefix, layer=None) for row in first_rows]
    for layer in range(shape.layers):
        pairs += [_make_pair(row, shape, prefix, layer) for row in layer_rows]
    pairs += [_make_pair(row, shape, prefix, layer=None) for row in last_rows]
    return tuple(pairs)


def _make_pair(
    row: Mapping[str, str], shape: ModelShape, prefix: str, layer: int | None
) -> TensorPair:
    """Return the tensor of a row of `families.csv`, paired with its tensors in Hugging Face's format.

    Args:
        row: The row.
        shape: Shape of the model.
        prefix: Text with which the names in Hugging Face's format begin.
        layer: Number of the layer, from 0; None for a tensor outside of the layers.
    """
    sizes = _sizes_by_name(shape)
    names = tuple(_list_names(row["names"], prefix, layer, shape.experts))
    form = _make_reshaping(row["form"], shape)
    loaded_names, loaded_form = names, form
    if row["loaded_as"]:
        loaded_names = tuple(_list_names(row["loaded_as"], prefix, layer, shape.experts))
        loaded_form = _make_reshaping("same", shape)
    return TensorPair(
        keys=tuple(row["key"].split()),
        layer=layer,
        shape=tuple(sizes[size] for size in row["sizes"].split()),
        names=names,
        form=form,
        loaded_names=loaded_names,
        loaded_form=loaded_form,
    )


def _sizes_by_name(shape: ModelShape) -> dict[str, int]:
    """Return the sizes of dimensions by the names that the column `sizes` of `families.csv` uses."""
    return {
        "hidden": shape.hidden,
        "vocabulary": shape.vocabulary,
        "positions": shape.positions,
        "heads": shape.heads * shape.head_width,
        "qkv": (shape.heads + 2 * shape.query_groups) * shape.head_width,
        "ffn": shape.ffn_hidden,
        "gated": 2 * shape.ffn_hidden,
        "head": shape.head_width,
        "experts": shape.experts,
        "expert_ffn": shape.expert_ffn_hidden,
        "gated_expert": 2 * shape.expert_ffn_hidden,
        "shared_ffn": shape.shared_expert_ffn,
        "gated_shared": 2 * shape.shared_expert_ffn,
        "one": 1,
    }


def _list_rows(family: str) -> list[Mapping[str, str]]:
    """Return the rows of `families.csv` for a family.

    If the family extends another family, its rows replace rows of the other family with the same key. A row without
    names removes the other family's row.
    """
    rows_by_key: dict[str, Mapping[str, str]] = {}
    base = _BASES.get(family)
    rows = _list_rows(base) if base else []
    rows += [row for row in _TABLE if row["family"] == family]
    for row in rows:
        first_key = row["key"].split()[0]
        rows_by_key[first_key] = row
    return [row for row in rows_by_key.values() if row["names"]]


def _list_names(templates: str, prefix: str, layer: int | None, experts: int) -> Iterator[str]:
    """Yield the names of a line of the table: of one layer, and of each expert where `{e}` stands for one."""
    for expert in range(experts if _EXPERT in templates else 1):
        for template in templates.split():
            name = template.replace("{}", str(layer)).replace(_EXPERT, str(expert))
            yield name if name == HEAD else prefix + name


def is_buffer(name: str) -> bool:
    """Return True for a buffer of older files that no model needs: masks and rotary frequencies."""
    return name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))


def _make_reshaping(form: str, shape: ModelShape) -> Reshaping:
    """Return the reshaping that `families.csv` names in its column `form`; `same` changes nothing."""
    if form == "by_group":
        return _reshape_separate_qkv(shape)
    if form == "rows_by_group":
        return _reshape_fused_rows(shape)
    if form == "fused_by_group":
        return _reshape_fused_qkv(shape)
    return _RESHAPINGS[form]


def _join_gates_by_expert(parts: Sequence[Tensor]) -> Tensor:
    """Return gate and value of each expert as one tensor, with the experts stacked."""
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return torch.stack([torch.cat(pair) for pair in pairs])


def _split_gates_by_expert(tensor: Tensor) -> Sequence[Tensor]:
    """Return gate and value of the first expert, then those of the next ones."""
    return [half for expert in tensor for half in expert.chunk(2)]


def _reshape_separate_qkv(shape: ModelShape) -> Reshaping:
    """Return the reshaping between separate queries, keys and values and Megatron's `linear_qkv`.

    The rows of `linear_qkv` are ordered by query group: the queries of group 0, its key, its value, then group
    1 and so on.
    """
    groups, width = shape.query_groups, shape.head_width
    query_rows = shape.heads // groups * width

    def join(parts: Sequence[Tensor]) -> Tensor:
        grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, 1).flatten(0, 1)

    def split(tensor: Tensor) -> Sequence[Tensor]:
        grouped = tensor.reshape(groups, query_rows + 2 * width, *tensor.shape[1:])
        parts = torch.split(grouped, [query_rows, width, width], 1)
        return [part.flatten(0, 1) for part in parts]

    return Reshaping(join, split)


def _reshape_fused_rows(shape: ModelShape) -> Reshaping:
    """Return the reshaping between Phi-3's `qkv_proj` and Megatron's `linear_qkv`.

    `qkv_proj` holds all queries, then all keys, then all values.
    """
    separate = _reshape_separate_qkv(shape)
    key_rows = shape.query_groups * shape.head_width
    rows = [shape.heads * shape.head_width, key_rows, key_rows]
    return Reshaping(
        lambda parts: separate.join(torch.split(parts[0], rows)),
        lambda tensor: (torch.cat(list(separate.split(tensor))),),
    )


def _reshape_fused_qkv(shape: ModelShape) -> Reshaping:
    """Return the reshaping between GPT-2's `c_attn` and Megatron's `linear_qkv`.

    `c_attn` holds all queries, then all keys, then all values. Its matrix belongs to a Conv1D and has the shape
    [inputs, outputs], so it is transposed. Its bias is a vector and is not transposed.
    """
    separate = _reshape_separate_qkv(shape)

    def transpose_matrix(tensor: Tensor) -> Tensor:
        return tensor.t() if tensor.ndim > 1 else tensor

    return Reshaping(
        lambda parts: separate.join(transpose_matrix(parts[0]).chunk(3)),
        lambda tensor: (transpose_matrix(torch.cat(list(separate.split(tensor)))),),
    )


_RESHAPINGS = {
    "same": Reshaping(lambda parts: parts[0], lambda tensor: (tensor,)),
    # GPT-2's Conv1D holds [inputs, outputs], Megatron's linear layer [outputs, inputs].
    "transposed": Reshaping(lambda parts: parts[0].t(), lambda tensor: (tensor.t(),)),
    # Gate and value of a gated MLP follow one another in Megatron's tensor.
    "halves": Reshaping(lambda parts: torch.cat(list(parts)), lambda tensor: tensor.chunk(2)),
    "by_expert": Reshaping(lambda parts: torch.stack(list(parts)), lambda tensor: tensor.unbind()),
    "halves_by_expert": Reshaping(_join_gates_by_expert, _split_gates_by_expert),
}
"""Reshapings that do not depend on the model's dimensions."""
_EXPERT = "{e}"
"""The number of an expert in a name."""
_BASES = {
    "mistral": "llama",
    "smollm3": "llama",
    "phi3": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "glm": "qwen2",
    "mixtral": "llama",
    "qwen2_moe": "qwen2",
    "qwen3_moe": "qwen3",
}
"""The family whose lines of the table a family extends."""
_TABLE = tuple(csv.DictReader(Path(__file__).with_name("families.csv").read_text().splitlines()))
"""Lines of `families.csv`, one per tensor; `{}` in a name stands for the number of the layer. The last column
names the parameter that `transformers` loads the tensors as, where it joins those of all experts."""
