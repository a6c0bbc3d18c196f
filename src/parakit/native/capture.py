"""Writes the tensors of one iteration under Megatron's names, as a reference for `parakit.verify`.

What is computed is Megatron's model written a second time, here or by others (`Counterpart`), so what is
wrong in every strategy of Megatron differs from it. One rank alone. Which tensors have a counterpart
stands in `taps`; the comparison lists those that have none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from parakit.artifacts.capture import (
    REACH,
    RESPONSES_FILE,
    START_WEIGHT,
    UPDATE,
    CapturedRank,
    CaptureWriter,
    Placement,
    Site,
    Stage,
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
    """A parameter of Megatron's, and what it is made of here."""

    name: str
    """Megatron's, with the layer's number from 0."""
    placement: Placement
    parameters: tuple[nn.Parameter, ...]
    join: Callable[[Sequence[Tensor]], Tensor] = lambda parts: parts[0]

    def piece(self, values: Callable[[nn.Parameter], Tensor]) -> Piece:
        """What has the parameter's shape, such as its gradient, at its place in checkpoints."""
        made = self.join([values(parameter) for parameter in self.parameters])
        return Piece(self.name, self.placement, made.detach())


@dataclass(frozen=True)
class Counterpart:
    """Megatron's model, written by others."""

    model: nn.Module
    wholes: tuple[MegatronParameter, ...]
    taps: Callable[[Sink, Sequence[MicroBatch]], AbstractContextManager[object]]
    """Hands activations and their gradients to a sink while the block runs."""


def build_native_counterpart(model: GPT) -> Counterpart:
    """This backend's own."""
    experts, wholes = find_expert_layers(model), []
    stacked = (len(model.blocks), *([experts[0].count] if experts else []))
    for name, parameter in model.named_parameters():
        key, places = find_checkpoint_key(name)
        shape = (*stacked[: len(places)], *parameter.shape)
        placement = Placement(key, shape, (*places, *[0] * parameter.ndim))
        wholes.append(MegatronParameter(megatron_name(name), placement, (parameter,)))
    return Counterpart(model, tuple(wholes), partial(Taps, model))


def wrap_for_capture(engine: TorchEngine, counterpart: Counterpart, settings: Settings) -> Engine:
    """The engine; one that writes an iteration's tensors, where the environment asks for it."""
    if variables.CAPTURE not in os.environ:
        return engine
    return CapturingEngine(engine, counterpart, settings)


class CapturingEngine:
    """An engine whose iteration is written, and repeated with weights off by one rounding error."""

    def __init__(self, engine: TorchEngine, counterpart: Counterpart, settings: Settings) -> None:
        self._engine, self._settings = engine, settings
        self._counterpart, self._model = counterpart, counterpart.model
        self._folder = Path(os.environ[variables.CAPTURE]) / "rank-0"
        self._wanted = int(os.environ[variables.CAPTURE_ITERATION])
        self._seeds = int(os.environ.get(variables.CAPTURE_SEEDS, "0"))
        self._iteration = 0
        self._batches: Sequence[MicroBatch] = ()
        self._before: TrainingState | None = None
        self._writer: CaptureWriter | None = None
        self._reach = [torch.zeros_like(whole.piece(_data).values) for whole in counterpart.wholes]

    def forward_backward(self, batches: Sequence[MicroBatch]) -> Tensor:
        """The engine's; in the wanted iteration every tensor is written."""
        self._iteration += 1
        if self._iteration != self._wanted:
            return self._engine.forward_backward(batches)
        self._batches = batches
        self._before = TrainingState(self._model.parameters(), self._engine.optimizer)
        self._writer = CaptureWriter(self._folder)
        recording = Recording(self._writer)
        for reached, whole in zip(self._reach, self._counterpart.wholes, strict=True):
            weight = whole.piece(_data)
            recording.write_piece(Stage.WEIGHTS, START_WEIGHT, weight)
            recording.write_piece(Stage.WEIGHTS, REACH, replace(weight, values=reached))
        return self._pass(recording)

    def update(self, learning_rate: float) -> Update:
        """The engine's; in the wanted iteration followed by the repetitions."""
        writer, before = self._writer, self._before
        if writer is None or before is None:
            weights = self._weights()
            update = self._engine.update(learning_rate)
            self._follow(weights)
            return update
        self._writer = self._before = None
        recording = Recording(writer)
        update = self._step(recording, learning_rate)
        self._write_schedule(recording)
        writer.flush()
        after = TrainingState(self._model.parameters(), self._engine.optimizer)
        responding = RoundingProbe(StoredTensors(self._folder, writer.records))
        for seed in range(self._seeds):
            before.restore()
            perturb((f"{seed} {name}", one) for name, one in self._model.named_parameters())
            self._pass(responding)
            self._step(responding, learning_rate)
        after.restore()
        (self._folder / RESPONSES_FILE).write_text(json.dumps(responding.responses))
        settings = self._settings
        writer.close(
            CapturedRank(
                iteration=self._wanted,
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
        )
        return update

    def logits(self, tokens: Tensor) -> Tensor:
        """The engine's."""
        return self._engine.logits(tokens)

    def _pass(self, sink: Sink) -> Tensor:
        with self._counterpart.taps(sink, self._batches):
            losses = self._engine.forward_backward(self._batches)
        for stage in (Stage.LOCAL_GRADIENTS, Stage.REDUCED_GRADIENTS):
            for whole in self._counterpart.wholes:
                gradient = whole.piece(lambda one: cast(Tensor, one.grad))
                sink.write_piece(stage, "gradient", gradient)
        return losses

    def _step(self, sink: Sink, learning_rate: float) -> Update:
        before = self._weights()
        update = self._engine.update(learning_rate)
        norm = fp64_scalar(update.gradient_norm or 0.0)
        sink.write(Site(Stage.NORM, "grad_norm", "returned"), norm)
        state = self._engine.optimizer.state
        for whole in self._counterpart.wholes:
            for slot, values in state[whole.parameters[0]].items():
                if values.numel() == 1:  # The number of steps.
                    sink.write(Site(Stage.OPTIMIZER_STATE, whole.name, slot), fp64_scalar(values))
                else:
                    kept = whole.piece(lambda one, slot=slot: state[one][slot])  # type: ignore[misc]
                    sink.write_piece(Stage.OPTIMIZER_STATE, slot, kept)
        for whole in self._counterpart.wholes:
            for slot, values in ((UPDATE, lambda one: one.data - before[one]), ("weight", _data)):
                sink.write_piece(Stage.WEIGHTS, slot, whole.piece(values))
        return update

    def _follow(self, before: dict[nn.Parameter, Tensor]) -> None:
        """Note how far an update reached."""
        state = self._engine.optimizer.state
        for reached, whole in zip(self._reach, self._counterpart.wholes, strict=True):
            if "exp_avg_sq" in state[whole.parameters[0]]:
                moved = whole.piece(lambda one: one.data - before[one]).values
                squares = whole.piece(lambda one: state[one]["exp_avg_sq"]).values
                reached.add_(update_magnitude(moved, squares))

    def _write_schedule(self, sink: Sink) -> None:
        """What the update was made with."""
        steps = torch.tensor([(self._iteration - 1) * self._settings.global_batch_size])
        sink.write(Site(Stage.OPTIMIZER_STATE, "schedule", "steps"), steps)
        rates = {
            id(parameter): {"learning rate": group["lr"], "weight decay": group["weight_decay"]}
            for group in self._engine.optimizer.param_groups
            for parameter in group["params"]
        }
        for whole in self._counterpart.wholes:
            for slot, rate in rates[id(whole.parameters[0])].items():
                sink.write(Site(Stage.OPTIMIZER_STATE, whole.name, slot), fp64_scalar(rate))

    def _weights(self) -> dict[nn.Parameter, Tensor]:
        return {one: one.detach().clone() for one in self._model.parameters()}


def _data(parameter: nn.Parameter) -> Tensor:
    return parameter.data
