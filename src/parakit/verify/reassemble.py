"""Reassemble a reference of several ranks to the capture that one rank would have written.

A strategy is then compared with one rank, however the reference was split. This is the inverse of `align`. Parts of the
sequence, of the hidden size, of heads and of the vocabulary are joined, and so are an expert's rows of all senders.
Micro batches of data-parallel ranks get the numbers that one rank gives them. Pipeline stages follow one another. A
tensor that is equal bit for bit on all tensor-parallel ranks is a full tensor on each. A tensor that cannot be joined
is noted with the reason, so that it is listed as not compared.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from parakit.artifacts.capture import (
    COUNTS,
    RESPONSES_FILE,
    CapturedRank,
    CaptureStage,
    CaptureWriter,
    Placement,
    TensorKey,
    TensorRecord,
)
from parakit.verify.align import (
    GATED,
    find_router,
    has_distinct_tokens,
    is_in_expert,
    is_recomputed,
    layout_signature,
    micro_batch_loss_scale,
    sequence_positions,
    token_indices,
)
from parakit.verify.captured import (
    PARAMETERS,
    Array,
    Capture,
    RankCapture,
    assemble_parameter,
    encode_tensor,
    group_parameter_parts,
    order_tensor_keys,
    read_capture,
)

_SPLIT_IN_EXPERTS = ("linear_fc1 output.0", "linear_fc2 input.input_")
"""Tensors of an expert that its expert-tensor-parallel ranks have parts of. Of any other tensor each of
these ranks has the full tensor, or one term of its sum."""
_NOT_EVERY_RANK = "some ranks of the reference lack a part of the same size"
_ROUTING_UNKNOWN = "the reference's routing does not tell the tokens of an expert's rows"
_RankPair = tuple[int, int]
"""Context-parallel and tensor-parallel rank."""


def reassemble_to_one_rank(reference: Capture, strategy: Capture | None, folder: Path) -> Capture:
    """Join the captures of all ranks of the reference to the capture of one rank, and write it to `folder`.

    If the reference has one rank, or the same parallel sizes as the strategy, nothing is written and the
    reference itself is returned. Without a strategy several ranks are always joined.
    """
    has_same_layout = strategy is not None and layout_signature(
        reference.first
    ) == layout_signature(strategy.first)
    if len(reference.ranks) == 1 or has_same_layout:
        return reference
    target = folder / "rank-0"
    with CaptureWriter(target) as writer:
        joiner = _Joiner(reference, writer)
        joiner.join_activations()
        joiner.join_parameters()
        # Only a reference that was repeated with rounding probes has responses.
        if all((rank.folder / RESPONSES_FILE).is_file() for rank in reference.ranks):
            responses = {"|".join(key): value for key, value in reference.responses().items()}
            (target / RESPONSES_FILE).write_text(json.dumps(responses))
        writer.close(joiner.describe_rank())
    return read_capture(folder)


@dataclass(frozen=True)
class _RankTensor:
    """A tensor of one rank of the reference."""

    rank_capture: RankCapture
    record: TensorRecord

    @property
    def rank(self) -> CapturedRank:
        """Description of the rank."""
        return self.rank_capture.rank

    def values(self) -> Array:
        """Return the tensor's values."""
        return self.rank_capture.values(self.record)


@dataclass(frozen=True)
class _SequenceDimension:
    """Dimension of a rank's tensor that is the sequence."""

    axis: int
    samples: int
    """Samples per position if batch and sequence are merged, sequence first; 1 if they are not merged."""
    is_split: bool
    """Whether sequence parallelism split the dimension over the tensor-parallel ranks."""


@dataclass(frozen=True)
class _SenderRows:
    """Rows of an expert for the tokens of one rank that sends tokens to it."""

    data_rank: int
    tokens: Array
    """Indices of the tokens in the micro batch."""
    rows: Array


class _Joiner:
    """Joins the tensors of all ranks of a reference, and writes them as the tensors of one rank."""

    def __init__(self, reference: Capture, writer: CaptureWriter) -> None:
        self._reference, self._writer, self._rank = reference, writer, reference.first
        self._names_by_obstacle: defaultdict[str, list[str]] = defaultdict(list)
        loss_scale_of_one_rank = micro_batch_loss_scale(self.describe_rank())
        self._gradient_scale = np.float32(
            loss_scale_of_one_rank / micro_batch_loss_scale(self._rank)
        )
        """Factor from the reference's activation gradients to those of one rank."""
        self._written: dict[object, TensorRecord] = {}
        """Written tensors by the storage of their parts, so that a tensor of several modules is written
        once."""
        self._rank_by_position = {
            (
                rank_capture.rank.data[0],
                rank_capture.rank.context[0],
                rank_capture.rank.tensor[0],
                rank_capture.rank.pipeline[0],
            ): rank_capture
            for rank_capture in reference.ranks
        }

    def describe_rank(self) -> CapturedRank:
        """Return the description of the joined capture, which has one rank.

        The notes of the reference are kept. One note per reason is added that lists the tensors that could not
        be joined.
        """
        rank, alone = self._rank, (0, 1)
        missing = [
            f"{' '.join(dict.fromkeys(names))}: {obstacle}"
            for obstacle, names in self._names_by_obstacle.items()
        ]
        return msgspec.structs.replace(
            rank,
            rank=0,
            world_size=1,
            tensor=alone,
            pipeline=alone,
            context=alone,
            data=alone,
            expert=alone,
            expert_tensor=alone,
            virtual_stages=1,
            expert_sources=((0, 0, 0),),
            sequence_parallel=False,
            micro_batches=rank.micro_batches * rank.data[1],
            modules=self._reference.modules,
            norm_groups=(),
            notes=(*self._reference.notes(), *missing),
        )

    def join_activations(self) -> None:
        """Join and write all tensors without placement, but for those of recomputed forward passes."""
        parts_by_key = self._group_activations()
        for tensor_key in order_tensor_keys(self._reference):
            for micro_batch, parts in parts_by_key.get(tensor_key, {}).items():
                self._join_activation(tensor_key, micro_batch, parts)

    def _group_activations(self) -> dict[TensorKey, dict[int | None, list[_RankTensor]]]:
        """Return the ranks' parts of every tensor to join, by key without micro batch and then by micro batch."""
        parts_by_key: dict[TensorKey, dict[int | None, list[_RankTensor]]] = {}
        for rank_capture in self._reference.ranks:
            for record in rank_capture.records:
                if record.placement is not None or is_recomputed(record.tensor_key):
                    continue
                micro_batch = record.tensor_key.micro_batch
                tensor_key = msgspec.structs.replace(record.tensor_key, micro_batch=None)
                parts_by_micro_batch = parts_by_key.setdefault(tensor_key, {})
                parts = parts_by_micro_batch.setdefault(micro_batch, [])
                parts.append(_RankTensor(rank_capture, record))
        return parts_by_key

    def _join_activation(
        self, tensor_key: TensorKey, micro_batch: int | None, parts: Sequence[_RankTensor]
    ) -> None:
        """Join and write one tensor of one micro batch. `micro_batch` None is for tensors that belong to no
        micro batch.

        One tensor is written per data-parallel rank, because each has micro batches of its own.
        """
        if micro_batch is None:
            self._write_scalar(tensor_key, parts)
            return
        if is_in_expert(tensor_key.name):
            self._join_expert_tensor(tensor_key, micro_batch, parts)
            return
        num_data_ranks = self._rank.data[1]
        for data_rank in range(num_data_ranks):
            parts_of_data_rank = [part for part in parts if part.rank.data[0] == data_rank]
            self._join_module_tensor(tensor_key, micro_batch, parts_of_data_rank)

    def join_parameters(self) -> None:
        """Assemble and write parameters, gradients and optimizer states, each as one full tensor."""
        for stage in PARAMETERS:
            parts_by_key = group_parameter_parts(self._reference, stage)
            for (parameter_name, layer_offset, _slot), parts in parts_by_key.items():
                full = assemble_parameter(parts, self._reference)
                # Name, dtype and global shape are the same for all parts.
                first_part = parts[0]
                record = first_part.record
                # The full tensor starts at 0 in its own dimensions. If layers are stacked, the first dimension of
                # the global shape is the layer, which the tensor does not have.
                placement = Placement(
                    parameter_name,
                    global_shape=first_part.placement.global_shape,
                    global_offset=(*layer_offset, *[0] * full.ndim),
                )
                tensor_key = msgspec.structs.replace(record.tensor_key, name=first_part.name)
                self._add(tensor_key, record.dtype, full, placement)

    def _write_scalar(self, tensor_key: TensorKey, parts: Sequence[_RankTensor]) -> None:
        """Write a tensor that belongs to no micro batch. Token counts are summed over ranks; of others, one
        copy is written.
        """
        if tensor_key.slot == COUNTS:
            counts = [part.values() for part in parts if has_distinct_tokens(part.rank)]
            values = np.sum(counts, axis=0)
        else:
            values = parts[0].values()
        self._write(tensor_key, parts[0].record, values)

    def _join_module_tensor(
        self, tensor_key: TensorKey, micro_batch: int, parts: Sequence[_RankTensor]
    ) -> None:
        """Join and write a tensor outside of experts. All `parts` belong to ranks with the same data-parallel rank.

        If the parts cannot be joined, the reason is noted and nothing is written.
        """
        part_by_ranks: dict[_RankPair, _RankTensor] = {}
        for part in parts:
            context_rank, tensor_rank = part.rank.context[0], part.rank.tensor[0]
            part_by_ranks.setdefault((context_rank, tensor_rank), part)
        if not part_by_ranks:
            return
        first = next(iter(part_by_ranks.values()))
        shape = first.record.shape
        if not self._have_all_ranks_shape(part_by_ranks, shape):
            self._note_missing(tensor_key, _NOT_EVERY_RANK)
            return
        number = micro_batch * first.rank.data[1] + first.rank.data[0]
        numbered_tensor_key = msgspec.structs.replace(tensor_key, micro_batch=number)
        storage = (
            (tensor_key.stage, GATED in tensor_key.name, shape),
            *((part.rank.rank, part.record.offset_bytes) for part in part_by_ranks.values()),
        )
        if storage in self._written:
            known = self._written[storage]
            self._writer.add_same(numbered_tensor_key, known, known.shape)
            return
        full = self._join_ranks(tensor_key, part_by_ranks, self._find_sequence(shape))
        if full is None:
            obstacle = f"the reference's parts {list(shape)} follow no known split"
            self._note_missing(tensor_key, obstacle)
            return
        self._written[storage] = self._write(numbered_tensor_key, first.record, full)

    def _have_all_ranks_shape(
        self, part_by_ranks: Mapping[_RankPair, _RankTensor], shape: tuple[int, ...]
    ) -> bool:
        """Return True if every pair of context- and tensor-parallel rank has a part of a shape."""
        for context_rank in range(self._rank.context[1]):
            for tensor_rank in range(self._rank.tensor[1]):
                part = part_by_ranks.get((context_rank, tensor_rank))
                if part is None or part.record.shape != shape:
                    return False
        return True

    def _join_ranks(
        self,
        tensor_key: TensorKey,
        part_by_ranks: Mapping[_RankPair, _RankTensor],
        sequence: _SequenceDimension | None,
    ) -> Array | None:
        """Join the parts of all tensor-parallel ranks, then of all context-parallel ranks, to the full tensor.

        None means that the parts follow no known split.
        """
        joined_parts = []
        for context_rank in range(self._rank.context[1]):
            parts = [
                part_by_ranks[context_rank, tensor_rank]
                for tensor_rank in range(self._rank.tensor[1])
            ]
            joined = self._join_tensor_parallel(tensor_key, parts, sequence)
            if joined is None:
                return None
            joined_parts.append(joined)
        return self._join_context_parallel(tensor_key, joined_parts, sequence)

    def _join_tensor_parallel(
        self,
        tensor_key: TensorKey,
        parts: Sequence[_RankTensor],
        sequence: _SequenceDimension | None,
    ) -> Array | None:
        """Join the parts of the tensor-parallel ranks. Return None for a scalar that differs between the ranks.

        Equal parts are copies, and the first is returned.
        """
        values = [part.values() for part in parts]
        if sequence is not None and sequence.is_split:
            return np.concatenate(values, sequence.axis)
        if _are_equal(values):
            return values[0]
        num_dimensions = values[0].ndim
        if num_dimensions == 0:
            return None
        split_axis = num_dimensions - 1
        if num_dimensions == 4:
            # Four dimensions have heads: before the head size for rows of the sequence, and after the
            # batch for attention scores.
            has_sequence_first = sequence is not None and sequence.axis == 0
            split_axis = 2 if has_sequence_first else 1
        is_gated = self._rank.gated and GATED in tensor_key.name
        return _concatenate(values, split_axis, is_gated=is_gated)

    def _join_context_parallel(
        self, tensor_key: TensorKey, parts: Sequence[Array], sequence: _SequenceDimension | None
    ) -> Array | None:
        """Return the tensor of all context-parallel ranks; None if no known split gives their parts."""
        if len(parts) == 1:
            return parts[0]
        if sequence is not None:
            return self._join_sequence(parts, sequence)
        if tensor_key.stage is CaptureStage.LOSS and parts[0].ndim < 2:
            return np.asarray(np.sum(parts, axis=0))
        return parts[0] if _are_equal(parts) else None

    def _join_sequence(self, parts: Sequence[Array], sequence: _SequenceDimension) -> Array:
        """Return the full sequence, with each context-parallel rank's part at its positions."""
        if sequence.samples == 1:
            return self._place_at_positions(parts, sequence.axis)
        # The first dimension counts sequence and batch together. It is split, so that whole positions are placed.
        split_parts = [part.reshape(-1, sequence.samples, *part.shape[1:]) for part in parts]
        full = self._place_at_positions(split_parts, sequence.axis)
        return full.reshape(-1, *full.shape[2:])

    def _place_at_positions(self, parts: Sequence[Array], axis: int) -> Array:
        """Return a tensor whose dimension `axis` is the full sequence, filled from context-parallel ranks' parts."""
        shape = list(parts[0].shape)
        shape[axis] = self._rank.sequence_length
        full = np.empty(shape, parts[0].dtype)
        # The swap makes the sequence the first dimension, which is indexed by positions. It copies nothing.
        full_by_position = full.swapaxes(0, axis)
        for context_rank, part in enumerate(parts):
            positions = sequence_positions(self._rank, context_rank)
            full_by_position[positions] = part.swapaxes(0, axis)
        return full

    def _find_sequence(self, shape: tuple[int, ...]) -> _SequenceDimension | None:
        """Return the dimension of a rank's tensor that is the sequence; None if no size fits."""
        rank = self._rank
        length = rank.sequence_length // rank.context[1]
        split_length = length // rank.tensor[1] if rank.sequence_parallel else length
        samples = rank.micro_batch_size
        token_counts = (split_length * samples, length * samples)
        if 1 <= len(shape) <= 2 and shape[0] in token_counts:
            is_split = shape[0] == split_length * samples and split_length != length
            return _SequenceDimension(axis=0, samples=samples, is_split=is_split)
        for axis, size in enumerate(shape):
            if size in (length, split_length):
                return _SequenceDimension(axis=axis, samples=1, is_split=size != length)
        return None

    def _join_expert_tensor(
        self, tensor_key: TensorKey, micro_batch: int, parts: Sequence[_RankTensor]
    ) -> None:
        """Join and write a tensor of an expert, which has one row per token.

        The rows belong to tokens of all ranks that send tokens to the expert. One tensor is written per
        data-parallel rank, with its rows in the order of the tokens. If the routing of a data-parallel rank is
        unknown, this is noted and its tensor is not written.
        """
        groups: defaultdict[object, list[_RankTensor]] = defaultdict(list)
        for part in parts:
            groups[part.rank.expert_sources].append(part)
        senders_by_data_rank: defaultdict[int, list[_SenderRows]] = defaultdict(list)
        for group in groups.values():
            values = self._join_expert_tensor_parallel(tensor_key, group)
            holder = group[0].rank_capture
            for sender in self._split_by_sender(tensor_key, micro_batch, holder, values):
                senders_by_data_rank[sender.data_rank].append(sender)
        rank = self._rank
        num_senders = rank.context[1] * (rank.tensor[1] if rank.sequence_parallel else 1)
        for data_rank in range(rank.data[1]):
            senders = senders_by_data_rank[data_rank]
            if len(senders) != num_senders:
                self._note_missing(tensor_key, _ROUTING_UNKNOWN)
                continue
            tokens = np.concatenate([sender.tokens for sender in senders])
            rows = np.concatenate([sender.rows for sender in senders])
            number = micro_batch * rank.data[1] + data_rank
            numbered_tensor_key = msgspec.structs.replace(tensor_key, micro_batch=number)
            self._write(numbered_tensor_key, parts[0].record, rows[np.argsort(tokens)])

    def _split_by_sender(
        self, tensor_key: TensorKey, micro_batch: int, holder: RankCapture, values: Array
    ) -> list[_SenderRows]:
        """Return the rows of an expert by the rank that sent their tokens.

        The list is empty if the routing was not captured, or does not match the number of rows.
        """
        router, expert = find_router(tensor_key.name)
        router = msgspec.structs.replace(router, micro_batch=micro_batch)
        tokens_of_senders: list[tuple[int, Array]] = []
        for data_rank, context_rank, tensor_rank in holder.rank.expert_sources:
            position = (data_rank, context_rank, tensor_rank, holder.rank.pipeline[0])
            sender = self._rank_by_position[position]
            record = sender.first_records.get(router)
            if record is None or expert is None:
                return []
            is_routed = sender.values(record)[:, expert].astype(bool)
            tokens = token_indices(sender.rank, context_rank, tensor_rank)
            if len(tokens) != len(is_routed):
                return []
            tokens_of_senders.append((data_rank, tokens[is_routed]))
        num_rows = sum(len(tokens) for _, tokens in tokens_of_senders)
        if not values.ndim or len(values) != num_rows:
            return []
        senders = []
        begin = 0
        for data_rank, tokens in tokens_of_senders:
            end = begin + len(tokens)
            senders.append(_SenderRows(data_rank, tokens, rows=values[begin:end]))
            begin = end
        return senders

    def _join_expert_tensor_parallel(
        self, tensor_key: TensorKey, parts: Sequence[_RankTensor]
    ) -> Array:
        """Join the parts of all ranks that share an expert.

        Equal parts are copies, and the first is returned. Tensors that expert tensor parallelism splits are
        concatenated. All others are summed.
        """
        ordered = sorted(parts, key=lambda part: part.rank.expert_tensor[0])
        values = [part.values() for part in ordered]
        if _are_equal(values):
            return values[0]
        if f"{tensor_key.name} {tensor_key.slot}".endswith(_SPLIT_IN_EXPERTS):
            is_gated = self._rank.gated and "linear_fc1" in tensor_key.name
            return _concatenate(values, axis=-1, is_gated=is_gated)
        return np.asarray(np.sum(values, axis=0, dtype=values[0].dtype))

    def _write(self, tensor_key: TensorKey, record: TensorRecord, values: Array) -> TensorRecord:
        """Write an activation with the dtype of `record`; gradients are scaled to those of one rank."""
        if tensor_key.stage is CaptureStage.ACTIVATION_GRADIENTS:
            values = values * self._gradient_scale
        return self._add(tensor_key, record.dtype, values)

    def _add(
        self, tensor_key: TensorKey, dtype: str, values: Array, placement: Placement | None = None
    ) -> TensorRecord:
        """Encode a tensor, append it to the capture and return its record."""
        encoded = encode_tensor(values, dtype)
        return self._writer.add(
            tensor_key, dtype, shape=values.shape, values=encoded, placement=placement
        )

    def _note_missing(self, tensor_key: TensorKey, obstacle: str) -> None:
        """Note that a tensor was not joined, and the reason."""
        self._names_by_obstacle[obstacle].append(f"{tensor_key.name} {tensor_key.slot}")


def _are_equal(tensors: Sequence[Array]) -> bool:
    """Return True if all tensors are equal bit for bit."""
    return all(values.tobytes() == tensors[0].tobytes() for values in tensors[1:])


def _concatenate(parts: Sequence[Array], axis: int, *, is_gated: bool) -> Array:
    """Concatenate parts along an axis. For a gated layer, the gates of all parts come first, then all values."""
    if not is_gated:
        return np.concatenate(parts, axis)
    gates, values = [], []
    for part in parts:
        gate, value = np.split(part, 2, axis)
        gates.append(gate)
        values.append(value)
    return np.concatenate([*gates, *values], axis)
