"""Which part of the reference's tensor a rank's tensor is.

Activations follow the strategy: batch by data parallelism, sequence by sequence and context parallelism
(Megatron's context parallelism gives a rank two chunks, one from the front and one from the back),
hidden size or heads by tensor parallelism, tokens of experts by the rank they came from. Which dimension
is which follows from the sizes. Parameters carry their place with them (`Placement`). Micro batches of
another size than the reference's are aligned by the sample's number in the global batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from parakit.artifacts.capture import (
    EARLIER,
    LOSS,
    RECOMPUTED,
    CapturedRank,
    Site,
    Stage,
    TensorRecord,
)
from parakit.verify.captured import Array, Capture, RankCapture

EXPERTS = ".experts"
GATED = ".linear_fc1"


@dataclass(frozen=True)
class Alignment:
    """A rank's tensor, and the same part of the reference's; or why there is none."""

    ours: Array | None
    reference: Array | None
    obstacle: str = ""
    scale: float = 1.0
    """By what the reference's part was multiplied."""


_NO_SUCH = Alignment(None, None, "the reference has no such tensor")


class ActivationAligner:
    """Finds the reference's part for each tensor of the strategy's ranks."""

    def __init__(self, reference: Capture, strategy: Capture) -> None:
        self._reference, self._strategy = reference, strategy
        self._alike = layout_signature(reference.first) == layout_signature(strategy.first)
        self._holders: dict[tuple[Site, int], tuple[RankCapture, TensorRecord]] = {}
        """The first rank of the reference that has a tensor of a micro batch."""
        self._resized = strategy.first.micro_batch_size != reference.first.micro_batch_size
        self._means: dict[Site, float] = {}
        for one in reference.ranks:
            data_rank, data_size = one.rank.data
            for record in one.records:
                if record.placement is None and record.site.micro_batch is not None:
                    number = record.site.micro_batch * data_size + data_rank
                    self._holders.setdefault((_plain(record.site), number), (one, record))

    def align(self, one: RankCapture, record: TensorRecord) -> Alignment:
        """Find a tensor's counterpart, scaled as its gradients are."""
        site = record.site
        ours = one.values(record)
        if self._alike:
            return self._same_rank(one.rank, record, ours)
        if site.stage is Stage.LOSS and ours.ndim < 2:
            ours = self._over_sequence(one.rank, site, ours)
        if self._resized and (is_in_expert(site.name) or (ours.ndim < 2 and ours.size == 1)):
            return self._of_whole_batch(one, record)
        if is_in_expert(site.name):
            whole, scale = self._expert_rows(one.rank, site)
        else:
            whole, scale = self._micro_batch(one.rank, record)
        if whole is None:
            return _NO_SUCH
        part = _part(whole, record.shape, one.rank, self._reference.first, site)
        if part is None and whole.ndim > 2:  # An embedding that is scattered comes sequence first.
            swapped = whole.swapaxes(0, 1)
            part = _part(swapped, record.shape, one.rank, self._reference.first, site)
        if part is None:
            shapes = f"{list(record.shape)} of the reference's {list(whole.shape)}"
            return Alignment(None, None, f"its shape {shapes} follows no known split")
        scaled = site.stage is Stage.ACTIVATION_GRADIENTS and not is_recomputed(site)
        factor = micro_batch_loss_scale(one.rank) / scale if scaled else 1.0
        return Alignment(ours, part * np.float32(factor) if scaled else part, scale=factor)

    def quadratic_mean(self, site: Site) -> float:
        """Of an element of the reference's tensors of a site, over all of its micro batches."""
        plain = _plain(site)
        if plain not in self._means:
            values = [
                holder.values(record).astype(np.float64).ravel()
                for (site_there, _), (holder, record) in self._holders.items()
                if site_there == plain
            ]
            squares = np.square(np.concatenate(values)) if values else np.zeros(1)
            self._means[plain] = float(np.sqrt(squares.mean())) if squares.size else 0.0
        return self._means[plain]

    def _same_rank(self, rank: CapturedRank, record: TensorRecord, ours: Array) -> Alignment:
        """Of a reference of the same strategy, the same rank's tensor is the counterpart."""
        there = self._reference.ranks[rank.rank]
        plain = _plain(record.site)
        site = Site(plain.stage, plain.name, plain.slot, record.site.micro_batch, plain.call)
        found = there.by_site.get(site)
        if found is None:
            return _NO_SUCH
        if found.shape != record.shape:
            shapes = f"{list(record.shape)} of the reference's {list(found.shape)}"
            return Alignment(None, None, f"its shape {shapes} is another one")
        return Alignment(ours, there.values(found))

    def _micro_batch(self, rank: CapturedRank, ours: TensorRecord) -> tuple[Array | None, float]:
        site = ours.site
        assert site.micro_batch is not None
        number = site.micro_batch * rank.data[1] + rank.data[0]
        if not self._resized:
            return self._held(ours, number)
        size, theirs = rank.micro_batch_size, self._reference.first.micro_batch_size
        first = number * size
        numbers = range(first // theirs, (first + size - 1) // theirs + 1)
        held = [self._held(ours, there) for there in numbers]
        wholes = [whole for whole, _ in held if whole is not None]
        if len(wholes) < len(held):
            return None, 1.0
        skipped = first - numbers[0] * theirs
        rows = _samples(self._reference.first, size, wholes, ours.shape, skipped)
        return rows, held[0][1]

    def _held(self, ours: TensorRecord, number: int) -> tuple[Array | None, float]:
        """The reference's tensor of one of its micro batches, and what its loss was multiplied by."""
        found = self._holders.get((_plain(ours.site), number))
        return (
            (found[0].values(found[1]), micro_batch_loss_scale(found[0].rank))
            if found
            else (None, 1.0)
        )

    def _of_whole_batch(self, one: RankCapture, record: TensorRecord) -> Alignment:
        """A sum over the tokens of a micro batch, over all of them: other micro batches have others."""
        site, rank = record.site, one.rank
        if site.stage is not Stage.LOSS or is_recomputed(site):
            obstacle = "it is of a whole micro batch, and these are of another size"
            return Alignment(None, None, obstacle)
        theirs = [
            holder.values(held)
            for (plain, _), (holder, held) in self._holders.items()
            if plain == _plain(site)
        ]
        if not theirs:
            return _NO_SUCH
        ours = [
            self._over_sequence(other.rank, found.site, other.values(found))
            for other in self._strategy.ranks
            if (other.rank.tensor, other.rank.pipeline, other.rank.context)
            == (rank.tensor, rank.pipeline, rank.context)
            for found in other.records
            if _plain(found.site) == _plain(site) and not is_recomputed(found.site)
        ]
        return Alignment(np.sum(ours, axis=0), np.sum(theirs, axis=0))

    def _over_sequence(self, rank: CapturedRank, site: Site, ours: Array) -> Array:
        """A loss, or a number of tokens, over all parts of the sequence."""
        for other in self._strategy.ranks:
            there = other.rank
            places = [(one.data, one.tensor, one.pipeline) for one in (there, rank)]
            if places[0] == places[1] and there.context[0] != rank.context[0]:
                ours = ours + other.values(other.by_site[site])
        return ours

    def _expert_rows(self, rank: CapturedRank, site: Site) -> tuple[Array | None, float]:
        """Rows of an expert's tokens: those of every rank that sends here, one after another."""
        assert site.micro_batch is not None
        parts, scale = [], 1.0
        for data_rank, context_rank, tensor_rank in rank.expert_sources:
            number = site.micro_batch * rank.data[1] + data_rank
            found = self._holders.get((_plain(site), number))
            if not found:
                return None, 1.0
            holder, record = found
            part: Array | None = holder.values(record) if record.shape else None
            if part is not None and (rank.context[1] > 1 or rank.sequence_parallel):
                place = (context_rank, tensor_rank if rank.sequence_parallel else 0)
                part = self._rows_from(part, rank, site.name, number, place)
            if part is None:
                return None, 1.0
            parts.append(part)
            scale = micro_batch_loss_scale(holder.rank)
        return np.concatenate(parts), scale

    def _rows_from(
        self, rows: Array, rank: CapturedRank, name: str, number: int, place: tuple[int, int]
    ) -> Array | None:
        """Those rows of an expert whose tokens a context- and tensor-parallel rank has."""
        router, expert = find_router(name)
        found = self._holders.get((router, number))
        if not found or expert is None:
            return None
        holder, record = found
        routed = holder.values(record)[:, expert].astype(bool)
        every = rank.sequence_length * rank.micro_batch_size
        if len(routed) != every or len(rows) != routed.sum():
            return None
        tokens = token_indices(rank, *place)
        row_of_token = np.cumsum(routed) - 1
        return np.asarray(rows[row_of_token[tokens[routed[tokens]]]])


def layout_signature(rank: CapturedRank) -> tuple[object, ...]:
    """What two runs share in which every rank has the same part of the same micro batches."""
    return (rank.degrees, rank.micro_batch_size, rank.micro_batches)


def _plain(site: Site) -> Site:
    """The site without its micro batch; a recomputed tensor is compared with the first pass's."""
    stage = site.stage
    if is_recomputed(site):
        stage = Stage.LOSS if site.name == LOSS else Stage.OUTPUTS
    return Site(stage, site.name, site.slot.removeprefix(RECOMPUTED), None, site.call)


def list_activation_sites(capture: Capture) -> dict[Site, None]:
    """Activations, whatever the micro batch, in order; without a router's of earlier iterations."""
    return {
        _plain(record.site): None
        for one in capture.ranks
        for record in one.records
        if record.placement is None
        and record.site.micro_batch is not None
        and not record.site.slot.startswith(EARLIER)
    }


def has_distinct_tokens(rank: CapturedRank) -> bool:
    """Whether its tokens are not those of another tensor-parallel rank as well."""
    return rank.sequence_parallel or rank.tensor[0] == 0


def is_recomputed(site: Site) -> bool:
    """Whether a recomputed forward pass gave it."""
    return site.slot.startswith(RECOMPUTED)


def is_in_expert(name: str) -> bool:
    """Whether a module is in an expert."""
    return EXPERTS in name


def find_router(name: str) -> tuple[Site, int | None]:
    """What the router of an expert's layer chose, and the expert's number; None if it has none."""
    layer, _, expert = name.partition(f"{EXPERTS}.local_experts.")
    number = int(expert.partition(".")[0]) if expert else None
    return Site(Stage.OUTPUTS, f"{layer}.router", "output.1"), number


def micro_batch_loss_scale(rank: CapturedRank) -> float:
    """What the loss of a micro batch is multiplied by before the backward pass, but for its tokens."""
    if rank.per_token_loss:
        return 1.0
    return rank.context[1] / (rank.micro_batches * rank.micro_batch_size)


def _samples(
    reference: CapturedRank, size: int, wholes: list[Array], shape: tuple[int, ...], skipped: int
) -> Array:
    """`size` samples, after `skipped` ones, of consecutive micro batches' tensors of the reference's."""
    theirs, whole = reference.micro_batch_size, wholes[0].shape
    sizes = zip(whole, shape, strict=False)
    axis = next((number for number, pair in enumerate(sizes) if pair == (theirs, size)), None)
    merged = axis is None and whole[:1] == (theirs * reference.sequence_length,)
    if merged:  # Sequence first.
        axis = 1
        length = reference.sequence_length
        wholes = [one.reshape(length, -1, *one.shape[1:]) for one in wholes]
    if axis is None:  # Of no sample, such as angles of positions.
        return wholes[0]
    found = np.concatenate(wholes, axis).take(range(skipped, skipped + size), axis)
    return found.reshape(-1, *found.shape[2:]) if merged else found


def _part(
    whole: Array, shape: tuple[int, ...], rank: CapturedRank, reference: CapturedRank, site: Site
) -> Array | None:
    """The part of `whole` that a rank's tensor of `shape` is; None if no known split gives it."""
    if whole.ndim != len(shape):
        return None
    length, batch = reference.sequence_length, reference.micro_batch_size
    # Sequences follow one another where MTP's stand ahead of the model's own.
    follow = whole.ndim > 2 and whole.shape[1] == batch and whole.shape[0] % length == 0
    sequences = whole.shape[0] // length if follow else 1
    if sequences > 1 and whole.shape != shape and shape[0] % sequences == 0:
        one = (shape[0] // sequences, *shape[1:])
        parts = [_part(each, one, rank, reference, site) for each in np.split(whole, sequences)]
        found = [part for part in parts if part is not None]
        return np.concatenate(found) if len(found) == sequences else None
    tensor = rank.expert_tensor if is_in_expert(site.name) else rank.tensor
    sequence_seen = is_in_expert(site.name)  # Whose rows are no sequence.
    for axis, (size, local) in enumerate(zip(whole.shape, shape, strict=True)):
        if size == local:
            sequence_seen |= size == length
            continue
        if 0 in (size, local) or (size % local and not (local == 1 and size < tensor[1])):
            return None
        merged = axis == 0 and size == length * rank.micro_batch_size
        if not sequence_seen and (size == length or merged):
            sequence_seen = True
            part = _sequence_part(whole, axis, size // local, rank, reference)
        elif size // local == tensor[1]:
            part = _tensor_part(whole, axis, tensor, rank.gated and GATED in site.name)
        elif local == 1 and size < tensor[1]:  # Query groups, fewer than ranks.
            head = tensor[0] * size // tensor[1]
            part = whole.take([head], axis)
        else:
            part = None
        if part is None:
            return None
        whole = part
    return whole if whole.shape == shape else None


def _sequence_part(
    whole: Array, axis: int, ratio: int, rank: CapturedRank, reference: CapturedRank
) -> Array | None:
    context, tensor = rank.context, rank.tensor
    split = whole.shape
    merged = split[axis] != reference.sequence_length
    if merged:  # Tokens: sequence and batch in one dimension, sequence first.
        whole = whole.reshape(reference.sequence_length, -1, *split[1:])
    if context[1] > 1 and ratio % context[1] == 0:
        whole = _context_part(whole, axis, context)
        ratio //= context[1]
    if ratio == tensor[1] and tensor[1] > 1:
        whole = np.split(whole, tensor[1], axis)[tensor[0]]
    elif ratio != 1:
        return None
    return whole.reshape(-1, *split[1:]) if merged else whole


def sequence_positions(rank: CapturedRank, context: int, tensor: int | None = None) -> Array:
    """Positions of the sequence that a context-parallel rank has, or its sequence-parallel one."""
    positions = _context_part(np.arange(rank.sequence_length), 0, (context, rank.context[1]))
    if tensor is not None and rank.sequence_parallel:
        positions = np.split(positions, rank.tensor[1])[tensor]
    return positions


def token_indices(rank: CapturedRank, context: int, tensor: int) -> Array:
    """Numbers in a micro batch of the tokens that a context- and sequence-parallel rank has."""
    samples = rank.micro_batch_size
    return (
        sequence_positions(rank, context, tensor)[:, None] * samples + np.arange(samples)
    ).ravel()


def _context_part(whole: Array, axis: int, context: tuple[int, int]) -> Array:
    """A chunk from the front and one from the back, so that all ranks attend to as much."""
    chunks = np.split(whole, 2 * context[1], axis)
    return np.concatenate([chunks[context[0]], chunks[-1 - context[0]]], axis)


def _tensor_part(whole: Array, axis: int, tensor: tuple[int, int], gated: bool) -> Array:
    if not gated:
        return np.asarray(np.split(whole, tensor[1], axis)[tensor[0]])
    halves = [_tensor_part(half, axis, tensor, gated=False) for half in np.split(whole, 2, axis)]
    return np.concatenate(halves, axis)
