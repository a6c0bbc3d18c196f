"""Judge the values and the types of weights: numbers that are not finite, weights that nobody wrote, mixed types."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from parakit.artifacts.torch_dist import VOCABULARY, StoredTensor
from parakit.checkpoint.contents import is_stacked
from parakit.formatting.units import plural

if TYPE_CHECKING:
    from torch import Tensor

FLOATING_TYPES = ("float32", "bfloat16", "float16")
"""Types of weights whose values are judged. Quantized weights are left out."""

_STACKED_EXPERTS = ".experts.experts."
_NORM_WEIGHT = re.compile(r"(?:norm|\.ln_)[^.]*(?:\.|_)weight$")
_LINEAR_WEIGHT = re.compile(r"\.(?:linear_\w+|eh_proj)\.weight$")
"""Matrices that Megatron stores in the type of the model. The router's may be fp32 on purpose."""
_CENTERED = ("apply_layernorm_1p", "layernorm_zero_centered_gamma")
"""Arguments of Megatron and Megatron-Bridge by which norms multiply with 1 plus their weight."""


def has_centered_norms(arguments: Mapping[str, str]) -> bool:
    """Return True if the norms of a model multiply with 1 plus their weight, so that 0 is a usual weight."""
    return any(arguments.get(name) == "True" for name in _CENTERED)


def describe_wrong_values(
    name: str, values: Tensor, begin: Sequence[int], has_centered_norms: bool
) -> str:
    """Return a clause on what is wrong with the values of a weight's piece; empty if nothing is.

    Values are wrong if they are not finite, or if they are 0 in a whole matrix or in a whole norm: then nobody
    wrote them. Where layers or experts are stacked, each is judged by itself. Biases may be 0, and so may rows
    that pad the vocabulary.

    Args:
        name: The weight's name.
        values: The values of one piece.
        begin: Index of the piece's first element in the full tensor; empty for a full tensor.
        has_centered_norms: True if the weight of a norm may be 0.
    """
    at = f" at {list(begin)}" if begin else ""
    piece = f" in the piece{at}" if at else ""
    if not values.isfinite().all():
        return f"is not finite{piece}"
    num_stacked = is_stacked(name) + (_STACKED_EXPERTS in name)
    natural_dims = values.ndim - num_stacked
    is_padding = name in VOCABULARY and any(begin)
    is_norm = natural_dims == 1 and _NORM_WEIGHT.search(name) and not has_centered_norms
    if is_padding or not (is_norm or natural_dims > 1) or not values.numel():
        return ""
    is_written = values.flatten(num_stacked).any(-1)
    if not values.any():
        whole = f"the whole piece{at}" if at else "all elements"
        return f"is 0 in {whole}: it was never written"
    if is_written.all():
        return ""
    index = (~is_written).nonzero()[0].tolist()
    offsets = begin[:num_stacked] if begin else [0] * num_stacked
    index = [number + offset for number, offset in zip(index, offsets, strict=True)]
    units = ["layer"] * is_stacked(name) + ["expert"] * (_STACKED_EXPERTS in name)
    where = ", ".join(f"{unit} {number}" for unit, number in zip(units, index, strict=True))
    return f"is 0 in all elements of {where}: it was never written"


def find_mixed_types(weights: Mapping[str, StoredTensor], names: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each type that only a minority of a model's linear layers has.

    Megatron converts a whole model to one type, so a layer of another type comes from another run or from a
    converter.

    Args:
        weights: The weights of a checkpoint.
        names: Names of the weights that belong to the model that the arguments define.
    """
    names_by_type = defaultdict[str, list[str]](list)
    for name in sorted(names):
        if _LINEAR_WEIGHT.search(name) and weights[name].dtype in FLOATING_TYPES:
            names_by_type[weights[name].dtype].append(name)
    if len(names_by_type) < 2:
        return
    usual_type = max(names_by_type, key=lambda dtype: len(names_by_type[dtype]))
    other_layers = plural(len(names_by_type.pop(usual_type)), "other linear layer")
    for dtype, names_of_type in names_by_type.items():
        more = f" and {len(names_of_type) - 1} more" if len(names_of_type) > 1 else ""
        yield (
            f"{names_of_type[0]}{more} of type {dtype}, beside {other_layers} of type {usual_type}: "
            "Megatron saves them all in one type."
        )
