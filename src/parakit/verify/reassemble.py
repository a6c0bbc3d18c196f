"""A reference of several ranks as one of one rank, so that any strategy is compared with it in one way.

The inverse of `align`: parts of the sequence, of the hidden size, heads and vocabulary, and an expert's
rows of every sender are put together; micro batches of data-parallel ranks get the numbers that one rank
gives them; stages of a pipeline follow one another. A tensor that tensor-parallel ranks have alike, bit
for bit, is whole on each. What cannot be put together is noted, and so listed as not compared.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from parakit.artifacts.capture import (
    COUNTS,
    RESPONSES_FILE,
    CapturedRank,
    CaptureWriter,
    Placement,
    Site,
    Stage,
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
    order_sites,
    read_capture,
)

_SPLIT_IN_EXPERTS = ("linear_fc1 output.0", "linear_fc2 input.input_")
"""What expert-tensor-parallel ranks have parts of; of all else the whole each, or a term of a sum."""
_Held = tuple[RankCapture, TensorRecord]
_Place = tuple[int, int]
"""Context- and tensor-parallel rank."""


def reassemble_to_one_rank(reference: Capture, strategy: Capture, folder: Path) -> Capture:
    """The reference as one rank would have it, written to a folder; itself if it is one, or split as the
    strategy is that will be compared with it."""
    if len(reference.ranks) == 1 or layout_signature(reference.first) == layout_signature(
        strategy.first
    ):
        return reference
    target = folder / "rank-0"
    with CaptureWriter(target) as writer:
        joiner = _Joiner(reference, writer)
        joiner.activations()
        joiner.parameters()
        responses = {"|".join(key): value for key, value in reference.responses().items()}
        (target / RESPONSES_FILE).write_text(json.dumps(responses))
        writer.close(joiner.described())
    return read_capture(folder)


@dataclass(frozen=True)
class _Sequence:
    """Which dimension of a rank's tensor is the sequence."""

    axis: int
    samples: int
    """Samples of a position that are merged into the dimension, sequence first; 1 if it is alone."""
    split: bool
    """Whether sequence parallelism split it over the tensor-parallel ranks."""


class _Joiner:
    def __init__(self, reference: Capture, writer: CaptureWriter) -> None:
        self._reference, self._writer, self._rank = reference, writer, reference.first
        self._left: defaultdict[str, list[str]] = defaultdict(list)
        self._scale = np.float32(
            micro_batch_loss_scale(self.described()) / micro_batch_loss_scale(self._rank)
        )
        """Of one rank's activation gradients to these."""
        self._written: dict[object, TensorRecord] = {}
        """By the parts' memory: a tensor that several modules have is written once."""
        self._by_place = {
            (one.rank.data[0], one.rank.context[0], one.rank.tensor[0], one.rank.pipeline[0]): one
            for one in reference.ranks
        }

    def described(self) -> CapturedRank:
        """The one rank."""
        alone, rank = (0, 1), self._rank
        left = (f"{' '.join(dict.fromkeys(names))}: {why}" for why, names in self._left.items())
        return msgspec.structs.replace(
            rank,
            rank=0,
            world_size=1,
            **dict.fromkeys(
                ("tensor", "pipeline", "context", "data", "expert", "expert_tensor"), alone
            ),
            virtual_stages=1,
            expert_sources=((0, 0, 0),),
            sequence_parallel=False,
            micro_batches=rank.micro_batches * rank.data[1],
            modules=self._reference.modules,
            norm_groups=(),
            notes=(*self._reference.notes(), *left),
        )

    def activations(self) -> None:
        """Everything but parameters, and what has their shape."""
        held: defaultdict[Site, defaultdict[int | None, list[_Held]]]
        held = defaultdict(lambda: defaultdict(list))
        for one in self._reference.ranks:
            for record in one.records:
                if record.placement is None and not is_recomputed(record.site):
                    site = msgspec.structs.replace(record.site, micro_batch=None)
                    held[site][record.site.micro_batch].append((one, record))
        for site in order_sites(self._reference):
            for micro_batch, parts in held[site].items():
                if micro_batch is None:
                    one, record = parts[0]
                    counted = [
                        there.values(of) for there, of in parts if has_distinct_tokens(there.rank)
                    ]
                    is_sum = site.slot == COUNTS
                    self._write(site, record, np.sum(counted, 0) if is_sum else one.values(record))
                elif is_in_expert(site.name):
                    self._expert(site, micro_batch, parts)
                else:
                    for data in range(self._rank.data[1]):
                        of_batch = [part for part in parts if part[0].rank.data[0] == data]
                        self._module(site, micro_batch, of_batch)

    def parameters(self) -> None:
        """Parameters, gradients and states, each as one piece."""
        for stage in PARAMETERS:
            for (key, stacked, _), pieces in group_parameter_parts(self._reference, stage).items():
                like = pieces[0]
                site = msgspec.structs.replace(like.record.site, name=like.name)
                whole = assemble_parameter(pieces, self._reference)
                shape = like.placement.global_shape
                place = Placement(key, shape, (*stacked, *[0] * whole.ndim))
                self._add(site, like.record.dtype, whole, place)

    def _module(self, site: Site, micro_batch: int, parts: Sequence[_Held]) -> None:
        """A tensor of one micro batch outside of experts."""
        held: dict[_Place, _Held] = {}
        for one, record in parts:
            held.setdefault((one.rank.context[0], one.rank.tensor[0]), (one, record))
        if not held:
            return
        contexts, tensors = self._rank.context[1], self._rank.tensor[1]
        places = [(c, t) for c in range(contexts) for t in range(tensors)]
        first = next(iter(held.values()))
        shape = first[1].shape
        if any(place not in held or held[place][1].shape != shape for place in places):
            self._leave(site, "not every rank of the reference has a part of one size")
            return
        rank = first[0].rank
        numbered = msgspec.structs.replace(
            site, micro_batch=micro_batch * rank.data[1] + rank.data[0]
        )
        memory = (
            (site.stage, GATED in site.name, shape),
            *((there.rank.rank, record.offset_bytes) for there, record in held.values()),
        )
        if memory in self._written:
            known = self._written[memory]
            self._writer.add_same(numbered, known, known.shape)
            return
        sequence = self._sequence(shape)
        rows = [
            self._over_tensor(site, [held[c, t] for t in range(tensors)], sequence)
            for c in range(contexts)
        ]
        joined = [one for one in rows if one is not None]
        whole = self._over_context(site, joined, sequence) if len(joined) == contexts else None
        if whole is None:
            self._leave(site, f"the reference's parts {list(shape)} follow no known split")
            return
        self._written[memory] = self._write(numbered, first[1], whole)

    def _over_tensor(
        self, site: Site, parts: Sequence[_Held], sequence: _Sequence | None
    ) -> Array | None:
        """What tensor-parallel ranks have together."""
        values = [one.values(record) for one, record in parts]
        if sequence is not None and sequence.split:
            return np.concatenate(values, sequence.axis)
        if _alike(values):
            return values[0]
        axis = values[0].ndim - 1
        if axis < 0:
            return None
        if axis == 3:  # Heads: of rows they stand before the width, of scores after the batch.
            axis = 2 if sequence is not None and sequence.axis == 0 else 1
        return _joined(values, axis, gated=self._rank.gated and GATED in site.name)

    def _over_context(
        self, site: Site, parts: Sequence[Array], sequence: _Sequence | None
    ) -> Array | None:
        """What context-parallel ranks have together."""
        if len(parts) == 1:
            return parts[0]
        if sequence is not None:
            return self._positioned(parts, sequence)
        if site.stage is Stage.LOSS and parts[0].ndim < 2:
            return np.asarray(np.sum(parts, axis=0))
        return parts[0] if _alike(parts) else None

    def _positioned(self, parts: Sequence[Array], sequence: _Sequence) -> Array:
        """Parts of the sequence, each at its positions."""
        axis, length = sequence.axis, self._rank.sequence_length
        merged = sequence.samples > 1
        if merged:
            parts = [part.reshape(-1, sequence.samples, *part.shape[1:]) for part in parts]
        shape = parts[0].shape
        whole = np.empty((*shape[:axis], length, *shape[axis + 1 :]), parts[0].dtype)
        for number, part in enumerate(parts):
            whole.swapaxes(0, axis)[sequence_positions(self._rank, number)] = part.swapaxes(0, axis)
        return whole.reshape(-1, *shape[2:]) if merged else whole

    def _sequence(self, shape: tuple[int, ...]) -> _Sequence | None:
        rank = self._rank
        whole = rank.sequence_length // rank.context[1]
        split = whole // rank.tensor[1] if rank.sequence_parallel else whole
        samples = rank.micro_batch_size
        if len(shape) <= 2 and shape and shape[0] in (split * samples, whole * samples):
            return _Sequence(0, samples, shape[0] == split * samples and split != whole)
        for axis, size in enumerate(shape):
            if size in (whole, split):
                return _Sequence(axis, 1, size != whole)
        return None

    def _expert(self, site: Site, micro_batch: int, parts: Sequence[_Held]) -> None:
        """An expert's tensor, whose rows are of every rank that sends tokens to it."""
        groups: defaultdict[object, list[_Held]] = defaultdict(list)
        for one, record in parts:
            groups[one.rank.expert_sources].append((one, record))
        rows: dict[int, list[tuple[Array, Array]]] = defaultdict(list)
        """Numbers of the tokens in the micro batch, and their rows, by data-parallel rank."""
        for group in groups.values():
            values = self._over_expert_tensor(site, group)
            for data, tokens, part in self._of_senders(site, micro_batch, group[0][0], values):
                rows[data].append((tokens, part))
        rank = self._rank
        senders = rank.context[1] * (rank.tensor[1] if rank.sequence_parallel else 1)
        for data in range(rank.data[1]):
            if len(rows[data]) != senders:
                self._leave(site, "the reference's routing does not say whose rows an expert has")
                continue
            tokens = np.concatenate([one for one, _ in rows[data]])
            whole = np.concatenate([part for _, part in rows[data]])[np.argsort(tokens)]
            number = micro_batch * rank.data[1] + data
            numbered = msgspec.structs.replace(site, micro_batch=number)
            self._write(numbered, parts[0][1], whole)

    def _of_senders(
        self, site: Site, micro_batch: int, holder: RankCapture, values: Array
    ) -> Iterator[tuple[int, Array, Array]]:
        """Each sender's data-parallel rank, the numbers of its tokens, and their rows."""
        router, expert = find_router(site.name)
        router = msgspec.structs.replace(router, micro_batch=micro_batch)
        found, begin = [], 0
        for data, context, tensor in holder.rank.expert_sources:
            sender = self._by_place[data, context, tensor, holder.rank.pipeline[0]]
            record = sender.by_site.get(router)
            if record is None or expert is None:
                return
            routed = sender.values(record)[:, expert].astype(bool)
            tokens = token_indices(sender.rank, context, tensor)
            if len(tokens) != len(routed):
                return
            tokens = tokens[routed]
            found.append((data, tokens, slice(begin, begin := begin + len(tokens))))
        if values.ndim and len(values) == begin:
            yield from ((data, tokens, values[rows]) for data, tokens, rows in found)

    def _over_expert_tensor(self, site: Site, parts: Sequence[_Held]) -> Array:
        """What the ranks that share an expert have together."""
        ordered = sorted(parts, key=lambda part: part[0].rank.expert_tensor[0])
        values = [one.values(record) for one, record in ordered]
        if _alike(values):
            return values[0]
        if f"{site.name} {site.slot}".endswith(_SPLIT_IN_EXPERTS):
            return _joined(values, -1, gated=self._rank.gated and "linear_fc1" in site.name)
        return np.asarray(np.sum(values, axis=0, dtype=values[0].dtype))

    def _write(self, site: Site, like: TensorRecord, whole: Array) -> TensorRecord:
        if site.stage is Stage.ACTIVATION_GRADIENTS:
            whole = whole * self._scale
        return self._add(site, like.dtype, whole)

    def _add(
        self, site: Site, dtype: str, whole: Array, placement: Placement | None = None
    ) -> TensorRecord:
        return self._writer.add(site, dtype, whole.shape, encode_tensor(whole, dtype), placement)

    def _leave(self, site: Site, why: str) -> None:
        self._left[why].append(f"{site.name} {site.slot}")


def _alike(values: Sequence[Array]) -> bool:
    """Whether all are equal bit for bit."""
    return all(one.tobytes() == values[0].tobytes() for one in values[1:])


def _joined(values: Sequence[Array], axis: int, *, gated: bool) -> Array:
    """Parts one after another; of a gated layer the gates first, then the values."""
    if not gated:
        return np.concatenate(values, axis)
    halves = zip(*(np.split(one, 2, axis) for one in values), strict=True)
    return np.concatenate([np.concatenate(half, axis) for half in halves], axis)
