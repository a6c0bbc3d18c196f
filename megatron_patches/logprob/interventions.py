"""Changes of one thing at a time in Megatron's model on one rank, each as a context in which tokens are scored.

A change says nothing about which engine is wrong. If the bridge computes what the serving engine computes once the
epsilon of its norms is 1e-5, the engines have different epsilons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megatron_patches.capture.routing import capture_routing
from megatron_patches.logprob.choices import ServedChoices
from megatron_patches.logprob.passes import Inputs, PassEdits, Scores
from megatron_patches.logprob.scorer import Scorer
from parakit.artifacts.capture import CHOICE, START_WEIGHT, CaptureStage, TensorKey
from parakit.capturing import StoredTensors

Change = Callable[[PassEdits], AbstractContextManager[None]]
"""Function that returns the context in which a change is in effect, and that adds edits of the pass."""

EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12)
ROTARY_BASES = (1e4, 5e5, 1e6)
ROTARY_FACTORS = (2.0, 4.0, 8.0)
TEMPERATURES = tuple(round(0.5 + 0.1 * step, 1) for step in range(16) if step != 5)
TOP_K, TOP_P = (10, 20, 50, 100), (0.8, 0.9, 0.95, 0.99)
ROUTER_CHOICES = "router-choices"
_EPSILON_NAMES = ("eps", "epsilon", "variance_epsilon")


@dataclass(frozen=True)
class Bridge:
    """The model on one rank, and what is known of the serving engine."""

    scorer: Scorer
    served: StoredTensors
    """Capture of the serving engine, which may lack weights and choices."""
    prompt_tokens: int

    @property
    def model(self) -> Any:
        """Megatron's model."""
        return self.scorer.chunks[0]

    def list_changes(self) -> dict[str, Change]:
        """Return all changes that make sense for this model, specific ones before general ones."""
        changes: dict[str, Change] = {}
        for collect in (
            self._list_weights,
            self._list_semantics,
            self._list_rotary,
            self._list_router,
            self._list_reported,
            self._list_precision,
        ):
            changes |= collect()
        return changes

    def _list_weights(self) -> dict[str, Change]:
        """Return the change that takes the serving engine's weights where they differ; empty if none differs."""
        differing = dict(self._find_differing_weights())
        if not differing:
            return {}
        names = ", ".join(list(differing)[:3])
        if len(differing) > 3:
            names += f" and {len(differing) - 3} more"
        return {f"weights={names}": partial(_replace_weights, list(differing.values()))}

    def _find_differing_weights(self) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Yield the name of each weight that differs in the serving engine, the weight, and the served values."""
        for parameter in self.scorer.parameters.parameters:
            for piece in self.scorer.parameters.pieces(parameter, parameter.data):
                stored = self.served.get(TensorKey(CaptureStage.WEIGHTS, piece.name, START_WEIGHT))
                if stored is None or stored.shape[1:] != piece.values.shape[1:]:
                    continue
                rows = min(len(stored), len(piece.values))
                values = stored[:rows].to(piece.values.dtype)
                if not torch.equal(values, piece.values[:rows]):
                    yield piece.name, (piece.values[:rows], values.clone())

    def _list_semantics(self) -> dict[str, Change]:
        """Return changes of norms, activations, positions, masks and dropout."""
        changes: dict[str, Change] = {}
        norms = [m for m in self.model.modules() if _find_epsilon_name(m)]
        for epsilon in EPSILONS:
            if any(getattr(norm, str(_find_epsilon_name(norm))) != epsilon for norm in norms):
                changes[f"norm-epsilon={epsilon:g}"] = partial(_set_epsilon, norms, epsilon)
        for offset in (1, -1):
            changes[f"cache-positions={offset:+d}"] = partial(
                self._shift_positions, self.prompt_tokens, offset
            )
            changes[f"positions={offset:+d}"] = partial(self._shift_positions, 0, offset)
        changes["first-token-doubled"] = _double_first_token
        query_norms = [
            module
            for name, module in self.model.named_modules()
            if name.endswith(("q_layernorm", "k_layernorm")) and _find_epsilon_name(module)
        ]
        if query_norms:
            changes["qk-norm"] = partial(_bypass, query_norms)
        changes |= self._list_activations()
        changes |= self._list_documents()
        if any(_has_dropout(module) for module in self.model.modules()):
            changes["dropout"] = partial(_switch_dropout_off, self.model)
        return changes

    def _list_activations(self) -> dict[str, Change]:
        """Return changes of the MLPs' activation, for models with GELU."""
        config = self.model.config
        if config.gated_linear_unit or config.activation_func is not functional.gelu:
            return {}
        # The fused kernel of bias and GELU has the approximation with tanh.
        is_tanh = bool(config.bias_activation_fusion)
        name, activation = ("GELU with erf", functional.gelu)
        if not is_tanh:
            name, activation = "GELU with tanh", partial(functional.gelu, approximate="tanh")
        return {f"activation={name}": partial(_set_activation, self.model, activation)}

    def _list_documents(self) -> dict[str, Change]:
        """Return the change of the mask between the documents of a packed sequence."""
        from megatron.training import get_args, get_tokenizer

        if get_args().reset_attention_mask:
            return {"documents=together": _attend_everywhere}
        return {"documents=apart": partial(_attend_within_documents, int(get_tokenizer().eod))}

    def _list_rotary(self) -> dict[str, Change]:
        """Return changes of the rotary embedding; empty for models without one."""
        rotary = getattr(self.model, "rotary_pos_emb", None)
        frequencies = getattr(rotary, "inv_freq", None)
        if frequencies is None:
            return {}
        changes: dict[str, Change] = {}
        num_channels = 2 * len(frequencies)
        own_base = float(self.model.rotary_base)
        plain = _compute_frequencies(num_channels, own_base)
        if not torch.allclose(plain, frequencies):
            changes["rope-scaling=none"] = partial(self._set_frequencies, plain)
        for base in ROTARY_BASES:
            if base != own_base:
                values = _compute_frequencies(num_channels, base)
                changes[f"rope-base={base:g}"] = partial(self._set_frequencies, values)
        for factor in ROTARY_FACTORS:
            changes[f"rope-scaling=linear by {factor:g}"] = partial(
                self._set_frequencies, plain / factor
            )
            if hasattr(rotary, "_apply_scaling"):
                scaled = rotary._apply_scaling(plain, factor=factor)
                if not torch.allclose(scaled, frequencies):
                    name = f"rope-scaling=Llama 3 by {factor:g}"
                    changes[name] = partial(self._set_frequencies, scaled)
        return changes

    def _list_router(self) -> dict[str, Change]:
        """Return changes of the routers; empty for dense models."""
        routers = {
            self.scorer.names[0][name]: module
            for name, module in self.model.named_modules()
            if hasattr(module, "routing") and hasattr(module, "topk")
        }
        if not routers:
            return {}
        config = self.model.config
        changes: dict[str, Change] = {}
        if any(getattr(router, "expert_bias", None) is not None for router in routers.values()):
            changes["router-bias"] = partial(_zero_bias, list(routers.values()))
        if config.moe_router_score_function == "softmax":
            order = "after" if config.moe_router_pre_softmax else "before"
            value = not config.moe_router_pre_softmax
            changes[f"router-order={order}"] = partial(
                _set_config, self.model, "moe_router_pre_softmax", value
            )
        if config.moe_router_topk_scaling_factor not in (None, 1.0):
            changes["router-scale=1"] = partial(
                _set_config, self.model, "moe_router_topk_scaling_factor", None
            )
        if self.served.get(_choice_key(next(iter(routers)), 0)) is not None:
            changes[ROUTER_CHOICES] = partial(self._replay_choices, routers)
        return changes

    def _list_reported(self) -> dict[str, Change]:
        """Return changes of what is reported for the logits: other positions, temperatures, truncation, padding."""
        from megatron.training import get_args

        changes: dict[str, Change] = {}
        for offset in (0, 1, -1):
            name = "the trainer's labels are wrong" if offset == 0 else f"{offset:+d}"
            changes[f"labels={name}"] = partial(_shift_labels, offset)
        vocabulary = int(getattr(get_args(), "vocab_size", None) or 0)
        rows = int(get_args().padded_vocab_size) - vocabulary
        if vocabulary and rows > 0:
            changes[f"vocabulary-padding={rows} rows"] = partial(
                _edit_logits, partial(_mask_padding, vocabulary)
            )
        for temperature in TEMPERATURES:
            changes[f"temperature={temperature:g}"] = partial(
                _edit_logits, partial(_divide, temperature)
            )
        for count in TOP_K:
            changes[f"top-k={count}"] = partial(_edit_logits, partial(_keep_top_k, count))
        for probability in TOP_P:
            changes[f"top-p={probability:g}"] = partial(
                _edit_logits, partial(_keep_top_p, probability)
            )
        return changes

    def _list_precision(self) -> dict[str, Change]:
        """Return changes of dtypes, part by part and then of the whole model."""
        own = next(self.model.parameters()).dtype
        other = torch.bfloat16 if own is torch.float32 else torch.float32
        name = str(other).removeprefix("torch.")
        norms = [module for module in self.model.modules() if _find_epsilon_name(module)]
        changes: dict[str, Change] = {
            f"norm-precision={name}": partial(_compute_in, norms, other),
            f"logits-precision={name}": partial(_compute_in, [self.model.output_layer], other),
        }
        if self.model.config.num_moe_experts:
            routers = [module for module in self.model.modules() if hasattr(module, "routing")]
            changes[f"router-precision={name}"] = partial(_compute_in, routers, other)
        return changes

    @contextmanager
    def _shift_positions(self, first: int, offset: int, edits: PassEdits) -> Iterator[None]:
        """Add an offset to the positions of all tokens from the index `first` on."""
        edits.inputs.append(partial(_add_to_positions, self.model, first, offset))
        rotary = getattr(self.model, "rotary_pos_emb", None)
        if rotary is None:
            yield
            return

        def shift(module: Any, _: Any, output: Any) -> Any:
            emb = output[0] if isinstance(output, tuple) else output
            positions = torch.arange(len(emb)).float()
            positions[first:] += offset
            shifted = _make_rotary(module.inv_freq, positions, emb)
            return (shifted, *output[1:]) if isinstance(output, tuple) else shifted

        handle = rotary.register_forward_hook(shift)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _set_frequencies(self, frequencies: Tensor, edits: PassEdits) -> Iterator[None]:  # noqa: ARG002
        """Give the rotary embedding other frequencies."""

        def replace(_: Any, __: Any, output: Any) -> Any:
            emb = output[0] if isinstance(output, tuple) else output
            made = _make_rotary(frequencies, torch.arange(len(emb)).float(), emb)
            return (made, *output[1:]) if isinstance(output, tuple) else made

        handle = self.model.rotary_pos_emb.register_forward_hook(replace)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def _replay_choices(self, routers: dict[str, Any], edits: PassEdits) -> Iterator[None]:  # noqa: ARG002
        """Let the routers choose the experts that the serving engine chose."""
        with capture_routing(self.scorer.chunks, self.scorer.names, ServedChoices(self.served)):
            yield


def _choice_key(router: str, micro_batch: int) -> TensorKey:
    """Return the key of a router's choice in a capture."""
    return TensorKey(CaptureStage.OUTPUTS, router, CHOICE, micro_batch)


def _find_epsilon_name(module: Any) -> str | None:
    """Return the name of a norm's epsilon; None for other modules."""
    if "norm" not in type(module).__name__.lower():
        return None
    return next((name for name in _EPSILON_NAMES if hasattr(module, name)), None)


@contextmanager
def _set_epsilon(norms: list[Any], epsilon: float, edits: PassEdits) -> Iterator[None]:  # noqa: ARG001
    """Give all norms another epsilon."""
    names = [str(_find_epsilon_name(norm)) for norm in norms]
    before = [getattr(norm, name) for norm, name in zip(norms, names, strict=True)]
    for norm, name in zip(norms, names, strict=True):
        setattr(norm, name, epsilon)
    try:
        yield
    finally:
        for norm, name, value in zip(norms, names, before, strict=True):
            setattr(norm, name, value)


@contextmanager
def _replace_weights(pairs: list[tuple[Tensor, Tensor]], edits: PassEdits) -> Iterator[None]:  # noqa: ARG001
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
def _bypass(modules: list[Any], edits: PassEdits) -> Iterator[None]:  # noqa: ARG001
    """Let modules return their input."""
    handles = [module.register_forward_hook(lambda _, args, __: args[0]) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _set_config(model: Any, name: str, value: object, edits: PassEdits) -> Iterator[None]:  # noqa: ARG001
    """Set a field of the model's config, which all modules share."""
    with patch.object(model.config, name, value):
        yield


@contextmanager
def _set_activation(model: Any, activation: Any, edits: PassEdits) -> Iterator[None]:  # noqa: ARG001
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
def _zero_bias(routers: list[Any], edits: PassEdits) -> Iterator[None]:  # noqa: ARG001
    """Set the bias of all routers to 0."""
    biases = [router.expert_bias for router in routers]
    pairs = [(bias, torch.zeros_like(bias)) for bias in biases]
    with _replace_weights(pairs, PassEdits()):
        yield


def _has_dropout(module: Any) -> bool:
    """Return True for a dropout that would drop elements now."""
    return isinstance(module, torch.nn.Dropout) and module.training and module.p > 0


@contextmanager
def _switch_dropout_off(model: Any, edits: PassEdits) -> Iterator[None]:  # noqa: ARG001
    """Score in evaluation mode."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _compute_in(modules: list[Any], dtype: torch.dtype, edits: PassEdits) -> Iterator[None]:  # noqa: ARG001
    """Let modules compute in another dtype: their weights and inputs are cast, and their outputs are cast back."""
    weights = list(dict.fromkeys(p for module in modules for p in module.parameters()))
    before = [weight.data for weight in weights]
    handles = []
    for weight in weights:
        weight.data = weight.data.to(dtype)
    own = before[0].dtype if before else torch.float32

    def cast_in(_: Any, args: tuple[Any, ...], kwargs: Inputs) -> tuple[tuple[Any, ...], Inputs]:
        cast = partial(_cast, dtype)
        return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}

    def cast_out(_: Any, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return tuple(_cast(own, value) for value in output)
        return _cast(own, output)

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


def _cast(dtype: torch.dtype, value: Any) -> Any:
    """Return a floating-point tensor in another dtype, and any other value as it is."""
    is_float = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_float else value


@contextmanager
def _double_first_token(edits: PassEdits) -> Iterator[None]:
    """Put the first token of each sequence before the sequence once more, and score the tokens after it."""

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
def _attend_everywhere(edits: PassEdits) -> Iterator[None]:
    """Let every token attend to all tokens before it, across documents."""

    def replace(inputs: Inputs) -> Inputs:
        length = inputs["input_ids"].shape[1]
        positions = torch.arange(length).expand_as(inputs["input_ids"])
        mask = ~torch.ones(length, length).tril().bool()
        return {**inputs, "attention_mask": mask[None, None], "position_ids": positions}

    edits.inputs.append(replace)
    yield


@contextmanager
def _attend_within_documents(end_of_document: int, edits: PassEdits) -> Iterator[None]:
    """Let every token attend only to tokens of its own document, which the token `end_of_document` ends."""

    def replace(inputs: Inputs) -> Inputs:
        is_end = inputs["input_ids"] == end_of_document
        document = is_end.cumsum(1) - is_end.long()
        is_other = document[:, None, :, None] != document[:, None, None, :]
        length = is_end.shape[1]
        is_later = ~torch.ones(length, length).tril().bool()
        return {**inputs, "attention_mask": is_other | is_later}

    edits.inputs.append(replace)
    yield


@contextmanager
def _shift_labels(offset: int, edits: PassEdits) -> Iterator[None]:
    """Report the log probability of the token `offset` positions after the next token; 0 is the next token."""

    def shift(inputs: Inputs) -> Inputs:
        tokens = inputs["input_ids"]
        return {**inputs, "labels": torch.roll(tokens, -1 - offset, dims=1)}

    edits.inputs.append(shift)
    yield


@contextmanager
def _edit_logits(edit: Callable[[Tensor], Tensor], edits: PassEdits) -> Iterator[None]:
    """Change the logits before log probabilities are computed."""
    edits.logits.append(edit)
    yield


def _divide(temperature: float, logits: Tensor) -> Tensor:
    """Return the logits over a temperature."""
    return logits / temperature


def _mask_padding(vocabulary: int, logits: Tensor) -> Tensor:
    """Return the logits with those of the vocabulary's padding at minus infinity, nearly."""
    masked = logits.clone()
    masked[..., vocabulary:] = torch.finfo(logits.dtype).min
    return masked


def _keep_top_k(count: int, logits: Tensor) -> Tensor:
    """Return the logits with all but the `count` largest per position at minus infinity, nearly."""
    if count >= logits.shape[-1]:
        return logits
    least = logits.topk(count, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, torch.finfo(logits.dtype).min)


def _keep_top_p(probability: float, logits: Tensor) -> Tensor:
    """Return the logits with those outside of the smallest set of this probability at minus infinity, nearly."""
    ordered, indices = logits.sort(dim=-1, descending=True)
    shares = ordered.float().softmax(-1)
    is_outside = shares.cumsum(-1) - shares > probability
    outside = torch.zeros_like(is_outside).scatter(-1, indices, is_outside)
    return logits.masked_fill(outside, torch.finfo(logits.dtype).min)


def _add_to_positions(model: Any, first: int, offset: int, inputs: Inputs) -> Inputs:
    """Return the inputs with an offset added to the learned positions from the index `first` on."""
    positions = inputs["position_ids"].clone()
    positions[:, first:] += offset
    embedding = getattr(getattr(model, "embedding", None), "position_embeddings", None)
    if embedding is not None:
        positions.clamp_(0, embedding.weight.shape[0] - 1)
    return {**inputs, "position_ids": positions}


def _compute_frequencies(num_channels: int, base: float) -> Tensor:
    """Return the frequencies of a rotary embedding without scaling."""
    exponents = torch.arange(0, num_channels, 2).float() / num_channels
    return 1.0 / base**exponents


def _make_rotary(frequencies: Tensor, positions: Tensor, like: Tensor) -> Tensor:
    """Return the rotary embedding of positions, in the form of `like` [positions, 1, 1, channels]."""
    angles = torch.outer(positions, frequencies.float())
    return torch.cat((angles, angles), dim=-1).view(like.shape).to(like.dtype)
