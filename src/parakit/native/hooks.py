"""Attach hooks to the model's modules that pass each tensor to a sink, under Megatron's name and in its order.

`_SLOTS_BY_MODULE` is the whole correspondence between both models: it has Megatron's slots for the inputs and the
output of each module. Megatron's tensors differ in three ways, which the hooks undo. The sequence is the first
dimension. Output projections return the product without the bias. The rows of an expert are in the order of
Megatron's tokens.
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

from parakit.artifacts.capture import CaptureStage, TensorKey
from parakit.capturing import Sink, tap
from parakit.native.batches import MicroBatch
from parakit.native.model import MixtureOfExperts
from parakit.native.weights import IN_LAYER_PATTERN, megatron_name

Form = Callable[[Tensor], Tensor]
"""Function that brings a tensor, or its gradient, into Megatron's order."""


def sequence_first(tensor: Tensor) -> Tensor:
    """Return a tensor [batch, sequence, …] as [sequence, batch, …]."""
    return tensor.transpose(0, 1)


@dataclass(frozen=True)
class ModuleSlots:
    """The slots of one kind of Megatron's modules: the names that its inputs and its output have in captures."""

    takes: tuple[str, ...] = ()
    """Slot of each positional argument, without `input.`; `*` is the argument's name in this backend.

    Further arguments are not captured.
    """
    gives: str = ""
    """Slot of the output; if empty, the output is not captured."""
    bias_apart: bool = False
    """True if Megatron's module returns the product alone, and Megatron adds the bias elsewhere."""
    is_last: bool = False
    """True if the output of this module is also the output of the module around it."""
    form: Form = sequence_first


_NORM = ModuleSlots(("*",), "output")
_LINEAR = ModuleSlots(("input_",), "output.0")
_SLOTS_BY_MODULE = {
    "word_embeddings": ModuleSlots(("input_",), "output", form=lambda tensor: tensor),
    "layers.N": ModuleSlots(("hidden_states",), "output.0"),
    "input_layernorm": _NORM,
    "self_attention": ModuleSlots(("hidden_states",)),
    "linear_qkv": _LINEAR,
    # [batch, heads, sequence, width] becomes [sequence, batch, heads, width].
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
"""Slots by the last part of Megatron's module name; N stands for a number."""
_FIRST_LAYER_INPUT_SITES = (
    "embedding.embedding_dropout input.input",
    "embedding.embedding_dropout output",
    "embedding output",
    "decoder input.hidden_states",
)
"""Further `module slot` names of the first layer's input: Megatron has modules between the embedding
and the first layer that this backend does not have."""


def find_module_slots(whole: str) -> ModuleSlots | None:
    """Return the slots of a module by its full name in Megatron; None if the module is not captured."""
    *_, parent, last_part = ("", *whole.split("."))
    return _SLOTS_BY_MODULE.get(f"{parent}.N" if last_part.isdigit() else last_part)


@dataclass
class Taps:
    """Context in which hooks pass the activations and gradients of one iteration to a sink."""

    model: nn.Module
    sink: Sink
    batches: Sequence[MicroBatch]
    """All micro batches of the iteration, in order."""
    _micro_batch: int = -1
    """Index of the current micro batch; −1 before the first forward pass."""
    _expert_rows: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    """Order of an expert's rows that follows Megatron's tokens, by layer and expert.

    The orders are those of the current micro batch.
    """
    _handles: list[Any] = field(default_factory=list)

    def __enter__(self) -> Taps:
        self._handles.append(self.model.register_forward_pre_hook(self._begin_micro_batch))
        for name, module in self.model.named_modules():
            self._attach_hooks(name, module)
        self._handles.append(self.model.register_forward_hook(self._write_losses))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _attach_hooks(self, name: str, module: nn.Module) -> None:
        """Attach the hooks that pass a module's inputs and outputs to the sink. The sink may replace them.

        Position embeddings and the router of a mixture of experts get an additional hook. A module whose
        tensors have no equal in Megatron gets no hook for its inputs and outputs. `name` is the module's name
        in this backend.
        """
        if name == "position_embeddings":
            self._handles.append(module.register_forward_hook(self._pass_position_embeddings))
        if isinstance(module, MixtureOfExperts):
            layer = int(name.split(".")[1])
            pass_routing = partial(self._pass_routing, layer, module)
            self._handles.append(module.router.register_forward_hook(pass_routing))
        name_and_slots = self.place(name, module)
        if name_and_slots is None:
            return
        full_name, slots = name_and_slots
        tap_inputs = partial(self._tap_inputs, _name_inputs(full_name, slots, module), slots.form)
        self._handles.append(module.register_forward_pre_hook(tap_inputs))
        output_names = _name_outputs(full_name, slots)
        if output_names:
            tap_output = partial(self._tap_output, output_names, slots)
            self._handles.append(module.register_forward_hook(tap_output))

    def _tap_inputs(
        self,
        names_by_argument: Sequence[Sequence[str]],
        form: Form,
        _: nn.Module,
        args: tuple[Any, ...],
    ) -> tuple[Any, ...]:
        """Return a module's arguments after the sink has seen, and perhaps replaced, those with names."""
        tapped = []
        for argument, names in zip(args, names_by_argument, strict=False):
            tapped.append(self._tap(argument, names, form))
        return (*tapped, *args[len(tapped) :])

    def _tap_output(
        self,
        names: Sequence[str],
        slots: ModuleSlots,
        module: nn.Module,
        args: tuple[Tensor, ...],
        output: Tensor,
    ) -> Tensor:
        """Return a module's output after the sink has seen, and perhaps replaced, it."""
        value = output.detach()
        if slots.bias_apart and isinstance(module, nn.Linear) and module.bias is not None:
            # Megatron returns the bias of this layer separately, so its output is without it.
            value = linear(args[0].detach(), module.weight.detach())
        return self._tap(output, names, slots.form, value)

    def place(self, name: str, module: nn.Module) -> tuple[str, ModuleSlots] | None:
        """Return the name and the slots of a module in Megatron. None means that Megatron has no equal tensors."""
        full_name = megatron_name(name)
        slots = find_module_slots(full_name)
        if slots is None:
            return None
        if isinstance(module, MixtureOfExperts):
            return full_name, replace(slots, gives="output.0")
        if full_name.endswith(".router"):
            return full_name, replace(slots, form=self._order_tokens)
        in_layer = IN_LAYER_PATTERN.fullmatch(full_name)
        if in_layer is None or in_layer[2] is None:  # The second group is the expert.
            return full_name, slots
        layer, expert, name_in_expert = in_layer.groups()
        # Megatron multiplies by the router's weight before the second matrix, and this backend after
        # it. So the tensors of the second matrix differ.
        if name_in_expert == "linear_fc2":
            return None
        form = partial(self._order_expert_rows, int(layer), int(expert))
        return full_name, replace(slots, form=form)

    def _tap(
        self, tensor: Tensor, names: Sequence[str], form: Form, value: Tensor | None = None
    ) -> Tensor:
        """Pass a tensor to the sink by `parakit.capturing.tap`, under each name in `names` ('module slot')."""
        tensor_keys = []
        for name in names:
            output_key = self._tensor_key(CaptureStage.OUTPUTS, name)
            gradient_key = self._tensor_key(CaptureStage.ACTIVATION_GRADIENTS, name)
            tensor_keys.append((output_key, gradient_key))

        def make_contiguous(values: Tensor) -> Tensor:
            """Return the values in Megatron's form, contiguous in memory."""
            return form(values).contiguous()

        return tap(self.sink, tensor, tensor_keys, make_contiguous, value)

    def _tensor_key(self, stage: CaptureStage, name: str) -> TensorKey:
        """Return the tensor key of a `module slot` name in the current micro batch."""
        module, _, slot = name.partition(" ")
        return TensorKey(stage, module, slot, self._micro_batch)

    def _begin_micro_batch(self, _: nn.Module, args: tuple[Tensor]) -> None:
        """Count the micro batch, and pass the inputs that Megatron's model would get to the sink."""
        self._micro_batch += 1
        self.sink.begin_micro_batch()
        tokens, labels = args[0], self.batches[self._micro_batch][1]
        positions = torch.arange(tokens.shape[1]).expand_as(tokens).contiguous()
        inputs = {"input_ids": tokens, "position_ids": positions, "labels": labels}
        for slot, values in inputs.items():
            self.sink.forward(self._tensor_key(CaptureStage.INPUTS, f"model input.{slot}"), values)

    def _write_losses(self, _: nn.Module, __: object, logits: Tensor) -> None:
        """Pass the losses of the micro batch to the sink: the loss per token, the sum of these, and the number
        of tokens.
        """
        labels = self.batches[self._micro_batch][1]
        losses = cross_entropy(logits.detach().flatten(0, 1), labels.flatten(), reduction="none")
        values = {
            "of each token": losses.view_as(labels),
            "sum": losses.sum(),
            "tokens": torch.tensor(labels.numel(), dtype=torch.int32),
        }
        for slot, value in values.items():
            self.sink.write(self._tensor_key(CaptureStage.LOSS, f"loss {slot}"), value)

    def _pass_position_embeddings(self, _: nn.Module, __: object, output: Tensor) -> None:
        """Pass the position embeddings to the sink, repeated for each sample as Megatron has them."""
        samples = self.batches[self._micro_batch][0].shape[0]
        tensor_key = self._tensor_key(CaptureStage.OUTPUTS, "embedding.position_embeddings output")
        self.sink.forward(tensor_key, output.detach().expand(samples, -1, -1).contiguous())

    def _pass_routing(
        self, layer: int, mixture: MixtureOfExperts, _: nn.Module, __: object, logits: Tensor
    ) -> None:
        """Pass the outputs of Megatron's router to the sink, and store the order of each expert's rows.

        Megatron's router returns two tensors [tokens, experts]: the weights, and which experts are chosen.
        """
        top_logits, experts = logits.detach().float().topk(mixture.experts_per_token, dim=-1)
        is_chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
        top_weights = top_logits.softmax(dim=-1)
        weights = torch.zeros_like(logits).detach().scatter(1, experts, top_weights)
        # This backend orders tokens by sample, Megatron by sequence position: token i is Megatron's token
        # megatron_positions[i].
        tokens, _labels = self.batches[self._micro_batch]
        samples, length = tokens.shape
        megatron_positions = torch.arange(samples * length).view(length, samples).t().reshape(-1)
        for expert in range(mixture.num_experts):
            positions = megatron_positions[is_chosen[:, expert]]
            self._expert_rows[layer, expert] = positions.argsort()
        for index, value in enumerate((weights, is_chosen)):
            name = f"decoder.layers.{layer}.mlp.router output.{index}"
            ordered = torch.empty_like(value)
            ordered[megatron_positions] = value
            self.sink.forward(self._tensor_key(CaptureStage.OUTPUTS, name), ordered)

    def _order_tokens(self, tensor: Tensor) -> Tensor:
        """Return a tensor [tokens, …] of the router as [sequence, batch, …]."""
        samples, length = self.batches[self._micro_batch][0].shape
        return sequence_first(tensor.view(samples, length, -1))

    def _order_expert_rows(self, layer: int, expert: int, tensor: Tensor) -> Tensor:
        """Return the rows of an expert in the order of Megatron's tokens."""
        return tensor[self._expert_rows[layer, expert]]


def _name_inputs(full_name: str, slots: ModuleSlots, module: nn.Module) -> list[list[str]]:
    """Return the names that each captured argument of a module has in Megatron, as 'module slot'.

    An argument has several names if Megatron has further modules at this point that this backend does not have.
    """
    argument_names = inspect.signature(module.forward).parameters
    names_by_argument = []
    for slot, argument_name in zip(slots.takes, argument_names, strict=False):
        name = f"{full_name} input.{slot.replace('*', argument_name)}"
        names_by_argument.append([name])
    further_names: Sequence[str] = ()
    if full_name == "decoder.layers.0":
        further_names = _FIRST_LAYER_INPUT_SITES
    elif full_name.endswith(".linear_proj"):
        parent = full_name.rpartition(".")[0]
        further_names = (f"{parent}.core_attention output",)
    if further_names:
        names_by_argument[0] = [*further_names, *names_by_argument[0]]
    return names_by_argument


def _name_outputs(full_name: str, slots: ModuleSlots) -> list[str]:
    """Return Megatron's `module slot` names of a module's output; empty if it is not captured."""
    if not slots.gives:
        return []
    parent = full_name.rpartition(".")[0]
    module_names = (full_name, parent) if slots.is_last else (full_name,)
    return [f"{module_name} {slots.gives}" for module_name in module_names]
