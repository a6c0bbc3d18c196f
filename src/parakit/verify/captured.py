"""Read a capture: the tensors of one iteration that every rank of a run has written.

The tensors are memory-mapped, so a capture can be larger than memory. A parameter, and each tensor of a
parameter's shape (gradient, optimizer state), is assembled from the parts that the ranks hold.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from parakit.artifacts.capture import (
    RESPONSES_FILE,
    TENSORS_FILE,
    CapturedModule,
    CapturedRank,
    CaptureStage,
    Placement,
    TensorKey,
    TensorRecord,
    read_index,
    read_rank,
)

Array = NDArray[Any]
_LAYER_NAME = re.compile(r"decoder\.layers\.(\d+)")
_SMALL_STEP = 1e-6
"""Distance between tensors that are inserted before a known tensor, whose positions are 1 apart."""
PARAMETERS = (
    CaptureStage.LOCAL_GRADIENTS,
    CaptureStage.REDUCED_GRADIENTS,
    CaptureStage.OPTIMIZER_STATE,
    CaptureStage.WEIGHTS,
)
"""Stages whose tensors have a parameter's shape."""
ParameterKey = tuple[Any, ...]
"""Key of one full tensor, equal on all ranks: parameter, offset of the layer if layers are stacked, slot."""


class VerifyError(ValueError):
    """Two captures cannot be compared; the message says why and what to do."""


@dataclass(frozen=True)
class RankCapture:
    """Tensors that one rank has captured."""

    folder: Path
    rank: CapturedRank
    records: tuple[TensorRecord, ...]
    """Descriptions of the tensors, in the order in which they were computed."""

    @cached_property
    def first_records(self) -> dict[TensorKey, TensorRecord]:
        """The first record of each tensor key."""
        records: dict[TensorKey, TensorRecord] = {}
        for record in self.records:
            records.setdefault(record.tensor_key, record)
        return records

    def read_changes(self, file: str) -> dict[tuple[str, str, str], float]:
        """Read how much each of the rank's tensors changed when the iteration was repeated.

        Args:
            file: Name of the JSON file in the rank's folder, such as `responses.json`.

        Returns:
            The relative change by stage, name and slot of the tensor.
        """
        changes: dict[str, float] = msgspec.json.decode((self.folder / file).read_bytes())
        return {tuple(key.split("|")): change for key, change in changes.items()}  # type: ignore[misc]

    @cached_property
    def _bytes(self) -> NDArray[np.uint8]:
        path = self.folder / TENSORS_FILE
        if path.stat().st_size == 0:
            return np.zeros(0, np.uint8)
        return np.memmap(path, mode="r")

    def tensor_bytes(self, record: TensorRecord) -> bytes:
        """Return a copy of a tensor's bytes, as the rank had them in memory."""
        return self._bytes[record.offset_bytes : record.offset_bytes + record.size_bytes].tobytes()

    def values(self, record: TensorRecord) -> Array:
        """Return a tensor's values; bfloat16 and float16 are widened to float32."""
        stored = self._bytes[record.offset_bytes : record.offset_bytes + record.size_bytes]
        return decode_tensor(stored, record.dtype).reshape(record.shape)


@dataclass(frozen=True)
class Capture:
    """Tensors of one iteration of one run, of all ranks."""

    folder: Path
    ranks: tuple[RankCapture, ...]

    @property
    def first(self) -> CapturedRank:
        """Description of rank 0, for properties that all ranks share."""
        return self.ranks[0].rank

    @property
    def modules(self) -> dict[str, CapturedModule]:
        """Modules of all ranks by name."""
        modules: dict[str, CapturedModule] = {}
        for rank_capture in self.ranks:
            modules |= rank_capture.rank.modules
        return modules

    def responses(self) -> dict[tuple[str, str, str], float]:
        """Return the relative change of each tensor when all weights change by one rounding error.

        If several ranks hold a tensor, the result has the largest of their changes. The key is the stage, the
        name of the full parameter or module, and the slot. Only a reference that trained with rounding probes
        has responses.

        Raises:
            FileNotFoundError: A rank measured no responses.
        """
        responses: dict[tuple[str, str, str], float] = {}
        for rank_capture in self.ranks:
            changes = rank_capture.read_changes(RESPONSES_FILE)
            for (stage, name, slot), change in changes.items():
                key = (stage, full_parameter_name(name), slot)
                responses[key] = max(change, responses.get(key, 0.0))
        return responses

    @cached_property
    def largest_gradient(self) -> float:
        """Largest absolute value of all reduced gradients of all ranks; infinite if an element is not finite."""
        largest = 0.0
        for parts in group_parameter_parts(self, CaptureStage.REDUCED_GRADIENTS).values():
            for part in parts:
                values = part.values()
                owned_values = values[part.owned_elements(values)]
                largest_of_part = float(np.abs(owned_values).max(initial=0.0))
                largest = max(largest, largest_of_part if np.isfinite(largest_of_part) else np.inf)
        return largest

    def notes(self) -> Iterator[str]:
        """Yield the ranks' notes on tensors that they could not capture, each distinct note once."""
        yield from dict.fromkeys(
            note for rank_capture in self.ranks for note in rank_capture.rank.notes
        )


@dataclass(frozen=True)
class ParameterPart:
    """The part of a parameter, of its gradient or of its optimizer state that one rank holds."""

    rank_capture: RankCapture
    record: TensorRecord

    @property
    def placement(self) -> Placement:
        """Position of the part in the full parameter."""
        assert self.record.placement is not None
        return self.record.placement

    @property
    def key(self) -> ParameterKey:
        """Key of the full tensor, which is equal for the parts on all ranks."""
        placement = self.placement
        num_stacked = len(placement.global_shape) - len(self.record.shape)
        return (placement.key, placement.global_offset[:num_stacked], self.record.tensor_key.slot)

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the full parameter, without the dimension in which layers are stacked."""
        return self.placement.global_shape[-len(self.record.shape) :]

    @property
    def name(self) -> str:
        """Name of the full parameter."""
        return full_parameter_name(self.record.tensor_key.name)

    @property
    def rank(self) -> int:
        """Global rank that holds the part."""
        return self.rank_capture.rank.rank

    def values(self) -> Array:
        """Return the part's values; elements that this rank does not hold are NaN."""
        return self.rank_capture.values(self.record)

    def owned_elements(self, values: Array) -> Array:
        """Return truth values of the shape of `values`: True for elements that this rank holds."""
        if not self.placement.partial:
            return np.ones(values.shape, bool)
        return np.isfinite(values)

    def region(self) -> tuple[slice, ...]:
        """Return the region of the full parameter that the part covers, one slice per dimension."""
        offsets = self.placement.global_offset[-len(self.record.shape) :]
        return tuple(
            slice(offset, offset + size)
            for offset, size in zip(offsets, self.record.shape, strict=True)
        )


def group_parameter_parts(
    capture: Capture, stage: CaptureStage, slot_prefix: str = ""
) -> dict[ParameterKey, list[ParameterPart]]:
    """Return the tensors of a stage that have a parameter's shape, as a list of all ranks' parts per tensor.

    Tensors whose slot does not begin with `slot_prefix` are left out.
    """
    parts: defaultdict[ParameterKey, list[ParameterPart]] = defaultdict(list)
    for rank_capture in capture.ranks:
        for record in rank_capture.records:
            tensor_key = record.tensor_key
            if tensor_key.stage is not stage or record.placement is None:
                continue
            if tensor_key.slot.startswith(slot_prefix):
                part = ParameterPart(rank_capture, record)
                parts[part.key].append(part)
    return dict(parts)


def assemble_parameter(parts: list[ParameterPart], capture: Capture) -> Array:
    """Join all ranks' parts of a tensor into the full tensor; elements that no rank holds are 0.

    Local gradients are gradients before their reduction over the ranks. For these, the result is the gradient
    that the reduction should give.
    """
    first = parts[0]
    if first.record.tensor_key.stage is CaptureStage.LOCAL_GRADIENTS:
        return _reduce_local_gradients(parts, capture)
    if len(parts) == 1 and first.record.shape == first.full_shape:
        return first.values()
    full = np.zeros(first.full_shape, np.float32)
    for part in parts:
        values = part.values()
        is_owned = part.owned_elements(values)
        full[part.region()][is_owned] = values[is_owned]
    return full


def _reduce_local_gradients(parts: list[ParameterPart], capture: Capture) -> Array:
    """Return the full gradient that the reduction of the ranks' local gradients should give."""
    full = np.zeros(parts[0].full_shape, np.float32)
    for means_by_part in average_local_gradients(parts, capture):
        first_part, first_mean = means_by_part[0]
        means = [mean for _, mean in means_by_part]
        # Equal means are copies of the full gradient. Unequal ones are terms of it.
        are_copies = all(np.array_equal(mean, first_mean) for mean in means)
        full[first_part.region()] = first_mean if are_copies else np.sum(means, axis=0)
    return full


def assemble_region(
    parts: list[ParameterPart],
    capture: Capture,
    region: tuple[slice, ...],
    shape: tuple[int, ...],
) -> Array | None:
    """Join all ranks' parts of a tensor, and cut the region `region` out of the full tensor.

    None means that the full tensor has another number of dimensions than `shape`, or that the region has another
    shape.
    """
    full = assemble_parameter(parts, capture)
    if full.ndim != len(shape):
        return None
    values = full[region]
    return values if values.shape == shape else None


def average_local_gradients(
    parts: list[ParameterPart], capture: Capture
) -> list[list[tuple[ParameterPart, Array]]]:
    """Average a parameter's local gradients over the data- and context-parallel ranks.

    Returns:
        One list per region of the parameter. Each list has one mean per group of data- and context-parallel
        ranks, together with the part of the group's first rank. Several groups can hold the same region: the
        weight of a norm, for example, is on every tensor-parallel rank. The means of these groups either add up
        to the gradient, or each of them is the full gradient. With a loss per token, a mean is the sum over the
        group.
    """
    copies: defaultdict[tuple[int, ...], list[ParameterPart]] = defaultdict(list)
    for part in parts:
        rank = part.rank_capture.rank
        tensor_rank, _ = rank.tensor
        stage, _ = rank.pipeline
        expert_rank, _ = rank.expert
        # Ranks that differ in nothing else are of one data- and context-parallel group.
        key = (tensor_rank, stage, expert_rank, *part.placement.global_offset)
        copies[key].append(part)
    # With a loss per token, each copy's gradient is a sum over the tokens of that copy, so the reduction
    # does not divide by the number of copies.
    first = capture.first
    divisor = 1 if first.per_token_loss else first.data[1] * first.context[1]
    regions: defaultdict[str, list[tuple[ParameterPart, Array]]] = defaultdict(list)
    for group in copies.values():
        total: Array = np.sum([part.values() for part in group], axis=0, dtype=np.float32)
        regions[str(group[0].region())].append((group[0], total / divisor))
    return list(regions.values())


def full_parameter_name(name: str) -> str:
    """Return a parameter's name without the bracketed part number that some checkpoints append.

    Megatron stores gate and value of a gated MLP as two such parts.
    """
    return name.partition("[")[0]


def encode_tensor(values: Array, dtype: str) -> memoryview:
    """Convert values to a dtype of a capture, and return the bytes that `CaptureWriter.add` takes.

    Rounding to bfloat16 is to the nearest number, and to the even one of two equally near numbers.
    """
    if dtype == "bfloat16":
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        encoded: Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    else:
        encoded = np.ascontiguousarray(values, np.dtype(dtype))
    return memoryview(encoded.ravel().view(np.uint8))


def decode_tensor(stored: Array, dtype: str) -> Array:
    """Return captured bytes as a flat array of the dtype; bfloat16 and float16 are widened to float32."""
    if dtype == "bfloat16":
        float32_bits = stored.view(np.uint16).astype(np.uint32) << 16
        return float32_bits.view(np.float32)
    values = stored.view(np.dtype(dtype))
    return values.astype(np.float32) if dtype == "float16" else values


def round_to_dtype(values: Array, dtype: str) -> Array:
    """Return float32 values rounded to a captured dtype and widened again."""
    encoded = np.frombuffer(encode_tensor(values, dtype), np.uint8)
    return decode_tensor(encoded, dtype).reshape(values.shape)


def order_tensor_keys(capture: Capture) -> list[TensorKey]:
    """Return the keys of all ranks' tensors in the order in which a single rank would compute the tensors.

    The keys have no micro batch, so each tensor is listed once. The order follows the layers: from first to
    last in the forward pass, and from last to first in the backward pass.

    Ranks of one pipeline stage can hold different tensors, such as experts. The first rank of the stage gives the
    order. If rank 1 computes `a`, `x`, `b` and rank 0 only `a`, `b`, then `x` is placed directly before `b`.
    """
    positions: dict[TensorKey, _OrderPosition] = {}
    pipeline_ranks_seen: set[int] = set()
    for rank_capture in capture.ranks:
        tensor_keys = dict.fromkeys(
            msgspec.structs.replace(record.tensor_key, micro_batch=None)
            for record in rank_capture.records
        )
        first_layers = _first_layers_of_chunks(tensor_keys)
        pipeline_rank = rank_capture.rank.pipeline[0]
        is_later_rank = pipeline_rank in pipeline_ranks_seen
        pipeline_ranks_seen.add(pipeline_rank)
        for stage in CaptureStage:
            keys_of_stage = [key for key in tensor_keys if key.stage is stage]
            chunks = _chunks_of_tensor_keys(keys_of_stage, stage, first_layers)
            _add_positions(positions, keys_of_stage, chunks, is_later_rank=is_later_rank)
    return sorted(positions, key=positions.__getitem__)


class _OrderPosition(NamedTuple):
    """The position of a tensor in the order of computation; positions are compared field by field."""

    stage_index: int
    chunk: float
    """First layer of the tensor's chunk of consecutive layers, negative in the backward pass."""
    within_chunk: float


def _chunks_of_tensor_keys(
    tensor_keys: Sequence[TensorKey],
    stage: CaptureStage,
    first_layers: Mapping[int | None, int],
) -> list[float]:
    """Return one sort number per key of a rank's stage: the number of the first layer of the key's chunk.

    The numbers are negative for activation gradients, whose order is reversed. A tensor outside of layers gets
    the number of the tensor before it. Tensors before the first layer, such as the output of the embedding, get
    half a unit less than the first layer's chunk.
    """
    sign = -1 if stage is CaptureStage.ACTIVATION_GRADIENTS else 1
    numbers = [first_layers.get(_layer_number(key.name)) for key in tensor_keys]
    known_numbers = [number for number in numbers if number is not None]
    first_number = known_numbers[0] if known_numbers else 0
    chunk = sign * first_number - 0.5
    chunks = []
    for number in numbers:
        if number is not None:
            chunk = sign * number
        chunks.append(chunk)
    return chunks


def _add_positions(
    positions: dict[TensorKey, _OrderPosition],
    tensor_keys: Sequence[TensorKey],
    chunks: Sequence[float],
    *,
    is_later_rank: bool,
) -> None:
    """Add the positions of a rank's keys of one stage to `positions`. A key that has a position keeps it.

    The keys of the first rank of a pipeline stage get the positions 0, 1, 2 and so on. A key that only a later rank
    has is placed just before that rank's next known key. If no known key follows, it is placed just after the key
    before it.

    Args:
        positions: Positions of the earlier ranks' keys. The new positions are added to it in place.
        tensor_keys: The rank's keys of the stage, in the order of its computation.
        chunks: The chunk of each key.
        is_later_rank: True if an earlier rank of the same pipeline stage gave the order.
    """
    stages = list(CaptureStage)
    step = 1.0
    positions_before: dict[TensorKey, float] = {}
    if is_later_rank:
        step = _SMALL_STEP
        positions_before = _positions_before_known_tensor_keys(tensor_keys, positions)
    previous_position = -1.0
    for key, chunk in zip(tensor_keys, chunks, strict=True):
        if key not in positions:
            within_chunk = positions_before.get(key, previous_position + step)
            positions[key] = _OrderPosition(stages.index(key.stage), chunk, within_chunk)
        previous_position = positions[key].within_chunk


def _first_layers_of_chunks(tensor_keys: Mapping[TensorKey, None]) -> dict[int | None, int]:
    """Return, by layer number, the first layer of the run of consecutive layers that the layer belongs to."""
    layers = {_layer_number(tensor_key.name) for tensor_key in tensor_keys}
    first_layers: dict[int | None, int] = {}
    for layer in sorted(layer for layer in layers if layer is not None):
        first_layers[layer] = first_layers.get(layer - 1, layer)
    return first_layers


def _positions_before_known_tensor_keys(
    tensor_keys: Sequence[TensorKey], positions: Mapping[TensorKey, _OrderPosition]
) -> dict[TensorKey, float]:
    """Return positions for the keys without one, each just before the next key that has a position.

    Keys that come after the last key with a position are left out of the result.
    """
    new_positions: dict[TensorKey, float] = {}
    next_position: float | None = None
    for tensor_key in reversed(tensor_keys):
        if tensor_key in positions:
            next_position = positions[tensor_key].within_chunk
        elif next_position is not None:
            next_position -= _SMALL_STEP
            new_positions[tensor_key] = next_position
    return new_positions


def _layer_number(name: str) -> int | None:
    """Return the number of the decoder layer that a module is in; None outside of the layers."""
    match = _LAYER_NAME.search(name)
    return int(match[1]) if match else None


def read_capture(folder: Path) -> Capture:
    """Read the capture of a run from the folder that holds its `rank-<number>` folders.

    Raises:
        VerifyError: The folder holds no capture, or the capture of a rank is incomplete or missing.
    """
    folders = sorted(folder.glob("rank-*"), key=lambda path: int(path.name.removeprefix("rank-")))
    if not folders:
        raise VerifyError(
            f"{folder} holds no captured tensors; the run ended before the iteration."
        )
    try:
        ranks = [RankCapture(path, read_rank(path), tuple(read_index(path))) for path in folders]
    except FileNotFoundError as error:
        raise VerifyError(
            f"The capture {folder} was cut off ({Path(error.filename).parent.name} did not finish); "
            "run it again."
        ) from None
    expected = ranks[0].rank.world_size
    if len(ranks) != expected:
        raise VerifyError(
            f"The capture {folder} holds {len(ranks)} of {expected} ranks; run it again."
        )
    return Capture(folder, tuple(ranks))
