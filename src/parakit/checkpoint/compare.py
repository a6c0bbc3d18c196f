"""Whether two checkpoints hold the same weights, tensor by tensor, over strategies and formats.

One layer of each is in memory at a time. Weights of Hugging Face's folders are read by Megatron's names,
by the table of `parakit.convert.hf.families`.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from parakit.artifacts.torch_dist import VOCABULARY, Shape, read_tensor
from parakit.checkpoint.contents import HUGGING_FACE, Contents, is_stacked
from parakit.convert import read_source

EQUAL, DTYPE, PADDING = "equal", "equal but for dtype", "equal but for padding"
ROUNDING = "equal but for rounding"
PERMUTED, SCALED, DIFFERENT, ONE_SIDED = "permuted", "scaled", "different", "only in one"
_ROUNDING = 1e-4
"""Most that two tensors differ, as a part of their length, and are one: sums of other orders, a few
updates on. Measured after 4 and 8 updates of gpt2-tiny in fp32 (2-core VM): five strategies are at most
4.7e-5 apart (a bias that began at 0; moments 7.6e-7), 4 updates of one strategy at least 1.7e-3."""


@dataclass(frozen=True)
class TensorRelation:
    """How two tensors of one name are related."""

    name: str
    relation: str
    detail: str = ""
    """Which permutation, which factor, the first and the worst element."""

    @property
    def is_same(self) -> bool:
        """Whether it is the same weight of the same model."""
        return self.relation in (EQUAL, DTYPE, PADDING, ROUNDING)


@dataclass(frozen=True)
class _Weights:
    """Tensors by Megatron's names."""

    shapes: Mapping[str, Shape]
    read: Callable[[str, int | None], Tensor]
    """All of a tensor, or one layer of it."""


def compare_weights(one: Contents, other: Contents) -> list[TensorRelation]:
    """Every tensor of two checkpoints: weights first, then optimizer states that both hold."""
    a, b = _weights(one), _weights(other)
    names = sorted(a.shapes.keys() | b.shapes.keys(), key=lambda name: ("optimizer" in name, name))
    found = []
    for name in names:
        if name in a.shapes and name in b.shapes:
            found.append(_compare(name, a, b))
        elif "optimizer" not in name:
            found.append(TensorRelation(name, ONE_SIDED))
    return found


def _weights(contents: Contents) -> _Weights:
    if contents.format != HUGGING_FACE:
        stored = contents.stored.tensors
        return _Weights(
            contents.shapes, lambda key, layer: read_tensor(contents.folder, stored[key], layer)
        )
    source = read_source(contents.folder)
    pairs = {(pair.key, pair.layer): pair for pair in source.pairs}
    shapes = {
        key: pair.shape if layer is None else (source.shape.layers, *pair.shape)
        for (key, layer), pair in pairs.items()
    }
    return _Weights(shapes, lambda key, layer: source.values(pairs[key, layer]))


def _compare(name: str, a: _Weights, b: _Weights) -> TensorRelation:
    first, second = a.shapes[name], b.shapes[name]
    if not is_stacked(name):
        return _relation(name, a.read(name, None), b.read(name, None))
    if first != second:
        return TensorRelation(name, DIFFERENT, f"shapes {list(first)} and {list(second)}")
    digests = ([hash_values(one.read(name, at)) for at in range(first[0])] for one in (a, b))
    if order := _order(*digests):
        return TensorRelation(name, PERMUTED, f"the second has the layers in the order {order}")
    found = [_relation(name, a.read(name, at), b.read(name, at)) for at in range(first[0])]
    wrong = [(at, one) for at, one in enumerate(found) if not one.is_same]
    if not wrong:
        return next((one for one in found if one.relation != EQUAL), found[0])
    at, worst = wrong[0]
    return TensorRelation(
        name, worst.relation, f"in {len(wrong)} of {first[0]} layers, first in {at}: {worst.detail}"
    )


def _relation(name: str, a: Tensor, b: Tensor) -> TensorRelation:
    padded = a.shape != b.shape
    if padded:
        if not name.endswith(VOCABULARY) or a.ndim != b.ndim:
            return TensorRelation(name, DIFFERENT, f"shapes {list(a.shape)} and {list(b.shape)}")
        rows = min(len(a), len(b))
        a, b = a[:rows], b[:rows]
    # What is not finite is equal by its bits alone.
    if a.dtype == b.dtype and (torch.equal(a, b) or hash_values(a) == hash_values(b)):
        return TensorRelation(name, PADDING if padded else EQUAL)
    narrow = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    if a.dtype != b.dtype and torch.equal(a.to(narrow), b.to(narrow)):
        return TensorRelation(name, DTYPE, f"{a.dtype} and {b.dtype}".replace("torch.", ""))
    if detail := _permutation(a, b, ".experts.experts." in name):
        return TensorRelation(name, PERMUTED, detail)
    eps = max(torch.finfo(one.dtype).eps if one.is_floating_point() else 0 for one in (a, b))
    return _scaled_or_different(name, a.double(), b.double(), eps)


def _permutation(a: Tensor, b: Tensor, experts: bool) -> str:
    """Which parts of the first the second has where; empty if it is no permutation."""
    parts = ("experts", "rows", "columns") if experts else ("rows", "columns")
    for dimension, what in enumerate(parts[: a.ndim]):
        digests = ([hash_values(row) for row in one.unbind(dimension)] for one in (a, b))
        if order := _order(*digests):
            width = max(w for w in range(1, len(order)) if _moves_whole(order, w))
            blocks = [at // width for at in order[::width]]
            shown = f"{blocks[:16]}{'…' if len(blocks) > 16 else ''}"
            return f"the second has blocks of {width} {what} in the order {shown}"
    return ""


def _moves_whole(order: list[int], width: int) -> bool:
    """Whether a permutation moves blocks of so many places."""
    return len(order) % width == 0 and all(
        order[at] % width == 0
        and order[at : at + width] == list(range(order[at], order[at] + width))
        for at in range(0, len(order), width)
    )


def _order(own: list[bytes], others: list[bytes]) -> list[int]:
    """Which part of the first each of the second is; empty if they are in order or no permutation."""
    if own == others or sorted(own) != sorted(others):
        return []
    places = defaultdict[bytes, list[int]](list)
    for at in reversed(range(len(own))):
        places[own[at]].append(at)
    return [places[value].pop() for value in others]


def hash_values(values: Tensor) -> bytes:
    """Of a tensor's bits, without its shape."""
    return hashlib.blake2b(
        memoryview(values.contiguous().reshape(-1).view(torch.uint8).numpy()), digest_size=16
    ).digest()


def _scaled_or_different(name: str, a: Tensor, b: Tensor, eps: float) -> TensorRelation:
    """By a factor if every product is rounded to it and it is further from 1 than rounding goes."""
    square = (a * a).sum().item()
    factor = (a * b).sum().item() / square if square else 0.0
    if abs(factor - 1) > max(_ROUNDING, eps) and torch.allclose(a * factor, b, rtol=eps, atol=0):
        return TensorRelation(name, SCALED, f"by {factor:.8g}")
    error = (a - b).abs()
    error = torch.where(error.isnan(), torch.inf, error)
    apart = error.norm().item()
    relation = ROUNDING if apart <= _ROUNDING * square**0.5 else DIFFERENT
    first = error.flatten().nonzero()[0].item()
    worst = error.argmax().item()
    places = (
        f"{which} at {list(map(int, torch.unravel_index(torch.tensor(at), a.shape)))}: "
        f"{a.flatten()[int(at)].item():.8g} and {b.flatten()[int(at)].item():.8g}"
        for which, at in (("first", first), ("worst", worst))
    )
    return TensorRelation(name, relation, "; ".join(places))
