"""Find the position of each parameter and buffer of a rank in the full tensor.

The position comes from the model's own `sharded_state_dict`. It knows tensor, pipeline, virtual and expert
parallelism, and tied copies. It also knows the parameters that checkpoints hold in parts, such as the two halves of
a gated MLP. The flat ranges of the distributed optimizer come from its own map of parameters. A `Piece` is a tensor
of values with its position.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from parakit.accounting import list_optimizers, parameter_gradient
from parakit.artifacts.capture import Placement
from parakit.capturing import Piece, local_tensor


class ParameterMap:
    """The parameters and buffers of a rank's model chunks with their positions in the full tensors."""

    def __init__(self, chunks: list[torch.nn.Module], names: list[dict[str, str]]) -> None:
        """Look up all parameters and saved buffers.

        Args:
            chunks: Chunks of the model.
            names: One dictionary per chunk: each module's global name by its name in the chunk.
        """
        self._entries: dict[int, Any] = {}
        """Entry of the sharded state dict that holds the tensor's position, by the tensor's id."""
        self._names: dict[int, str] = {}
        """Global name of each tensor, by the tensor's id."""
        self.parameters: list[torch.nn.Parameter] = []
        self.buffers: list[torch.Tensor] = []
        """Buffers that checkpoints hold."""
        self.unplaced: list[str] = []
        """Names of the parameters and buffers that `sharded_state_dict` does not hold."""
        for chunk, names_of_chunk in zip(chunks, names, strict=True):
            entries = {id(entry.data): entry for entry in _list_entries(_shard_state(chunk))}
            for name, tensor in (*chunk.named_parameters(), *_list_saved_buffers(chunk)):
                module, _, tensor_name = name.rpartition(".")
                # A tensor that several modules share keeps its first name.
                self._names.setdefault(id(tensor), f"{names_of_chunk[module]}.{tensor_name}")
                entry = entries.get(id(tensor)) or _find_by_memory(entries.values(), tensor)
                if entry is None:
                    self.unplaced.append(name)
                else:
                    self._add(tensor, entry)

    def _add(self, tensor: torch.Tensor, entry: Any) -> None:
        """Add a parameter or buffer with its entry in the sharded state dict, unless it is already there."""
        if id(tensor) in self._entries:
            return
        self._entries[id(tensor)] = entry
        if isinstance(tensor, torch.nn.Parameter):
            self.parameters.append(tensor)
        else:
            self.buffers.append(tensor)

    def hash_values(self) -> str:
        """Return a hash of the values of all parameters and buffers on this rank."""
        return hash_local_values((*self.parameters, *self.buffers))

    def places(self, parameter: torch.Tensor) -> bool:
        """Return True if the parameter's position in the full tensor is known."""
        return id(parameter) in self._entries

    def name(self, parameter: torch.Tensor) -> str:
        """Return the parameter's name with the global numbers of layers and experts."""
        return self._names[id(parameter)]

    def parts(self, optimizer: Any) -> Iterator[tuple[torch.nn.Parameter, OptimizerPart]]:
        """Yield each parameter that this rank's optimizer updates, fully or in part, with the updated part."""
        for parameter in self.parameters:
            part = _optimizer_part(optimizer, parameter)
            if part is not None:
                yield parameter, part

    def pieces(
        self, parameter: torch.Tensor, values: torch.Tensor, start: int | None = None
    ) -> Iterator[Piece]:
        """Yield the values of a parameter (weights, gradients or states) with their position in the full parameter.

        There is one piece, or several for a parameter that checkpoints store in several parts.

        Args:
            parameter: The parameter that the values belong to.
            values: One value per element, in the parameter's shape or flat.
            start: Index of the first value in the flattened parameter; None if there is one value for
                every element.
        """
        full, is_partial = self.spread(parameter, values, start)
        yield from self.split(parameter, full, is_partial)

    def spread(
        self, parameter: torch.Tensor, values: torch.Tensor, start: int | None = None
    ) -> tuple[torch.Tensor, bool]:
        """Return `values` in the parameter's shape, and whether some elements have no value.

        The arguments are those of `pieces`. If all elements have a value, the result is a view of `values`.
        Otherwise it is a copy on the CPU, in which missing elements are NaN, or 0 for integers.
        """
        values, shape = local_tensor(values), local_tensor(parameter).shape
        fsdp_range = flat_range(parameter)
        if fsdp_range:
            start, shape = fsdp_range.start, parameter.shape
        if start is None:
            return values.detach().view(shape), False
        absent = torch.nan if values.is_floating_point() else 0
        full = torch.full((parameter.numel(),), absent, dtype=values.dtype)
        full[start : start + values.numel()] = values.detach().cpu().view(-1)
        return full.view(shape), True

    def split(
        self, parameter: torch.Tensor, values: torch.Tensor, is_partial: bool
    ) -> Iterator[Piece]:
        """Yield views of `values`, each with its position in the full parameter.

        `values` have the parameter's shape on this rank. A parameter that checkpoints store in several parts, such as
        gate and value of a gated MLP, gives one piece per part. The names of these pieces end in `[0]` and `[1]`.
        `is_partial` is True if some elements of `values` are placeholders without a value (`spread`).
        """
        entry, name = self._entries[id(parameter)], self._names[id(parameter)]
        if not hasattr(entry, "build_fn"):
            yield Piece(name, _make_placement(entry, is_partial), values)
            return
        built = entry.build_fn(entry.key, values, entry.replica_id, None)
        for number, part in enumerate(_list_entries(built)):
            yield Piece(f"{name}[{number}]", _make_placement(part, is_partial), part.data)


def hash_local_values(tensors: Iterable[torch.Tensor]) -> str:
    """Return a hash of the values of tensors on this rank. Only the local shard of a DTensor counts."""
    digest = hashlib.sha256()
    for tensor in tensors:
        values = local_tensor(tensor.detach()).reshape(-1).contiguous()
        digest.update(values.view(torch.uint8).cpu().numpy())
    return digest.hexdigest()[:16]


def _list_saved_buffers(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that checkpoints hold, with their names in the chunk."""
    for prefix, module in chunk.named_modules():
        for buffer_name, buffer in module.named_buffers(recurse=False):
            if buffer_name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{buffer_name}".lstrip("."), buffer


def _find_by_memory(entries: Iterable[Any], tensor: torch.Tensor) -> Any:
    """Return the entry with the tensor's memory and shape; None if there is none.

    Some modules detach their parameters for `sharded_state_dict`, which makes another object.
    """
    memory = (local_tensor(tensor).data_ptr(), local_tensor(tensor).shape)
    for entry in entries:
        if (entry.data.data_ptr(), entry.data.shape) == memory:
            return entry
    return None


@dataclass(frozen=True)
class OptimizerPart:
    """The part of a parameter that this rank's optimizer updates: the full parameter, or a range of it when
    flattened.
    """

    start: int | None
    """Index of the range's first element in the flattened parameter; None for the full parameter."""
    main: torch.Tensor
    """The tensor that is updated: the parameter, or a master copy of the parameter or of the range."""
    states: dict[str, torch.Tensor]
    """The optimizer's states by name, and the master copy as `param` if its type is another."""
    gradient: torch.Tensor | None
    """The reduced gradient of the part; None if there is none."""
    group: dict[str, Any]
    """The optimizer's parameter group, with its learning rate and weight decay."""


def _optimizer_part(optimizer: Any, parameter: torch.nn.Parameter) -> OptimizerPart | None:
    """Return the part of a parameter that this rank's optimizer updates; None if it updates nothing."""
    for megatron_optimizer in list_optimizers(optimizer):
        if getattr(megatron_optimizer, "model_param_gbuf_map", None) is None:
            part = _full_part(megatron_optimizer, parameter)
            if part is not None:
                return part
        elif parameter in megatron_optimizer.model_param_gbuf_map:
            return _sharded_part(megatron_optimizer, parameter)
    return None


def _sharded_part(optimizer: Any, parameter: torch.nn.Parameter) -> OptimizerPart | None:
    """Return the range of a parameter that this rank's shard of a distributed optimizer holds.

    The result is None if another rank's shard holds all of the parameter.
    """
    try:
        held_range = optimizer._get_model_param_range_map(parameter)["param"]
        states = optimizer._get_main_param_and_optimizer_states(parameter)
    except KeyError:
        return None
    gradient = parameter_gradient(parameter)
    if gradient is not None:
        gradient = gradient.view(-1)[held_range.start : held_range.end]
    group_index, index_in_group = optimizer.model_param_group_index_map[parameter]
    group = optimizer.optimizer.param_groups[group_index]
    return OptimizerPart(
        start=held_range.start,
        main=group["params"][index_in_group],
        states=_select_tensors(states, parameter),
        gradient=gradient,
        group=group,
    )


def _full_part(optimizer: Any, parameter: torch.nn.Parameter) -> OptimizerPart | None:
    """Return a full parameter with its optimizer states, as an optimizer without sharding holds them.

    None means that the optimizer does not update the parameter.
    """
    master = getattr(parameter, "main_param", None)
    main = parameter if master is None else master
    for group in optimizer.param_groups:
        # `in` would compare elements of tensors.
        is_in_group = any(main is candidate for candidate in group["params"])
        if not is_in_group:
            continue
        torch_optimizer = getattr(optimizer, "optimizer", optimizer)
        states = {**torch_optimizer.state.get(main, {}), "param": main}
        return OptimizerPart(
            start=None,
            main=main,
            states=_select_tensors(states, parameter),
            gradient=parameter_gradient(parameter),
            group=group,
        )
    return None


def _shard_state(chunk: torch.nn.Module) -> Any:
    """Return the chunk's sharded state dict.

    Two faults of older versions are worked around. Before 0.19 Megatron takes every DTensor for one of torch FSDP2,
    where ranks have equally many rows. The DTensors of Megatron-FSDP are ranges of flat buffers. With MTP, the
    model of 0.16 reads `dp_cp_group` from the caller's metadata, where only its modules would add it.
    """
    from megatron.core import utils
    from megatron.core.transformer import utils as transformer_utils

    metadata = None
    if hasattr(transformer_utils, "ensure_metadata_has_dp_cp_group"):
        metadata = transformer_utils.ensure_metadata_has_dp_cp_group(None)
    has_flat_ranges = any(
        hasattr(parameter, "megatron_fsdp_slice") for parameter in chunk.parameters()
    )
    have_dtensor = utils.HAVE_DTENSOR
    utils.HAVE_DTENSOR = have_dtensor and not has_flat_ranges
    try:
        return chunk.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
    finally:
        utils.HAVE_DTENSOR = have_dtensor


def _make_placement(entry: Any, is_partial: bool) -> Placement:
    """Return the position of an entry of a sharded state dict."""
    return Placement(entry.key, tuple(entry.global_shape), tuple(entry.global_offset), is_partial)


def _select_tensors(
    states: dict[str, Any], parameter: torch.nn.Parameter
) -> dict[str, torch.Tensor]:
    """Return the states that are tensors. A master copy (`param`) is left out if it has the parameter's dtype."""
    tensors = {}
    for name, value in states.items():
        if not isinstance(value, torch.Tensor):
            continue
        is_distinct = name != "param" or value.dtype != parameter.dtype
        if is_distinct:
            tensors[name] = value
    return tensors


def _list_entries(state: Any) -> Iterator[Any]:
    """Yield the sharded tensors, and the factories of sharded tensors, in a nested state dict."""
    if isinstance(state, dict):
        for value in state.values():
            yield from _list_entries(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from _list_entries(value)
    elif hasattr(state, "replica_id") and isinstance(state.data, torch.Tensor):
        yield state


def flat_range(parameter: torch.Tensor) -> slice | None:
    """Return the range of the flattened parameter that this rank has under Megatron-FSDP, else None.

    Megatron-FSDP splits flat buffers and not rows, so a rank may have a part of a row.
    """
    fsdp_slice: slice | None = getattr(parameter, "megatron_fsdp_slice", None)
    return fsdp_slice
