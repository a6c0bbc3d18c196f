"""Write the tensors of one iteration under Megatron's names, as a reference for `parakit.verify`.

The model here is a second implementation of Megatron's model: this backend's, or another program's with a
`Counterpart`. An error that all of Megatron's strategies have in common shows as a difference from it. The
capture runs on one rank. The counterpart's `taps` decide which of Megatron's tensors have an equal here; the
comparison lists the tensors that have none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from parakit.artifacts.capture import (
    RESPONSES_FILE,
    START_WEIGHT,
    UPDATE_MAGNITUDE,
    UPDATE_SUFFIX,
    CapturedRank,
    CaptureStage,
    CaptureWriter,
    Placement,
    TensorKey,
)
from parakit.capturing import (
    Piece,
    Recording,
    RoundingProbe,
    Sink,
    StoredTensors,
    TrainingState,
    fp64_scalar,
    perturb,
    update_magnitude,
)
from parakit.config import variables
from parakit.native.batches import MicroBatch
from parakit.native.engines import Engine, TorchEngine, Update
from parakit.native.hooks import Taps
from parakit.native.model import GPT, find_expert_layers
from parakit.native.settings import Settings
from parakit.native.weights import find_checkpoint_key, megatron_name


@dataclass(frozen=True)
class MegatronParameter:
    """A parameter of Megatron's model, and the parameters of the other model from which it is made."""

    name: str
    """Megatron's name, with layers counted from 0."""
    placement: Placement
    parameters: tuple[nn.Parameter, ...]
    join: Callable[[Sequence[Tensor]], Tensor] = lambda parts: parts[0]
    """Function that makes one tensor of Megatron's shape from a tensor per parameter."""

    def piece(self, values: Callable[[nn.Parameter], Tensor]) -> Piece:
        """Return a tensor in Megatron's shape, such as the gradient; `values` returns it per parameter."""
        joined = self.join([values(parameter) for parameter in self.parameters])
        return Piece(self.name, self.placement, joined.detach())


@dataclass(frozen=True)
class Counterpart:
    """A second implementation of Megatron's model, with the relation of its parameters and modules to Megatron's."""

    model: nn.Module
    parameters: tuple[MegatronParameter, ...]
    """All parameters of Megatron's model."""
    taps: Callable[[Sink, Sequence[MicroBatch]], AbstractContextManager[object]]
    """Function that returns a context: within it, activations and their gradients reach the sink."""


def build_native_counterpart(model: GPT) -> Counterpart:
    """Return the counterpart of Megatron's model that the native backend's model is."""
    expert_layers = find_expert_layers(model)
    stack_sizes = [len(model.blocks)]
    if expert_layers:
        stack_sizes.append(expert_layers[0].num_experts)
    megatron_parameters = []
    for name, parameter in model.named_parameters():
        key, stack_index = find_checkpoint_key(name)
        shape = (*stack_sizes[: len(stack_index)], *parameter.shape)
        offset = (*stack_index, *[0] * parameter.ndim)
        placement = Placement(key, shape, offset)
        megatron_parameters.append(MegatronParameter(megatron_name(name), placement, (parameter,)))
    return Counterpart(model, tuple(megatron_parameters), partial(Taps, model))


def wrap_for_capture(engine: TorchEngine, counterpart: Counterpart, settings: Settings) -> Engine:
    """Return an engine that captures one iteration if the environment variable CAPTURE is set.

    Otherwise return the engine itself.
    """
    if variables.CAPTURE not in os.environ:
        return engine
    return CapturingEngine(engine, counterpart, settings)


class CapturingEngine:
    """Engine that writes the tensors of one iteration, and repeats the iteration to measure rounding.

    Environment variables give the folder of the capture, the number of the iteration and the number of
    repetitions. In each repetition every weight is changed by one rounding error. Afterwards training
    continues as if the iteration had run once.
    """

    def __init__(self, engine: TorchEngine, counterpart: Counterpart, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._counterpart, self._model = counterpart, counterpart.model
        self._folder = Path(os.environ[variables.CAPTURE]) / "rank-0"
        self._captured_iteration = int(os.environ[variables.CAPTURE_ITERATION])
        self._seeds = int(os.environ.get(variables.CAPTURE_SEEDS, "0"))
        self._iteration = 0
        self._batches: Sequence[MicroBatch] = ()
        self._state_before: TrainingState | None = None
        self._writer: CaptureWriter | None = None
        self._update_magnitudes = [
            torch.zeros_like(parameter.piece(_get_data).values)
            for parameter in counterpart.parameters
        ]
        """Sum of the update magnitudes of the iterations before the captured one, per parameter."""

    def forward_backward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Run the engine's passes and return its losses. In the captured iteration, write all tensors as well."""
        self._iteration += 1
        if self._iteration != self._captured_iteration:
            return self._engine.forward_backward(batches)
        self._batches = batches
        self._state_before = TrainingState(self._model.parameters(), self._engine.optimizer)
        self._writer = CaptureWriter(self._folder)
        recording = Recording(self._writer)
        parameters = self._counterpart.parameters
        for parameter, magnitudes in zip(parameters, self._update_magnitudes, strict=True):
            weight = parameter.piece(_get_data)
            recording.write_piece(CaptureStage.WEIGHTS, START_WEIGHT, weight)
            recording.write_piece(
                CaptureStage.WEIGHTS, UPDATE_MAGNITUDE, replace(weight, values=magnitudes)
            )
        return self._run_passes(recording)

    def update(self, learning_rate: float) -> Update:
        """Run the engine's update.

        In the captured iteration, write the tensors of the update, and then repeat passes and update to measure
        rounding.
        """
        writer, state_before = self._writer, self._state_before
        if writer is None or state_before is None:
            weights_before = self._copy_weights()
            update = self._engine.update(learning_rate)
            self._add_update_magnitudes(weights_before)
            return update
        self._writer = self._state_before = None
        recording = Recording(writer)
        update = self._run_update(recording, learning_rate)
        self._write_schedule(recording)
        writer.flush()
        self._measure_rounding(state_before, writer, learning_rate)
        writer.close(self._describe_rank())
        return update

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the engine's logits."""
        return self._engine.logits(tokens)

    def _measure_rounding(
        self, state_before: TrainingState, writer: CaptureWriter, learning_rate: float
    ) -> None:
        """Repeat the captured iteration with perturbed weights, and write the relative change of each tensor.

        At the end, the model and the optimizer are in the same state as before this call.
        """
        state_after = TrainingState(self._model.parameters(), self._engine.optimizer)
        probe = RoundingProbe(StoredTensors(self._folder, writer.records))
        for seed in range(self._seeds):
            state_before.restore()
            perturb((f"{seed} {name}", weight) for name, weight in self._model.named_parameters())
            self._run_passes(probe)
            self._run_update(probe, learning_rate)
        state_after.restore()
        (self._folder / RESPONSES_FILE).write_text(json.dumps(probe.responses))

    def _describe_rank(self) -> CapturedRank:
        """Return the description of the capture, which has one rank."""
        settings = self._settings
        return CapturedRank(
            iteration=self._captured_iteration,
            gated=settings.activation == "swiglu",
            sequence_length=settings.seq_length,
            micro_batch_size=settings.micro_batch_size,
            micro_batches=len(self._batches),
            clip_gradient=settings.clip_grad,
            hidden_dropout=settings.hidden_dropout,
            attention_dropout=settings.attention_dropout,
            vocabulary=settings.vocab_size,
            dtype="float32",
        )

    def _run_passes(self, sink: Sink) -> Tensor:
        """Run forward and backward passes, and pass activations and gradients to the sink."""
        with self._counterpart.taps(sink, self._batches):
            losses = self._engine.forward_backward(self._batches)
        # On one rank the gradients before and after the reduction over ranks are equal.
        for stage in (CaptureStage.LOCAL_GRADIENTS, CaptureStage.REDUCED_GRADIENTS):
            for parameter in self._counterpart.parameters:
                sink.write_piece(stage, "gradient", parameter.piece(_get_gradient))
        return losses

    def _run_update(self, sink: Sink, learning_rate: float) -> Update:
        """Run the update, and pass the gradient norm, the optimizer states and the weights to the sink."""
        weights_before = self._copy_weights()
        update = self._engine.update(learning_rate)
        norm = fp64_scalar(update.gradient_norm or 0.0)
        sink.write(TensorKey(CaptureStage.NORM, "grad_norm", "returned"), norm)
        for parameter in self._counterpart.parameters:
            self._write_optimizer_state(sink, parameter)

        def get_change(parameter: nn.Parameter) -> Tensor:
            """Return how far the update has moved a parameter of this model."""
            return parameter.data - weights_before[parameter]

        for parameter in self._counterpart.parameters:
            sink.write_piece(CaptureStage.WEIGHTS, UPDATE_SUFFIX, parameter.piece(get_change))
            sink.write_piece(CaptureStage.WEIGHTS, "weight", parameter.piece(_get_data))
        return update

    def _write_optimizer_state(self, sink: Sink, parameter: MegatronParameter) -> None:
        """Pass the optimizer states of one of Megatron's parameters to the sink."""
        states = self._engine.optimizer.state

        def get_state(native_parameter: nn.Parameter, slot: str) -> Tensor:
            """Return the state `slot` of a parameter of this model."""
            values: Tensor = states[native_parameter][slot]
            return values

        for slot, values in states[parameter.parameters[0]].items():
            # A state with one element is the number of steps.
            if values.numel() == 1:
                tensor_key = TensorKey(CaptureStage.OPTIMIZER_STATE, parameter.name, slot)
                sink.write(tensor_key, fp64_scalar(values))
            else:
                piece = parameter.piece(partial(get_state, slot=slot))
                sink.write_piece(CaptureStage.OPTIMIZER_STATE, slot, piece)

    def _add_update_magnitudes(self, weights_before: dict[nn.Parameter, Tensor]) -> None:
        """Add the magnitude of the last update to the sums per parameter.

        Parameters without Adam's average of the squared gradient are left out.
        """
        states = self._engine.optimizer.state

        def get_change(parameter: nn.Parameter) -> Tensor:
            """Return how far the update has moved a parameter of this model."""
            return parameter.data - weights_before[parameter]

        def get_squares(parameter: nn.Parameter) -> Tensor:
            """Return the running average of the squared gradient."""
            squares: Tensor = states[parameter]["exp_avg_sq"]
            return squares

        parameters = self._counterpart.parameters
        for parameter, magnitudes in zip(parameters, self._update_magnitudes, strict=True):
            if "exp_avg_sq" in states[parameter.parameters[0]]:
                change = parameter.piece(get_change).values
                squares = parameter.piece(get_squares).values
                magnitudes.add_(update_magnitude(change, squares))

    def _write_schedule(self, sink: Sink) -> None:
        """Pass the schedule to the sink: the number of trained samples, and each parameter's learning rate and
        weight decay.
        """
        samples = torch.tensor([(self._iteration - 1) * self._settings.global_batch_size])
        sink.write(TensorKey(CaptureStage.OPTIMIZER_STATE, "schedule", "steps"), samples)
        group_by_id: dict[int, dict[str, Any]] = {}
        for group in self._engine.optimizer.param_groups:
            for native_parameter in group["params"]:
                group_by_id[id(native_parameter)] = group
        for parameter in self._counterpart.parameters:
            group = group_by_id[id(parameter.parameters[0])]
            values = {"learning rate": group["lr"], "weight decay": group["weight_decay"]}
            for slot, value in values.items():
                tensor_key = TensorKey(CaptureStage.OPTIMIZER_STATE, parameter.name, slot)
                sink.write(tensor_key, fp64_scalar(value))

    def _copy_weights(self) -> dict[nn.Parameter, Tensor]:
        """Return copies of all weights by parameter."""
        return {parameter: parameter.detach().clone() for parameter in self._model.parameters()}


def _get_data(parameter: nn.Parameter) -> Tensor:
    """Return the values of a parameter."""
    return parameter.data


def _get_gradient(parameter: nn.Parameter) -> Tensor:
    """Return the gradient of a parameter, which must exist."""
    return cast(Tensor, parameter.grad)
