"""Compare the weights of a checkpoint with the model that its arguments define, by names and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parakit.artifacts.torch_dist import EMBEDDING, OUTPUT, VOCABULARY, Shape
from parakit.checkpoint.contents import Contents
from parakit.checkpoint.model_tensors import (
    ModelTensor,
    find_stored_name,
    is_described,
    known_tensor_names,
    list_model_tensors,
    remove_layer_number,
)
from parakit.config.model import ModelShape
from parakit.formatting.units import plural

_EXPERT_BIAS = "mlp.router.expert_bias"
_RANK_PREFIX = re.compile(r"^mp_rank_[\d_]+\.")
"""Beginning of a tensor of the format `torch` that is neither known to be split by TP nor to be replicated."""


@dataclass(frozen=True)
class ModelComparison:
    """The result of comparing a checkpoint's weights with a model."""

    problems: tuple[str, ...]
    """A sentence for each tensor that is missing, left over or of another shape."""
    compared_names: frozenset[str]
    """Names of the stored tensors that belong to the model."""


@dataclass(frozen=True)
class _StoredForm:
    """A tensor as a checkpoint stores it: of one layer, of all layers stacked, or outside of layers."""

    names: tuple[str, ...]
    shape: Shape


def compare_with_model(contents: Contents, shape: ModelShape) -> ModelComparison:
    """Compare the names and shapes of a checkpoint's weights with a model. The values are not read."""
    problems: list[str] = []
    compared_names: set[str] = set()
    # Every name under which a checkpoint may store a tensor of the model.
    model_names: set[str] = set()
    shapes = {_RANK_PREFIX.sub("", name): tensor.shape for name, tensor in contents.weights.items()}
    has_stacked_layers = not any(re.match(r"decoder\.layers\.\d", name) for name in shapes)
    for tensor in list_model_tensors(shape):
        missing_names: list[str] = []
        for form in _list_stored_forms(tensor, has_stacked_layers):
            model_names.update(form.names)
            name = find_stored_name(form.names, shapes)
            if name is None:
                missing_names.append(form.names[0])
                continue
            compared_names.add(name)
            # If only the shard of one rank is stored, the shape of the full tensor is unknown.
            is_full_tensor = name in contents.weights
            if is_full_tensor and shapes[name] != form.shape:
                problems.append(
                    f"{name} has the shape {list(shapes[name])}, and by the checkpoint's arguments it is "
                    f"{list(form.shape)}."
                )
        is_needed = not tensor.is_optional or _has_expert_bias(contents, tensor)
        if missing_names and is_needed:
            problems.append(_describe_missing_tensor(missing_names))
    problems += _find_vocabulary_misfits(contents, shape)
    compared_names |= {name for name in VOCABULARY if name in shapes}
    # A tensor that is stored under two of its names is left over under neither of them.
    problems += _find_left_over(contents, shape, shapes.keys() - compared_names - model_names)
    stored_names = {
        name for name in contents.weights if _RANK_PREFIX.sub("", name) in compared_names
    }
    return ModelComparison(tuple(problems), frozenset(stored_names))


def _describe_missing_tensor(names: Sequence[str]) -> str:
    """Return a sentence on a tensor that is missing. `names` has one name per layer in which it is missing."""
    more = ""
    if len(names) > 1:
        more = f", and so is the tensor of {plural(len(names) - 1, 'more layer')}"
    return f"{names[0]} is missing{more}: the model of the checkpoint's arguments has it."


def _list_stored_forms(tensor: ModelTensor, has_stacked_layers: bool) -> Iterator[_StoredForm]:
    """Yield name and shape under which a checkpoint stores a tensor; one pair per layer if layers are not stacked."""
    if not tensor.layers:
        yield _StoredForm(tensor.names, tensor.shape)
    elif has_stacked_layers:
        yield _StoredForm(tensor.names, (len(tensor.layers), *tensor.shape))
    else:
        for layer in tensor.layers:
            yield _StoredForm(tensor.names_in_layer(layer), tensor.shape)


def _has_expert_bias(contents: Contents, tensor: ModelTensor) -> bool:
    """Return True if the tensor is the router's buffer of biases and the arguments switch it on."""
    is_expert_bias = tensor.names[0].endswith(_EXPERT_BIAS)
    return is_expert_bias and contents.arguments.get("moe_router_enable_expert_bias") == "True"


def _find_vocabulary_misfits(contents: Contents, shape: ModelShape) -> Iterator[str]:
    """Yield a sentence for an embedding or output layer that is missing, left over or of another shape."""
    shapes = contents.shapes
    padded_rows = contents.arguments.get("padded_vocab_size", "")
    for name in VOCABULARY:
        if name not in shapes or not padded_rows.isdigit():
            continue
        expected = (int(padded_rows), shape.hidden)
        if shapes[name] != expected:
            yield (
                f"{name} has the shape {list(shapes[name])}, and by the checkpoint's arguments it is "
                f"{list(expected)}: it was padded otherwise, or is of another model."
            )
    if EMBEDDING not in shapes:
        yield f"{EMBEDDING} is missing: the model of the checkpoint's arguments has it."
    if OUTPUT in shapes and shape.tied_embeddings:
        yield f"{OUTPUT} is left over: by the checkpoint's arguments the embedding is the output layer."
    if OUTPUT not in shapes and not shape.tied_embeddings:
        yield f"{OUTPUT} is missing: the checkpoint's arguments have --untie-embeddings-and-output-weights."


def _find_left_over(
    contents: Contents, shape: ModelShape, names: frozenset[str] | set[str]
) -> Iterator[str]:
    """Yield a sentence for each tensor among `names` that other models have, and this model does not.

    Tensors that no known model has give no sentence, because a user's own module may have made them.
    """
    if not is_described(shape):
        return
    for name in sorted(names):
        if remove_layer_number(name) not in known_tensor_names():
            continue
        is_linear_bias = re.search(r"\.linear_\w+\.bias$", name) is not None
        if is_linear_bias and contents.arguments.get("add_bias_linear") == "False":
            yield f"{name} is left over: the checkpoint's arguments have --disable-bias-linear."
        else:
            yield f"{name} is left over: the model of the checkpoint's arguments does not have it."
