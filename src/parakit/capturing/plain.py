"""Capture one training step of any PyTorch program, so that two runs of the program can be compared.

    from parakit import capture

    for _ in capture(model, optimizer, "captures/tp2", tensor=mesh["tp"].get_group()):
        for batch in batches:                        # One forward pass of the model per micro batch.
            (loss(model(batch)) / len(batches)).backward()
        optimizer.step()

Each rank writes a folder `rank-<n>` with all activations, gradients, optimizer states and weights of the step.
Modules and parameters keep the names that the program gives them. So a model that FSDP2 or tensor parallelism has
changed in place can be compared with the same model on one rank. `parakit inspect --ckpt captures/tp2 --compare
captures/one` names the first tensor that is wrong.
"""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from parakit.artifacts.capture import (
    RESPONSES_FILE,
    START_WEIGHT,
    UPDATE_SUFFIX,
    CapturedModule,
    CapturedRank,
    CaptureStage,
    CaptureWriter,
    Placement,
    TensorKey,
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
"""Default number of repetitions that measure how far rounding errors move each tensor."""
_ROOT = "model"
"""Name of the model itself; its modules have the names of `named_modules`."""
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts that `torch.compile` and activation checkpointing add to the names of modules."""


class _GroupPosition(NamedTuple):
    """Position of this rank in a process group."""

    rank: int
    size: int


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
    """Write the tensors of a training step, then repeat the step to measure the effect of rounding errors.

    Use the result in a loop: `for _ in capture(...)`. The body of the loop is the step, from the first forward
    pass to `optimizer.step()`. The body runs `1 + seeds` times and must use the same batches every time. Every
    run starts from the same weights, optimizer states and random numbers. The tensors of the first run are
    written. In each further run, every weight is first changed by one rounding error. After the loop the model
    and the optimizer are in the state after the first run.

    Gradients are written as the optimizer gets them. The loss must be the mean over the tokens of a micro
    batch, divided by the number of micro batches.

    Args:
        model: Model whose first tensor argument is [batch, sequence] or [batch, sequence, hidden].
        optimizer: Optimizer of all parameters of the model.
        folder: Folder of the capture; this rank's folder in it, `rank-<n>`, must not exist yet.
        data: Data-parallel group of this rank; None without data parallelism. With D data-parallel ranks, micro
            batch m of rank d must be micro batch m·D + d of the global batch.
        tensor: Tensor-parallel group of this rank; None without tensor parallelism.
        iteration: Number of the iteration. It must be equal in the captures that are compared.
        seeds: Number of repetitions. Only the reference of a comparison needs repetitions.

    Raises:
        ValueError: The sizes of the two groups do not multiply to the number of ranks.
    """
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    data_position, tensor_position = _find_position(data), _find_position(tensor)
    if data_position.size * tensor_position.size != world_size:
        raise ValueError(
            f"{world_size} ranks are not {data_position.size} data-parallel ones times "
            f"{tensor_position.size} tensor-parallel ones; give data= and tensor= the groups of this "
            "rank."
        )
    rank = dist.get_rank() if world_size > 1 else 0
    rank_folder = Path(folder) / f"rank-{rank}"
    model_tensors = (*model.parameters(), *model.buffers())
    state_before = TrainingState(model_tensors, optimizer)
    with CaptureWriter(rank_folder) as writer:
        step = _Step(model, optimizer, Recording(writer))
        with step:
            yield
        writer.flush()
        state_after = TrainingState(model_tensors, optimizer)
        probe = RoundingProbe(StoredTensors(rank_folder, writer.records))
        for seed in range(seeds):
            state_before.restore()
            repetition = _Step(model, optimizer, probe)
            weights = repetition.pieces(_get_weight)
            perturb((f"{seed} {weight.name}", weight.values) for weight in weights)
            with repetition:
                yield
        state_after.restore()
        (rank_folder / RESPONSES_FILE).write_text(json.dumps(probe.responses))
        description = _describe_rank(
            model,
            step,
            rank=rank,
            world_size=world_size,
            iteration=iteration,
            data=data_position,
            tensor=tensor_position,
        )
        writer.close(description)


def _find_position(group: dist.ProcessGroup | None) -> _GroupPosition:
    """Return this rank's position in a group; without a group, this rank is alone."""
    if not group:
        return _GroupPosition(rank=0, size=1)
    return _GroupPosition(dist.get_rank(group), dist.get_world_size(group))


def _describe_rank(
    model: nn.Module,
    step: _Step,
    *,
    rank: int,
    world_size: int,
    iteration: int,
    data: _GroupPosition,
    tensor: _GroupPosition,
) -> CapturedRank:
    """Return the description of this rank's capture, after its step has run."""
    dropouts = [module.p for module in model.modules() if isinstance(module, nn.Dropout)]
    embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return CapturedRank(
        rank=rank,
        world_size=world_size,
        iteration=iteration,
        data=data,
        tensor=tensor,
        gated=False,
        sequence_length=step.sequence_length,
        micro_batch_size=step.micro_batch_size,
        micro_batches=step.micro_batch + 1,
        clip_gradient=0.0,
        hidden_dropout=max(dropouts, default=0.0),
        attention_dropout=0.0,
        vocabulary=embeddings[0].num_embeddings if embeddings else 0,
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        modules={name: _describe_module(module) for name, module in _named_modules(model)},
    )


@dataclass
class _Step:
    """Context in which hooks pass the tensors of one training step to a sink."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sink: Sink
    micro_batch: int = -1
    """Index of the current micro batch; −1 before the first forward pass."""
    micro_batch_size: int = 1
    """Samples per micro batch, from the last forward pass."""
    sequence_length: int = 1
    """Tokens per sample, from the last forward pass."""
    _calls: Counter[str] = field(default_factory=Counter)
    """Finished calls of each module in the current micro batch."""
    _handles: list[Any] = field(default_factory=list)
    _weights_before_update: dict[str, Tensor] = field(default_factory=dict)

    def __enter__(self) -> None:
        self.optimizer.zero_grad()
        for weight in self.pieces(_get_weight):
            self.sink.write_piece(CaptureStage.WEIGHTS, START_WEIGHT, weight)
        for name, module in _named_modules(self.model):
            before = partial(self._before_forward, name)
            after = partial(self._after_forward, name)
            self._handles += (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after),
            )
        self._handles += (
            self.optimizer.register_step_pre_hook(self._before_update),
            self.optimizer.register_step_post_hook(self._after_update),
        )

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _before_forward(
        self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Pass the arguments of a module to the sink. Return them with the tensors with which the module goes on.

        A call of the model itself begins a new micro batch.
        """
        if name == _ROOT:
            self._begin_micro_batch(args, kwargs)
        parameter_names = list(inspect.signature(module.forward).parameters)
        stage = CaptureStage.INPUTS if name == _ROOT else CaptureStage.OUTPUTS
        tapped_args = []
        for index, argument in enumerate(args):
            # Arguments beyond the named parameters belong to the last parameter, `*args`.
            parameter_name = parameter_names[min(index, len(parameter_names) - 1)]
            tapped_args.append(self._tap(stage, name, f"input.{parameter_name}", argument))
        tapped_kwargs = {
            key: self._tap(stage, name, f"input.{key}", argument)
            for key, argument in kwargs.items()
        }
        return tuple(tapped_args), tapped_kwargs

    def _begin_micro_batch(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Count a new micro batch, reset the counts of module calls, and notify the sink.

        The micro batch size and the sequence length are read from the first two dimensions of the model's first
        tensor argument.

        Raises:
            ValueError: No argument of the model is a tensor.
        """
        self.micro_batch += 1
        self._calls.clear()
        self.sink.begin_micro_batch()
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not tensors:
            raise ValueError(
                "The captured model was called without a tensor; pass its inputs as arguments, the first of "
                "them [batch, sequence] or [batch, sequence, hidden]."
            )
        self.micro_batch_size, self.sequence_length = tensors[0].shape[:2]

    def _after_forward(self, name: str, _: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        """Pass the output of a module to the sink, and return the output with which the caller goes on."""
        if isinstance(output, tuple | list):
            tapped_values = (
                self._tap(CaptureStage.OUTPUTS, name, f"output.{index}", value)
                for index, value in enumerate(output)
            )
            tapped_output = type(output)(tapped_values)
        else:
            tapped_output = self._tap(CaptureStage.OUTPUTS, name, "output", output)
        self._calls[name] += 1
        return tapped_output

    def _tap(self, stage: CaptureStage, name: str, slot: str, value: Any) -> Any:
        """Pass a tensor to the sink now, and its gradient in the backward pass. Return the tensor to go on with.

        A value that is no tensor is returned unchanged.
        """
        if not isinstance(value, Tensor):
            return value
        call = self._calls[name]
        tensor_key = TensorKey(stage, name, slot, micro_batch=self.micro_batch, call=call)
        gradient_tensor_key = TensorKey(
            CaptureStage.ACTIVATION_GRADIENTS, name, slot, micro_batch=self.micro_batch, call=call
        )
        return tap(self.sink, value, [(tensor_key, gradient_tensor_key)], _gather_full_tensor)

    def _before_update(self, *_: object) -> None:
        """Pass the gradients to the sink, and copy the weights before the optimizer changes them."""
        for gradient in self.pieces(_get_gradient):
            self.sink.write_piece(CaptureStage.REDUCED_GRADIENTS, "gradient", gradient)
        self._weights_before_update = {
            weight.name: weight.values.clone() for weight in self.pieces(_get_weight)
        }

    def _after_update(self, *_: object) -> None:
        """Pass the optimizer states, the weights, and the change of each weight by the update to the sink."""
        # A dictionary keeps each name once, in the order in which the optimizer made the states.
        slots: dict[str, None] = {}
        for state in self.optimizer.state.values():
            slots |= dict.fromkeys(state)
        for slot in slots:
            self._write_states(slot)
        for weight in self.pieces(_get_weight):
            change = weight.values - self._weights_before_update[weight.name]
            self.sink.write_piece(
                CaptureStage.WEIGHTS, UPDATE_SUFFIX, replace(weight, values=change)
            )
            self.sink.write_piece(CaptureStage.WEIGHTS, "weight", weight)

    def _write_states(self, slot: str) -> None:
        """Pass the optimizer states of one name to the sink; parameters without such a tensor are left out."""
        values_by_parameter: dict[Tensor, Tensor] = {}
        for parameter, state in self.optimizer.state.items():
            values = state.get(slot)
            if isinstance(values, Tensor):
                values_by_parameter[parameter] = values
        for piece in self.pieces(values_by_parameter.get):
            # A scalar state is the number of steps.
            if piece.values.ndim == 0:
                tensor_key = TensorKey(CaptureStage.OPTIMIZER_STATE, piece.name, slot)
                self.sink.write(tensor_key, fp64_scalar(piece.values))
            else:
                self.sink.write_piece(CaptureStage.OPTIMIZER_STATE, slot, piece)

    def pieces(self, get_values: Callable[[nn.Parameter], Tensor | None]) -> Iterator[Piece]:
        """Yield this rank's part of one tensor per parameter, such as the gradient of each parameter.

        Args:
            get_values: Function that returns a tensor with the parameter's shape, or None to leave the
                parameter out.
        """
        for wrapped_name, parameter in self.model.named_parameters():
            values = get_values(parameter)
            if values is None:
                continue
            name = _strip_wrappers(wrapped_name)
            offset: tuple[int, ...] = (0,) * parameter.ndim
            if isinstance(parameter, DTensor):
                _, offset = compute_local_shape_and_global_offset(
                    parameter.shape, parameter.device_mesh, parameter.placements
                )
            placement = Placement(name, tuple(parameter.shape), tuple(offset))
            yield Piece(name, placement, local_tensor(values).detach())


def _named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of all modules except wrappers and containers.

    The names are those of the unwrapped model, because the names that DDP and other wrappers add are removed.
    """
    for name, module in model.named_modules():
        is_wrapper = f"{name}.".endswith(_WRAPPERS)
        is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
        if not is_wrapper and not is_container:
            yield _strip_wrappers(name) or _ROOT, module


def _strip_wrappers(name: str) -> str:
    """Return the name that the program gave, without the parts that wrappers add."""
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def _gather_full_tensor(value: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, and wait for the collective that a tensor comes from."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, AsyncCollectiveTensor):
        value = value.wait()
    return value


def _get_weight(parameter: nn.Parameter) -> Tensor:
    """Return the parameter itself."""
    return parameter


def _get_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient, distributed like its parameter; None if the parameter has no gradient."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        return gradient.redistribute(placements=parameter.placements)
    return gradient


def _describe_module(module: nn.Module) -> CapturedModule:
    """Return a module's class, and the file and line of its forward pass.

    File and line are empty if the forward pass is not Python. FSDP2 adds the prefix `FSDP` to the name of the
    class; it is removed.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    class_name = type(module).__name__.removeprefix("FSDP")
    source = f"{code.co_filename}:{code.co_firstlineno}" if code else ""
    return CapturedModule(class_name, source)
