"""Hooks on the model's modules that hand each tensor, under Megatron's name and in its order, to a sink.

`_POINTS` is the whole correspondence: what modules take and give, as Megatron's modules and slots.
Megatron has the sequence first, keeps the biases of output projections apart, and orders an expert's
rows by its own order of tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from parakit.artifacts.capture import Site, Stage
from parakit.capturing import Sink, tap
from parakit.native.batches import MicroBatch
from parakit.native.model import MixtureOfExperts
from parakit.native.weights import IN_LAYER_PATTERN, megatron_name

Form = Callable[[Tensor], Tensor]
"""Brings a tensor, or its gradient, into Megatron's order."""


def sequence_first(tensor: Tensor) -> Tensor:
    """[batch, sequence, …] as [sequence, batch, …]."""
    return tensor.transpose(0, 1)


@dataclass(frozen=True)
class ModuleSlots:
    """A module of Megatron's: the slots of what it takes, argument by argument, and gives."""

    takes: tuple[str, ...] = ()
    """`*` is the argument's name in the module of this backend."""
    gives: str = ""
    bias_apart: bool = False
    """Megatron gives the product alone and adds the bias elsewhere."""
    is_last: bool = False
    """What it gives is what the module around it gives."""
    form: Form = sequence_first


_NORM, _LINEAR = ModuleSlots(("*",), "output"), ModuleSlots(("input_",), "output.0")
_POINTS = {
    "word_embeddings": ModuleSlots(("input_",), "output", form=lambda tensor: tensor),
    "layers.N": ModuleSlots(("hidden_states",), "output.0"),
    "input_layernorm": _NORM,
    "self_attention": ModuleSlots(("hidden_states",)),
    "linear_qkv": _LINEAR,
    # [batch, heads, sequence, width] as [sequence, batch, heads, width].
    "core_attention": ModuleSlots(("*",) * 3, form=lambda tensor: tensor.permute(2, 0, 1, 3)),
    "linear_proj": replace(_LINEAR, bias_apart=True, is_last=True),
    "pre_mlp_layernorm": _NORM,
    "mlp": ModuleSlots(("hidden_states",)),
    "router": ModuleSlots(("*",)),
    "local_experts.N": ModuleSlots(("hidden_states",)),
    "linear_fc1": replace(_LINEAR, bias_apart=True),
    "linear_fc2": replace(_LINEAR, bias_apart=True, is_last=True),
    "final_layernorm": replace(_NORM, is_last=True),
    "output_layer": _LINEAR,
}
_ENTRY = (
    "embedding.embedding_dropout input.input",
    "embedding.embedding_dropout output",
    "embedding output",
    "decoder input.hidden_states",
)
"""What the first layer takes is more than its own input."""


def find_module_slots(whole: str) -> ModuleSlots | None:
    """What a module is, by the last part of Megatron's name."""
    *_, around, own = ("", *whole.split("."))
    return _POINTS.get(f"{around}.N" if own.isdigit() else own)


@dataclass
class Taps:
    """Hooks for the passes of one iteration."""

    model: nn.Module
    sink: Sink
    batches: Sequence[MicroBatch]
    _number: int = -1
    _rows: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Of a layer's expert: its rows in the order of Megatron's tokens, in this micro batch."""
    _handles: list[Any] = field(default_factory=list)

    def __enter__(self) -> Taps:
        self._handles.append(self.model.register_forward_pre_hook(self._begin))
        for name, module in self.model.named_modules():
            self._attach(name, module)
        self._handles.append(self.model.register_forward_hook(self._end))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _attach(self, name: str, module: nn.Module) -> None:
        if name == "position_embeddings":
            self._handles.append(module.register_forward_hook(self._positions))
        if isinstance(module, MixtureOfExperts):
            layer = int(name.split(".")[1])
            routed = partial(self._routed, layer, module)
            self._handles.append(module.router.register_forward_hook(routed))
        if (place := self.place(name, module)) is None:
            return
        whole, point = place
        takes, gives = _names(whole, point, module)

        def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            pairs = zip(args, takes, strict=False)
            tapped = [self._tap(value, names, point.form) for value, names in pairs]
            return (*tapped, *args[len(tapped) :])

        def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            value = output.detach()
            if point.bias_apart and isinstance(module, nn.Linear) and module.bias is not None:
                value = linear(args[0].detach(), module.weight.detach())
            return self._tap(output, gives, point.form, value)

        self._handles.append(module.register_forward_pre_hook(before))
        if gives:
            self._handles.append(module.register_forward_hook(after))

    def place(self, name: str, module: nn.Module) -> tuple[str, ModuleSlots] | None:
        """Megatron's name of a module, and what it is there; None where it is nothing."""
        whole = megatron_name(name)
        point, in_layer = find_module_slots(whole), IN_LAYER_PATTERN.fullmatch(whole)
        if point is None:
            return None
        if isinstance(module, MixtureOfExperts):
            point = replace(point, gives="output.0")
        elif whole.endswith(".router"):
            point = replace(point, form=self._by_token)
        elif in_layer and in_layer[2]:
            # Megatron multiplies by the router's weight before the second matrix, this backend after it.
            if in_layer[3] == "linear_fc2":
                return None
            by_row = partial(self._by_row, int(in_layer[1]), int(in_layer[2]))
            point = replace(point, form=by_row)
        return whole, point

    def _tap(
        self, tensor: Tensor, names: Sequence[str], form: Form, value: Tensor | None = None
    ) -> Tensor:
        """`tap` under Megatron's names."""
        sites = [
            (self._site(Stage.OUTPUTS, name), self._site(Stage.ACTIVATION_GRADIENTS, name))
            for name in names
        ]
        return tap(self.sink, tensor, sites, lambda one: form(one).contiguous(), value)

    def _site(self, stage: Stage, name: str) -> Site:
        module, _, slot = name.partition(" ")
        return Site(stage, module, slot, self._number)

    def _begin(self, _: nn.Module, args: tuple[Tensor]) -> None:
        self._number += 1
        self.sink.begin_micro_batch()
        tokens, labels = args[0], self.batches[self._number][1]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
        inputs = {"input_ids": tokens, "position_ids": positions, "labels": labels}
        for slot, values in inputs.items():
            self.sink.forward(self._site(Stage.INPUTS, f"model input.{slot}"), values)

    def _end(self, _: nn.Module, __: object, logits: Tensor) -> None:
        labels = self.batches[self._number][1]
        losses = cross_entropy(logits.detach().flatten(0, 1), labels.flatten(), reduction="none")
        values = {
            "of each token": losses.view_as(labels),
            "sum": losses.sum(),
            "tokens": torch.tensor(labels.numel(), dtype=torch.int32),
        }
        for slot, value in values.items():
            self.sink.write(self._site(Stage.LOSS, f"loss {slot}"), value)

    def _positions(self, _: nn.Module, __: object, output: Tensor) -> None:
        """One row a position; Megatron has one a sample and position."""
        samples = self.batches[self._number][0].shape[0]
        site = self._site(Stage.OUTPUTS, "embedding.position_embeddings output")
        self.sink.forward(site, output.detach().expand(samples, -1, -1).contiguous())

    def _routed(
        self, layer: int, mixture: MixtureOfExperts, _: nn.Module, __: object, logits: Tensor
    ) -> None:
        """The choice of experts: what the router of Megatron gives, and each expert's rows."""
        top, experts = logits.detach().float().topk(mixture.chosen, dim=-1)
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        weights = torch.zeros_like(logits).detach().scatter(1, experts, top.softmax(dim=-1))
        # Of each token, samples first, its place with the sequence first.
        samples, length = self.batches[self._number][0].shape
        places = torch.arange(samples * length).view(length, samples).t().reshape(-1)
        for expert in range(mixture.count):
            self._rows[layer, expert] = places[chosen[:, expert]].argsort()
        for index, value in enumerate((weights, chosen)):
            name = f"decoder.layers.{layer}.mlp.router output.{index}"
            ordered = torch.empty_like(value)
            ordered[places] = value
            self.sink.forward(self._site(Stage.OUTPUTS, name), ordered)

    def _by_token(self, tensor: Tensor) -> Tensor:
        samples, length = self.batches[self._number][0].shape
        return sequence_first(tensor.view(samples, length, -1))

    def _by_row(self, layer: int, expert: int, tensor: Tensor) -> Tensor:
        return tensor[self._rows[layer, expert]]


def _names(whole: str, point: ModuleSlots, module: nn.Module) -> tuple[list[list[str]], list[str]]:
    """Megatron's `module slot` of each argument and of the output, several where they are the same."""
    own = inspect.signature(module.forward).parameters
    slots = zip(point.takes, own, strict=False)
    takes = [[f"{whole} input.{slot.replace('*', argument)}"] for slot, argument in slots]
    around = whole.rpartition(".")[0]
    if whole == "decoder.layers.0":
        takes[0][:0] = _ENTRY
    elif whole.endswith(".linear_proj"):
        takes[0][:0] = [f"{around}.core_attention output"]
    gives = (whole, around) if point.is_last else (whole,)
    return takes, [f"{one} {point.gives}" for one in gives if point.gives]
