"""Compare the weights of two checkpoints, tensor by tensor, across strategies and formats.

The result is a `TensorRelation` per tensor. One layer of each checkpoint is in memory at a time. Weights of
Hugging Face folders are read under Megatron's names, by the table of `parakit.convert.hf.families`.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parakit.artifacts.torch_dist import VOCABULARY, PieceReader, Shape
from parakit.checkpoint.contents import HUGGING_FACE, Contents, is_stacked
from parakit.convert import read_source

EQUAL, DTYPE, PADDING = "equal", "equal but for dtype", "equal but for padding"
ROUNDING = "equal but for rounding"
PERMUTED, SCALED, DIFFERENT, ONE_SIDED = "permuted", "scaled", "different", "only in one"
_ROUNDING_TOLERANCE = 1e-4
"""The largest norm of a difference, relative to the norm of the first tensor, that counts as rounding.

Sums in another order over a few updates cause such differences. Measured after 4 and 8 updates of gpt2-tiny in
fp32 (2-core VM): five strategies differ by at most 4.7e-5 (a bias that began at 0; moments 7.6e-7), and 4 more
updates of one strategy make a difference of at least 1.7e-3.
"""
_MOST_SHOWN_BLOCKS = 16


@dataclass(frozen=True)
class TensorRelation:
    """The relation between the tensors of one name in two checkpoints."""

    name: str
    relation: str
    detail: str = ""
    """The permutation, the factor, or the first and the worst difference."""

    @property
    def is_same(self) -> bool:
        """True if both tensors are the same weight of the same model."""
        return self.relation in (EQUAL, DTYPE, PADDING, ROUNDING)


@dataclass(frozen=True)
class _ReadableTensors:
    """The tensors of a checkpoint under Megatron's names."""

    shapes: Mapping[str, Shape]
    read: Callable[[str, int | None], Tensor]
    """Reads a tensor by name: one layer of a stacked tensor, or the full tensor for None."""


def compare_weights(first: Contents, second: Contents) -> list[TensorRelation]:
    """Compare every tensor of two checkpoints: weights first, then optimizer states, each by name.

    A weight that only one checkpoint has is listed with the relation ONE_SIDED. An optimizer state that only
    one checkpoint has is left out.
    """
    relations = []
    with PieceReader(first.folder) as reader_a, PieceReader(second.folder) as reader_b:
        a, b = _open_tensors(first, reader_a), _open_tensors(second, reader_b)
        names = a.shapes.keys() | b.shapes.keys()
        for name in sorted(names, key=lambda name: ("optimizer" in name, name)):
            if name in a.shapes and name in b.shapes:
                relations.append(_compare_tensor(name, a, b))
            elif "optimizer" not in name:
                relations.append(TensorRelation(name, ONE_SIDED))
    return relations


def _open_tensors(contents: Contents, reader: PieceReader) -> _ReadableTensors:
    """Return the shapes of a checkpoint's tensors, and a function that reads a tensor. Any format is possible.

    The reader is of the checkpoint's folder. It reads every format but Hugging Face's.
    """
    if contents.format != HUGGING_FACE:
        stored = contents.stored.tensors
        return _ReadableTensors(
            contents.shapes, lambda key, layer: reader.read_tensor(stored[key], layer)
        )
    source = read_source(contents.folder)
    pairs = {(pair.key, pair.layer): pair for pair in source.pairs}
    shapes: dict[str, Shape] = {}
    for (key, layer), pair in pairs.items():
        # Megatron stacks the tensors of all layers, and Hugging Face stores one tensor per layer.
        shapes[key] = pair.shape if layer is None else (source.shape.layers, *pair.shape)
    return _ReadableTensors(shapes, lambda key, layer: source.values(pairs[key, layer]))


def _compare_tensor(name: str, a: _ReadableTensors, b: _ReadableTensors) -> TensorRelation:
    """Compare the two tensors of one name. A stacked tensor is compared layer by layer.

    For a stacked tensor the result describes the first layer that differs, and states how many layers differ.
    If the second checkpoint has the same layers in another order, the result states this order.
    """
    if not is_stacked(name):
        return _compare_values(name, a.read(name, None), b.read(name, None))
    shape = a.shapes[name]
    if shape != b.shapes[name]:
        return _different_shapes(name, shape, b.shapes[name])
    num_layers = shape[0]
    hashes_a, dtypes_a = _hash_layers(name, a, num_layers)
    hashes_b, dtypes_b = _hash_layers(name, b, num_layers)
    if order := _find_order(hashes_a, hashes_b):
        return TensorRelation(name, PERMUTED, f"the second has the layers in the order {order}")
    by_layer = []
    for layer in range(num_layers):
        # Layers with the same bits are equal, so their values are not read a second time.
        if hashes_a[layer] == hashes_b[layer] and dtypes_a[layer] == dtypes_b[layer]:
            by_layer.append(TensorRelation(name, EQUAL))
        else:
            by_layer.append(_compare_values(name, a.read(name, layer), b.read(name, layer)))
    different_layers = [layer for layer, relation in enumerate(by_layer) if not relation.is_same]
    if not different_layers:
        unequal = (relation for relation in by_layer if relation.relation != EQUAL)
        return next(unequal, by_layer[0])
    first = different_layers[0]
    return TensorRelation(
        name,
        by_layer[first].relation,
        f"in {len(different_layers)} of {num_layers} layers, first in {first}: "
        f"{by_layer[first].detail}",
    )


def _hash_layers(
    name: str, tensors: _ReadableTensors, num_layers: int
) -> tuple[list[bytes], list[torch.dtype]]:
    """Return the hash and the dtype of each layer of a stacked tensor."""
    hashes, dtypes = list[bytes](), list[torch.dtype]()
    for layer in range(num_layers):
        values = tensors.read(name, layer)
        hashes.append(hash_values(values))
        dtypes.append(values.dtype)
    return hashes, dtypes


def _different_shapes(name: str, a: Shape, b: Shape) -> TensorRelation:
    """Return the relation of two tensors of different shapes."""
    return TensorRelation(name, DIFFERENT, f"shapes {list(a)} and {list(b)}")


def _compare_values(name: str, a: Tensor, b: Tensor) -> TensorRelation:
    """Compare the values of two tensors.

    If two vocabularies differ in size, only the rows that both have are compared.
    """
    is_padded = a.shape != b.shape
    if is_padded:
        if not name.endswith(VOCABULARY) or a.ndim != b.ndim:
            return _different_shapes(name, tuple(a.shape), tuple(b.shape))
        rows = min(len(a), len(b))
        a, b = a[:rows], b[:rows]
    if a.dtype == b.dtype:
        # NaN is unequal to itself, so tensors with NaN are compared by their bits.
        if torch.equal(a, b) or hash_values(a) == hash_values(b):
            return TensorRelation(name, PADDING if is_padded else EQUAL)
    else:
        narrow = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
        if torch.equal(a.to(narrow), b.to(narrow)):
            return TensorRelation(name, DTYPE, f"{a.dtype} and {b.dtype}".replace("torch.", ""))
    if detail := _describe_permutation(a, b, has_experts=".experts.experts." in name):
        return TensorRelation(name, PERMUTED, detail)
    eps = max(_machine_epsilon(a), _machine_epsilon(b))
    return _compare_magnitudes(name, a.double(), b.double(), eps)


def _machine_epsilon(values: Tensor) -> float:
    """Return the relative rounding step of a tensor's dtype; 0 for integers."""
    return torch.finfo(values.dtype).eps if values.is_floating_point() else 0


def _describe_permutation(a: Tensor, b: Tensor, *, has_experts: bool) -> str:
    """Return a clause on how `b` permutes the experts, rows or columns of `a`; empty if it does not.

    The clause gives the order of the widest blocks that move together, at most `_MOST_SHOWN_BLOCKS` of them.
    """
    dimensions = ("experts", "rows", "columns") if has_experts else ("rows", "columns")
    for dimension, noun in enumerate(dimensions[: a.ndim]):
        hashes_a = [hash_values(values) for values in a.unbind(dimension)]
        hashes_b = [hash_values(values) for values in b.unbind(dimension)]
        order = _find_order(hashes_a, hashes_b)
        if order:
            width = max(width for width in range(1, len(order)) if _moves_blocks(order, width))
            blocks = [index // width for index in order[::width]]
            ellipsis = "…" if len(blocks) > _MOST_SHOWN_BLOCKS else ""
            shown = f"{blocks[:_MOST_SHOWN_BLOCKS]}{ellipsis}"
            return f"the second has blocks of {width} {noun} in the order {shown}"
    return ""


def _moves_blocks(order: list[int], width: int) -> bool:
    """Return True if a permutation only moves aligned blocks of `width` consecutive indices."""
    if len(order) % width:
        return False
    for start in range(0, len(order), width):
        first = order[start]
        if first % width or order[start : start + width] != list(range(first, first + width)):
            return False
    return True


def _find_order(first: list[bytes], second: list[bytes]) -> list[int]:
    """Return, for each element of `second`, its index in `first`.

    The list is empty if both are in the same order, or if `second` is no permutation of `first`. Equal
    elements are matched from the front.
    """
    if first == second or sorted(first) != sorted(second):
        return []
    indices = defaultdict[bytes, list[int]](list)
    for index in reversed(range(len(first))):
        indices[first[index]].append(index)
    return [indices[element].pop() for element in second]


def hash_values(values: Tensor) -> bytes:
    """Return a 16-byte hash of a tensor's bits; its shape and dtype do not count."""
    raw = values.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(memoryview(raw), digest_size=16).digest()


def _compare_magnitudes(name: str, a: Tensor, b: Tensor, eps: float) -> TensorRelation:
    """Return whether `b` is `a` times a factor, differs from `a` by rounding, or is different.

    Args:
        name: The tensor's name.
        a: The first tensor in fp64.
        b: The second tensor in fp64.
        eps: The relative rounding step of the dtype in which the tensors are stored.
    """
    square = (a * a).sum().item()
    factor = (a * b).sum().item() / square if square else 0.0
    is_other_scale = abs(factor - 1) > max(_ROUNDING_TOLERANCE, eps)
    if is_other_scale and torch.allclose(a * factor, b, rtol=eps, atol=0):
        return TensorRelation(name, SCALED, f"by {factor:.8g}")
    error = (a - b).abs()
    error = torch.where(error.isnan(), torch.inf, error)
    is_rounding = error.norm().item() <= _ROUNDING_TOLERANCE * square**0.5
    first_index = int(error.flatten().nonzero()[0].item())
    worst_index = int(error.argmax().item())
    detail = (
        f"first at {_describe_element(a, b, first_index)}; "
        f"worst at {_describe_element(a, b, worst_index)}"
    )
    return TensorRelation(name, ROUNDING if is_rounding else DIFFERENT, detail)


def _describe_element(a: Tensor, b: Tensor, flat_index: int) -> str:
    """Return the index and both values of an element, such as `[0, 3]: 1.5 and 1.25`."""
    index = list(map(int, torch.unravel_index(torch.tensor(flat_index), a.shape)))
    value_a, value_b = a.flatten()[flat_index].item(), b.flatten()[flat_index].item()
    return f"{index}: {value_a:.8g} and {value_b:.8g}"
