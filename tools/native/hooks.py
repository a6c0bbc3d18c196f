"""Hooks on the model's modules that hand each tensor, under Megatron's name and in its order, to a sink.

`POINTS` is the whole correspondence: what a module of this backend takes and gives, as Megatron's
modules and slots. Megatron has the sequence first, keeps the biases of output projections apart, and
orders an expert's rows by its own order of tokens.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from tools.capture.sinks import Sink, tap
from tools.native.batches import MicroBatch
from tools.native.model import MixtureOfExperts
from tools.native.weights import EXPERT, LAYER
from tools.records.capture import Site, Stage

Form = Callable[[Tensor], Tensor]
"""Brings a tensor, or its gradient, into Megatron's order."""


@dataclass(frozen=True)
class Point:
    """What a module takes, argument by argument, and gives: Megatron's `module slot`, in its order."""

    takes: tuple[tuple[str, ...], ...] = ()
    gives: tuple[str, ...] = ()
    bias_apart: bool = False
    """Megatron gives the product alone and adds the bias elsewhere."""


POINTS = {
    "word_embeddings": Point(
        (("embedding.word_embeddings input.input_",),), ("embedding.word_embeddings output",)
    ),
    "norm": Point(
        (("decoder.final_layernorm input.*",),),
        ("decoder.final_layernorm output", "decoder output"),
    ),
    "output_layer": Point((("output_layer input.input_",),), ("output_layer output.0",)),
}
ENTRY = (
    "embedding.embedding_dropout input.input",
    "embedding.embedding_dropout output",
    "embedding output",
    "decoder input.hidden_states",
)
"""What the first layer takes is more than its own input."""

_CORE = "self_attention.core_attention"
IN_LAYER = {
    "": Point(((" input.hidden_states",),), (" output.0",)),
    "norm1": Point((("input_layernorm input.*",),), ("input_layernorm output",)),
    "attention": Point((("self_attention input.hidden_states",),)),
    "attention.qkv": Point(
        (("self_attention.linear_qkv input.input_",),), ("self_attention.linear_qkv output.0",)
    ),
    "attention.core": Point(
        ((f"{_CORE} input.query",), (f"{_CORE} input.key",), (f"{_CORE} input.value",))
    ),
    "attention.proj": Point(
        ((f"{_CORE} output", "self_attention.linear_proj input.input_"),),
        ("self_attention.linear_proj output.0", "self_attention output.0"),
        bias_apart=True,
    ),
    "norm2": Point((("pre_mlp_layernorm input.*",),), ("pre_mlp_layernorm output",)),
    "mlp": Point((("mlp input.hidden_states",),)),
    "mlp.fc1": Point(
        (("mlp.linear_fc1 input.input_",),), ("mlp.linear_fc1 output.0",), bias_apart=True
    ),
    "mlp.fc2": Point(
        (("mlp.linear_fc2 input.input_",),),
        ("mlp.linear_fc2 output.0", "mlp output.0"),
        bias_apart=True,
    ),
    "mlp.router": Point((("mlp.router input.input",),)),
}
_MIXTURE = Point((("mlp input.hidden_states",),), ("mlp output.0",))
_IN_EXPERT = {
    "": Point(((" input.hidden_states",),)),
    # Megatron multiplies by the router's weight before the second matrix, this backend after it.
    "fc1": Point((("linear_fc1 input.input_",),), ("linear_fc1 output.0",), bias_apart=True),
}


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
        point, form = self.point(name, module)
        if point is None:
            return
        own = f"input.{_argument(module)}"
        takes = [[n.replace("input.*", own) for n in names] for names in point.takes]

        def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            pairs = zip(args, takes, strict=False)
            tapped = [self._tap(value, names, form) for value, names in pairs]
            return (*tapped, *args[len(tapped) :])

        def after(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            value = output.detach()
            if point.bias_apart and isinstance(module, nn.Linear) and module.bias is not None:
                value = linear(args[0].detach(), module.weight.detach())
            return self._tap(output, point.gives, form, value)

        self._handles.append(module.register_forward_pre_hook(before))
        if point.gives:
            self._handles.append(module.register_forward_hook(after))

    def point(self, name: str, module: nn.Module) -> tuple[Point | None, Form]:
        """What a module is of Megatron's, with whole names, and the form of its tensors."""
        in_layer = LAYER.fullmatch(name)
        if in_layer is None:
            return POINTS.get(name), as_it_is if name == "word_embeddings" else sequence_first
        layer, rest = int(in_layer[1]), in_layer[2]
        prefix, form = f"decoder.layers.{layer}", sequence_first
        point = _MIXTURE if isinstance(module, MixtureOfExperts) else IN_LAYER.get(rest)
        if rest == "attention.core":
            form = _heads_last
        elif rest == "mlp.router":
            form = self._by_token
        elif in_expert := EXPERT.fullmatch(rest):
            expert = int(in_expert[1])
            prefix += f".mlp.experts.local_experts.{expert}"
            point = _IN_EXPERT.get(in_expert[2])
            form = partial(self._by_row, layer, expert)
        whole = prefixed(point, prefix) if point else None
        if whole and name == "blocks.0":
            whole = Point((ENTRY + whole.takes[0],), whole.gives)
        return whole, form

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


def prefixed(point: Point, prefix: str) -> Point:
    """The point of a module that lies in another one."""

    def whole(name: str) -> str:
        return f"{prefix}{name}" if name.startswith(" ") else f"{prefix}.{name}"

    takes = tuple(tuple(map(whole, names)) for names in point.takes)
    return Point(takes, tuple(map(whole, point.gives)), point.bias_apart)


def _argument(module: nn.Module) -> str:
    """Name of the first argument of a module's forward pass, which is a part of Megatron's slot."""
    return next(iter(inspect.signature(module.forward).parameters))


def as_it_is(tensor: Tensor) -> Tensor:
    """Megatron's order already."""
    return tensor


def sequence_first(tensor: Tensor) -> Tensor:
    """[batch, sequence, …] as [sequence, batch, …]."""
    return tensor.transpose(0, 1)


def _heads_last(tensor: Tensor) -> Tensor:
    """[batch, heads, sequence, width] as [sequence, batch, heads, width]."""
    return tensor.permute(2, 0, 1, 3)
