"""`capture(model, optimizer, folder)`: a training step of any PyTorch program, for two to be compared.

    from parakit import capture

    for _ in capture(model, optimizer, "captures/tp2", tensor=mesh["tp"].get_group()):
        for batch in batches:                        # One forward pass of the model a micro batch.
            (loss(model(batch)) / len(batches)).backward()
        optimizer.step()

Modules and parameters keep the names that the program gives them, so a model that FSDP2 or tensor
parallelism has changed in place is compared with itself on one rank. `parakit inspect --ckpt
captures/tp2 --compare captures/one` says which tensor is the first that is wrong.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from parakit.artifacts.capture import (
    RESPONSES_FILE,
    START_WEIGHT,
    UPDATE,
    CapturedModule,
    CapturedRank,
    CaptureWriter,
    Placement,
    Site,
    Stage,
)
from parakit.capturing.sinks import (
    Piece,
    Recording,
    RoundingProbe,
    Sink,
    StoredTensors,
    fp64_scalar,
    tap,
)
from parakit.capturing.state import TrainingState, local_tensor, perturb

SEEDS = 3
"""Repetitions by which it is measured how far rounding alone moves each tensor."""
_ROOT = "model"
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of names that `torch.compile` and activation checkpointing add."""


def capture(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: str | Path,
    *,
    data: dist.ProcessGroup | None = None,
    tensor: dist.ProcessGroup | None = None,
    iteration: int = 1,
    seeds: int = SEEDS,
) -> Iterator[None]:
    """Write what a step computes, then repeat it with every weight off by one rounding error.

    The loop's body is the step, from the first forward pass to `optimizer.step()`. It runs `1 + seeds`
    times on the same batches, always from the same weights, optimizer state and random numbers; what
    the first one gave is what stays. Gradients are those that the optimizer is given. Losses are means
    over the tokens of a micro batch, divided by the number of micro batches.

    Args:
        model: Its first tensor is [batch, sequence] or [batch, sequence, hidden].
        optimizer: Of all its parameters.
        folder: Takes `rank-<n>`; it must not hold a capture yet.
        data: Ranks with other samples: rank d's micro batch m is the global batch's m·D + d.
        tensor: Ranks that share each module.
        iteration: Its number, the same in what is compared with it.
        seeds: Repetitions; a run that is only compared with a reference needs none.

    Raises:
        ValueError: The two groups' sizes do not multiply to the number of ranks.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    places = [
        (dist.get_rank(one), dist.get_world_size(one)) if one else (0, 1) for one in (data, tensor)
    ]
    if places[0][1] * places[1][1] != world:
        raise ValueError(
            f"{world} ranks are not {places[0][1]} data-parallel ones times {places[1][1]} "
            "tensor-parallel ones; give data= and tensor= the groups of this rank."
        )
    rank = dist.get_rank() if world > 1 else 0
    own = Path(folder) / f"rank-{rank}"
    held = (*model.parameters(), *model.buffers())
    before = TrainingState(held, optimizer)
    with CaptureWriter(own) as writer:
        step = _Step(model, optimizer, Recording(writer))
        with step:
            yield
        writer.flush()
        after = TrainingState(held, optimizer)
        responding = RoundingProbe(StoredTensors(own, writer.records))
        for seed in range(seeds):
            before.restore()
            again = _Step(model, optimizer, responding)
            perturb((f"{seed} {one.name}", one.values) for one in again.pieces(lambda w: w))
            with again:
                yield
        after.restore()
        (own / RESPONSES_FILE).write_text(json.dumps(responding.responses))
        batch, length = step.shape
        dropout = max(
            (one.p for one in model.modules() if isinstance(one, nn.Dropout)), default=0.0
        )
        embeddings = [one for one in model.modules() if isinstance(one, nn.Embedding)]
        writer.close(
            CapturedRank(
                rank=rank,
                world_size=world,
                iteration=iteration,
                data=places[0],
                tensor=places[1],
                gated=False,
                sequence_length=length,
                micro_batch_size=batch,
                micro_batches=step.micro_batch + 1,
                clip_gradient=0.0,
                hidden_dropout=dropout,
                attention_dropout=0.0,
                vocabulary=embeddings[0].num_embeddings if embeddings else 0,
                dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
                modules={name: _described(one) for name, one in _named(model)},
            )
        )


@dataclass
class _Step:
    """Hooks of one step that hand its tensors to a sink."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sink: Sink
    micro_batch: int = -1
    shape: tuple[int, int] = (1, 1)
    """Of a micro batch: samples and tokens of each."""
    _calls: Counter[str] = field(default_factory=Counter)
    _handles: list[Any] = field(default_factory=list)
    _weights: dict[str, Tensor] = field(default_factory=dict)

    def __enter__(self) -> None:
        self.optimizer.zero_grad()
        for weight in self.pieces(lambda one: one):
            self.sink.write_piece(Stage.WEIGHTS, START_WEIGHT, weight)
        for name, module in _named(self.model):
            before = partial(self._before, name)
            handle = module.register_forward_pre_hook(before, with_kwargs=True)
            self._handles += (handle, module.register_forward_hook(partial(self._after, name)))
        self._handles += (
            self.optimizer.register_step_pre_hook(self._before_update),
            self.optimizer.register_step_post_hook(self._after_update),
        )

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if name == _ROOT:
            self.micro_batch += 1
            self._calls.clear()
            self.sink.begin_micro_batch()
            first = next(one for one in (*args, *kwargs.values()) if isinstance(one, Tensor))
            self.shape = first.shape[0], first.shape[1]
        names = list(inspect.signature(module.forward).parameters)
        stage = Stage.INPUTS if name == _ROOT else Stage.OUTPUTS
        taken = [
            self._tap(stage, name, f"input.{names[min(place, len(names) - 1)]}", one)
            for place, one in enumerate(args)
        ]
        named = {key: self._tap(stage, name, f"input.{key}", one) for key, one in kwargs.items()}
        return tuple(taken), named

    def _after(self, name: str, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple | list):
            taps = (
                self._tap(Stage.OUTPUTS, name, f"output.{n}", one) for n, one in enumerate(output)
            )
            given: Any = type(output)(taps)
        else:
            given = self._tap(Stage.OUTPUTS, name, "output", output)
        self._calls[name] += 1
        return given

    def _tap(self, stage: Stage, name: str, slot: str, value: Any) -> Any:
        """Hand over a tensor and, later, its gradient; anything else is left as it is."""
        if not isinstance(value, Tensor):
            return value
        seen, gradient = (
            Site(one, name, slot, self.micro_batch, self._calls[name])
            for one in (stage, Stage.ACTIVATION_GRADIENTS)
        )
        return tap(self.sink, value, [(seen, gradient)], _whole)

    def _before_update(self, *_: object) -> None:
        for gradient in self.pieces(_gradient):
            self.sink.write_piece(Stage.REDUCED_GRADIENTS, "gradient", gradient)
        self._weights = {one.name: one.values.clone() for one in self.pieces(lambda p: p)}

    def _after_update(self, *_: object) -> None:
        state = self.optimizer.state
        for slot in dict.fromkeys(slot for one in state.values() for slot in one):
            of_slot = {p: s[slot] for p, s in state.items() if isinstance(s.get(slot), Tensor)}
            for kept in self.pieces(of_slot.get):
                if kept.values.ndim == 0:  # The number of steps.
                    site = Site(Stage.OPTIMIZER_STATE, kept.name, slot)
                    self.sink.write(site, fp64_scalar(kept.values))
                else:
                    self.sink.write_piece(Stage.OPTIMIZER_STATE, slot, kept)
        for weight in self.pieces(lambda one: one):
            moved = replace(weight, values=weight.values - self._weights[weight.name])
            self.sink.write_piece(Stage.WEIGHTS, UPDATE, moved)
            self.sink.write_piece(Stage.WEIGHTS, "weight", weight)

    def pieces(self, of: Callable[[nn.Parameter], Tensor | None]) -> Iterator[Piece]:
        """What has each parameter's shape, such as its gradient, as this rank's part of the whole."""
        for name, parameter in self.model.named_parameters():
            value, plain = of(parameter), _plain_name(name)
            if value is None:
                continue
            offset, shape = (0,) * parameter.ndim, tuple(parameter.shape)
            if isinstance(parameter, DTensor):
                mesh, split = parameter.device_mesh, parameter.placements
                _, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, split)
            placement = Placement(plain, shape, tuple(offset))
            yield Piece(plain, placement, local_tensor(value).detach())


def _named(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that compute, by the program's names; what only wraps one has its name and is left out."""
    for name, module in model.named_modules():
        if not f"{name}.".endswith(_WRAPPERS) and not isinstance(
            module, nn.ModuleList | nn.ModuleDict
        ):
            yield _plain_name(name) or _ROOT, module


def _plain_name(name: str) -> str:
    """The name that the program gave, without what wraps it."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def _whole(value: Tensor) -> Tensor:
    """All of a distributed tensor; what a collective is still on its way to is waited for."""
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.wait() if isinstance(whole, AsyncCollectiveTensor) else whole


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    """Split as the parameter is."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def _described(module: nn.Module) -> CapturedModule:
    """Its class, and file and line of its forward pass; FSDP2 gives a class another name."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    kind = type(module).__name__.removeprefix("FSDP")
    return CapturedModule(kind, f"{code.co_filename}:{code.co_firstlineno}" if code else "")
