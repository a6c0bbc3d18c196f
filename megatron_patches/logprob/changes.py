"""Contexts in which one thing of Megatron's model on one rank is changed, and edits of inputs and logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from megatron_patches.logprob.passes import Inputs, PassEdits, Scores

_EPSILON_NAMES = ("eps", "epsilon", "variance_epsilon")


def find_epsilon_name(module: Any) -> str | None:
    """Return the name of a norm's epsilon; None for other modules."""
    if "norm" not in type(module).__name__.lower():
        return None
    return next((name for name in _EPSILON_NAMES if hasattr(module, name)), None)


@contextmanager
def set_epsilon(norms: list[Any], epsilon: float, edits: PassEdits) -> Iterator[None]:  # noqa: ARG001
    """Give all norms another epsilon."""
    names = [str(find_epsilon_name(norm)) for norm in norms]
    before = [getattr(norm, name) for norm, name in zip(norms, names, strict=True)]
    for norm, name in zip(norms, names, strict=True):
        setattr(norm, name, epsilon)
    try:
        yield
    finally:
        for norm, name, value in zip(norms, names, before, strict=True):
            setattr(norm, name, value)


@contextmanager
def replace_weights(pairs: list[tuple[Tensor, Tensor]], edits: PassEdits) -> Iterator[None]:  # noqa: ARG001
    """Give weights the values of the serving engine; each pair is a weight and the served values."""
    before = [weight.clone() for weight, _ in pairs]
    with torch.no_grad():
        for weight, served in pairs:
            weight.copy_(served)
    try:
        yield
    finally:
        with torch.no_grad():
            for (weight, _), values in zip(pairs, before, strict=True):
                weight.copy_(values)


@contextmanager
def bypass_modules(modules: list[Any], edits: PassEdits) -> Iterator[None]:  # noqa: ARG001
    """Let modules return their first input unchanged."""
    handles = [module.register_forward_hook(lambda _, args, __: args[0]) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def set_config(model: Any, name: str, value: object, edits: PassEdits) -> Iterator[None]:  # noqa: ARG001
    """Set a field of the model's config, which all modules share."""
    with patch.object(model.config, name, value):
        yield


@contextmanager
def set_activation(model: Any, activation: Any, edits: PassEdits) -> Iterator[None]:  # noqa: ARG001
    """Let all MLPs apply another activation, without the fused kernel."""
    mlps = [module for module in model.modules() if hasattr(module, "activation_func")]
    before = [mlp.activation_func for mlp in mlps]
    for mlp in mlps:
        mlp.activation_func = activation
    try:
        with (
            patch.object(model.config, "activation_func", activation),
            patch.object(model.config, "bias_activation_fusion", False),
        ):
            yield
    finally:
        for mlp, value in zip(mlps, before, strict=True):
            mlp.activation_func = value


@contextmanager
def zero_router_bias(routers: list[Any], edits: PassEdits) -> Iterator[None]:  # noqa: ARG001
    """Set the bias of all routers to 0."""
    biases = [router.expert_bias for router in routers]
    pairs = [(bias, torch.zeros_like(bias)) for bias in biases]
    with replace_weights(pairs, PassEdits()):
        yield


def has_dropout(module: Any) -> bool:
    """Return True for a dropout that would drop elements now."""
    return isinstance(module, torch.nn.Dropout) and module.training and module.p > 0


@contextmanager
def switch_dropout_off(model: Any, edits: PassEdits) -> Iterator[None]:  # noqa: ARG001
    """Put all modules into evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def compute_in_dtype(modules: list[Any], dtype: torch.dtype, edits: PassEdits) -> Iterator[None]:  # noqa: ARG001
    """Let modules compute in another dtype: their weights and inputs are cast, and their outputs are cast back."""
    weights = list(dict.fromkeys(p for module in modules for p in module.parameters()))
    before = [weight.data for weight in weights]
    handles = []
    for weight in weights:
        weight.data = weight.data.to(dtype)
    own_dtype = before[0].dtype if before else torch.float32

    def cast_in(_: Any, args: tuple[Any, ...], kwargs: Inputs) -> tuple[tuple[Any, ...], Inputs]:
        cast_value = partial(cast_floats, dtype)
        cast_kwargs = {name: cast_value(value) for name, value in kwargs.items()}
        return tuple(map(cast_value, args)), cast_kwargs

    def cast_out(_: Any, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(cast_floats(own_dtype, value) for value in output)
        return cast_floats(own_dtype, output)

    for module in modules:
        handles.append(module.register_forward_pre_hook(cast_in, with_kwargs=True))
        handles.append(module.register_forward_hook(cast_out))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for weight, values in zip(weights, before, strict=True):
            weight.data = values


@contextmanager
def compute_router_logits_in(
    routers: list[Any],
    dtype: torch.dtype,
    edits: PassEdits,  # noqa: ARG001
) -> Iterator[None]:
    """Let routers compute their logits in another dtype, and everything after the logits in fp32."""
    with ExitStack() as replacements:
        for router in routers:
            gating = partial(_compute_logits_in, router, router.gating, dtype)
            replacements.enter_context(patch.object(router, "gating", gating))
        yield


def _compute_logits_in(
    router: Any, gating: Callable[..., Tensor], dtype: torch.dtype, hidden: Tensor, *args: Any
) -> Tensor:
    """Return a router's logits in fp32, computed by `gating` from a weight and an input in another dtype."""
    own_weight = router.weight.data
    router.weight.data = own_weight.to(dtype)
    try:
        return gating(hidden.to(dtype), *args).float()
    finally:
        router.weight.data = own_weight


def cast_floats(dtype: torch.dtype, value: Any) -> Any:
    """Return a floating-point tensor in another dtype, and any other value as it is."""
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


@contextmanager
def double_first_token(edits: PassEdits) -> Iterator[None]:
    """Repeat the first token at the start of each sequence, and score each token at its original index."""

    def double(inputs: Inputs) -> Inputs:
        doubled = dict(inputs)
        for name in ("input_ids", "labels"):
            tokens = inputs[name]
            doubled[name] = torch.cat((inputs["input_ids"][:, :1], tokens[:, :-1]), dim=1)
        return doubled

    def shift_back(scores: Scores) -> Scores:
        # The last token has left the sequence; its log probability is that of the token before it.
        return np.concatenate((scores[:, 1:], scores[:, -1:]), axis=1)

    edits.inputs.append(double)
    edits.scores.append(shift_back)
    yield


@contextmanager
def use_masks() -> Iterator[None]:
    """Let attention use the masks that it gets.

    Without `--reset-attention-mask`, attention on CPU ranks ignores masks, because it is causal anyway.
    """
    from megatron.training import get_args

    with patch.object(get_args(), "reset_attention_mask", True):
        yield


@contextmanager
def attend_everywhere(edits: PassEdits) -> Iterator[None]:
    """Let every token attend to all tokens before it, across documents."""

    def replace(inputs: Inputs) -> Inputs:
        length = inputs["input_ids"].shape[1]
        positions = torch.arange(length).expand_as(inputs["input_ids"])
        mask = ~torch.ones(length, length).tril().bool()
        return {**inputs, "attention_mask": mask[None, None], "position_ids": positions}

    edits.inputs.append(replace)
    with use_masks():
        yield


@contextmanager
def attend_within_documents(end_of_document: int, edits: PassEdits) -> Iterator[None]:
    """Let every token attend only to tokens of its own document, which the token `end_of_document` ends."""

    def replace(inputs: Inputs) -> Inputs:
        is_end = inputs["input_ids"] == end_of_document
        document = is_end.cumsum(1) - is_end.long()
        is_other = document[:, None, :, None] != document[:, None, None, :]
        length = is_end.shape[1]
        is_later = ~torch.ones(length, length).tril().bool()
        return {**inputs, "attention_mask": is_other | is_later}

    edits.inputs.append(replace)
    with use_masks():
        yield


@contextmanager
def shift_labels(offset: int, edits: PassEdits) -> Iterator[None]:
    """Report the log probability of the token `offset` positions after the next token; 0 is the next token."""

    def shift(inputs: Inputs) -> Inputs:
        tokens = inputs["input_ids"]
        return {**inputs, "labels": torch.roll(tokens, -1 - offset, dims=1)}

    edits.inputs.append(shift)
    yield


@contextmanager
def edit_logits(edit: Callable[[Tensor], Tensor], edits: PassEdits) -> Iterator[None]:
    """Change the logits before log probabilities are computed."""
    edits.logits.append(edit)
    yield


def divide_by_temperature(temperature: float, logits: Tensor) -> Tensor:
    """Return the logits divided by a temperature."""
    return logits / temperature


def mask_padding(vocabulary: int, logits: Tensor) -> Tensor:
    """Return the logits, with the smallest finite number for the rows of the vocabulary's padding."""
    masked = logits.clone()
    masked[..., vocabulary:] = torch.finfo(logits.dtype).min
    return masked


def keep_top_k(count: int, logits: Tensor) -> Tensor:
    """Return the logits, with the smallest finite number for all but the `count` largest per position."""
    if count >= logits.shape[-1]:
        return logits
    least = logits.topk(count, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, torch.finfo(logits.dtype).min)


def keep_top_p(probability: float, logits: Tensor) -> Tensor:
    """Return the logits, with the smallest finite number for tokens that top-p sampling excludes.

    Per position, the most probable tokens are kept until their sum reaches `probability`.
    """
    ordered, indices = logits.sort(dim=-1, descending=True)
    probabilities = ordered.float().softmax(-1)
    is_outside = probabilities.cumsum(-1) - probabilities > probability
    outside = torch.zeros_like(is_outside).scatter(-1, indices, is_outside)
    return logits.masked_fill(outside, torch.finfo(logits.dtype).min)


def add_to_positions(model: Any, first: int, offset: int, inputs: Inputs) -> Inputs:
    """Return the inputs with an offset added to the learned positions from the index `first` on."""
    positions = inputs["position_ids"].clone()
    positions[:, first:] += offset
    embedding = getattr(getattr(model, "embedding", None), "position_embeddings", None)
    if embedding is not None:
        positions.clamp_(0, embedding.weight.shape[0] - 1)
    return {**inputs, "position_ids": positions}


def find_frequencies(rotary: Any) -> Tensor | None:
    """Return the frequencies of a rotary embedding with its scaling; None without one, or if it is of another kind."""
    frequencies: Tensor | None = getattr(rotary, "inv_freq", None)
    if frequencies is None:
        return None
    return frequencies / (getattr(rotary, "seq_len_interpolation_factor", None) or 1.0)


def compute_frequencies(num_channels: int, base: float) -> Tensor:
    """Return the frequencies of a rotary embedding without scaling."""
    exponents = torch.arange(0, num_channels, 2).float() / num_channels
    return 1.0 / base**exponents


def make_rotary(frequencies: Tensor, positions: Tensor, like: Tensor) -> Tensor:
    """Return the rotary embedding of positions, in the form of `like` [positions, 1, 1, channels]."""
    angles = torch.outer(positions, frequencies.float())
    return torch.cat((angles, angles), dim=-1).view(like.shape).to(like.dtype)


@contextmanager
def replace_rotary(rotary: Any, compute: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replace the output of a rotary embedding: `compute` gets the embedding and returns another one.

    If the module returns a tuple, the embedding is its first item, and the other items stay.
    """

    def replace_output(_: Any, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (compute(output[0]), *output[1:])
        return compute(output)

    handle = rotary.register_forward_hook(replace_output)
    try:
        yield
    finally:
        handle.remove()
