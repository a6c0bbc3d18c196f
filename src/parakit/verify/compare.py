"""Errors of a strategy's tensors, each with the tolerance that the reference measured for it.

The error is relative: the difference's Frobenius norm over the reference's. What must be equal bit for
bit needs no tolerance: copies of a parameter, integers, truth values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from types import MappingProxyType

import msgspec
import numpy as np

from parakit.artifacts.capture import (
    CHOICE,
    COUNTED_ONCE,
    COUNTS,
    EARLIER,
    INITIAL,
    REACH,
    SCORES,
    START_WEIGHT,
    STARTS,
    UNOBSERVED,
    UNOBSERVED_FILE,
    UPDATE,
    CapturedRank,
    Site,
    Stage,
    TensorRecord,
)
from parakit.verify.align import (
    ActivationAligner,
    has_distinct_tokens,
    is_in_expert,
    list_activation_sites,
)
from parakit.verify.captured import (
    PARAMETERS,
    Array,
    Capture,
    ParameterKey,
    ParameterPart,
    RankCapture,
    assemble_parameter,
    assemble_region,
    average_local_gradients,
    full_parameter_name,
    group_parameter_parts,
    order_sites,
)
from parakit.verify.comparison import (
    CaptureComparison,
    ComparedTensor,
    ComparisonKey,
    ParameterFault,
    TensorComparison,
    relative_error,
)
from parakit.verify.initial import find_wrong_initializations, list_initial_pieces
from parakit.verify.norm import check_norm_counts
from parakit.verify.tolerance import (
    EPSILON,
    RESPONSES,
    Tolerances,
    divide_by_reach,
    find_rounding_flips,
    float_spacing,
    largest_row_mean,
    update_error,
)

STAGES = tuple(Stage)
_SHORTLY = 1e-6
_Copies = dict[str, tuple[int, Array]]
"""Of each part of a parameter the first rank that has it, and its values."""
_GRADIENT = "gradient"
_SCALED = (Stage.ACTIVATION_GRADIENTS, Stage.LOCAL_GRADIENTS, Stage.REDUCED_GRADIENTS)
_OVERFLOW = "it overflows at this loss scale and the step is skipped; set --initial-loss-scale"
_HELD_BY_NONE = "no rank of the strategy has it"
NORM = (Stage.NORM, "grad_norm", "returned")
_WEIGHT = "weight"
_WHOLE_ON_EVERY_RANK = frozenset(
    [
        "LanguageModelEmbedding",
        "VocabParallelEmbedding",
        "TransformerBlock",
        "TransformerLayer",
        "RowParallelLinear",
        "SelfAttention",
        "MLASelfAttention",
        "MLP",
    ]
)
"""Modules whose output tensor-parallel ranks have alike, but for sequence parallelism."""
_RESIDUAL = ("embedding_dropout", "input_layernorm", "pre_mlp_layernorm", "final_layernorm")
"""And modules inside them, whose class says nothing of it."""
_ATTENTION, _KEY_NORM = ".core_attention", ".k_layernorm"
_KEY_AND_VALUE = ("input.key", "input.value")
"""Where heads of keys and values are apart from those of queries, of which each rank has its own."""
Drift = Mapping[ComparisonKey, float]
"""How far rounding alone puts off what earlier iterations leave, measured as a strategy's error is."""


def measure_drift(reference: Capture, runs: Iterable[Capture]) -> Drift:
    """The largest of runs whose weights were off by a rounding error in each earlier iteration.

    Adam divides by the gradient's size, and at a high rate what is off is off by more in each iteration.
    """
    most: dict[ComparisonKey, float] = {}
    for run in runs:
        comparer = _Comparer(reference, run, {})
        comparer.parameters()
        for one in comparer.result().comparisons:
            carried = one.key[0] in (Stage.OPTIMIZER_STATE, Stage.WEIGHTS)
            if carried and np.isfinite(one.error):
                most[one.key] = max(one.error, most.get(one.key, 0.0))
    # A few runs do not meet the worst of each tensor, where what is off grows from one to the next.
    of_slot: dict[str, float] = {}
    for (_, _, slot), error in most.items():
        if slot.endswith(UPDATE):  # One row whose gradient is rounding says nothing of others.
            continue
        of_slot[slot] = max(error / RESPONSES, of_slot.get(slot, 0.0))
    return {key: max(error, 2 * of_slot.get(key[2], 0.0)) for key, error in most.items()}


def compare(
    reference: Capture, strategy: Capture, drifted: Drift = MappingProxyType({})
) -> CaptureComparison:
    """Compare every tensor that both have; the reference has measured responses, and maybe its drift."""
    comparer = _Comparer(reference, strategy, drifted)
    comparer.lacking()
    comparer.activations()
    comparer.parameters()
    comparer.copies()
    comparer.scalars()
    comparer.counts()
    comparer.unobserved()
    comparer.membership()
    comparer.initial()
    return comparer.result()


class _Comparer:
    def __init__(self, reference: Capture, strategy: Capture, drifted: Drift) -> None:
        self._reference, self._strategy, self._drifted = reference, strategy, drifted
        self._aligner = ActivationAligner(reference, strategy)
        self._tolerances = Tolerances(reference)
        self._found: dict[ComparisonKey, TensorComparison] = {}
        self._not_aligned: defaultdict[str, list[str]] = defaultdict(list)
        self._seen = self._skipped = self._flips = 0
        # When each tensor is computed: the reference says, and of what it has not, the strategy.
        self._order: dict[ComparisonKey, float] = {}
        for site in order_sites(reference):
            self._order.setdefault(_key(site), float(len(self._order)))
        for one in strategy.ranks:
            last = -1.0
            for record in one.records:
                # Behind what comes before it, such as what is recomputed in the strategy alone.
                last = self._order.setdefault(_key(record.site), last + _SHORTLY)

    def result(self) -> CaptureComparison:

        def place(one: TensorComparison) -> tuple[object, ...]:
            # An iteration's start comes first. What a norm counts is wrong before its value is.
            later = one.key == NORM or one.key[2] == UNOBSERVED
            own = one.key[2] == INITIAL  # It does no harm to what was compared.
            return (own, one.key[2] not in STARTS, STAGES.index(one.key[0]), later, one.order)

        obstacles = [
            f"{' '.join(dict.fromkeys(names))}: {why}" for why, names in self._not_aligned.items()
        ]
        notes = (*self._strategy.notes(), *self._reference.notes(), *obstacles)
        return CaptureComparison(
            tuple(sorted(self._found.values(), key=place)),
            notes,
            self._seen,
            self._seen - self._skipped,
            self._flips,
            self._constant(),
            len(list_initial_pieces(self._strategy)),
            self._pairs_of,
            self._like,
        )

    def _constant(self) -> int | None:
        """Parameters and buffers of several elements that all begin with the same value."""
        found = group_parameter_parts(self._reference, Stage.WEIGHTS)
        starts = [pieces for unit, pieces in found.items() if unit[2] in STARTS]
        constant = 0
        for pieces in starts:
            parts = [piece.values().ravel() for piece in pieces]
            same = all((part == parts[0][:1]).all() for part in parts)
            constant += int(same and np.prod(pieces[0].whole_shape) > 1)
        return constant if starts else None

    def _pairs_of(self, key: ComparisonKey, micro_batch: int) -> list[ComparedTensor]:
        pairs = []
        for one in self._strategy.ranks:
            for record in one.records:
                if _key(record.site) == key and record.site.micro_batch == micro_batch:
                    found = self._aligner.align(one, record)
                    if found.ours is not None and found.reference is not None:
                        pairs.append(
                            ComparedTensor(one.rank.rank, micro_batch, found.ours, found.reference)
                        )
        return pairs

    def _like(self, found: TensorComparison) -> Iterator[tuple[str, Array]]:
        """The same part of the reference's other parameters; of a state its own gradient, too.

        Of a weight what it was before, and of an activation that of other micro batches and ranks.
        """
        (stage, name, slot), pair = found.key, found.worst
        if pair is not None and pair.micro_batch is not None:
            yield from self._elsewhere(found.key, pair)
        if stage not in PARAMETERS or pair is None:
            return
        # What it is compared with, in which slot, whether of the same parameter, and how that is called.
        candidates = [(stage, slot, False, "")]
        if slot == _WEIGHT:
            candidates.insert(0, (stage, START_WEIGHT, True, "the iteration before"))
        if stage is Stage.OPTIMIZER_STATE:
            candidates.append((Stage.REDUCED_GRADIENTS, _GRADIENT, True, ""))
        for of, in_slot, own, called in candidates:
            for unit, pieces in group_parameter_parts(self._reference, of, in_slot).items():
                if unit[2] == in_slot and (pieces[0].name == name) == own:
                    shape = pair.reference.shape
                    values = assemble_region(pieces, self._reference, pair.region, shape)
                    if values is not None:
                        yield called or pieces[0].name, values

    def _elsewhere(self, key: ComparisonKey, pair: ComparedTensor) -> Iterator[tuple[str, Array]]:
        """What other micro batches of a rank are to have, and other ranks in this one."""
        for micro_batch in range(self._strategy.first.micro_batches):
            for other in self._pairs_of(key, micro_batch):
                same = (other.rank == pair.rank, micro_batch == pair.micro_batch)
                alike = other.reference.shape == pair.reference.shape
                if sum(same) == 1 and alike and (other.reference != pair.reference).any():
                    place = f"rank {other.rank}" if same[1] else f"micro batch {micro_batch}"
                    yield place, other.reference

    def activations(self) -> None:
        shared: dict[object, list[tuple[TensorRecord, ComparedTensor]]] = {}
        for one in self._strategy.ranks:
            for record in one.records:
                site = record.site
                if record.placement is not None or site.micro_batch is None:
                    continue
                if site.slot.endswith(CHOICE):
                    self._choice(one, record)
                    continue
                if site.slot.startswith(EARLIER):
                    continue
                self._seen += 1
                aligned = self._aligner.align(one, record)
                if aligned.ours is None or aligned.reference is None:
                    self._skip(aligned.obstacle, f"{site.name} {site.slot}")
                    continue
                if self._beyond_scale(site.stage, aligned.ours, aligned.reference):
                    self._skip(_OVERFLOW, f"{site.name} {site.slot}")
                    continue
                pair = ComparedTensor(
                    one.rank.rank, site.micro_batch, aligned.ours, aligned.reference
                )
                if _is_shared(one.rank, site):
                    part = pair.reference.tobytes()
                    place = (site, one.rank.data, one.rank.context, one.rank.expert, part)
                    shared.setdefault(place, []).append((record, pair))
                else:
                    found = self._comparison(_key(site), record)
                    found.add(pair, self._error_of_part(found, pair, site, aligned.scale))
        for parts in shared.values():
            record = parts[0][0]
            found = self._comparison(_key(record.site), record)
            self._summed_or_whole(found, [pair for _, pair in parts])

    def _beyond_scale(self, stage: Stage, *values: Array) -> bool:
        """Whether it is a gradient that overflows where the reference's do: Megatron skips that step."""
        scaled = stage in _SCALED and self._overflows
        return scaled and not all(np.isfinite(one).all() for one in values)

    @cached_property
    def _overflows(self) -> bool:
        """Whether the reference's gradients do, at its loss scale."""
        in_fp16 = self._reference.first.dtype == "float16"
        return in_fp16 and not np.isfinite(self._reference.largest_gradient)

    def _error_of_part(
        self, found: TensorComparison, pair: ComparedTensor, site: Site, scale: float
    ) -> float:
        """The relative error of a rank's part; of one of small elements in terms of the whole's.

        The response is that of the whole tensor, and a rank may have few elements of it, all of them
        small: where each is a sum of larger numbers, its rounding is as large as that of the others.
        """
        error = relative_error(pair.ours, pair.reference)
        if not 0 < found.tolerance < error < np.inf:
            return error
        usual = self._aligner.quadratic_mean(site) * scale * np.sqrt(pair.reference.size)
        return error * min(1.0, float(np.linalg.norm(pair.reference) / usual))

    def _choice(self, one: RankCapture, record: TensorRecord) -> None:
        """What a router chose, exactly, but for experts whose scores are equal within rounding."""
        site = record.site
        by = one.by_site[msgspec.structs.replace(site, slot=site.slot.replace(CHOICE, SCORES))]
        choice, scores = (self._aligner.align(one, each) for each in (record, by))
        earlier = site.slot.startswith(EARLIER)
        self._seen += not earlier
        if choice.ours is None or choice.reference is None or scores.reference is None:
            if not earlier:
                self._skip(choice.obstacle, f"{site.name} {site.slot}")
            return
        tolerance = self._tolerances.of((site.stage, site.name, SCORES), by)
        within = find_rounding_flips(
            choice.ours, choice.reference, scores.reference, tolerance, one.rank.router_groups
        )
        self._flips += int(within.sum())
        if not earlier:
            ours = np.where(within[:, None], choice.reference, choice.ours)
            pair = ComparedTensor(one.rank.rank, site.micro_batch, ours, choice.reference)
            self._comparison(_key(site), record).add(pair)

    def parameters(self) -> None:
        for stage in PARAMETERS:
            theirs, every = (
                group_parameter_parts(self._reference, stage),
                group_parameter_parts(self._strategy, stage),
            )
            for unit, pieces in every.items():
                if unit[2] == REACH:
                    continue
                self._seen += len(pieces)
                if unit not in theirs:
                    name = pieces[0].record.site.name
                    self._skip("the reference has no such parameter", name, len(pieces))
                    continue
                name = theirs[unit][0].name
                whole = assemble_parameter(theirs[unit], self._reference)
                if self._beyond_scale(stage, whole, *(piece.values() for piece in pieces)):
                    self._skip(_OVERFLOW, name, len(pieces))
                    continue
                key = (stage, name, unit[2])
                found = self._comparison(key, theirs[unit][0].record)
                if stage is Stage.LOCAL_GRADIENTS:
                    # Whether ranks that are no data-parallel copies add up follows from the module: with
                    # sequence parallelism a norm's gradient is a sum over tensor-parallel ranks, or all
                    # of it. Either is right here; what becomes of it is seen after the reduction.
                    for held in average_local_gradients(pieces, self._strategy):
                        self._summed_or_whole(
                            found,
                            [
                                ComparedTensor(part.one.rank.rank, None, mean, whole[part.region()])
                                for part, mean in held
                            ],
                        )
                elif unit[2].endswith(UPDATE):
                    self._update(found, unit, pieces, theirs)
                elif unit[2] == START_WEIGHT:
                    self._start(found, unit, pieces, theirs)
                else:
                    moved = (*unit[:2], UPDATE)
                    judged_apart = (*unit[:2], "exp_avg_sq") in self._second_moments
                    if unit[2] == _WEIGHT and moved in every and judged_apart:
                        # Adam's update of an element whose gradient is nearly all rounding is as long as
                        # any other: a weight is judged without it.
                        ours = assemble_parameter(every[moved], self._strategy)
                        whole = whole + (ours - assemble_parameter(theirs[moved], self._reference))
                    self._copies(found, pieces, whole)

    def lacking(self) -> None:
        """What the reference has and no rank of the strategy.

        Of a parameter that the strategy has it is wrong, if it has the like of others; all else is
        listed.
        """
        known = {unit[:2] for unit in group_parameter_parts(self._strategy, Stage.WEIGHTS)}
        for stage in PARAMETERS:
            ours = group_parameter_parts(self._strategy, stage)
            slots = {unit[2] for unit in ours}
            for unit, pieces in group_parameter_parts(self._reference, stage).items():
                if unit in ours or unit[2] == REACH:
                    continue
                self._seen += 1
                record, name = pieces[0].record, pieces[0].name
                if unit[:2] not in known or unit[2] not in slots:
                    self._skip(_HELD_BY_NONE, f"{name} ({stage} {unit[2]})")
                    continue
                found = self._comparison((stage, name, unit[2]), record)
                found.error = 1.0
                found.uncovered += int(np.prod(pieces[0].whole_shape))
        here = list_activation_sites(self._strategy)
        for site in list_activation_sites(self._reference):
            if site not in here:
                self._seen += 1
                self._skip(_HELD_BY_NONE, f"{site.name} {site.slot}")

    def _summed_or_whole(self, found: TensorComparison, pairs: list[ComparedTensor]) -> None:
        """Ranks' tensors of one part of the reference's, which add up to it or are each all of it."""
        first = pairs[0]
        if len(pairs) > 1:
            total = np.sum([pair.ours for pair in pairs], axis=0, dtype=np.float32)
            apart = max(relative_error(pair.ours, pair.reference) for pair in pairs)
            if relative_error(total, first.reference) < apart:
                pairs = [ComparedTensor(first.rank, first.micro_batch, total, first.reference)]
        for pair in pairs:
            found.add(pair)

    @cached_property
    def _second_moments(self) -> dict[ParameterKey, list[ParameterPart]]:
        return group_parameter_parts(self._reference, Stage.OPTIMIZER_STATE, "exp_avg_sq")

    @cached_property
    def _reached(self) -> dict[ParameterKey, list[ParameterPart]]:
        return group_parameter_parts(self._reference, Stage.WEIGHTS, REACH)

    @property
    def _updates(self) -> int:
        """That were before the captured iteration, or 1."""
        return max(self._reference.first.iteration - 1, 1)

    def _update(
        self,
        found: TensorComparison,
        unit: ParameterKey,
        pieces: list[ParameterPart],
        theirs: dict[ParameterKey, list[ParameterPart]],
    ) -> None:
        """How far a weight moved, where rounding of the weight and of its gradient lets it be seen."""
        of_weight = (*unit[:2], unit[2].removesuffix(UPDATE).strip() or "weight")
        squares = self._second_moments.get((*unit[:2], "exp_avg_sq"))
        if squares is None:
            name = pieces[0].record.site.name
            self._skip("its optimizer keeps no square of the gradient", name, len(pieces))
            return
        weights = theirs[of_weight]
        scale = np.sqrt(assemble_parameter(squares, self._reference))
        least = float_spacing(
            assemble_parameter(weights, self._reference), EPSILON[weights[0].record.dtype]
        )
        moved = assemble_parameter(theirs[unit], self._reference)
        reached = self._reached.get((*unit[:2], REACH))
        if reached and found.tolerance >= 1:
            # All of a row may be rounding, and its update by chance less than those before it.
            least = np.maximum(least, assemble_parameter(reached, self._reference) / self._updates)
        for piece in pieces:
            values, region = piece.values(), piece.region()
            there = piece.held(values)
            ours, reference = (np.where(there, one, 0) for one in (values, moved[region]))
            error = update_error(ours, reference, scale[region], least[region])
            found.add(ComparedTensor(piece.one.rank.rank, None, ours, reference), error)

    def _start(
        self,
        found: TensorComparison,
        unit: ParameterKey,
        pieces: list[ParameterPart],
        theirs: dict[ParameterKey, list[ParameterPart]],
    ) -> None:
        """Where earlier updates have brought a weight, if rounding of gradients lets it be seen."""
        whole = assemble_parameter(theirs[unit], self._reference)
        reached = self._reached.get((*unit[:2], REACH))
        if reached is None and (*unit[:2], "exp_avg_sq") not in self._second_moments:
            self._copies(found, pieces, whole)
            return
        reach = assemble_parameter(reached, self._reference) if reached else np.zeros_like(whole)
        least = self._updates * float_spacing(whole, EPSILON[theirs[unit][0].record.dtype])
        first: _Copies = {}
        for piece in pieces:
            values, region = piece.values(), piece.region()
            there = piece.held(values)
            if there.all():
                _note_copies(found, first, piece, values)
            off = np.where(there, values - whole[region], 0)
            off = divide_by_reach(off, reach[region], least[region])
            pair = ComparedTensor(piece.one.rank.rank, None, off, np.zeros_like(off))
            found.add(pair, largest_row_mean(off))

    def copies(self) -> None:
        """Outputs that tensor-parallel ranks have alike, bit for bit, whatever the reference has."""
        first: dict[object, tuple[RankCapture, TensorRecord]] = {}
        for one in self._strategy.ranks:
            rank = one.rank
            if rank.tensor[1] == 1 or rank.sequence_parallel:
                continue
            for record in one.records:
                if not _is_whole(rank, record.site):
                    continue
                place = (record.site, rank.data[0], rank.context[0], rank.pipeline[0])
                other, known = first.setdefault(place, (one, record))
                if one.stored(record) != other.stored(known):
                    ours, theirs = one.values(record), other.values(known)
                    pair = ComparedTensor(rank.rank, record.site.micro_batch, ours, theirs)
                    self._comparison(_key(record.site), record).add_copies(pair, other.rank.rank)

    def scalars(self) -> None:
        """The numbers of steps, and the norm that each rank clips by, against the reference's own."""
        theirs: dict[Site, tuple[RankCapture, TensorRecord]] = {}
        for one, record in _scalars(self._reference):
            theirs.setdefault(record.site, (one, record))
        # A tied copy has another name in the strategy.
        there = group_parameter_parts(self._reference, Stage.WEIGHTS)
        tied = {
            piece.record.site.name: there[unit][0].record.site.name
            for unit, pieces in group_parameter_parts(self._strategy, Stage.WEIGHTS).items()
            for piece in pieces
            if unit in there
        }
        for one, record in _scalars(self._strategy):
            if record.site.slot == COUNTS:
                continue
            self._seen += 1
            site = Site(*NORM) if record.site.stage is Stage.NORM else record.site
            site = msgspec.structs.replace(site, name=tied.get(site.name, site.name))
            if site not in theirs:
                self._skip("the reference has no such parameter", site.name)
                continue
            holder, like = theirs[site]
            ours, other = one.values(record), holder.values(like)
            if site.stage is Stage.NORM and not (
                one.rank.clip_gradient or (ours.any() and other.any())
            ):
                self._skip(
                    "nothing is clipped, and not every optimizer computes a norm then", site.name
                )
                continue
            found, pair = (
                self._comparison(_key(site), like),
                ComparedTensor(one.rank.rank, None, ours, other),
            )
            found.add(pair)
            if site.stage is Stage.NORM:
                found.copies.append(pair)

    def counts(self) -> None:
        """How many tokens routers gave each expert in the iteration, over all ranks that route."""
        held: defaultdict[ComparisonKey, list[TensorRecord]] = defaultdict(list)
        totals: list[dict[ComparisonKey, Array]] = [{}, {}]
        for total, capture in zip(totals, (self._strategy, self._reference), strict=True):
            for one, record in _scalars(capture):
                if record.site.slot == COUNTS and has_distinct_tokens(one.rank):
                    key = _key(record.site)
                    held[key].append(record)
                    total[key] = total.get(key, 0) + one.values(record)
        for key in totals[0]:
            self._seen += 1
            if key not in totals[1]:
                self._skip("the reference has no such tensor", f"{key[1]} {key[2]}")
                continue
            ours, theirs = (total[key] for total in totals)
            self._comparison(key, held[key][0]).add(ComparedTensor(0, None, ours, theirs))

    def unobserved(self) -> None:
        """Gradients of the iteration without probes, where it was repeated so."""
        for one in self._strategy.ranks:
            if not (one.folder / UNOBSERVED_FILE).is_file():
                continue
            for (stage, name, slot), error in one.changes(UNOBSERVED_FILE).items():
                record = one.by_site.get(Site(Stage.REDUCED_GRADIENTS, name, slot))
                if stage != Stage.REDUCED_GRADIENTS or record is None or not np.isfinite(error):
                    continue
                whole = full_parameter_name(name)
                found = self._comparison((Stage.REDUCED_GRADIENTS, whole, UNOBSERVED), record)
                found.tolerance = self._tolerances.of(
                    (Stage.REDUCED_GRADIENTS, whole, slot), record
                )
                found.error = max(found.error, error)
                wrong = error > found.tolerance
                (found.wrong_ranks if wrong else found.right_ranks).add(one.rank.rank)

    def membership(self) -> None:
        """What each rank counts in the norm, exactly."""
        expected = group_parameter_parts(self._reference, Stage.REDUCED_GRADIENTS)
        for one in check_norm_counts(self._strategy, expected):
            self._seen += 1
            self._said((Stage.NORM, one.name, COUNTED_ONCE), one)

    def initial(self) -> None:
        """What the layout's own initialisation has made wrong, which loaded weights hide."""
        for one in find_wrong_initializations(self._reference, self._strategy):
            self._said((Stage.WEIGHTS, one.name, INITIAL), one)

    def _said(self, key: ComparisonKey, one: ParameterFault) -> None:
        order = self._order.get((Stage.WEIGHTS, one.name, _WEIGHT), float(len(self._order)))
        found = self._found.setdefault(key, TensorComparison(key, 0.0, order))
        found.compared, found.error = found.compared + 1, max(found.error, one.share)
        found.wrong_ranks |= {*one.ranks}
        found.said = found.said or one.kind

    def _copies(self, found: TensorComparison, pieces: list[ParameterPart], whole: Array) -> None:
        held = np.zeros(whole.shape, bool)
        first: _Copies = {}
        for piece in pieces:
            values, region = piece.values(), piece.region()
            there = piece.held(values)
            held[region] |= there
            reference = whole[region]
            rank = piece.one.rank.rank
            pair = ComparedTensor(rank, None, values, reference, region)
            found.add(
                pair if there.all() else ComparedTensor(rank, None, values[there], reference[there])
            )
            if not piece.placement.partial:
                found.copies.append(pair)
                _note_copies(found, first, piece, values)
        found.uncovered = int((~held).sum())
        if not found.differs:
            found.copies.clear()

    def _comparison(self, key: ComparisonKey, like: TensorRecord) -> TensorComparison:
        if key not in self._found:
            order = self._order.get(key, len(self._order))
            if key[0] in (Stage.LOCAL_GRADIENTS, Stage.NORM):
                # Buckets are reduced from the model's end.
                order = self._order.get((Stage.WEIGHTS, key[1], "weight"), order)
            tolerance = self._tolerances.of(key, like)
            if tolerance > 0:
                tolerance = max(tolerance, RESPONSES * self._drifted.get(key, 0.0))
            self._found[key] = TensorComparison(key, tolerance, order)
        return self._found[key]

    def _skip(self, why: str, name: str, tensors: int = 1) -> None:
        self._skipped += tensors
        self._not_aligned[why].append(name)


def _note_copies(
    found: TensorComparison, first: _Copies, piece: ParameterPart, values: Array
) -> None:
    """Compare a rank's copy with the first one of the same part, bit for bit."""
    rank = piece.one.rank.rank
    known = first.setdefault(str(piece.region()), (rank, values))
    if known[0] != rank and known[1].tobytes() != values.tobytes():
        found.replicas_differ = tuple(sorted({*found.replicas_differ, known[0], rank}))


def _scalars(capture: Capture) -> Iterator[tuple[RankCapture, TensorRecord]]:
    """What is of no place in a parameter, and of no micro batch."""
    for one in capture.ranks:
        for record in one.records:
            if record.placement is None and record.site.micro_batch is None:
                yield one, record


def _is_shared(rank: CapturedRank, site: Site) -> bool:
    """Whether tensor-parallel ranks that have the same part may each have a share of its sum.

    Those that share an expert add up after it, not inside it. Where there are fewer key/value heads than
    ranks, the gradient of a head is the sum over the ranks whose queries attend to it.
    """
    if is_in_expert(site.name):
        return rank.expert_tensor[1] > 1
    if site.stage is not Stage.ACTIVATION_GRADIENTS or rank.tensor[1] == 1:
        return False
    of_heads = site.name.endswith(_ATTENTION) and site.slot in _KEY_AND_VALUE
    return of_heads or site.name.endswith(_KEY_NORM)


def _is_whole(rank: CapturedRank, site: Site) -> bool:
    """Whether tensor-parallel ranks have all of a module's output each."""
    if site.stage is not Stage.OUTPUTS or not site.slot.startswith("output"):
        return False
    module = rank.modules.get(site.name)
    known = module is not None and module.kind in _WHOLE_ON_EVERY_RANK
    return known or site.name.rpartition(".")[2] in _RESIDUAL


def _key(site: Site) -> ComparisonKey:
    return (site.stage, full_parameter_name(site.name), site.slot)
