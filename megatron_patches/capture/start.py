"""What an iteration begins with: weights, buffers and states, put back, replaced or off by rounding.

Repeated with weights off by one rounding error, an iteration says how far each tensor follows. Source of
the idea: TTrace (arXiv:2506.09280), whose tolerance is the response of a tensor to a change of its input
by the machine's epsilon.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch

from megatron_patches.capture.parameters import OptimizerPart, ParameterMap, flat_range
from parakit.accounting import is_megatron_fsdp, optimizers
from parakit.artifacts.capture import (
    REACH,
    START_BUFFER,
    START_WEIGHT,
    InitialPiece,
    Stage,
)
from parakit.capturing import Recording, TrainingState, local_tensor, perturb, update_magnitude


class Start:
    """A rank's weights and buffers at the start of the captured iteration."""

    def __init__(self, model: list[Any], parameters: ParameterMap) -> None:
        self._model, self._parameters = model, parameters
        self._last: dict[int, torch.Tensor] = {}
        """What the optimizer updates of each parameter (by id), as it was one iteration ago."""
        self._reach: dict[int, torch.Tensor] = {}

    def follow(self, optimizer: Any) -> None:
        """Before an iteration, note how far the update before it reached."""
        for parameter, part in self._parameters.parts(optimizer):
            number, now = id(parameter), local_tensor(part.main).detach()
            squares = part.states.get("exp_avg_sq")
            if number in self._last and squares is not None:
                reached = update_magnitude(
                    *_rows(parameter, part, now - self._last[number], squares)
                )
                reached = reached.reshape(now.shape)
                self._reach[number] = self._reach.get(number, 0) + reached
            self._last[number] = now.clone()

    def write(self, sink: Recording, optimizer: Any) -> None:
        """Write them, and how far updates reached; begin with others, if that is forced."""
        for parameter, part in self._parameters.parts(optimizer):
            if id(parameter) in self._reach:
                reached = self._reach[id(parameter)]
                for piece in self._parameters.pieces(parameter, reached, part.start):
                    sink.write_piece(Stage.WEIGHTS, REACH, piece)
        self._last.clear()
        self._reach.clear()
        changed = False
        with torch.no_grad():
            held = self._parameters
            begins: list[tuple[str, torch.Tensor]] = [(START_WEIGHT, w) for w in held.parameters]
            begins += [(START_BUFFER, one) for one in held.buffers]
            for slot, one in begins:
                whole, partial = held.spread(one, one.data)
                for piece in held.split(one, whole, partial):
                    given = sink.begin(slot, piece)
                    if given is not None and not torch.equal(given, piece.values):
                        piece.values.copy_(given)
                        changed = True
                if partial:
                    local_tensor(one.data).view(-1).copy_(whole.view(-1)[flat_range(one)])
        if changed:
            self._carry_over(optimizer)

    def _carry_over(self, optimizer: Any) -> None:
        """Change copies of the weights as well: the optimizer's, or what Megatron-FSDP computes with."""
        flat = [chunk for chunk in self._model if is_megatron_fsdp(chunk)]
        for chunk in flat:
            chunk.param_and_grad_buffer.copy_main_weights_to_model_weights()
            # The optimizer's step has begun to gather the weights of before.
            chunk.start_param_sync(force_sync=True)
        if not flat:
            optimizer.reload_model_params()


def initial_pieces(parameters: ParameterMap) -> list[InitialPiece]:
    """What the layout has initialised by itself, of a model that has not loaded anything yet."""
    found = []
    for parameter in parameters.parameters:
        for piece in parameters.pieces(parameter, parameter.data):
            values = piece.values.detach().cpu().contiguous()
            deviation, mean = torch.std_mean(values.double(), correction=0)
            digest = hashlib.sha256(values.reshape(-1).view(torch.uint8).numpy()).hexdigest()[:16]
            place, shape = piece.placement, tuple(values.shape)
            entry = InitialPiece(piece.name, place, shape, digest, float(mean), float(deviation))
            found.append(entry)
    return found


def _rows(
    parameter: torch.Tensor, part: OptimizerPart, *tensors: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Tensors of an optimizer's part, in rows where it is the whole parameter."""
    whole = local_tensor(parameter)
    for tensor in tensors:
        flat = local_tensor(tensor).reshape(-1)
        alike = part.start is None and flat.numel() == whole.numel()
        yield flat.view(whole.shape) if alike else flat


def gather_weights(model: list[Any]) -> None:
    """Let ranks have the weights of now, which `--overlap-param-gather` sends in a forward pass."""
    from megatron.core.distributed import DistributedDataParallel

    for chunk in model:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


class Snapshot:
    """Everything an iteration changes, to begin the same iteration again."""

    def __init__(self, chunks: list[torch.nn.Module], optimizer: Any, scheduler: Any) -> None:
        inner = [getattr(one, "optimizer", one) for one in optimizers(optimizer)]
        held = [one for chunk in chunks for one in (*chunk.parameters(), *chunk.buffers())]
        held += [one for each in inner for group in each.param_groups for one in group["params"]]
        self._state = TrainingState(held, *inner)
        scalers = (getattr(one, "grad_scaler", None) for one in optimizers(optimizer))
        counting = (scheduler, *(one for one in scalers if one is not None))
        self._counted = [(one, dict(vars(one))) for one in counting]
        self._tracked = _tracker().get_states()

    def restore(self) -> None:
        """Put all of it back."""
        self._state.restore()
        for one, counted in self._counted:
            vars(one).update(counted)
        _tracker().set_states(self._tracked)


def perturb_weights(parameters: ParameterMap, seed: str) -> None:
    """Let every weight be off by a rounding error, its copies on several ranks alike."""
    perturb(
        (f"{seed} {piece.placement.key} {piece.placement.global_offset}", piece.values)
        for parameter in parameters.parameters
        for piece in parameters.pieces(parameter, parameter.data)
    )


def _tracker() -> Any:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    return get_cuda_rng_tracker()
