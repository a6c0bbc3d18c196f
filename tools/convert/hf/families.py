"""Which tensors of Hugging Face's make which tensor of Megatron's: the one table of each family.

Keys are those of Megatron's checkpoints, where layers of one kind are stacked in one tensor and a norm
has the name of the linear layer that follows it, with or without Transformer Engine. A `Form` is a pure
reshaping with its inverse; it fits weights, gradients and optimizer states alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tools.spec.model import ModelShape

Shape = tuple[int, ...]

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
VOCABULARY = (EMBEDDING, OUTPUT)
"""Keys whose rows are the vocabulary's entries, which Megatron pads."""

HEAD = "lm_head.weight"
"""The only tensor without a family's prefix."""

_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Norms in a checkpoint's key, and in the name of Megatron's own (local) module."""


@dataclass(frozen=True)
class Form:
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
    form: Form

    @property
    def parameter(self) -> str:
        """The name of Megatron's parameter, with the layer's number from 0."""
        if self.layer is None:
            return self.key
        rest = self.key.removeprefix("decoder.layers.")
        for norm, module in _NORMS.items():
            rest = rest.replace(norm, module)
        return f"decoder.layers.{self.layer}.{rest}"

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Of Hugging Face's tensors."""
        parts = self.form.split(torch.empty(self.shape, device="meta"))
        return tuple(tuple(part.shape) for part in parts)


def prefix_of(family: str, names: Sequence[str]) -> str:
    """What a file's names begin with: nothing in files of a bare model, such as GPT-2's on the hub."""
    prefix, rows = _FAMILIES[family]
    is_bare = rows[0].names[0] in names
    return "" if is_bare else prefix


def pairs_of(family: str, shape: ModelShape, prefix: str | None = None) -> tuple[TensorPair, ...]:
    """Every tensor of a model, outside of the layers first, then layer by layer, then the output.

    Args:
        family: `gpt2` or `llama`.
        shape: The model's.
        prefix: What Hugging Face's names begin with; the family's own by default.
    """
    own, rows = _FAMILIES[family]
    prefix = own if prefix is None else prefix
    rows = (*rows, *(() if shape.tied_embeddings else (_HEAD,)))

    def pairs(row: _NamedTensor, layer: int | None) -> TensorPair:
        names = (name if name == HEAD else prefix + name for name in row.names)
        numbered = tuple(name.format(layer) for name in names)
        return TensorPair(row.key, layer, row.shape(shape), numbered, row.form(shape))

    inside = [row for row in rows if "{}" in row.names[0]]
    first = [row for row in rows if row.key.startswith("embedding.")]
    last = [row for row in rows if row not in (*inside, *first)]
    layers = (pairs(row, layer) for layer in range(shape.layers) for row in inside)
    return (
        *(pairs(row, None) for row in first),
        *layers,
        *(pairs(row, None) for row in last),
    )


def is_buffer(name: str) -> bool:
    """Whether older files hold a tensor that no model needs: masks, and angles of rotary positions."""
    return name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"))


@dataclass(frozen=True)
class _NamedTensor:
    """A line of a family's table; `{}` in a name is the layer's number."""

    key: str
    names: tuple[str, ...]
    shape: Callable[[ModelShape], Shape]
    form: Callable[[ModelShape], Form]


def _same(_: ModelShape) -> Form:
    return Form(lambda parts: parts[0], lambda whole: (whole,))


def _transposed(_: ModelShape) -> Form:
    """GPT-2's Conv1D has the inputs first."""
    return Form(lambda parts: parts[0].t(), lambda whole: (whole.t(),))


def _halves(_: ModelShape) -> Form:
    """Gate and value of a gated MLP, one after the other."""
    return Form(lambda parts: torch.cat(list(parts)), lambda whole: whole.chunk(2))


def _by_group(shape: ModelShape) -> Form:
    """Rows of queries, keys and values: group by group, its queries, its key, its value."""
    groups, width = shape.query_groups, shape.head_width
    rows = shape.heads // groups * width

    def join(parts: Sequence[Tensor]) -> Tensor:
        grouped = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
        return torch.cat(grouped, 1).flatten(0, 1)

    def split(whole: Tensor) -> Sequence[Tensor]:
        grouped = whole.reshape(groups, rows + 2 * width, *whole.shape[1:])
        return [part.flatten(0, 1) for part in torch.split(grouped, [rows, width, width], 1)]

    return Form(join, split)


def _fused_by_group(shape: ModelShape) -> Form:
    """The same of one tensor with all queries, all keys, all values; a matrix is a Conv1D's."""
    grouped = _by_group(shape)

    def turned(tensor: Tensor) -> Tensor:
        return tensor.t() if tensor.ndim > 1 else tensor

    return Form(
        lambda parts: grouped.join(turned(parts[0]).chunk(3)),
        lambda whole: (turned(torch.cat(list(grouped.split(whole)))),),
    )


def _hidden(shape: ModelShape) -> Shape:
    return (shape.hidden,)


def _vocabulary(shape: ModelShape) -> Shape:
    return (shape.vocabulary, shape.hidden)


def _qkv(shape: ModelShape) -> int:
    return (shape.heads + 2 * shape.query_groups) * shape.head_width


def _layer(key: str, *names: str) -> tuple[str, tuple[str, ...]]:
    return f"decoder.layers.{key}", names


_HEAD = _NamedTensor(OUTPUT, (HEAD,), _vocabulary, _same)

_GPT2 = (
    _NamedTensor(EMBEDDING, ("wte.weight",), _vocabulary, _same),
    _NamedTensor(
        "embedding.position_embeddings.weight",
        ("wpe.weight",),
        lambda s: (s.positions, s.hidden),
        _same,
    ),
    _NamedTensor(
        *_layer("self_attention.linear_qkv.layer_norm_weight", "h.{}.ln_1.weight"), _hidden, _same
    ),
    _NamedTensor(
        *_layer("self_attention.linear_qkv.layer_norm_bias", "h.{}.ln_1.bias"), _hidden, _same
    ),
    _NamedTensor(
        *_layer("self_attention.linear_qkv.weight", "h.{}.attn.c_attn.weight"),
        lambda s: (_qkv(s), s.hidden),
        _fused_by_group,
    ),
    _NamedTensor(
        *_layer("self_attention.linear_qkv.bias", "h.{}.attn.c_attn.bias"),
        lambda s: (_qkv(s),),
        _fused_by_group,
    ),
    _NamedTensor(
        *_layer("self_attention.linear_proj.weight", "h.{}.attn.c_proj.weight"),
        lambda s: (s.hidden, s.heads * s.head_width),
        _transposed,
    ),
    _NamedTensor(
        *_layer("self_attention.linear_proj.bias", "h.{}.attn.c_proj.bias"), _hidden, _same
    ),
    _NamedTensor(*_layer("mlp.linear_fc1.layer_norm_weight", "h.{}.ln_2.weight"), _hidden, _same),
    _NamedTensor(*_layer("mlp.linear_fc1.layer_norm_bias", "h.{}.ln_2.bias"), _hidden, _same),
    _NamedTensor(
        *_layer("mlp.linear_fc1.weight", "h.{}.mlp.c_fc.weight"),
        lambda s: (s.ffn_hidden, s.hidden),
        _transposed,
    ),
    _NamedTensor(
        *_layer("mlp.linear_fc1.bias", "h.{}.mlp.c_fc.bias"), lambda s: (s.ffn_hidden,), _same
    ),
    _NamedTensor(
        *_layer("mlp.linear_fc2.weight", "h.{}.mlp.c_proj.weight"),
        lambda s: (s.hidden, s.ffn_hidden),
        _transposed,
    ),
    _NamedTensor(*_layer("mlp.linear_fc2.bias", "h.{}.mlp.c_proj.bias"), _hidden, _same),
    _NamedTensor("decoder.final_layernorm.weight", ("ln_f.weight",), _hidden, _same),
    _NamedTensor("decoder.final_layernorm.bias", ("ln_f.bias",), _hidden, _same),
)

_LLAMA = (
    _NamedTensor(EMBEDDING, ("embed_tokens.weight",), _vocabulary, _same),
    _NamedTensor(
        *_layer("self_attention.linear_qkv.layer_norm_weight", "layers.{}.input_layernorm.weight"),
        _hidden,
        _same,
    ),
    _NamedTensor(
        *_layer(
            "self_attention.linear_qkv.weight",
            *(f"layers.{{}}.self_attn.{part}_proj.weight" for part in "qkv"),
        ),
        lambda s: (_qkv(s), s.hidden),
        _by_group,
    ),
    _NamedTensor(
        *_layer("self_attention.linear_proj.weight", "layers.{}.self_attn.o_proj.weight"),
        lambda s: (s.hidden, s.heads * s.head_width),
        _same,
    ),
    _NamedTensor(
        *_layer("mlp.linear_fc1.layer_norm_weight", "layers.{}.post_attention_layernorm.weight"),
        _hidden,
        _same,
    ),
    _NamedTensor(
        *_layer(
            "mlp.linear_fc1.weight",
            "layers.{}.mlp.gate_proj.weight",
            "layers.{}.mlp.up_proj.weight",
        ),
        lambda s: (2 * s.ffn_hidden, s.hidden),
        _halves,
    ),
    _NamedTensor(
        *_layer("mlp.linear_fc2.weight", "layers.{}.mlp.down_proj.weight"),
        lambda s: (s.hidden, s.ffn_hidden),
        _same,
    ),
    _NamedTensor("decoder.final_layernorm.weight", ("norm.weight",), _hidden, _same),
)

_FAMILIES = {"gpt2": ("transformer.", _GPT2), "llama": ("model.", _LLAMA)}
