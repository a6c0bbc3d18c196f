"""Sinks, which receive every tensor of a captured iteration: they write, replace or compare tensors.

A backend's hooks call `tap` for each activation, and `write` or `write_piece` for each gradient, optimizer
state and weight. A sink is one of two classes:

* `Recording` writes tensors to a rank's capture. With `forced` tensors it also replaces module inputs by the
  tensors of another capture.
* `RoundingProbe` compares the tensors of a repeated iteration with the written ones, and keeps how far
  rounding errors moved each tensor.

A `TensorKey` (`parakit.artifacts.capture`) is the key of a tensor: stage, module or parameter, slot and micro batch.
"""

from __future__ import annotations

import ctypes
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch

from parakit.artifacts.capture import (
    ELEMENTS_PER_CHUNK,
    TENSORS_FILE,
    UPDATE_SUFFIX,
    CaptureStage,
    CaptureWriter,
    Placement,
    TensorKey,
    TensorRecord,
    read_index,
)


@dataclass(frozen=True)
class Piece:
    """The part that this rank holds of a parameter, or of a tensor with the parameter's shape."""

    name: str
    """Name of the parameter, with layers counted over the whole model.

    If checkpoints store a part of the parameter separately, the name ends in the number of that part.
    """
    placement: Placement
    """Position of the values in the full parameter."""
    values: torch.Tensor


@dataclass(frozen=True)
class _KnownTensor:
    """A tensor that was noted, the sum of its elements at that time, and the value that was noted for it."""

    tensor: torch.Tensor
    sum_of_elements: float
    value: Any


class KnownTensors:
    """A table of the tensors of one micro batch's forward pass, in which the caller notes a value per tensor.

    A tensor is recognised by its memory. `Recording` looks here if a tensor was already written under another
    key.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, int, int, torch.dtype], _KnownTensor] = {}

    def find(self, tensor: torch.Tensor) -> Any:
        """Return the value noted for the tensor, or None if the tensor is new or has changed."""
        known = self._entries.get(self._key(tensor))
        if known is None or not tensor.is_contiguous():
            return None
        # Megatron may have freed the known tensor's storage, which then belongs to another tensor. Or
        # Megatron may have written to the storage through a view that does not raise the version.
        has_same_memory = known.tensor.data_ptr() == tensor.data_ptr()
        if has_same_memory and known.sum_of_elements == _sum_of_elements(tensor):
            return known.value
        return None

    def note(self, tensor: torch.Tensor, value: Any) -> None:
        """Note a value for a tensor; a tensor that is not contiguous is ignored.

        The tensor is kept alive until `clear`, so that no other tensor gets its memory.
        """
        if tensor.is_contiguous():
            known = _KnownTensor(tensor, _sum_of_elements(tensor), value)
            self._entries[self._key(tensor)] = known

    def clear(self) -> None:
        """Forget all tensors, and let go of their memory."""
        self._entries.clear()

    @staticmethod
    def _key(tensor: torch.Tensor) -> tuple[int, int, int, torch.dtype]:
        """Return address, size, version and dtype; PyTorch raises the version at each in-place change."""
        return (tensor.data_ptr(), tensor.numel(), tensor._version, tensor.dtype)


def _sum_of_elements(tensor: torch.Tensor) -> float:
    """Return the sum of all elements in fp64."""
    return sum(float(chunk.sum(dtype=torch.float64)) for chunk in _split_flat(tensor.detach()))


def _split_flat(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the flattened tensor in chunks of at most ELEMENTS_PER_CHUNK elements, which fit into the cache."""
    flat = tensor.reshape(-1)
    begins = range(0, flat.numel(), ELEMENTS_PER_CHUNK)
    return [flat[begin : begin + ELEMENTS_PER_CHUNK] for begin in begins]


class StoredTensors:
    """Tensors of one rank's capture by their keys; values are read from the file on demand."""

    def __init__(self, folder: Path, records: dict[TensorKey, TensorRecord] | None = None) -> None:
        """Open the tensors in a rank's folder. `records` is their index; None reads the index from the folder."""
        if records is None:
            records = {record.tensor_key: record for record in read_index(folder)}
        self._records = records
        size = (folder / TENSORS_FILE).stat().st_size
        # Mode "c" (copy on write) is needed because torch warns of memory that is read-only.
        self._bytes = numpy.memmap(folder / TENSORS_FILE, mode="c") if size else None

    def get(self, tensor_key: TensorKey) -> torch.Tensor | None:
        """Return the stored tensor on the CPU, or None if the capture has no tensor of this key.

        The values are mapped from the file, so the caller must not change them.
        """
        record = self._records.get(tensor_key)
        if record is None:
            return None
        dtype: torch.dtype = getattr(torch, record.dtype)
        if record.size_bytes == 0 or self._bytes is None:
            return torch.empty(record.shape, dtype=dtype)
        values = self._bytes[record.offset_bytes : record.offset_bytes + record.size_bytes]
        return torch.frombuffer(values, dtype=dtype).view(record.shape)


class Recording:
    """Sink that writes every tensor and, if `forced` is given, replaces the inputs of modules.

    `forced` holds the tensors of another capture. They replace the inputs of modules in the forward pass, and
    the gradients of module outputs in the backward pass. So each module's result depends on the module alone,
    and no error reaches the next module. A tensor is written before it is replaced.
    """

    def __init__(self, writer: CaptureWriter, forced: StoredTensors | None = None) -> None:
        self._writer = writer
        self._forced = forced
        self._known = KnownTensors()

    def begin_micro_batch(self) -> None:
        """Forget the tensors of the previous micro batch; call this before each forward pass."""
        self._known.clear()

    def forward(self, tensor_key: TensorKey, tensor: torch.Tensor) -> torch.Tensor | None:
        """Write a tensor of the forward pass, and return the tensor to go on with; None means that the tensor stays.

        If the same tensor was already written under another key, only a reference to that key's values is
        written.
        """
        known: TensorRecord | None = self._known.find(tensor)
        if known is not None:
            self._writer.add_same(tensor_key, known, tuple(tensor.shape))
        else:
            self._known.note(tensor, self.write(tensor_key, tensor))
        return self._find_input(tensor_key, tensor)

    def backward(self, tensor_key: TensorKey, gradient: torch.Tensor) -> torch.Tensor | None:
        """Write the gradient of an activation; return its replacement, or None if there is none."""
        self.write(tensor_key, gradient)
        return self._find_input(tensor_key, gradient)

    def write(
        self, tensor_key: TensorKey, tensor: torch.Tensor, placement: Placement | None = None
    ) -> TensorRecord:
        """Write a tensor and return its record. `placement` is given for parts of parameters, and None otherwise."""
        name = str(tensor.dtype).removeprefix("torch.")
        return self._writer.add(
            tensor_key,
            name,
            shape=tuple(tensor.shape),
            values=_view_bytes(tensor),
            placement=placement,
        )

    def write_piece(self, stage: CaptureStage, slot: str, piece: Piece) -> None:
        """Write this rank's part of a parameter, or of a tensor with the parameter's shape."""
        self.write(TensorKey(stage, piece.name, slot), piece.values, piece.placement)

    def _find_input(self, tensor_key: TensorKey, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the forced tensor for an input of a module; None for other tensors, or if none is forced."""
        return self._find_replacement(tensor_key, tensor) if _is_module_input(tensor_key) else None

    def _find_replacement(self, tensor_key: TensorKey, like: torch.Tensor) -> torch.Tensor | None:
        """Return a copy of the forced tensor with the device and dtype of `like`.

        Return None if there is no forced tensor of this key, or if the forced tensor has another shape.
        """
        if self._forced is None:
            return None
        stored = self._forced.get(tensor_key)
        if stored is None or stored.shape != like.shape:
            return None
        return stored.to(device=like.device, dtype=like.dtype, copy=True)

    def begin(self, slot: str, piece: Piece) -> torch.Tensor | None:
        """Write a weight or buffer at the start of the iteration.

        Return the values with which the iteration must start in their place. None means that the values stay.
        """
        self.write_piece(CaptureStage.WEIGHTS, slot, piece)
        return self._find_replacement(
            TensorKey(CaptureStage.WEIGHTS, piece.name, slot), piece.values
        )

    def choose(self, tensor_key: TensorKey, chosen: torch.Tensor) -> torch.Tensor | None:
        """Write which experts a router chooses; return the forced choice, or None if there is none."""
        self.write(tensor_key, chosen)
        return self._forced.get(tensor_key) if self._forced is not None else None


class RoundingProbe:
    """Sink that measures how far rounding errors move each tensor of a repeated iteration.

    The iteration is repeated with weights that `perturb` has changed by one rounding error. Each tensor is
    compared with the written tensor of the same key, and `responses` keeps the largest relative change.

    After a call of `round_otherwise`, the inputs of modules are changed by a rounding error as well. The reason
    is attention: perturbed weights move all keys in the same way, and the softmax over the keys cancels such a
    change. Real rounding errors move each key differently.
    """

    def __init__(self, stored: StoredTensors) -> None:
        self._stored = stored
        self._rounding: torch.Generator | None = None
        self.responses: defaultdict[str, float] = defaultdict(float)
        """Largest relative change by stage, name and slot, joined by `|`."""

    def round_otherwise(self, seed: int) -> None:
        """Change every module input by one rounding error from now on; `seed` chooses the signs."""
        self._rounding = torch.Generator().manual_seed(seed)

    def begin_micro_batch(self) -> None:
        """Do nothing; `Recording` has a function of this name, which hooks call."""

    def forward(self, tensor_key: TensorKey, tensor: torch.Tensor) -> torch.Tensor | None:
        """Compare a tensor of the forward pass; return its rounded replacement, or None if it stays."""
        self.write(tensor_key, tensor)
        return self._add_rounding_errors(tensor) if _is_module_input(tensor_key) else None

    def backward(self, tensor_key: TensorKey, gradient: torch.Tensor) -> torch.Tensor | None:
        """Compare the gradient of an activation; return its replacement, or None if it stays."""
        self.write(tensor_key, gradient)
        return self._add_rounding_errors(gradient) if _is_module_input(tensor_key) else None

    def _add_rounding_errors(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor with every element multiplied by 1 ± ε/2, where ε is the dtype's epsilon.

        Return None before `round_otherwise`, and for integers.
        """
        if self._rounding is None or not tensor.is_floating_point():
            return None
        bits = torch.randint(0, 2, tensor.shape, generator=self._rounding, dtype=torch.int8)
        relative_errors = (bits.float() - 0.5) * torch.finfo(tensor.dtype).eps
        return (tensor + tensor * relative_errors.to(tensor.device)).to(tensor.dtype)

    def write(self, tensor_key: TensorKey, tensor: torch.Tensor) -> None:
        """Compare a tensor with the tensor that was written under its key, and keep the largest relative change.

        The relative change is the norm of the difference over the norm of the written tensor. Integers, and tensors
        without a written tensor of the same shape, are ignored. A tensor is ignored too if it has an infinite
        element where the written tensor is finite. In fp16 the changed weights may overflow, which says nothing
        about rounding.
        """
        if not tensor.is_floating_point():
            return
        before = self._stored.get(tensor_key)
        if before is None or before.shape != tensor.shape:
            return
        before_norms, change_norms = [], []
        chunks_before, chunks_now = _split_flat(before), _split_flat(tensor.detach().cpu())
        for chunk_before, chunk_now in zip(chunks_before, chunks_now, strict=True):
            has_overflowed = chunk_before.isfinite() & ~chunk_now.isfinite()
            if has_overflowed.any():
                return
            change = _fp64_without_nan(chunk_now) - _fp64_without_nan(chunk_before)
            before_norms.append(norm_without_nan(chunk_before))
            change_norms.append(norm_without_nan(change))
        norm_before = math.hypot(*before_norms)
        if norm_before > 0:
            self._keep_largest(tensor_key, math.hypot(*change_norms) / norm_before)

    def write_piece(self, stage: CaptureStage, slot: str, piece: Piece) -> None:
        """Compare a piece with the stored tensor of the first run, and keep the relative change.

        A piece is this rank's part of a parameter, or of a tensor with the parameter's shape. The update of a weight
        follows the running average of its gradient (`exp_avg`). For this average, the largest relative change of a
        row is therefore also kept, as the change of the update.
        """
        tensor_key = TensorKey(stage, piece.name, slot)
        self.write(tensor_key, piece.values)
        stored_average = self._stored.get(tensor_key) if slot == "exp_avg" else None
        if stored_average is None:
            return
        rows_before = _to_rows(stored_average)
        change_norms = (_to_rows(piece.values) - rows_before).norm(dim=1)
        norms_before = rows_before.norm(dim=1)
        is_nonzero = norms_before > 0
        if not is_nonzero.any():
            return
        largest_change = float((change_norms / norms_before)[is_nonzero].max())
        update = TensorKey(CaptureStage.WEIGHTS, piece.name, UPDATE_SUFFIX)
        master_update = TensorKey(
            CaptureStage.OPTIMIZER_STATE, piece.name, f"param {UPDATE_SUFFIX}"
        )
        self._keep_largest(update, largest_change)
        self._keep_largest(master_update, largest_change)

    def choose(self, tensor_key: TensorKey, chosen: torch.Tensor) -> torch.Tensor | None:  # noqa: ARG002
        """Return the experts that the router chose in the written iteration, or None if not written.

        The choice must not change, because another expert would move tensors far more than rounding.
        """
        return self._stored.get(tensor_key)

    def carry(self, states: Iterable[tuple[TensorKey, float]]) -> None:
        """Add the rounding errors of the gradients of earlier iterations to the responses of optimizer states.

        An optimizer state is a sum of its old value and this iteration's gradient. The repeated iteration
        measures only the gradient's part. The old value is assumed to have the same relative error as this
        iteration's gradient; squared averages (`…_sq`) have twice that error.

        Args:
            states: Tensor keys of optimizer states, each with the norm of the state at the start of the
                iteration. This norm may be larger than the norm at the end, because terms of the sum can
                cancel.
        """
        for tensor_key, norm_at_start in states:
            stored = self._stored.get(tensor_key)
            gradient_key = f"{CaptureStage.REDUCED_GRADIENTS}|{tensor_key.name}|gradient"
            gradient_response = self.responses.get(gradient_key)
            if stored is None or gradient_response is None:
                continue
            norm_at_end = norm_without_nan(stored)
            if norm_at_end > 0:
                power = 2 if tensor_key.slot.endswith("_sq") else 1
                carried = power * gradient_response * norm_at_start / norm_at_end
                self.responses[_response_key(tensor_key)] += carried

    def _keep_largest(self, tensor_key: TensorKey, change: float) -> None:
        """Keep a relative change if it is the largest of its stage, name and slot."""
        key = _response_key(tensor_key)
        self.responses[key] = max(self.responses[key], change)


def _response_key(tensor_key: TensorKey) -> str:
    """Return the key of a tensor in `RoundingProbe.responses`, which is the same for all micro batches."""
    return f"{tensor_key.stage}|{tensor_key.name}|{tensor_key.slot}"


def _is_module_input(tensor_key: TensorKey) -> bool:
    """Return True for an input of a module's forward or backward pass.

    The input of a backward pass is the gradient of the module's output.
    """
    if tensor_key.stage is CaptureStage.OUTPUTS:
        return "input." in tensor_key.slot
    if tensor_key.stage is CaptureStage.ACTIVATION_GRADIENTS:
        return tensor_key.slot.startswith("output")
    return False


def _fp64_without_nan(values: torch.Tensor) -> torch.Tensor:
    """Return the values in fp64 with 0 for NaN, which marks elements that another rank holds."""
    return values.double().nan_to_num()


def norm_without_nan(values: torch.Tensor) -> float:
    """Return the Euclidean norm in fp64; NaN, which marks elements of other ranks, counts as 0."""
    return float(torch.linalg.vector_norm(_fp64_without_nan(values)))


def fp64_scalar(value: float | torch.Tensor) -> torch.Tensor:
    """Return a number as captures store it: an fp64 tensor of shape [1]."""
    return torch.as_tensor(value).detach().reshape(1).double()


def _to_rows(values: torch.Tensor) -> torch.Tensor:
    """Return the values as an fp64 matrix [rows, columns] on the CPU; a vector becomes one row."""
    matrix = _fp64_without_nan(values.detach().cpu())
    if matrix.ndim <= 1:
        return matrix.reshape(1, -1)
    return matrix.reshape(-1, matrix.shape[-1])


def update_magnitude(moved: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
    """Estimate the distance that an update moves each weight if its gradient has the typical size of the row.

    Adam divides a gradient by the gradient's own size. So a weight moves as far as any other weight even if its
    gradient consists of rounding errors. The result is scaled by the gradients of the whole row instead, so
    rounding can be judged by it.

    Args:
        moved: Change of each weight by the update.
        squares: The optimizer's running average of the squared gradient, in the same shape.

    Returns:
        The distance per weight, fp32 in the same shape. It is 0 where the average is 0.
    """
    gradient_sizes = squares.detach().float().sqrt()
    weighted_moves = moved.detach().float() * gradient_sizes
    row_size = weighted_moves.square().mean(-1, keepdim=True).sqrt()
    return torch.where(gradient_sizes > 0, row_size / gradient_sizes, 0)


Sink = Recording | RoundingProbe


def tap(
    sink: Sink,
    tensor: torch.Tensor,
    tensor_keys: Sequence[tuple[TensorKey, TensorKey]],
    form: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
    value: torch.Tensor | None = None,
) -> torch.Tensor:
    """Pass an activation to a sink now, and its gradient in the backward pass.

    The result is a copy of the activation, or of the sink's replacement. The gradient of the copy is the
    contribution of this module alone, while the gradient of the original may be a sum over several modules. The
    result is not a view, because Megatron's pipeline schedule frees the output of a stage and refuses to do so
    for views. If autograd does not record `tensor`, the tensor itself or its replacement is returned without a
    copy.

    Args:
        sink: Receiver. If `form` or `value` is given, its replacements must fit `tensor` as they are.
        tensor: Input or output of a module.
        tensor_keys: Pairs of tensor keys: of the activation and of its gradient. There are several pairs if one
            model has several modules where the other has one. The replacement for the last pair is the one that
            counts.
        form: Function that brings activation and gradient into the form in which they are compared.
        value: Tensor that the sink receives instead of `tensor`.
    """
    received = form(tensor.detach() if value is None else value)
    replacement = None
    for activation_key, _ in tensor_keys:
        replacement = sink.forward(activation_key, received)
    is_recorded = tensor.requires_grad and torch.is_grad_enabled()
    if not is_recorded:
        return tensor if replacement is None else replacement

    def pass_gradient(gradient: torch.Tensor) -> torch.Tensor | None:
        """Pass the gradient to the sink, last tensor key first; return its replacement or None."""
        formed_gradient = form(gradient)
        gradient_replacement = None
        for _, gradient_key in reversed(tensor_keys):
            gradient_replacement = sink.backward(gradient_key, formed_gradient)
        return gradient_replacement

    copied: torch.Tensor = _CopyWithGradientHook.apply(tensor, replacement, pass_gradient)
    return copied


class _CopyWithGradientHook(torch.autograd.Function):
    """Copy of a tensor or of its replacement; backward calls `pass_gradient`, which may replace the gradient."""

    @staticmethod
    def forward(
        context: Any, tensor: torch.Tensor, replacement: torch.Tensor | None, pass_gradient: Any
    ) -> torch.Tensor:
        context.pass_gradient = pass_gradient
        return (tensor if replacement is None else replacement).clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        replacement = context.pass_gradient(gradient)
        return (gradient if replacement is None else replacement), None, None


def _view_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the tensor's values as bytes. A contiguous CPU tensor is not copied.

    `Tensor.numpy` is not used. After a call of it torch refuses to resize the storage, and Megatron resizes
    storages to free their memory.
    """
    flat = tensor.detach().cpu().reshape(-1).contiguous()
    array = (ctypes.c_uint8 * flat.nbytes).from_address(flat.data_ptr())
    # The array keeps the tensor, and with it the memory, alive as long as the view exists.
    array.tensor = flat  # type: ignore[attr-defined]
    return memoryview(array)
