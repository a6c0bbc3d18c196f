"""Save, restore, replace and perturb what an iteration begins with: weights, buffers and states.

An iteration that is repeated with weights that are off by one rounding error shows how strongly each tensor
responds. The idea is from TTrace (arXiv:2506.09280). Its tolerance is the response of a tensor to a change of its
input by the machine epsilon.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_patches.capture.parameters import (
    OptimizerPart,
    ParameterMap,
    flat_range,
    hash_local_values,
)
from parakit.accounting import is_megatron_fsdp, list_optimizers
from parakit.artifacts.capture import (
    START_BUFFER,
    START_WEIGHT,
    UPDATE_MAGNITUDE,
    CaptureStage,
    InitialPiece,
)
from parakit.capturing import (
    Piece,
    Recording,
    TrainingState,
    local_tensor,
    perturb,
    update_magnitude,
)


class InitialState:
    """A rank's weights and buffers at the start of the captured iteration, and how far earlier updates moved them."""

    def __init__(self, model: list[Any], parameters: ParameterMap) -> None:
        self._model, self._parameters = model, parameters
        self._last_weights: dict[int, torch.Tensor] = {}
        """Copy of the tensor that the optimizer updates, by the parameter's id, one iteration ago."""
        self._update_magnitudes: dict[int, torch.Tensor] = {}
        """Sum of the update magnitudes so far, by the parameter's id."""

    def follow(self, optimizer: Any) -> None:
        """Add the magnitude of the last update to the sums per parameter. This is called before each iteration."""
        for parameter, part in self._parameters.parts(optimizer):
            key, current = id(parameter), local_tensor(part.main).detach()
            squares = part.states.get("exp_avg_sq")
            if key in self._last_weights and squares is not None:
                update = _shape_as_parameter(parameter, part, current - self._last_weights[key])
                magnitude = update_magnitude(update, _shape_as_parameter(parameter, part, squares))
                self._update_magnitudes[key] = self._update_magnitudes.get(
                    key, 0
                ) + magnitude.reshape(current.shape)
            self._last_weights[key] = current.clone()

    def write(self, sink: Recording, optimizer: Any) -> None:
        """Write update magnitudes, weights and buffers to the sink.

        If the sink returns other values for a weight or a buffer, the model begins with those values. All sums of
        update magnitudes are forgotten.
        """
        self._write_update_magnitudes(sink, optimizer)
        # The copies of all weights would otherwise take memory during the captured iteration.
        self._last_weights.clear()
        self._update_magnitudes.clear()
        self._write_start(sink, optimizer)

    def _write_update_magnitudes(self, sink: Recording, optimizer: Any) -> None:
        """Write the sum of the update magnitudes of each parameter that was updated before."""
        for parameter, part in self._parameters.parts(optimizer):
            magnitude = self._update_magnitudes.get(id(parameter))
            if magnitude is None:
                continue
            for piece in self._parameters.pieces(parameter, magnitude, part.start):
                sink.write_piece(CaptureStage.WEIGHTS, UPDATE_MAGNITUDE, piece)

    def _write_start(self, sink: Recording, optimizer: Any) -> None:
        """Write weights and buffers, and take over the values by which the sink replaces them.

        The optimizer's copies of the weights then get the same values.
        """
        is_changed = False
        with torch.no_grad():
            for parameter in self._parameters.parameters:
                is_changed |= self._write_tensor(sink, START_WEIGHT, parameter)
            for buffer in self._parameters.buffers:
                is_changed |= self._write_tensor(sink, START_BUFFER, buffer)
        if is_changed:
            self._update_copies(optimizer)

    def _write_tensor(self, sink: Recording, slot: str, tensor: torch.Tensor) -> bool:
        """Write one weight or buffer, and return True if the sink replaced its values."""
        is_changed = False
        full, is_partial = self._parameters.spread(tensor, tensor.data)
        for piece in self._parameters.split(tensor, full, is_partial):
            replacement = sink.begin(slot, piece)
            if replacement is not None and not torch.equal(replacement, piece.values):
                piece.values.copy_(replacement)
                is_changed = True
        if is_partial:
            # The pieces are views of a copy, so the values are copied back into the model.
            local_tensor(tensor.data).view(-1).copy_(full.view(-1)[flat_range(tensor)])
        return is_changed

    def _update_copies(self, optimizer: Any) -> None:
        """Copy changed weights to the optimizer's master copies, or to those that Megatron-FSDP uses."""
        fsdp_chunks = [chunk for chunk in self._model if is_megatron_fsdp(chunk)]
        for chunk in fsdp_chunks:
            chunk.param_and_grad_buffer.copy_main_weights_to_model_weights()
            # The optimizer's last step has begun to gather the old weights, so they are gathered again.
            chunk.start_param_sync(force_sync=True)
        if not fsdp_chunks:
            optimizer.reload_model_params()


def describe_initial_weights(parameters: ParameterMap) -> list[InitialPiece]:
    """Return a digest, the mean and the standard deviation of this rank's part of each weight.

    The capture calls this function before a checkpoint is loaded, to record how the weights were initialised.
    """
    descriptions = []
    for parameter in parameters.parameters:
        for piece in parameters.pieces(parameter, parameter.data):
            descriptions.append(_describe_piece(piece))
    return descriptions


def _describe_piece(piece: Piece) -> InitialPiece:
    """Return a digest, the mean and the standard deviation of one part of a weight."""
    values = piece.values.detach().cpu().contiguous()
    deviation, mean = torch.std_mean(values.double(), correction=0)
    digest = hash_local_values((values,))
    shape = tuple(values.shape)
    return InitialPiece(piece.name, piece.placement, shape, digest, float(mean), float(deviation))


def _shape_as_parameter(
    parameter: torch.Tensor, part: OptimizerPart, values: torch.Tensor
) -> torch.Tensor:
    """Return a tensor of an optimizer part in the parameter's shape; flat if it is only a range of it."""
    local_parameter = local_tensor(parameter)
    flat = local_tensor(values).reshape(-1)
    is_full = part.start is None and flat.numel() == local_parameter.numel()
    return flat.view(local_parameter.shape) if is_full else flat


def gather_weights(model: list[Any]) -> None:
    """Gather the updated weights now; `--overlap-param-gather` would do so in the next forward pass."""
    from megatron.core.distributed import DistributedDataParallel

    for chunk in model:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


class Snapshot:
    """A copy of everything that an iteration changes, with which it can begin again."""

    def __init__(self, chunks: list[torch.nn.Module], optimizer: Any, scheduler: Any) -> None:
        """Copy weights, buffers, optimizer states, scheduler, loss scalers and random states."""
        tensors: list[torch.Tensor] = []
        for chunk in chunks:
            tensors += [*chunk.parameters(), *chunk.buffers()]
        torch_optimizers = []
        counters = [scheduler]
        for megatron_optimizer in list_optimizers(optimizer):
            torch_optimizer = getattr(megatron_optimizer, "optimizer", megatron_optimizer)
            torch_optimizers.append(torch_optimizer)
            for group in torch_optimizer.param_groups:
                tensors += group["params"]
            loss_scaler = getattr(megatron_optimizer, "grad_scaler", None)
            if loss_scaler is not None:
                counters.append(loss_scaler)
        self._state = TrainingState(tensors, *torch_optimizers)
        # Scheduler and loss scalers count iterations in their attributes.
        self._attributes = [(counter, dict(vars(counter))) for counter in counters]
        self._rng_states = get_rng_tracker().get_states()

    def restore(self) -> None:
        """Restore all of it in place."""
        self._state.restore()
        for counter, attributes in self._attributes:
            vars(counter).update(attributes)
        get_rng_tracker().set_states(self._rng_states)


def perturb_weights(parameters: ParameterMap, seed: str) -> None:
    """Move every weight in place to a neighbouring floating-point number, by one rounding error.

    The direction depends on `seed` and on the weight's position in the full parameter. So all ranks that hold a copy
    of a weight change it in the same way.
    """
    perturb(_name_weights(parameters, seed))


def _name_weights(parameters: ParameterMap, seed: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the values of each part of a weight, with a name that has the seed and the part's position."""
    for parameter in parameters.parameters:
        for piece in parameters.pieces(parameter, parameter.data):
            yield f"{seed} {piece.placement.key} {piece.placement.global_offset}", piece.values


def get_rng_tracker() -> Any:
    """Return Megatron's tracker of random states."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()
