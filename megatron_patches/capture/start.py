"""What an iteration begins with: weights and buffers, which another run's can take the place of."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_patches.capture.parameters import OptimizerPart, ParameterMap, local, optimizer_part
from tools.capture.sinks import Piece, Recording, reach
from tools.records.capture import REACH, START_BUFFER, START_WEIGHT, Site, Stage


class Start:
    """A rank's weights and buffers at the start of the captured iteration."""

    def __init__(self, parameters: ParameterMap) -> None:
        self._parameters = parameters
        self._last: dict[int, torch.Tensor] = {}
        """What the optimizer updates of each parameter (by number), as it was one iteration ago."""
        self._reach: dict[int, torch.Tensor] = {}

    def follow(self, optimizer: Any) -> None:
        """Before an iteration, note how far the update before it reached."""
        for number, parameter in enumerate(self._parameters.parameters):
            part = optimizer_part(optimizer, parameter)
            if part is None:
                continue
            now, squares = local(part.main).detach(), part.states.get("exp_avg_sq")
            if number in self._last and squares is not None:
                reached = reach(*_rows(parameter, part, now - self._last[number], squares))
                reached = reached.reshape(now.shape)
                self._reach[number] = self._reach.get(number, 0) + reached
            self._last[number] = now.clone()

    def write(self, sink: Recording, optimizer: Any) -> None:
        """Write them, and how far updates reached; begin with others, if that is forced."""
        for number, reached in self._reach.items():
            parameter = self._parameters.parameters[number]
            part = optimizer_part(optimizer, parameter)
            start = part.start if part else None
            for piece in self._parameters.pieces(parameter, reached, start):
                sink.write_piece(Site(Stage.WEIGHTS, piece.name, REACH), piece)
        self._last.clear()
        self._reach.clear()
        changed = False
        with torch.no_grad():
            for slot, piece in self._pieces():
                given = sink.begin(Site(Stage.WEIGHTS, piece.name, slot), piece)
                if given is None or piece.placement.partial:
                    continue
                if not torch.equal(given, piece.values):
                    piece.values.copy_(given)
                    changed = True
        if changed:  # Where an optimizer has copies of higher precision, it updates those.
            optimizer.reload_model_params()

    def _pieces(self) -> Iterator[tuple[str, Piece]]:
        """Views of the model's own memory."""
        held = self._parameters
        for parameter in held.parameters:
            yield from ((START_WEIGHT, piece) for piece in held.pieces(parameter, parameter.data))
        for buffer in held.buffers:
            yield from ((START_BUFFER, piece) for piece in held.pieces(buffer, buffer))


def _rows(
    parameter: torch.Tensor, part: OptimizerPart, *tensors: torch.Tensor
) -> Iterator[torch.Tensor]:
    """Tensors of an optimizer's part, in rows where it is the whole parameter."""
    whole = local(parameter)
    for tensor in tensors:
        flat = local(tensor).reshape(-1)
        alike = part.start is None and flat.numel() == whole.numel()
        yield flat.view(whole.shape) if alike else flat


def gather_weights(model: list[Any]) -> None:
    """Let ranks have the weights of now, which `--overlap-param-gather` sends in a forward pass."""
    from megatron.core.distributed import DistributedDataParallel

    for chunk in model:
        if isinstance(chunk, DistributedDataParallel) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
