"""A parameter's gradient, optimizer state and weight, and a buffer, with its place in the whole.

The place is what Megatron's own `sharded_state_dict` says of the model: it knows tensor, pipeline,
virtual and expert parallelism, tied copies, and parameters that checkpoints hold in parts (a gated MLP's
two halves). The distributed optimizer's flat ranges come from its own map of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from parakit.accounting import gradient_of, optimizers
from parakit.artifacts.capture import Placement
from parakit.capturing import Piece, local_tensor


class ParameterMap:
    """Where each parameter of a rank's model chunks lies in the whole model."""

    def __init__(self, chunks: list[torch.nn.Module], names: list[dict[str, str]]) -> None:
        """Look the parameters up; `names` gives each module's global name by its own."""
        self._entries: dict[int, Any] = {}
        self._names: dict[int, str] = {}
        self.parameters: list[torch.nn.Parameter] = []
        self.buffers: list[torch.Tensor] = []
        """Those that checkpoints hold."""
        self.unplaced: list[str] = []
        for chunk, names_of_chunk in zip(chunks, names, strict=True):
            entries = {id(entry.data): entry for entry in _entries(_described(chunk))}
            saved = (
                (f"{prefix}.{own}".lstrip("."), buffer)
                for prefix, inner in chunk.named_modules()
                for own, buffer in inner.named_buffers(recurse=False)
                if own not in inner._non_persistent_buffers_set
            )
            for name, held in (*chunk.named_parameters(), *saved):
                module, _, own = name.rpartition(".")
                self._names.setdefault(id(held), f"{names_of_chunk[module]}.{own}")
                # Some modules detach before they describe: it is the same memory.
                memory = (local_tensor(held).data_ptr(), local_tensor(held).shape)
                alike = (e for e in entries.values() if (e.data.data_ptr(), e.data.shape) == memory)
                entry = entries.get(id(held)) or next(alike, None)
                if entry is None:
                    self.unplaced.append(name)
                elif id(held) not in self._entries:
                    self._entries[id(held)] = entry
                    if isinstance(held, torch.nn.Parameter):
                        self.parameters.append(held)
                    else:
                        self.buffers.append(held)

    def places(self, parameter: torch.Tensor) -> bool:
        """Whether it is known where the parameter lies."""
        return id(parameter) in self._entries

    def name(self, parameter: torch.Tensor) -> str:
        """The parameter's name with global numbers."""
        return self._names[id(parameter)]

    def parts(self, optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, OptimizerPart]]:
        """Parameters of which the optimizer of this rank holds anything, and what."""
        for parameter in self.parameters:
            part = _optimizer_part(optimizer, parameter)
            if part is not None:
                yield parameter, part

    def pieces(
        self, parameter: torch.Tensor, values: torch.Tensor, start: int | None = None
    ) -> Iterator[Piece]:
        """Bring `values`, of the parameter's shape or its flat range from `start` on, to places."""
        whole, partial = self.spread(parameter, values, start)
        yield from self.split(parameter, whole, partial)

    def spread(
        self, parameter: torch.Tensor, values: torch.Tensor, start: int | None = None
    ) -> tuple[torch.Tensor, bool]:
        """Values in the parameter's shape, and whether they are a copy that has NaN for absent ones."""
        values, shape = local_tensor(values), local_tensor(parameter).shape
        if held := flat_range(parameter):
            start, shape = held.start, parameter.shape
        if start is not None:
            absent = torch.nan if values.is_floating_point() else 0
            whole = torch.full((parameter.numel(),), absent, dtype=values.dtype)
            whole[start : start + values.numel()] = values.detach().cpu().view(-1)
            values = whole
        return values.detach().view(shape), start is not None

    def split(
        self, parameter: torch.Tensor, values: torch.Tensor, partial: bool
    ) -> Iterator[Piece]:
        """Views of `values`, of the parameter's shape, each with its place."""
        entry, name = self._entries[id(parameter)], self._names[id(parameter)]
        if not hasattr(entry, "build_fn"):
            yield Piece(name, _place(entry, partial), values)
            return
        built = entry.build_fn(entry.key, values, entry.replica_id, None)
        for number, part in enumerate(_entries(built)):
            yield Piece(f"{name}[{number}]", _place(part, partial), part.data)


@dataclass(frozen=True)
class OptimizerPart:
    """What an optimizer keeps of one parameter: whole, or a flat range from `start` on."""

    start: int | None
    main: torch.Tensor
    """The tensor that it updates: the parameter, or a master copy of it or of the range."""
    states: dict[str, torch.Tensor]
    gradient: torch.Tensor | None
    group: dict[str, Any]
    """The optimizer's parameter group, with its learning rate and weight decay."""


def _optimizer_part(optimizer: Any, parameter: torch.nn.Parameter) -> OptimizerPart | None:
    """The states and the reduced gradient of a parameter; None if this rank holds nothing of it."""
    for one in optimizers(optimizer):
        ranges = getattr(one, "model_param_gbuf_map", None)
        if ranges is not None:
            if parameter not in ranges:
                continue
            try:
                held = one._get_model_param_range_map(parameter)["param"]
                states = one._get_main_param_and_optimizer_states(parameter)
            except KeyError:
                return None  # Another rank's shard has all of it.
            gradient = gradient_of(parameter)
            if gradient is not None:
                gradient = gradient.view(-1)[held.start : held.end]
            group, place = one.model_param_group_index_map[parameter]
            settings = one.optimizer.param_groups[group]
            main = settings["params"][place]
            return OptimizerPart(held.start, main, _kept(states, parameter), gradient, settings)
        main = getattr(parameter, "main_param", None)
        main = parameter if main is None else main
        for group in one.param_groups:
            if any(main is held for held in group["params"]):
                inner = getattr(one, "optimizer", one)
                states = _kept({**inner.state.get(main, {}), "param": main}, parameter)
                return OptimizerPart(None, main, states, gradient_of(parameter), group)
    return None


def _described(chunk: torch.nn.Module) -> Any:
    """The chunk's sharded state dict.

    Before 0.19 Megatron takes every DTensor for torch FSDP2's, whose ranks have equally many rows each;
    Megatron-FSDP's have ranges of flat buffers. With MTP the model of 0.16 reads `dp_cp_group` from the
    caller's metadata, which all modules within it would add.
    """
    from megatron.core import utils
    from megatron.core.transformer import utils as of_modules

    known = utils.HAVE_DTENSOR
    ranged = any(hasattr(one, "megatron_fsdp_slice") for one in chunk.parameters())
    utils.HAVE_DTENSOR = known and not ranged
    try:
        ensure = getattr(of_modules, "ensure_metadata_has_dp_cp_group", lambda metadata: metadata)
        return chunk.sharded_state_dict(metadata=ensure(None))  # type: ignore[operator]
    finally:
        utils.HAVE_DTENSOR = known


def _place(entry: Any, partial: bool) -> Placement:
    return Placement(entry.key, tuple(entry.global_shape), tuple(entry.global_offset), partial)


def _kept(states: dict[str, Any], parameter: torch.nn.Parameter) -> dict[str, torch.Tensor]:
    """States that are tensors, among them the master copy where it is more than the weight itself."""
    return {
        name: value
        for name, value in states.items()
        if isinstance(value, torch.Tensor)
        and not (name == "param" and value.dtype == parameter.dtype)
    }


def _entries(state: Any) -> Iterator[Any]:
    """The sharded tensors, and the factories of such, of a nested state dict."""
    if isinstance(state, dict):
        for value in state.values():
            yield from _entries(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _entries(value)
    elif hasattr(state, "replica_id") and isinstance(state.data, torch.Tensor):
        yield state


def flat_range(parameter: torch.Tensor) -> slice | None:
    """Which of its elements this rank has, under Megatron-FSDP, which splits flat buffers, not rows."""
    found: slice | None = getattr(parameter, "megatron_fsdp_slice", None)
    return found
