"""Find the part of the reference's activation that a rank of the strategy holds.

The inputs are the captures of the reference and of the strategy. For each activation of a rank,
`ActivationAligner.align` returns the rank's tensor and the same part of the reference's tensor. The split follows the
strategy. Data parallelism splits the batch. Sequence and context parallelism split the sequence: Megatron's context
parallelism gives a rank two chunks, one from the front and one from the back. Tensor parallelism splits the hidden size
or the heads. An expert has tokens of several ranks. Which dimension was split follows from the sizes. If the micro
batches of the two runs have different sizes, samples are matched by their number in the global batch.

Parameters are not aligned here: their `Placement` tells their part.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from parakit.artifacts.capture import (
    EARLIER_ITERATION_PREFIX,
    LOSS,
    RECOMPUTED_PREFIX,
    CapturedRank,
    CaptureStage,
    TensorKey,
    TensorRecord,
)
from parakit.verify.captured import Array, Capture, RankCapture

EXPERTS = ".experts"
GATED = ".linear_fc1"
"""Suffix of the layer that gives gate and value, one after the other, in a gated MLP."""


@dataclass(frozen=True)
class Alignment:
    """A rank's tensor and the same part of the reference's tensor, or the obstacle to aligning them."""

    ours: Array | None
    reference: Array | None
    obstacle: str = ""
    """Reason why the tensor could not be aligned; empty if it was."""
    scale: float = 1.0
    """Factor by which the reference's part was multiplied."""


@dataclass(frozen=True)
class _ReferenceTensor:
    """An activation of the reference for one micro batch."""

    values: Array
    loss_scale: float
    """Factor of the micro batch's loss on the rank that holds the tensor (`micro_batch_loss_scale`)."""


_NO_SUCH_TENSOR = Alignment(None, None, "the reference has no such tensor")


class ActivationAligner:
    """Aligns the activations of the strategy's ranks with those of the reference."""

    def __init__(self, reference: Capture, strategy: Capture) -> None:
        self._reference, self._strategy = reference, strategy
        self._has_same_layout = layout_signature(reference.first) == layout_signature(
            strategy.first
        )
        self._has_other_micro_batches = (
            strategy.first.micro_batch_size != reference.first.micro_batch_size
        )
        self._holders: dict[tuple[TensorKey, int], tuple[RankCapture, TensorRecord]] = {}
        """The first rank of the reference with a tensor of a micro batch, by its global number."""
        self._quadratic_means: dict[TensorKey, float] = {}
        for rank_capture in reference.ranks:
            data_rank, data_size = rank_capture.rank.data
            for record in rank_capture.records:
                if record.placement is None and record.tensor_key.micro_batch is not None:
                    number = record.tensor_key.micro_batch * data_size + data_rank
                    key = (_strip_micro_batch(record.tensor_key), number)
                    self._holders.setdefault(key, (rank_capture, record))

    def align(self, rank_capture: RankCapture, record: TensorRecord) -> Alignment:
        """Return a rank's tensor with the same part of the reference's tensor, or the obstacle to aligning them.

        The two runs may multiply the loss by different factors before the backward pass. The reference's
        activation gradients are therefore multiplied by the quotient of the two factors. A context-parallel
        rank has the loss and the number of tokens of its part of the sequence only, so both are summed over all
        parts.
        """
        tensor_key, rank = record.tensor_key, rank_capture.rank
        ours = rank_capture.values(record)
        if self._has_same_layout:
            return self._align_with_same_rank(rank, record, ours)
        if tensor_key.stage is CaptureStage.LOSS and ours.ndim < 2:
            ours = self._sum_over_context(rank, tensor_key, ours)
        is_scalar = ours.ndim < 2 and ours.size == 1
        if self._has_other_micro_batches and (is_in_expert(tensor_key.name) or is_scalar):
            return self._align_over_global_batch(rank_capture, record)
        full = self._read_full_tensor(rank, record)
        if full is None:
            return _NO_SUCH_TENSOR
        part = self._cut_part(full.values, record, rank)
        if part is None:
            shapes = f"{list(record.shape)} of the reference's {list(full.values.shape)}"
            return Alignment(None, None, f"its shape {shapes} follows no known split")
        if tensor_key.stage is not CaptureStage.ACTIVATION_GRADIENTS or is_recomputed(tensor_key):
            return Alignment(ours, part)
        scale = micro_batch_loss_scale(rank) / full.loss_scale
        return Alignment(ours, part * np.float32(scale), scale=scale)

    def quadratic_mean(self, tensor_key: TensorKey) -> float:
        """Return the quadratic mean of the reference's elements of a tensor key, over all micro batches.

        The mean is 0 if the reference has no such tensor.
        """
        key = _strip_micro_batch(tensor_key)
        if key not in self._quadratic_means:
            values = [
                holder.values(record).astype(np.float64).ravel()
                for (holder_tensor_key, _), (holder, record) in self._holders.items()
                if holder_tensor_key == key
            ]
            squares = np.square(np.concatenate(values)) if values else np.zeros(1)
            mean = float(np.sqrt(squares.mean())) if squares.size else 0.0
            self._quadratic_means[key] = mean
        return self._quadratic_means[key]

    def _align_with_same_rank(
        self, rank: CapturedRank, record: TensorRecord, ours: Array
    ) -> Alignment:
        """Return a rank's tensor with the tensor of the same rank in a reference with the same parallel sizes.

        The result is an obstacle if that rank has no such tensor, or has a tensor of another shape.
        """
        rank_capture = self._reference.ranks[rank.rank]
        stripped = _strip_micro_batch(record.tensor_key)
        tensor_key = TensorKey(
            stripped.stage,
            stripped.name,
            slot=stripped.slot,
            micro_batch=record.tensor_key.micro_batch,
            call=stripped.call,
        )
        reference_record = rank_capture.first_records.get(tensor_key)
        if reference_record is None:
            return _NO_SUCH_TENSOR
        if reference_record.shape != record.shape:
            shapes = (
                f"{list(record.shape)} differs from the reference's {list(reference_record.shape)}"
            )
            return Alignment(None, None, f"its shape {shapes}")
        return Alignment(ours, rank_capture.values(reference_record))

    def _cut_part(self, full: Array, record: TensorRecord, rank: CapturedRank) -> Array | None:
        """Cut a rank's part out of a full tensor. Return None if no known split gives the record's shape."""
        cut = partial(
            _cut_to_shape,
            shape=record.shape,
            rank=rank,
            reference=self._reference.first,
            tensor_key=record.tensor_key,
        )
        part = cut(full)
        if part is None and full.ndim > 2:
            # The embedding's output has the batch first, but with sequence parallelism Megatron
            # transposes it to sequence first before it scatters it.
            return cut(full.swapaxes(0, 1))
        return part

    def _read_full_tensor(
        self, rank: CapturedRank, record: TensorRecord
    ) -> _ReferenceTensor | None:
        """Return the reference's tensor for the tokens of which the rank has all or a part; None if absent."""
        if is_in_expert(record.tensor_key.name):
            return self._read_expert_rows(rank, record.tensor_key)
        return self._read_micro_batch(rank, record)

    def _read_micro_batch(
        self, rank: CapturedRank, record: TensorRecord
    ) -> _ReferenceTensor | None:
        """Return the reference's full tensor for the samples of a rank's micro batch.

        If the micro batches of the two runs differ in size, the samples are a part of one micro batch of the
        reference, or come from several. None means that the reference lacks the tensor in one of these micro
        batches.
        """
        micro_batch = record.tensor_key.micro_batch
        assert micro_batch is not None
        number = micro_batch * rank.data[1] + rank.data[0]
        if not self._has_other_micro_batches:
            return self._read_reference(record, number)
        num_samples = rank.micro_batch_size
        reference_samples = self._reference.first.micro_batch_size
        first_sample = number * num_samples
        if is_returned_bias(record.tensor_key, record.shape):
            return self._read_reference(record, first_sample // reference_samples)
        last_sample = first_sample + num_samples - 1
        first_number = first_sample // reference_samples
        numbers = range(first_number, last_sample // reference_samples + 1)
        tensors = [self._read_reference(record, index) for index in numbers]
        present = [tensor for tensor in tensors if tensor is not None]
        if len(present) < len(tensors):
            return None
        samples = _select_samples(
            [tensor.values for tensor in present],
            self._reference.first,
            shape=record.shape,
            num_samples=num_samples,
            num_skipped=first_sample - first_number * reference_samples,
        )
        return _ReferenceTensor(samples, present[0].loss_scale)

    def _read_reference(self, record: TensorRecord, number: int) -> _ReferenceTensor | None:
        """Return the reference's tensor of its micro batch `number`; None if the reference has no such tensor."""
        holder = self._holders.get((_strip_micro_batch(record.tensor_key), number))
        if holder is None:
            return None
        rank_capture, reference_record = holder
        return _ReferenceTensor(
            rank_capture.values(reference_record), micro_batch_loss_scale(rank_capture.rank)
        )

    def _align_over_global_batch(
        self, rank_capture: RankCapture, record: TensorRecord
    ) -> Alignment:
        """Return a loss and the reference's loss, each summed over all micro batches of the global batch.

        This is for runs whose micro batches differ in size. Losses of single micro batches cannot be compared
        then, but their totals can. A tensor that is not a loss gives an obstacle.
        """
        tensor_key = record.tensor_key
        if tensor_key.stage is not CaptureStage.LOSS or is_recomputed(tensor_key):
            obstacle = "it belongs to a full micro batch, and the micro batches of the two runs differ in size"
            return Alignment(None, None, obstacle)
        loss_key = _strip_micro_batch(tensor_key)
        reference_values = [
            holder.values(reference_record)
            for (holder_tensor_key, _), (holder, reference_record) in self._holders.items()
            if holder_tensor_key == loss_key
        ]
        if not reference_values:
            return _NO_SUCH_TENSOR
        our_values = self._read_losses_of_copies(rank_capture.rank, loss_key)
        return Alignment(np.sum(our_values, axis=0), np.sum(reference_values, axis=0))

    def _read_losses_of_copies(self, rank: CapturedRank, loss_key: TensorKey) -> list[Array]:
        """Return a loss of all micro batches, on all data-parallel copies of a rank.

        `loss_key` has no number of a micro batch. Each loss is summed over the context-parallel ranks.
        """
        losses = []
        for copy_capture in self._strategy.ranks:
            copy = copy_capture.rank
            is_data_parallel_copy = (
                copy.tensor == rank.tensor
                and copy.pipeline == rank.pipeline
                and copy.context == rank.context
            )
            if not is_data_parallel_copy:
                continue
            for record in copy_capture.records:
                tensor_key = record.tensor_key
                if _strip_micro_batch(tensor_key) == loss_key and not is_recomputed(tensor_key):
                    values = copy_capture.values(record)
                    losses.append(self._sum_over_context(copy, tensor_key, values))
        return losses

    def _sum_over_context(self, rank: CapturedRank, tensor_key: TensorKey, values: Array) -> Array:
        """Return a loss or a number of tokens, summed over a rank's context-parallel group."""
        for other_capture in self._strategy.ranks:
            other = other_capture.rank
            is_same_group = (other.data, other.tensor, other.pipeline) == (
                rank.data,
                rank.tensor,
                rank.pipeline,
            )
            if is_same_group and other.context[0] != rank.context[0]:
                values = values + other_capture.values(other_capture.first_records[tensor_key])
        return values

    def _read_expert_rows(
        self, rank: CapturedRank, tensor_key: TensorKey
    ) -> _ReferenceTensor | None:
        """Return the reference's rows for the tokens that an expert on this rank has.

        The rows are in the order of the ranks that send tokens (`expert_sources`). None means that the
        reference lacks the tensor in a micro batch, or that the captured routing does not tell which rows
        belong to a sender.
        """
        assert tensor_key.micro_batch is not None
        rows_of_senders, loss_scale = [], 1.0
        for data_rank, context_rank, tensor_rank in rank.expert_sources:
            number = tensor_key.micro_batch * rank.data[1] + data_rank
            holder = self._holders.get((_strip_micro_batch(tensor_key), number))
            if holder is None:
                return None
            rank_capture, record = holder
            rows: Array | None = rank_capture.values(record) if record.shape else None
            if rows is not None and (rank.context[1] > 1 or rank.sequence_parallel):
                sender = (context_rank, tensor_rank if rank.sequence_parallel else 0)
                rows = self._select_sender_rows(
                    rows, rank, module=tensor_key.name, number=number, sender=sender
                )
            if rows is None:
                return None
            rows_of_senders.append(rows)
            loss_scale = micro_batch_loss_scale(rank_capture.rank)
        return _ReferenceTensor(np.concatenate(rows_of_senders), loss_scale)

    def _select_sender_rows(
        self,
        rows: Array,
        rank: CapturedRank,
        *,
        module: str,
        number: int,
        sender: tuple[int, int],
    ) -> Array | None:
        """Return the rows of an expert whose tokens belong to one sender.

        Args:
            rows: All rows that the expert has in the reference's micro batch.
            rank: A rank of the strategy, for its sizes.
            module: Name of a module in the expert.
            number: Global number of the micro batch.
            sender: Context- and tensor-parallel rank of the sender.

        Returns:
            The sender's rows; None if the captured routing is missing or does not match the rows.
        """
        router, expert = find_router(module)
        holder = self._holders.get((router, number))
        if holder is None or expert is None:
            return None
        rank_capture, record = holder
        is_routed = rank_capture.values(record)[:, expert].astype(bool)
        num_tokens = rank.sequence_length * rank.micro_batch_size
        if len(is_routed) != num_tokens or len(rows) != is_routed.sum():
            return None
        tokens = token_indices(rank, *sender)
        row_of_token = np.cumsum(is_routed) - 1
        return np.asarray(rows[row_of_token[tokens[is_routed[tokens]]]])


def layout_signature(rank: CapturedRank) -> tuple[object, ...]:
    """Return a value that is equal for two runs whose ranks hold the same parts of the same micro batches."""
    return (rank.degrees, rank.micro_batch_size, rank.micro_batches)


def _strip_micro_batch(tensor_key: TensorKey) -> TensorKey:
    """Return the tensor key without its micro batch; for a recomputed tensor, that of the first forward pass."""
    stage = tensor_key.stage
    if is_recomputed(tensor_key):
        stage = CaptureStage.LOSS if tensor_key.name == LOSS else CaptureStage.OUTPUTS
    slot = tensor_key.slot.removeprefix(RECOMPUTED_PREFIX)
    return TensorKey(stage, tensor_key.name, slot=slot, micro_batch=None, call=tensor_key.call)


def list_activation_tensor_keys(capture: Capture) -> dict[TensorKey, None]:
    """Return the tensor keys of all activations, each once, without the number of the micro batch.

    The keys are in the order in which the ranks computed them, rank after rank. Choices that routers made in
    earlier iterations are left out. The result is a dict without values, which serves as an ordered set.
    """
    return {
        _strip_micro_batch(record.tensor_key): None
        for rank_capture in capture.ranks
        for record in rank_capture.records
        if record.placement is None
        and record.tensor_key.micro_batch is not None
        and not record.tensor_key.slot.startswith(EARLIER_ITERATION_PREFIX)
    }


def has_distinct_tokens(rank: CapturedRank) -> bool:
    """Return True if no earlier tensor-parallel rank has the same tokens as this rank."""
    return rank.sequence_parallel or rank.tensor[0] == 0


def is_recomputed(tensor_key: TensorKey) -> bool:
    """Return True if a recomputed forward pass gave the tensor."""
    return tensor_key.slot.startswith(RECOMPUTED_PREFIX)


def is_in_expert(name: str) -> bool:
    """Return True if a module with this name is in an expert."""
    return EXPERTS in name


def find_router(name: str) -> tuple[TensorKey, int | None]:
    """Return the tensor key of the routing map that sends tokens to an expert, and the expert's number.

    `name` is a module in the layer's experts. The number is None if the module does not belong to a single
    expert.
    """
    layer, _, expert = name.partition(f"{EXPERTS}.local_experts.")
    number = int(expert.partition(".")[0]) if expert else None
    return TensorKey(CaptureStage.OUTPUTS, f"{layer}.router", "output.1"), number


def micro_batch_loss_scale(rank: CapturedRank) -> float:
    """Return the factor by which a micro batch's summed loss is multiplied before the backward pass.

    Megatron also divides the loss by the number of tokens; the factor does not include this division. With
    `--calculate-per-token-loss` the factor is 1.
    """
    if rank.per_token_loss:
        return 1.0
    return rank.context[1] / (rank.micro_batches * rank.micro_batch_size)


def _select_samples(
    tensors: list[Array],
    reference: CapturedRank,
    *,
    shape: tuple[int, ...],
    num_samples: int,
    num_skipped: int,
) -> Array:
    """Return consecutive samples of the reference's tensors of consecutive micro batches.

    Args:
        tensors: The reference's tensors, one per micro batch.
        reference: A rank of the reference, for its sizes.
        shape: Shape of the strategy's tensor, from which the batch dimension follows.
        num_samples: Number of samples to return.
        num_skipped: Number of samples to skip at the beginning of the first tensor.

    Returns:
        The samples. If no dimension is the batch, as in the rotary angles of positions, the first tensor is
        returned unchanged.
    """
    full_shape = tensors[0].shape
    batch_axis = None
    for axis, sizes in enumerate(zip(full_shape, shape, strict=False)):
        if sizes == (reference.micro_batch_size, num_samples):
            batch_axis = axis
            break
    num_tokens = reference.micro_batch_size * reference.sequence_length
    # Rows may be tokens: sequence and batch merged into the first dimension, sequence first.
    is_merged = batch_axis is None and full_shape[:1] == (num_tokens,)
    if is_merged:
        batch_axis = 1
        tensors = [
            tensor.reshape(reference.sequence_length, -1, *tensor.shape[1:]) for tensor in tensors
        ]
    if batch_axis is None:
        return tensors[0]
    indices = range(num_skipped, num_skipped + num_samples)
    samples = np.concatenate(tensors, batch_axis).take(indices, batch_axis)
    return samples.reshape(-1, *samples.shape[2:]) if is_merged else samples


def _cut_to_shape(
    full: Array,
    shape: tuple[int, ...],
    *,
    rank: CapturedRank,
    reference: CapturedRank,
    tensor_key: TensorKey,
) -> Array | None:
    """Cut out of `full` the part that a rank holds as a tensor of shape `shape`.

    Each dimension that has another size in `shape` is cut. The sequence is cut by context and sequence parallelism,
    and any other dimension by tensor parallelism. None means that no known split gives a part of this shape.
    """
    if full.ndim != len(shape):
        return None
    cut_dimensions = partial(_cut_dimensions, rank=rank, reference=reference, tensor_key=tensor_key)
    # With MTP the model's sequence and those of the MTP layers are concatenated, each split by itself.
    num_sequences = _count_sequences(full, reference)
    if num_sequences == 1 or full.shape == shape or shape[0] % num_sequences != 0:
        return cut_dimensions(full, shape)
    shape_of_one = (shape[0] // num_sequences, *shape[1:])
    parts = []
    for sequence in np.split(full, num_sequences):
        part = cut_dimensions(sequence, shape_of_one)
        if part is None:
            return None
        parts.append(part)
    return np.concatenate(parts)


def _cut_dimensions(
    full: Array,
    shape: tuple[int, ...],
    *,
    rank: CapturedRank,
    reference: CapturedRank,
    tensor_key: TensorKey,
) -> Array | None:
    """Cut every dimension of `full` to its size in `shape`, as `_cut_to_shape` says; None if one cannot be cut.

    `full` has as many dimensions as `shape`, and at most one sequence.
    """
    length = reference.sequence_length
    # Rows of an expert are tokens in the order of routing, so none of its dimensions is the sequence. A bias has no
    # sequence either, even if it has as many elements as a micro batch has tokens.
    is_sequence_passed = is_in_expert(tensor_key.name) or is_returned_bias(tensor_key, shape)
    part = full
    for axis, (full_size, size) in enumerate(zip(full.shape, shape, strict=True)):
        if full_size == size:
            is_sequence_passed |= full_size == length
            continue
        # The first dimension may count the tokens of all samples.
        is_all_tokens = axis == 0 and full_size == length * rank.micro_batch_size
        is_sequence = not is_sequence_passed and (full_size == length or is_all_tokens)
        is_divisible = size > 0 and full_size > 0 and full_size % size == 0
        cut: Array | None
        if is_sequence and is_divisible:
            is_sequence_passed = True
            ratio = full_size // size
            cut = _cut_sequence(part, axis, ratio=ratio, rank=rank, reference=reference)
        else:
            cut = _cut_dimension_by_tensor_parallel(
                part, axis, size=size, rank=rank, tensor_key=tensor_key
            )
        if cut is None:
            return None
        part = cut
    return part if part.shape == shape else None


def is_returned_bias(tensor_key: TensorKey, shape: tuple[int, ...]) -> bool:
    """Return True if a tensor is the bias that one of Megatron's linear layers returns next to its output.

    Megatron's names of these layers begin with `linear`, such as `linear_fc1`, or are `output_layer`.
    """
    layer = tensor_key.name.rpartition(".")[2]
    is_further_output = tensor_key.slot.removeprefix(RECOMPUTED_PREFIX).startswith("output.")
    return len(shape) == 1 and is_further_output and layer.startswith(("linear", "output_layer"))


def _count_sequences(full: Array, reference: CapturedRank) -> int:
    """Return the number of sequences that a tensor's first dimension has one after another; 1 if it is no sequence."""
    if full.ndim <= 2 or full.shape[1] != reference.micro_batch_size:
        return 1
    num_sequences, remainder = divmod(full.shape[0], reference.sequence_length)
    return num_sequences if remainder == 0 else 1


def _cut_dimension_by_tensor_parallel(
    tensor: Array, axis: int, *, size: int, rank: CapturedRank, tensor_key: TensorKey
) -> Array | None:
    """Cut a tensor-parallel rank's part out of a dimension. Return None if TP does not split the dimension.

    Args:
        tensor: The tensor, whose dimension has its full size.
        axis: The dimension.
        size: The size of the dimension on the rank.
        rank: The rank.
        tensor_key: Key of the tensor. Tensors of experts are split by the expert tensor parallel size.
    """
    tensor_parallel = rank.expert_tensor if is_in_expert(tensor_key.name) else rank.tensor
    tensor_rank, tensor_size = tensor_parallel
    full_size = tensor.shape[axis]
    if full_size == 0 or size == 0:
        return None
    if full_size % size == 0 and full_size // size == tensor_size:
        is_gated = rank.gated and GATED in tensor_key.name
        return _cut_tensor_parallel(tensor, axis, tensor=tensor_parallel, is_gated=is_gated)
    # Fewer query groups than tensor-parallel ranks: several ranks hold the same group.
    if size == 1 and full_size < tensor_size:
        group = tensor_rank * full_size // tensor_size
        return tensor.take([group], axis)
    return None


def _cut_sequence(
    full: Array,
    axis: int,
    *,
    ratio: int,
    rank: CapturedRank,
    reference: CapturedRank,
) -> Array | None:
    """Return a rank's part of the sequence, cut first by context and then by sequence parallelism.

    Args:
        full: Tensor with the full sequence.
        axis: Dimension of the sequence. The sequence and the batch may be merged in it.
        ratio: Number of equal parts that the dimension is cut into.
        rank: The rank whose part is returned.
        reference: A rank of the reference, for the sequence length.

    Returns:
        The part; None if the parallel degrees do not give `ratio` parts.
    """
    context, (tensor_rank, tensor_size) = rank.context, rank.tensor
    full_shape = full.shape
    is_merged = full_shape[axis] != reference.sequence_length
    if is_merged:
        full = full.reshape(reference.sequence_length, -1, *full_shape[1:])
    if context[1] > 1 and ratio % context[1] == 0:
        full = _cut_context_parallel(full, axis, context)
        ratio //= context[1]
    if ratio == tensor_size and tensor_size > 1:
        full = np.split(full, tensor_size, axis)[tensor_rank]
    elif ratio != 1:
        return None
    return full.reshape(-1, *full_shape[1:]) if is_merged else full


def sequence_positions(rank: CapturedRank, context: int, tensor: int | None = None) -> Array:
    """Return the positions in the sequence that a context-parallel rank holds.

    With sequence parallelism and `tensor` given, only the positions that the tensor-parallel rank `tensor`
    holds are returned.
    """
    positions = _cut_context_parallel(
        np.arange(rank.sequence_length), axis=0, context=(context, rank.context[1])
    )
    if tensor is not None and rank.sequence_parallel:
        positions = np.split(positions, rank.tensor[1])[tensor]
    return positions


def token_indices(rank: CapturedRank, context: int, tensor: int) -> Array:
    """Return the indices of a rank's tokens in a micro batch, whose tokens are ordered sequence first.

    `context` and `tensor` are the context- and tensor-parallel ranks.
    """
    num_samples = rank.micro_batch_size
    positions = sequence_positions(rank, context, tensor)
    return (positions[:, None] * num_samples + np.arange(num_samples)).ravel()


def _cut_context_parallel(full: Array, axis: int, context: tuple[int, int]) -> Array:
    """Return a context-parallel rank's two chunks of the sequence, one from the front and one from the back.

    These two chunks give every rank the same amount of causal attention to compute. `context` is the rank's
    number in its context-parallel group, and the group's size.
    """
    context_rank, context_size = context
    chunks = np.split(full, 2 * context_size, axis)
    return np.concatenate([chunks[context_rank], chunks[-1 - context_rank]], axis)


def _cut_tensor_parallel(
    full: Array, axis: int, *, tensor: tuple[int, int], is_gated: bool
) -> Array:
    """Cut a tensor-parallel rank's part out of the dimension `axis`.

    `tensor` is the rank's number in its tensor-parallel group, and the group's size. A gated layer stores the
    gate before the value. The result is then the rank's part of the gate, followed by the rank's part of the
    value.
    """
    tensor_rank, tensor_size = tensor
    if not is_gated:
        return np.asarray(np.split(full, tensor_size, axis)[tensor_rank])
    halves = [
        _cut_tensor_parallel(half, axis, tensor=tensor, is_gated=False)
        for half in np.split(full, 2, axis)
    ]
    return np.concatenate(halves, axis)
