"""Errors of a layout's tensors, each with the tolerance that the reference measured for it.

The error is relative: the difference's Frobenius norm over the reference's. The tolerance is a few times
the tensor's response, which is its change when every weight of the reference changes by one rounding
error; and never less than a sum of as many terms rounds. What must be equal bit for bit needs no
tolerance: copies of a parameter, integers, truth values.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tools.records.capture import Placement, Site, Stage, TensorRecord
from tools.verify.align import ActivationAligner, of_experts
from tools.verify.captured import Array, Capture, RankCapture, whole_name

RESPONSES = 6.0
"""Times its response that a tensor may be off. Healthy layouts stay below 2 (README, bench-verify)."""
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
STAGES = tuple(Stage)
_NORM_TERMS = 64
"""A norm is a sum over all parameters, but of squares: its rounding is that of a short sum."""
_PARAMETERS = (
    Stage.LOCAL_GRADIENTS,
    Stage.REDUCED_GRADIENTS,
    Stage.OPTIMIZER_STATE,
    Stage.WEIGHTS,
)

Key = tuple[Stage, str, str]
"""Stage, name and slot of a tensor, over all micro batches and ranks."""


@dataclass(frozen=True)
class Pair:
    """A tensor of one rank, and the same part of the reference's."""

    rank: int
    micro_batch: int | None
    ours: Array
    reference: Array


@dataclass
class Comparison:
    """One tensor over all ranks and micro batches."""

    key: Key
    tolerance: float
    order: int
    """Its place among all, in the order in which the reference computed them."""
    error: float = 0.0
    """The largest, relative; infinite where the reference is zero and this is not."""
    compared: int = 0
    wrong_ranks: set[int] = field(default_factory=set)
    right_ranks: set[int] = field(default_factory=set)
    replicas_differ: tuple[int, ...] = ()
    """Ranks whose copies of a parameter differ, where they must be equal bit for bit."""
    uncovered: int = 0
    """Elements of a parameter that no rank holds."""
    worst: Pair | None = None
    copies: list[Pair] = field(default_factory=list)
    """Of a parameter that is wrong, every rank's part: what they are together says what is wrong."""

    @property
    def differs(self) -> bool:
        """Whether it is wrong."""
        return self.error > self.tolerance or bool(self.replicas_differ) or self.uncovered > 0

    @property
    def ratio(self) -> float:
        """Error over tolerance: what the picture shows."""
        if self.replicas_differ or self.uncovered:
            return max(np.inf if self.tolerance == 0 else self.error / self.tolerance, 1.0)
        if self.tolerance == 0:
            return 0.0 if self.error == 0 else np.inf
        return self.error / self.tolerance

    def add(self, pair: Pair) -> None:
        """Take one rank's tensor in."""
        error = relative_error(pair.ours, pair.reference)
        self.compared += 1
        wrong = error > self.tolerance
        (self.wrong_ranks if wrong else self.right_ranks).add(pair.rank)
        if wrong and (self.worst is None or error > self.error):
            self.worst = pair
        self.error = max(self.error, error)


@dataclass(frozen=True)
class Compared:
    """All tensors of two captures."""

    comparisons: tuple[Comparison, ...]
    """In the order in which the reference computed them."""
    not_aligned: tuple[str, ...]
    """What could not be compared, and why."""
    seen: int
    """Tensors of the layout's ranks."""
    compared: int
    """How many of them were compared."""

    def wrong(self, *stages: Stage) -> list[Comparison]:
        """Those that differ, the earliest first; of some stages or of all."""
        return [
            one for one in self.comparisons if one.differs and (not stages or one.key[0] in stages)
        ]


def relative_error(ours: Array, reference: Array) -> float:
    """Norm of the difference over the reference's norm; of integers the share that differs.

    A result that is not finite where the reference is gives infinity.
    """
    if ours.size == 0:
        return 0.0
    if not np.issubdtype(ours.dtype, np.floating):
        return float(np.mean(ours != reference))
    difference = float(np.linalg.norm(np.subtract(ours, reference, dtype=np.float64).ravel()))
    size = float(np.linalg.norm(reference.astype(np.float64, copy=False).ravel()))
    if not np.isfinite(difference):
        return 0.0 if np.array_equal(ours, reference, equal_nan=True) else np.inf
    if size == 0:
        return 0.0 if difference == 0 else np.inf
    return difference / size


def compare(reference: Capture, layout: Capture) -> Compared:
    """Compare every tensor that both have.

    Args:
        reference: With measured responses.
        layout: The run in question.
    """
    comparer = _Comparer(reference, layout)
    comparer.activations()
    comparer.parameters()
    comparer.scalars()
    comparer.norm()
    return comparer.result()


def pairs_of(reference: Capture, layout: Capture, key: Key, micro_batch: int | None) -> list[Pair]:
    """Every rank's tensor of an activation and one micro batch, each with the reference's part."""
    aligner = ActivationAligner(reference, layout)
    pairs = []
    for one in layout.ranks:
        for record in one.records:
            if _key(record.site) == key and record.site.micro_batch == micro_batch:
                aligned = aligner.align(one, record)
                if aligned.ours is not None and aligned.reference is not None:
                    pairs.append(Pair(one.rank.rank, micro_batch, aligned.ours, aligned.reference))
    return pairs


class _Comparer:
    def __init__(self, reference: Capture, layout: Capture) -> None:
        self._reference, self._layout = reference, layout
        self._aligner = ActivationAligner(reference, layout)
        self._responses = reference.responses()
        self._found: dict[Key, Comparison] = {}
        self._not_aligned: defaultdict[str, list[str]] = defaultdict(list)
        self._seen = self._skipped = 0
        self._order: dict[Key, int] = {}
        for one in reference.ranks:
            for record in one.records:
                self._order.setdefault(_key(record.site), len(self._order))
        for key in list(self._order):  # Buckets are reduced from the model's end.
            if key[0] is Stage.LOCAL_GRADIENTS:
                weight = (Stage.WEIGHTS, key[1], "weight")
                self._order[key] = self._order.get(weight, self._order[key])

    def result(self) -> Compared:
        ordered = sorted(
            self._found.values(), key=lambda one: (STAGES.index(one.key[0]), one.order)
        )
        obstacles = [
            f"{' '.join(dict.fromkeys(names))}: {why}" for why, names in self._not_aligned.items()
        ]
        notes = (*self._layout.notes(), *obstacles)
        return Compared(tuple(ordered), notes, self._seen, self._seen - self._skipped)

    def activations(self) -> None:
        split: dict[object, list[tuple[TensorRecord, Pair]]] = {}
        for one in self._layout.ranks:
            for record in one.records:
                site = record.site
                if record.placement is not None or site.micro_batch is None:
                    continue
                self._seen += 1
                aligned = self._aligner.align(one, record)
                if aligned.ours is None or aligned.reference is None:
                    self._skip(aligned.obstacle, f"{site.name} {site.slot}")
                    continue
                pair = Pair(one.rank.rank, site.micro_batch, aligned.ours, aligned.reference)
                if of_experts(site.name) and one.rank.expert_tensor[1] > 1:
                    place = (site, one.rank.data, one.rank.context, one.rank.expert)
                    split.setdefault(place, []).append((record, pair))
                else:
                    self._comparison(_key(site), record).add(pair)
        for parts in split.values():
            self._split_expert(parts)

    def parameters(self) -> None:
        for stage in _PARAMETERS:
            theirs = _units(self._reference, stage)
            for unit, pieces in _units(self._layout, stage).items():
                self._seen += len(pieces)
                if unit not in theirs:
                    name = pieces[0].record.site.name
                    self._skip("the reference has no such parameter", name, len(pieces))
                    continue
                name = whole_name(theirs[unit][0].record.site.name)
                whole = _assembled(theirs[unit], stage, self._reference)
                key = (stage, name, unit[2])
                found = self._comparison(key, theirs[unit][0].record)
                if stage is Stage.LOCAL_GRADIENTS:
                    self._local(found, pieces, whole)
                else:
                    self._copies(found, pieces, whole)

    def _split_expert(self, parts: list[tuple[TensorRecord, Pair]]) -> None:
        """An expert that tensor-parallel ranks share: they add up after the expert, not inside it."""
        pairs = [pair for _, pair in parts]
        record, first = parts[0]
        found = self._comparison(_key(record.site), record)
        alike = all(pair.reference.shape == first.reference.shape for pair in pairs)
        if alike and all(np.array_equal(pair.reference, first.reference) for pair in pairs[1:]):
            total = np.sum([pair.ours for pair in pairs], axis=0, dtype=np.float32)
            apart = max(relative_error(pair.ours, pair.reference) for pair in pairs)
            if relative_error(total, first.reference) < apart:
                pairs = [Pair(first.rank, first.micro_batch, total, first.reference)]
        for pair in pairs:
            found.add(pair)

    def scalars(self) -> None:
        """The numbers of steps, on every rank."""
        for one in self._layout.ranks:
            for record in one.records:
                if record.site.stage is Stage.OPTIMIZER_STATE and record.placement is None:
                    self._seen += 1
                    theirs = self._reference.ranks[0].by_site.get(record.site)
                    if theirs is None:
                        self._skip("the reference has no such parameter", record.site.name)
                        continue
                    expected = self._reference.ranks[0].values(theirs)
                    pair = Pair(one.rank.rank, None, one.values(record), expected)
                    self._comparison(_key(record.site), record).add(pair)

    def norm(self) -> None:
        """The gradient norm that each rank clips by, against the reference's own."""
        theirs = self._reference.ranks[0].by_site.get(Site(Stage.NORM, "grad_norm", "returned"))
        if theirs is None:
            return
        expected = self._reference.ranks[0].values(theirs)
        for one in self._layout.ranks:
            for record in one.records:
                if record.site.stage is Stage.NORM:
                    self._seen += 1
                    key = (Stage.NORM, "grad_norm", "returned")
                    found = self._comparison(key, theirs)
                    found.add(Pair(one.rank.rank, None, one.values(record), expected))

    def _local(self, found: Comparison, pieces: list[_Part], whole: Array) -> None:
        """Before reduction, data-parallel copies add up; others either add up or are each the whole.

        Which of the two depends on the module: under sequence parallelism a norm's gradient is a sum
        over the tensor-parallel ranks, without it each rank has all. Either is right here, and what
        becomes of it is seen after the reduction.
        """
        holders: dict[tuple[int, ...], list[_Part]] = defaultdict(list)
        for piece in pieces:
            rank = piece.one.rank
            place = piece.placement.global_offset
            holders[rank.tensor[0], rank.pipeline[0], rank.expert[0], *place].append(piece)
        sums = []
        for parts in holders.values():
            total, region = _mean_of_copies(parts, self._layout)
            sums.append((parts[0], total, region))
        by_region: dict[Any, list[Any]] = defaultdict(list)
        for part, total, region in sums:
            by_region[tuple((one.start, one.stop) for one in region)].append((part, total, region))
        for copies in by_region.values():
            reference = whole[copies[0][2]]
            added = sum((total for _, total, _ in copies[1:]), copies[0][1])
            apart = max(relative_error(total, reference) for _, total, _ in copies)
            if len(copies) > 1 and relative_error(added, reference) < apart:
                found.add(Pair(copies[0][0].one.rank.rank, None, added, reference))
            else:
                for part, total, _ in copies:
                    found.add(Pair(part.one.rank.rank, None, total, reference))

    def _copies(self, found: Comparison, pieces: list[_Part], whole: Array) -> None:
        held = np.zeros(whole.shape, bool)
        first: dict[Any, tuple[int, Array]] = {}
        for piece in pieces:
            values, region = piece.values(), piece.region(whole.ndim)
            there = np.isfinite(values) if piece.placement.partial else np.ones(values.shape, bool)
            held[region] |= there
            reference = whole[region]
            rank = piece.one.rank.rank
            found.add(
                Pair(rank, None, values[there], reference[there])
                if not there.all()
                else Pair(rank, None, values, reference)
            )
            if piece.placement.partial:
                continue
            found.copies.append(Pair(rank, None, values, reference))
            known = first.setdefault(str(region), (rank, values))
            if known[0] != rank and known[1].tobytes() != values.tobytes():
                found.replicas_differ = tuple(sorted({*found.replicas_differ, known[0], rank}))
        found.uncovered = int((~held).sum())
        if not found.differs:
            found.copies.clear()

    def _comparison(self, key: Key, like: TensorRecord) -> Comparison:
        if key not in self._found:
            order = self._order.get(key, len(self._order))
            self._found[key] = Comparison(key, self._tolerance(key, like), order)
        return self._found[key]

    def _tolerance(self, key: Key, like: TensorRecord) -> float:
        if not like.dtype.startswith(("float", "bfloat")):
            return 0.0
        first = self._reference.first
        terms = max((*like.shape, _NORM_TERMS if key[0] is Stage.NORM else 1))
        if key[0] in _PARAMETERS:
            terms = first.sequence_length * first.micro_batch_size * first.micro_batches
        epsilon = EPSILON.get(first.dtype, EPSILON["float32"])
        response = self._responses.get(key, 0.0)
        return RESPONSES * max(response, epsilon * float(np.sqrt(terms)) / 4)

    def _skip(self, why: str, name: str, tensors: int = 1) -> None:
        self._skipped += tensors
        self._not_aligned[why].append(name)


@dataclass(frozen=True)
class _Part:
    """A piece of a parameter on one rank."""

    one: RankCapture
    record: TensorRecord

    @property
    def placement(self) -> Placement:
        assert self.record.placement is not None
        return self.record.placement

    def values(self) -> Array:
        return self.one.values(self.record)

    def region(self, dimensions: int) -> tuple[slice, ...]:
        """Where it lies in the whole, of which stacked layers are no dimension."""
        offsets = self.placement.global_offset[-dimensions:]
        return tuple(
            slice(offset, offset + size)
            for offset, size in zip(offsets, self.record.shape, strict=True)
        )


def _units(capture: Capture, stage: Stage) -> dict[tuple[Any, ...], list[_Part]]:
    """Pieces of every parameter (a layer's own where layers are stacked), by key, layer and slot."""
    found: defaultdict[tuple[Any, ...], list[_Part]] = defaultdict(list)
    for one in capture.ranks:
        for record in one.records:
            place = record.placement
            if record.site.stage is stage and place is not None:
                stacked = len(place.global_shape) - len(record.shape)
                unit = (place.key, place.global_offset[:stacked], record.site.slot)
                found[unit].append(_Part(one, record))
    return dict(found)


def _assembled(pieces: list[_Part], stage: Stage, capture: Capture) -> Array:
    """The whole parameter from its pieces."""
    dimensions = len(pieces[0].record.shape)
    shape = pieces[0].placement.global_shape[-dimensions:]
    if len(pieces) == 1 and pieces[0].record.shape == shape:
        return pieces[0].values()
    whole = np.zeros(shape, np.float32)
    for piece in pieces:
        values, region = piece.values(), piece.region(dimensions)
        there = np.isfinite(values) if piece.placement.partial else np.ones(values.shape, bool)
        if stage is Stage.LOCAL_GRADIENTS:
            whole[region] += values / (capture.first.data[1] * capture.first.context[1])
        else:
            whole[region][there] = values[there]
    return whole


def _mean_of_copies(parts: list[_Part], layout: Capture) -> tuple[Array, tuple[slice, ...]]:
    total: Array = np.sum([part.values() for part in parts], axis=0, dtype=np.float32)
    if not layout.first.per_token_loss:
        total = total / (layout.first.data[1] * layout.first.context[1])
    return total, parts[0].region(total.ndim)


def _key(site: Site) -> Key:
    return (site.stage, whole_name(site.name), site.slot)
