"""Changes of one thing at a time in Megatron's model on one rank, each as a context in which tokens are scored.

A change says nothing about which engine is wrong. If the bridge computes what the serving engine computes once the
epsilon of its norms is 1e-5, the engines have different epsilons.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

from megatron_patches.capture.routing import capture_routing
from megatron_patches.logprob.changes import (
    add_to_positions,
    attend_everywhere,
    attend_within_documents,
    bypass_modules,
    compute_frequencies,
    compute_in_dtype,
    compute_router_logits_in,
    divide_by_temperature,
    double_first_token,
    edit_logits,
    find_epsilon_name,
    find_frequencies,
    has_dropout,
    keep_top_k,
    keep_top_p,
    make_rotary,
    mask_padding,
    replace_rotary,
    replace_weights,
    set_activation,
    set_config,
    set_epsilon,
    shift_labels,
    switch_dropout_off,
    zero_router_bias,
)
from megatron_patches.logprob.choices import ServedChoices
from megatron_patches.logprob.passes import PassEdits
from megatron_patches.logprob.scorer import Scorer
from parakit.artifacts.capture import (
    CHOICE,
    INDEX_FILE,
    START_WEIGHT,
    CaptureStage,
    Placement,
    TensorKey,
    read_index,
)
from parakit.capturing import StoredTensors

Change = Callable[[PassEdits], AbstractContextManager[None]]
"""Function that returns the context in which a change is in effect, and that adds edits of the pass."""

EPSILONS = (1e-3, 1e-5, 1e-6, 1e-8, 1e-12)
"""Epsilons of norms that are tried. The constants below list the tried values of other settings."""
ROTARY_BASES = (1e4, 5e5, 1e6)
ROTARY_FACTORS = (2.0, 4.0, 8.0)
TEMPERATURES = tuple(tenths / 10 for tenths in range(5, 21) if tenths != 10)
"""Temperatures that are tried: 0.5 to 2.0 without 1.0, which changes nothing."""
TOP_K, TOP_P = (10, 20, 50, 100), (0.8, 0.9, 0.95, 0.99)
ROUTER_CHOICES = "router-choices"
"""Hypothesis that the routers of the two engines choose different experts."""


@dataclass(frozen=True)
class Bridge:
    """The model on one rank, and what is known of the serving engine."""

    scorer: Scorer
    served: StoredTensors | None
    """Capture of the serving engine, which may lack weights and choices; None if it wrote none."""
    prompt_tokens: int
    weight_keys: Mapping[tuple[object, ...], TensorKey]
    """Keys of the served weights by their position in checkpoints, which both engines share."""

    @classmethod
    def open(cls, scorer: Scorer, capture: Path, prompt_tokens: int) -> Self:
        """Return the bridge, with the capture of the serving engine in the folder `capture`, which may be missing."""
        if not (capture / INDEX_FILE).is_file():
            return cls(scorer, None, prompt_tokens, {})
        keys = {
            _get_checkpoint_position(record.placement): record.tensor_key
            for record in read_index(capture)
            if record.placement is not None and record.tensor_key.slot == START_WEIGHT
        }
        return cls(scorer, StoredTensors(capture), prompt_tokens, keys)

    @property
    def model(self) -> Any:
        """Megatron's model, without wrappers."""
        return self.scorer.chunks[0]

    def list_changes(self) -> dict[str, Change]:
        """Return all changes that can apply to this model by hypothesis, specific changes before general changes."""
        changes: dict[str, Change] = {}
        for collect in (
            self._list_weights,
            self._list_semantics,
            self._list_rotary,
            self._list_router,
            self._list_labels_and_logits,
            self._list_precision,
        ):
            changes |= collect()
        return changes

    def _list_weights(self) -> dict[str, Change]:
        """Return the change that takes the serving engine's weights where they differ; empty if none differs."""
        differing = dict(self._find_differing_weights()) if self.served is not None else {}
        if not differing:
            return {}
        names = ", ".join(list(differing)[:3])
        if len(differing) > 3:
            names += f" and {len(differing) - 3} more"
        return {f"weights={names}": partial(replace_weights, list(differing.values()))}

    def _find_differing_weights(self) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
        """Yield the name of each weight that differs in the serving engine, the weight, and the served values.

        Rows of the vocabulary that only one engine has are not compared.
        """
        for parameter in self.scorer.parameters.parameters:
            for piece in self.scorer.parameters.pieces(parameter, parameter.data):
                served_key = self.weight_keys.get(_get_checkpoint_position(piece.placement))
                stored = self.served.get(served_key) if self.served and served_key else None
                if stored is None or stored.shape[1:] != piece.values.shape[1:]:
                    continue
                rows = min(len(stored), len(piece.values))
                values = stored[:rows].to(piece.values.dtype)
                if not torch.equal(values, piece.values[:rows]):
                    yield piece.name, (piece.values[:rows], values.clone())

    def _list_semantics(self) -> dict[str, Change]:
        """Return changes of norms, activations, positions, masks and dropout."""
        changes: dict[str, Change] = {}
        norms = [module for module in self.model.modules() if find_epsilon_name(module)]
        for epsilon in EPSILONS:
            if any(getattr(norm, str(find_epsilon_name(norm))) != epsilon for norm in norms):
                changes[f"norm-epsilon={epsilon:g}"] = partial(set_epsilon, norms, epsilon)
        for offset in (1, -1):
            changes[f"cache-positions={offset:+d}"] = partial(
                self._shift_positions, self.prompt_tokens, offset
            )
            changes[f"positions={offset:+d}"] = partial(self._shift_positions, 0, offset)
        changes["first-token-doubled"] = double_first_token
        query_norms = [
            module
            for name, module in self.model.named_modules()
            if name.endswith(("q_layernorm", "k_layernorm")) and find_epsilon_name(module)
        ]
        if query_norms:
            changes["qk-norm"] = partial(bypass_modules, query_norms)
        changes |= self._list_activations()
        changes |= self._list_documents()
        if any(has_dropout(module) for module in self.model.modules()):
            changes["dropout"] = partial(switch_dropout_off, self.model)
        return changes

    def _list_activations(self) -> dict[str, Change]:
        """Return changes of the MLPs' activation, for models with GELU."""
        config = self.model.config
        if config.gated_linear_unit or config.activation_func is not functional.gelu:
            return {}
        # The fused kernel of bias and GELU already computes the approximation with tanh.
        if config.bias_activation_fusion:
            return {
                "activation=GELU with erf": partial(set_activation, self.model, functional.gelu)
            }
        gelu_with_tanh = partial(functional.gelu, approximate="tanh")
        return {"activation=GELU with tanh": partial(set_activation, self.model, gelu_with_tanh)}

    def _list_documents(self) -> dict[str, Change]:
        """Return the change of the mask between the documents of a packed sequence."""
        from megatron.training import get_args, get_tokenizer

        if get_args().reset_attention_mask:
            return {"documents=together": attend_everywhere}
        return {"documents=apart": partial(attend_within_documents, int(get_tokenizer().eod))}

    def _list_rotary(self) -> dict[str, Change]:
        """Return changes of the rotary embedding; empty for models without one."""
        rotary = getattr(self.model, "rotary_pos_emb", None)
        frequencies = find_frequencies(rotary)
        if rotary is None or frequencies is None:
            return {}
        changes: dict[str, Change] = {}
        num_channels = 2 * len(frequencies)
        own_base = float(self.model.rotary_base)
        unscaled = compute_frequencies(num_channels, own_base)
        if not torch.allclose(unscaled, frequencies):
            changes["rope-scaling=none"] = partial(self._set_frequencies, unscaled)
        for base in ROTARY_BASES:
            if base != own_base:
                values = compute_frequencies(num_channels, base)
                changes[f"rope-base={base:g}"] = partial(self._set_frequencies, values)
        for factor in ROTARY_FACTORS:
            changes[f"rope-scaling=linear by {factor:g}"] = partial(
                self._set_frequencies, unscaled / factor
            )
            if hasattr(rotary, "_apply_scaling"):
                scaled = rotary._apply_scaling(unscaled, factor=factor)
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
            changes["router-bias"] = partial(zero_router_bias, list(routers.values()))
        if config.moe_router_score_function == "softmax":
            order = "after" if config.moe_router_pre_softmax else "before"
            value = not config.moe_router_pre_softmax
            changes[f"router-order={order}"] = partial(
                set_config, self.model, "moe_router_pre_softmax", value
            )
        if config.moe_router_topk_scaling_factor not in (None, 1.0):
            changes["router-scale=1"] = partial(
                set_config, self.model, "moe_router_topk_scaling_factor", None
            )
        served = self.served
        if served is not None and served.get(_make_choice_key(next(iter(routers)), 0)) is not None:
            changes[ROUTER_CHOICES] = partial(self._replay_choices, served)
        return changes

    def _list_labels_and_logits(self) -> dict[str, Change]:
        """Return changes of labels and logits: position, padding of the vocabulary, temperature, top-k and top-p."""
        from megatron.training import get_args

        changes: dict[str, Change] = {}
        for offset in (0, 1, -1):
            name = "the trainer's labels are wrong" if offset == 0 else f"{offset:+d}"
            changes[f"labels={name}"] = partial(shift_labels, offset)
        vocabulary = int(getattr(get_args(), "vocab_size", None) or 0)
        rows = int(get_args().padded_vocab_size) - vocabulary
        if vocabulary and rows > 0:
            changes[f"vocabulary-padding={rows} row{'s' * (rows > 1)}"] = partial(
                edit_logits, partial(mask_padding, vocabulary)
            )
        for temperature in TEMPERATURES:
            changes[f"temperature={temperature:g}"] = partial(
                edit_logits, partial(divide_by_temperature, temperature)
            )
        for count in TOP_K:
            changes[f"top-k={count}"] = partial(edit_logits, partial(keep_top_k, count))
        for probability in TOP_P:
            changes[f"top-p={probability:g}"] = partial(
                edit_logits, partial(keep_top_p, probability)
            )
        return changes

    def _list_precision(self) -> dict[str, Change]:
        """Return the changes that let norms, the output layer or routers compute in another dtype."""
        own_dtype = next(self.model.parameters()).dtype
        other = torch.bfloat16 if own_dtype is torch.float32 else torch.float32
        name = str(other).removeprefix("torch.")
        norms = [module for module in self.model.modules() if find_epsilon_name(module)]
        changes: dict[str, Change] = {
            f"norm-precision={name}": partial(compute_in_dtype, norms, other),
            f"logits-precision={name}": partial(compute_in_dtype, [self.model.output_layer], other),
        }
        if self.model.config.num_moe_experts:
            routers = [module for module in self.model.modules() if hasattr(module, "routing")]
            changes[f"router-precision={name}"] = partial(compute_router_logits_in, routers, other)
        return changes

    @contextmanager
    def _shift_positions(self, first: int, offset: int, edits: PassEdits) -> Iterator[None]:
        """Add an offset to the positions of all tokens from the index `first` on."""
        edits.inputs.append(partial(add_to_positions, self.model, first, offset))
        rotary = getattr(self.model, "rotary_pos_emb", None)
        frequencies = find_frequencies(rotary)
        if rotary is None or frequencies is None:
            yield
            return

        def shift(embedding: Tensor) -> Tensor:
            positions = torch.arange(len(embedding)).float()
            positions[first:] += offset
            return make_rotary(frequencies, positions, embedding)

        with replace_rotary(rotary, shift):
            yield

    @contextmanager
    def _set_frequencies(self, frequencies: Tensor, edits: PassEdits) -> Iterator[None]:  # noqa: ARG002
        """Give the rotary embedding other frequencies."""

        def scale(embedding: Tensor) -> Tensor:
            return make_rotary(frequencies, torch.arange(len(embedding)).float(), embedding)

        with replace_rotary(self.model.rotary_pos_emb, scale):
            yield

    @contextmanager
    def _replay_choices(self, served: StoredTensors, edits: PassEdits) -> Iterator[None]:  # noqa: ARG002
        """Let the routers choose the experts that the serving engine chose."""
        with capture_routing(self.scorer.chunks, self.scorer.names, ServedChoices(served)):
            yield


def _get_checkpoint_position(placement: Placement | None) -> tuple[object, ...]:
    """Return the position of a weight in checkpoints: the name of the full parameter, and the first index."""
    assert placement is not None
    return (placement.key, placement.global_offset)


def _make_choice_key(router: str, micro_batch: int) -> TensorKey:
    """Return the key of a router's choice in a capture."""
    return TensorKey(CaptureStage.OUTPUTS, router, CHOICE, micro_batch)
