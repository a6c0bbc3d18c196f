"""Compare the tensors of a strategy with the reference's, each within its measured tolerance.

The inputs are two captures of one iteration. The result, a `CaptureComparison`, has one comparison per
tensor over all ranks and micro batches. A tensor's error is relative: the Frobenius norm of the difference
over the reference's norm. Copies of a parameter, integers and truth values must be equal bit for bit, so
they need no tolerance.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import msgspec
import numpy as np

from parakit.artifacts.capture import (
    CHOICE,
    COUNTED_ONCE,
    COUNTS,
    EARLIER_ITERATION_PREFIX,
    INITIAL,
    INITIAL_SLOTS,
    MASTER_CAST,
    SCORES,
    START_WEIGHT,
    UNOBSERVED_FILE,
    UNOBSERVED_GRADIENT,
    UPDATE_MAGNITUDE,
    UPDATE_SUFFIX,
    CapturedRank,
    CaptureStage,
    TensorKey,
    TensorRecord,
)
from parakit.verify.align import (
    ActivationAligner,
    has_distinct_tokens,
    is_in_expert,
    is_returned_bias,
    list_activation_tensor_keys,
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
    order_tensor_keys,
    round_to_dtype,
)
from parakit.verify.comparison import (
    CaptureComparison,
    ComparedTensor,
    ComparisonKey,
    ParameterFault,
    SkippedTensors,
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

STAGES = tuple(CaptureStage)
"""Stages in the order in which an iteration passes through them."""
_SMALL_STEP = 1e-6
"""Distance between the positions of a tensor and of the tensor after it that only the strategy has."""
_GRADIENT = "gradient"
_WEIGHT = "weight"
_SECOND_MOMENT = "exp_avg_sq"
_MASTER = "param"
_SCALED_STAGES = (
    CaptureStage.ACTIVATION_GRADIENTS,
    CaptureStage.LOCAL_GRADIENTS,
    CaptureStage.REDUCED_GRADIENTS,
)
"""Stages whose tensors are multiplied by the loss scale in fp16."""
_OVERFLOW = "it overflows at this loss scale and the step is skipped; set --initial-loss-scale"
_HELD_BY_NONE = "no rank of the strategy has it"
_SLOT_NOT_CAPTURED = "the strategy captured no such tensor of any parameter"
_NO_SUCH_PARAMETER = "the reference has no such parameter"
_NO_SUCH_TENSOR = "the reference has no such tensor"
_NORM_UNUSED = "nothing is clipped, and not every optimizer computes a norm then"
_NO_SECOND_MOMENT = "its optimizer keeps no square of the gradient"
NORM = (CaptureStage.NORM, "grad_norm", "returned")
"""Key of the gradient norm's value."""
_MODULES_WITH_REPLICATED_OUTPUT = frozenset(
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
"""Classes of modules whose output is held in full by all tensor-parallel ranks without sequence parallelism."""
_RESIDUAL_MODULES = (
    "embedding_dropout",
    "input_layernorm",
    "pre_mlp_layernorm",
    "final_layernorm",
)
"""Names of modules on the residual stream whose output is replicated although their class does not tell it."""
_ATTENTION, _KEY_NORM = ".core_attention", ".k_layernorm"
_KEY_AND_VALUE = ("input.key", "input.value")
"""Inputs of attention that several tensor-parallel ranks share if there are fewer heads than ranks."""
Drift = Mapping[ComparisonKey, float]
"""Relative error that rounding in earlier iterations alone causes in each weight and optimizer state."""


def measure_drift(reference: Capture, runs: Iterable[Capture]) -> Drift:
    """Return the relative error that rounding in earlier iterations causes in each weight and optimizer state.

    Adam divides each update by the size of the gradient. So at a high learning rate, a rounding error grows
    from one iteration to the next.

    Args:
        reference: Capture of the undisturbed run.
        runs: Captures of runs whose weights were changed by one rounding error in each earlier iteration.

    Returns:
        The largest relative error of each tensor over all runs, by tensor. The lower bound of every error in a
        slot, such as `exp_avg`, is twice the largest error of the slot divided by `RESPONSES`. Smaller errors
        are raised to this bound, except for errors of updates. Errors of a tensor that are not finite are left
        out.
    """
    largest_errors: dict[ComparisonKey, float] = {}
    for run in runs:
        comparer = _Comparer(reference, run, {})
        comparer.compare_parameters()
        for comparison in comparer.result().comparisons:
            is_carried_over = comparison.key[0] in (
                CaptureStage.OPTIMIZER_STATE,
                CaptureStage.WEIGHTS,
            )
            if is_carried_over and np.isfinite(comparison.error):
                known_error = largest_errors.get(comparison.key, 0.0)
                largest_errors[comparison.key] = max(comparison.error, known_error)
    # A few runs do not show the worst case of each tensor, because errors grow from iteration to
    # iteration. So a tensor may be off by as much as the other tensors of its slot.
    error_by_slot: dict[str, float] = {}
    for (_, _, slot), error in largest_errors.items():
        # The error of an update is that of the worst row. A row whose gradient is all rounding tells
        # nothing about the updates of other tensors.
        if not slot.endswith(UPDATE_SUFFIX):
            error_by_slot[slot] = max(error / RESPONSES, error_by_slot.get(slot, 0.0))
    return {
        key: max(error, 2 * error_by_slot.get(key[2], 0.0)) for key, error in largest_errors.items()
    }


def compare(
    reference: Capture, strategy: Capture, drifted: Drift = MappingProxyType({})
) -> CaptureComparison:
    """Compare all tensors of a strategy's capture with the reference's.

    Args:
        reference: Capture of the reference. It must hold the responses, which are the measured changes of its
            tensors when all weights change by one rounding error.
        strategy: Capture to compare.
        drifted: Relative error that rounding in earlier iterations may cause, by tensor, as `measure_drift`
            returns it; empty if it was not measured.

    Returns:
        One comparison per tensor, in the order of computation, and the tensors that could not be compared.
    """
    comparer = _Comparer(reference, strategy, drifted)
    comparer.list_missing_tensors()
    comparer.compare_activations()
    comparer.compare_parameters()
    comparer.compare_weights_with_masters()
    comparer.compare_replicated_outputs()
    comparer.compare_scalars()
    comparer.compare_token_counts()
    comparer.compare_unobserved_gradients()
    comparer.check_norm()
    comparer.check_initialization()
    return comparer.result()


@dataclass(frozen=True)
class _FirstCopy:
    """The copy of a parameter's region that is compared first. The copies on all other ranks must equal it."""

    rank: int
    values: Array


@dataclass(frozen=True)
class _SimilarTensors:
    """Tensors of the reference that a strategy may have used in place of the right tensor."""

    stage: CaptureStage
    slot: str
    is_same_parameter: bool
    """True if these tensors belong to the same parameter as the wrong tensor, False if to all others."""
    label: str = ""
    """Text that names the tensor; empty to name it after its parameter."""


@dataclass
class _PartialSums:
    """Tensors of several ranks that may be terms of one sum, and that have the same reference."""

    record: TensorRecord
    """The record of the first tensor."""
    tensors: list[ComparedTensor] = field(default_factory=list)


class _Comparer:
    """Collects the comparisons of a strategy's tensors with the reference's.

    Each `compare_…` and `check_…` method adds the tensors of one kind; `result` returns them all.
    """

    def __init__(self, reference: Capture, strategy: Capture, drifted: Drift) -> None:
        self._reference, self._strategy, self._drifted = reference, strategy, drifted
        self._aligner = ActivationAligner(reference, strategy)
        self._tolerances = Tolerances(reference)
        self._comparisons: dict[ComparisonKey, TensorComparison] = {}
        self._names_by_obstacle: defaultdict[str, list[str]] = defaultdict(list)
        self._obstacles_of_outputs: set[str] = set()
        self._num_seen = self._num_skipped = self._num_flips = 0
        self._order: dict[ComparisonKey, float] = {}
        for tensor_key in order_tensor_keys(reference):
            self._order.setdefault(_make_key(tensor_key), float(len(self._order)))
        # A tensor that the strategy alone has, such as a recomputed one, comes directly after the tensor
        # that the strategy computes before it.
        for rank_capture in strategy.ranks:
            position = -1.0
            for record in rank_capture.records:
                position = self._order.setdefault(
                    _make_key(record.tensor_key), position + _SMALL_STEP
                )

    def result(self) -> CaptureComparison:
        """Return the comparisons so far, in the order in which an iteration computes the tensors."""
        skipped = tuple(
            SkippedTensors(
                reason=obstacle,
                names=tuple(dict.fromkeys(names)),
                has_outputs=obstacle in self._obstacles_of_outputs,
            )
            for obstacle, names in self._names_by_obstacle.items()
        )
        return CaptureComparison(
            comparisons=tuple(sorted(self._comparisons.values(), key=_sort_key)),
            not_aligned=(*self._strategy.notes(), *self._reference.notes(), *map(str, skipped)),
            seen=self._num_seen,
            compared=self._num_seen - self._num_skipped,
            routing_flips=self._num_flips,
            constant=self._count_constant_starts(),
            initialised=len(list_initial_pieces(self._strategy)),
            skipped=skipped,
            pairs_of=self._align_all_ranks,
            similar_tensors=self._list_similar_tensors,
        )

    def _count_constant_starts(self) -> int | None:
        """Return the number of parameters and buffers whose elements are all equal when the iteration starts.

        Tensors with a single element are not counted. None means that the reference captured no tensors at
        the start of the iteration.
        """
        parts_by_key = group_parameter_parts(self._reference, CaptureStage.WEIGHTS)
        starts = [parts for key, parts in parts_by_key.items() if key[2] in INITIAL_SLOTS]
        if not starts:
            return None
        num_constant = 0
        for parts in starts:
            values = [part.values().ravel() for part in parts]
            first_element = values[0][:1]
            is_constant = all((flat == first_element).all() for flat in values)
            has_several_elements = np.prod(parts[0].full_shape) > 1
            if is_constant and has_several_elements:
                num_constant += 1
        return num_constant

    def _align_all_ranks(self, key: ComparisonKey, micro_batch: int) -> list[ComparedTensor]:
        """Return each rank's tensor of one activation and micro batch, paired with the right tensor.

        The right tensor is the same part of the reference's activation. Ranks whose tensor cannot be aligned
        with the reference are left out.
        """
        tensors = []
        for rank_capture in self._strategy.ranks:
            for record in rank_capture.records:
                tensor_key = record.tensor_key
                if _make_key(tensor_key) != key or tensor_key.micro_batch != micro_batch:
                    continue
                aligned = self._aligner.align(rank_capture, record)
                if aligned.ours is not None and aligned.reference is not None:
                    rank = rank_capture.rank.rank
                    tensor = ComparedTensor(
                        rank, micro_batch, ours=aligned.ours, reference=aligned.reference
                    )
                    tensors.append(tensor)
        return tensors

    def _list_similar_tensors(self, comparison: TensorComparison) -> Iterator[tuple[str, Array]]:
        """Yield names and values of the reference's tensors that a strategy may have used in place of the right one.

        A wrong tensor of a parameter's shape is compared with the same region of all other parameters. A
        weight is also compared with its value before the iteration, and an optimizer state with the gradient
        of its parameter. A wrong activation is compared with the same activation of other ranks and of other
        micro batches. The bias that a linear layer returns is also compared with the biases that other linear layers
        return. Nothing is yielded if the comparison has no worst tensor.
        """
        (stage, name, slot), worst = comparison.key, comparison.worst
        if worst is None:
            return
        if worst.micro_batch is not None:
            yield from self._list_similar_activations(comparison.key, worst)
            yield from self._list_returned_biases(comparison.key, worst)
        if stage not in PARAMETERS:
            return
        candidates = [_SimilarTensors(stage, slot, is_same_parameter=False)]
        if slot == _WEIGHT:
            start = _SimilarTensors(
                stage, START_WEIGHT, is_same_parameter=True, label="the iteration before"
            )
            candidates.insert(0, start)
        if stage is CaptureStage.OPTIMIZER_STATE:
            gradient = _SimilarTensors(
                CaptureStage.REDUCED_GRADIENTS, _GRADIENT, is_same_parameter=True
            )
            candidates.append(gradient)
        for candidate in candidates:
            parts_by_key = group_parameter_parts(self._reference, candidate.stage, candidate.slot)
            for key, parts in parts_by_key.items():
                is_same_parameter = parts[0].name == name
                if key[2] != candidate.slot or is_same_parameter != candidate.is_same_parameter:
                    continue
                values = _cut_same_elements(parts, self._reference, worst)
                if values is not None:
                    yield candidate.label or parts[0].name, values

    def _list_similar_activations(
        self, key: ComparisonKey, tensor: ComparedTensor
    ) -> Iterator[tuple[str, Array]]:
        """Yield the reference's tensors of an activation that the rank of `tensor` may have used by mistake.

        These are the right tensors of this rank in other micro batches, and the right tensors of other ranks in
        the same micro batch. Each has a name such as `rank 1` or `micro batch 2`. Tensors that equal the right
        tensor of `tensor`, or have another shape, are left out.
        """
        for micro_batch in range(self._strategy.first.micro_batches):
            for other in self._align_all_ranks(key, micro_batch):
                is_same_rank = other.rank == tensor.rank
                is_same_micro_batch = micro_batch == tensor.micro_batch
                if is_same_rank == is_same_micro_batch:
                    continue
                if other.reference.shape != tensor.reference.shape:
                    continue
                if (other.reference != tensor.reference).any():
                    label = (
                        f"rank {other.rank}"
                        if is_same_micro_batch
                        else f"micro batch {micro_batch}"
                    )
                    yield label, other.reference

    def _list_returned_biases(
        self, key: ComparisonKey, tensor: ComparedTensor
    ) -> Iterator[tuple[str, Array]]:
        """Yield the biases that other linear layers return next to their output, if `tensor` is such a bias.

        Megatron's row-parallel linear layers return a bias, which the caller adds. The biases are those of the
        reference's first rank, and have the shape of `tensor`.
        """
        stage, name, slot = key
        shape = tensor.reference.shape
        is_bias = is_returned_bias(TensorKey(stage, name, slot), shape)
        if stage is not CaptureStage.OUTPUTS or not is_bias:
            return
        first_rank = self._reference.ranks[0]
        for tensor_key, record in first_rank.first_records.items():
            if (tensor_key.stage, tensor_key.slot) != (stage, slot) or tensor_key.name == name:
                continue
            if record.shape == shape and is_returned_bias(tensor_key, shape):
                yield tensor_key.name, first_rank.values(record)

    def compare_activations(self) -> None:
        """Compare inputs and outputs of modules, losses, expert choices and activation gradients.

        Tensors that cannot be aligned with the reference's, and gradients that overflow in both runs, are
        listed as not compared.
        """
        partial_sums: dict[object, _PartialSums] = {}
        for rank_capture in self._strategy.ranks:
            for record in rank_capture.records:
                tensor_key = record.tensor_key
                if record.placement is not None or tensor_key.micro_batch is None:
                    continue
                if tensor_key.slot.endswith(CHOICE):
                    self._compare_routing(rank_capture, record)
                elif not tensor_key.slot.startswith(EARLIER_ITERATION_PREFIX):
                    self._num_seen += 1
                    self._compare_activation(rank_capture, record, partial_sums)
        for partial_sum in partial_sums.values():
            record = partial_sum.record
            comparison = self._get_comparison(_make_key(record.tensor_key), record)
            _add_sum_or_copies(comparison, partial_sum.tensors)

    def _compare_activation(
        self,
        rank_capture: RankCapture,
        record: TensorRecord,
        partial_sums: dict[object, _PartialSums],
    ) -> None:
        """Compare one rank's tensor with the reference.

        A tensor that may be one term of a sum over ranks is only added to `partial_sums`, and compared later. A
        tensor that cannot be aligned, or that overflows in both runs, is listed as not compared.
        """
        rank, tensor_key = rank_capture.rank, record.tensor_key
        aligned = self._aligner.align(rank_capture, record)
        if aligned.ours is None or aligned.reference is None:
            self._skip_activation(aligned.obstacle, tensor_key)
            return
        if self._is_overflow(tensor_key.stage, aligned.ours, aligned.reference):
            self._skip_activation(_OVERFLOW, tensor_key)
            return
        tensor = ComparedTensor(
            rank.rank, tensor_key.micro_batch, ours=aligned.ours, reference=aligned.reference
        )
        if _may_be_partial_sum(rank, tensor_key):
            reference_bytes = tensor.reference.tobytes()
            group = (tensor_key, rank.data, rank.context, rank.expert, reference_bytes)
            partial_sums.setdefault(group, _PartialSums(record)).tensors.append(tensor)
            return
        comparison = self._get_comparison(_make_key(tensor_key), record)
        error = self._error_of_part(comparison, tensor, tensor_key, scale=aligned.scale)
        comparison.add(tensor, error)

    def _is_overflow(self, stage: CaptureStage, *tensors: Array) -> bool:
        """Return True if a gradient among the tensors is not finite, and the reference overflows too.

        Megatron then skips the optimizer step in both runs.
        """
        if stage not in _SCALED_STAGES or not self._reference_overflows:
            return False
        return not all(np.isfinite(values).all() for values in tensors)

    @cached_property
    def _reference_overflows(self) -> bool:
        """True if gradients of the reference overflow in fp16 at its loss scale."""
        is_fp16 = self._reference.first.dtype == "float16"
        return is_fp16 and not np.isfinite(self._reference.largest_gradient)

    def _error_of_part(
        self,
        comparison: TensorComparison,
        tensor: ComparedTensor,
        tensor_key: TensorKey,
        scale: float,
    ) -> float:
        """Return the relative error of the part of a tensor that one rank holds.

        An error within the tolerance is returned unchanged. A larger error is taken relative to the quadratic
        mean of the full tensor if the elements of the part are smaller than this mean. The reason is that the tolerance
        was measured on the full tensor. A small element is a sum of larger numbers, and has the same absolute rounding
        error as a large element. `scale` is the factor by which the reference was multiplied.
        """
        error = relative_error(tensor.ours, tensor.reference)
        is_within_tolerance = error <= comparison.tolerance
        must_be_equal = comparison.tolerance <= 0
        if is_within_tolerance or must_be_equal or not np.isfinite(error):
            return error
        mean_of_full_tensor = self._aligner.quadratic_mean(tensor_key) * scale
        norm_of_average_part = mean_of_full_tensor * np.sqrt(tensor.reference.size)
        return error * min(1.0, float(np.linalg.norm(tensor.reference) / norm_of_average_part))

    def _compare_routing(self, rank_capture: RankCapture, record: TensorRecord) -> None:
        """Compare the experts that a router chose for each token with the reference's choice.

        Rounding can give a token another expert if the scores of two experts are almost equal. Such tokens are
        no errors. They are counted in `_num_flips`, in the captured iteration and in all earlier iterations.
        Any other difference is an error if it is in the captured iteration. In earlier iterations it is
        ignored.
        """
        tensor_key = record.tensor_key
        scores_tensor_key = msgspec.structs.replace(
            tensor_key, slot=tensor_key.slot.replace(CHOICE, SCORES)
        )
        scores_record = rank_capture.first_records[scores_tensor_key]
        choice = self._aligner.align(rank_capture, record)
        scores = self._aligner.align(rank_capture, scores_record)
        is_earlier = tensor_key.slot.startswith(EARLIER_ITERATION_PREFIX)
        self._num_seen += not is_earlier
        if choice.ours is None or choice.reference is None or scores.reference is None:
            if not is_earlier:
                self._skip_activation(choice.obstacle, tensor_key)
            return
        rank = rank_capture.rank
        tolerance = self._tolerances.tolerance_for(
            (tensor_key.stage, tensor_key.name, SCORES), scores_record
        )
        is_flip = find_rounding_flips(
            choice.ours,
            choice.reference,
            scores=scores.reference,
            tolerance=tolerance,
            groups=rank.router_groups,
        )
        self._num_flips += int(is_flip.sum())
        if not is_earlier:
            ours = np.where(is_flip[:, None], choice.reference, choice.ours)
            tensor = ComparedTensor(
                rank.rank, tensor_key.micro_batch, ours=ours, reference=choice.reference
            )
            self._get_comparison(_make_key(tensor_key), record).add(tensor)

    def compare_parameters(self) -> None:
        """Compare gradients, optimizer states, updates and weights with the full tensors."""
        for stage in PARAMETERS:
            expected = group_parameter_parts(self._reference, stage)
            actual = group_parameter_parts(self._strategy, stage)
            for key, parts in actual.items():
                if key[2] == UPDATE_MAGNITUDE:
                    continue
                self._num_seen += len(parts)
                if key in expected:
                    self._compare_parameter(stage, key, actual=actual, expected=expected)
                else:
                    name = parts[0].record.tensor_key.name
                    self._skip(_NO_SUCH_PARAMETER, name, num_tensors=len(parts))

    def _compare_parameter(
        self,
        stage: CaptureStage,
        key: ParameterKey,
        *,
        actual: Mapping[ParameterKey, list[ParameterPart]],
        expected: Mapping[ParameterKey, list[ParameterPart]],
    ) -> None:
        """Compare all ranks' parts of the tensor `key` with the reference's full tensor.

        Args:
            stage: Stage of the tensor.
            key: Key of the tensor in both mappings.
            actual: Parts of all tensors of the stage in the strategy's capture.
            expected: Parts of all tensors of the stage in the reference's capture.
        """
        parts, reference_parts = actual[key], expected[key]
        first_reference_part = reference_parts[0]
        parameter_name, layer, slot = key
        full = assemble_parameter(reference_parts, self._reference)
        if self._is_overflow(stage, full, *(part.values() for part in parts)):
            self._skip(_OVERFLOW, first_reference_part.name, num_tensors=len(parts))
            return
        comparison_key = (stage, first_reference_part.name, slot)
        comparison = self._get_comparison(comparison_key, first_reference_part.record)
        if stage is CaptureStage.LOCAL_GRADIENTS:
            self._compare_local_gradients(comparison, parts, full)
            return
        if slot.endswith(UPDATE_SUFFIX):
            self._compare_update(comparison, key, parts=parts, expected=expected)
            return
        if slot == START_WEIGHT:
            self._compare_start(comparison, key, parts=parts, expected=expected)
            return
        update_key = (parameter_name, layer, UPDATE_SUFFIX)
        has_second_moment = (parameter_name, layer, _SECOND_MOMENT) in self._second_moments
        if slot == _WEIGHT and update_key in actual and has_second_moment:
            # Adam moves an element whose gradient is nearly all rounding as far as any other, so
            # the update is compared by itself and its difference is no error of the weight.
            our_update = assemble_parameter(actual[update_key], self._strategy)
            reference_update = assemble_parameter(expected[update_key], self._reference)
            full = full + (our_update - reference_update)
        _compare_parts(comparison, parts, full)

    def _compare_local_gradients(
        self, comparison: TensorComparison, parts: list[ParameterPart], full: Array
    ) -> None:
        """Compare a parameter's gradients before the reduction over ranks with the full gradient `full`.

        The gradients of tensor-parallel ranks are compared as a sum or each by itself, whichever has the
        smaller error. For example, with sequence parallelism the ranks' gradients of a norm either add up to
        the full gradient, or are each the full gradient; the module's code decides. Both are right before the
        reduction, and a reduction that does not match shows in the reduced gradient.
        """
        for means_by_part in average_local_gradients(parts, self._strategy):
            tensors = [
                ComparedTensor(part.rank, None, ours=mean, reference=full[part.region()])
                for part, mean in means_by_part
            ]
            _add_sum_or_copies(comparison, tensors)

    def list_missing_tensors(self) -> None:
        """Add all tensors that the reference has and that no rank of the strategy has.

        A missing tensor is an error if the strategy holds the parameter and captured the same slot (such as
        `gradient`) for other parameters. Any other missing tensor is listed as not compared.
        """
        for stage in PARAMETERS:
            self._list_missing_parameters(stage)
        tensor_keys_of_strategy = list_activation_tensor_keys(self._strategy)
        for tensor_key in list_activation_tensor_keys(self._reference):
            if tensor_key not in tensor_keys_of_strategy:
                self._num_seen += 1
                self._skip(_HELD_BY_NONE, f"{tensor_key.name} {tensor_key.slot}")

    def _list_missing_parameters(self, stage: CaptureStage) -> None:
        """Add the parameters' tensors of a stage that only the reference has.

        Update magnitudes are left out, because they only scale other tensors. A tensor of a parameter that no rank of
        the strategy holds is listed as not compared, and so is a tensor in a slot that the strategy did not capture for
        any parameter. Every other missing tensor is wrong: it gets error 1.0, and all its elements are uncovered.
        """
        weights = group_parameter_parts(self._strategy, CaptureStage.WEIGHTS)
        held_parameters = {(parameter_name, layer) for parameter_name, layer, _ in weights}
        captured = group_parameter_parts(self._strategy, stage)
        captured_slots = {slot for _, _, slot in captured}
        for key, parts in group_parameter_parts(self._reference, stage).items():
            parameter_name, layer, slot = key
            if key in captured or slot == UPDATE_MAGNITUDE:
                continue
            self._num_seen += 1
            first_part = parts[0]
            label = f"{first_part.name} ({stage} {slot})"
            if (parameter_name, layer) not in held_parameters:
                self._skip(_HELD_BY_NONE, label)
            elif slot not in captured_slots:
                self._skip(_SLOT_NOT_CAPTURED, label)
            else:
                comparison = self._get_comparison((stage, first_part.name, slot), first_part.record)
                comparison.error = 1.0
                comparison.uncovered += int(np.prod(first_part.full_shape))

    @cached_property
    def _second_moments(self) -> dict[ParameterKey, list[ParameterPart]]:
        """Parts of the reference's second moments, by their keys."""
        return group_parameter_parts(self._reference, CaptureStage.OPTIMIZER_STATE, _SECOND_MOMENT)

    @cached_property
    def _update_reaches(self) -> dict[ParameterKey, list[ParameterPart]]:
        """Parts of the reference's `UPDATE_MAGNITUDE` tensors: how far earlier updates could move each weight."""
        return group_parameter_parts(self._reference, CaptureStage.WEIGHTS, UPDATE_MAGNITUDE)

    @property
    def _num_earlier_updates(self) -> int:
        """Number of updates before the captured iteration, at least 1."""
        return max(self._reference.first.iteration - 1, 1)

    def _compare_update(
        self,
        comparison: TensorComparison,
        key: ParameterKey,
        *,
        parts: list[ParameterPart],
        expected: Mapping[ParameterKey, list[ParameterPart]],
    ) -> None:
        """Compare how much a parameter's weights change in this iteration with the changes in the reference.

        A difference that the rounding of the weight and of its gradient can explain is no error. The error of
        each rank's part is added to `comparison`. If the optimizer has no second moment, the updates are listed
        as not compared.
        """
        weight_slot = key[2].removesuffix(UPDATE_SUFFIX).strip() or _WEIGHT
        second_moment = self._second_moments.get((*key[:2], _SECOND_MOMENT))
        if second_moment is None:
            name = parts[0].record.tensor_key.name
            self._skip(_NO_SECOND_MOMENT, name, num_tensors=len(parts))
            return
        weights = expected[*key[:2], weight_slot]
        divisor = np.sqrt(assemble_parameter(second_moment, self._reference))
        epsilon = EPSILON[weights[0].record.dtype]
        rounding = float_spacing(assemble_parameter(weights, self._reference), epsilon)
        update = assemble_parameter(expected[key], self._reference)
        reach = self._update_reaches.get((*key[:2], UPDATE_MAGNITUDE))
        if reach and comparison.tolerance >= 1:
            # A row's gradient may be all rounding, and by chance its update is then smaller than earlier
            # updates of the row. The average earlier update therefore counts as rounding.
            reach_per_update = (
                assemble_parameter(reach, self._reference) / self._num_earlier_updates
            )
            rounding = np.maximum(rounding, reach_per_update)
        for part in parts:
            values, region = part.values(), part.region()
            is_owned = part.owned_elements(values)
            ours = np.where(is_owned, values, 0)
            reference = np.where(is_owned, update[region], 0)
            error = update_error(
                ours, reference, divisor=divisor[region], rounding=rounding[region]
            )
            comparison.add(ComparedTensor(part.rank, None, ours=ours, reference=reference), error)

    def _compare_start(
        self,
        comparison: TensorComparison,
        key: ParameterKey,
        *,
        parts: list[ParameterPart],
        expected: Mapping[ParameterKey, list[ParameterPart]],
    ) -> None:
        """Compare a weight at the start of the iteration with the reference's.

        Each difference is divided by the distance that the earlier updates could have moved the weight. The
        largest quadratic mean of a row of these quotients is the error of a rank's part, and is added to
        `comparison`. If the distance was not captured and the optimizer has no second moment, the weights
        themselves are compared.
        """
        full = assemble_parameter(expected[key], self._reference)
        reach = self._update_reaches.get((*key[:2], UPDATE_MAGNITUDE))
        if reach is None and (*key[:2], _SECOND_MOMENT) not in self._second_moments:
            _compare_parts(comparison, parts, full)
            return
        reach_values = assemble_parameter(reach, self._reference) if reach else np.zeros_like(full)
        epsilon = EPSILON[expected[key][0].record.dtype]
        rounding = self._num_earlier_updates * float_spacing(full, epsilon)
        first_copies: dict[str, _FirstCopy] = {}
        for part in parts:
            values, region = part.values(), part.region()
            is_owned = part.owned_elements(values)
            if is_owned.all():
                _compare_copy(comparison, first_copies, part, values)
            difference = np.where(is_owned, values - full[region], 0)
            scaled = divide_by_reach(
                difference, reach=reach_values[region], rounding=rounding[region]
            )
            tensor = ComparedTensor(part.rank, None, ours=scaled, reference=np.zeros_like(scaled))
            comparison.add(tensor, largest_row_mean(scaled))

    def compare_weights_with_masters(self) -> None:
        """Compare each of the strategy's weights bit for bit with its fp32 master copy, rounded to its dtype.

        This check finds weights that the optimizer does not update. The comparison with the reference misses
        such weights, because in a few iterations a bf16 weight moves by less than its rounding error.
        Differences are added as faults.
        """
        weights = group_parameter_parts(self._strategy, CaptureStage.WEIGHTS, _WEIGHT)
        masters = group_parameter_parts(self._strategy, CaptureStage.OPTIMIZER_STATE, _MASTER)
        for key, master_parts in masters.items():
            parts = weights.get((*key[:2], _WEIGHT), [])
            # Several slots may share one group, and only the master copy is rounded to the weight.
            is_master = key[2] == _MASTER and master_parts[0].record.dtype == "float32"
            if not (is_master and parts):
                continue
            full = assemble_parameter(master_parts, self._strategy)
            is_mastered = np.zeros(full.shape, bool)
            for part in master_parts:
                is_mastered[part.region()] |= part.owned_elements(part.values())
            for part in parts:
                fault = _find_stale_weights(part, full, is_mastered)
                if fault is not None:
                    self._add_fault((CaptureStage.WEIGHTS, fault.name, MASTER_CAST), fault)

    def compare_replicated_outputs(self) -> None:
        """Compare outputs that every tensor-parallel rank holds in full between the ranks, bit for bit.

        The reference is not used. With sequence parallelism nothing is compared, because no rank holds such an
        output in full.
        """
        first_copies: dict[object, tuple[RankCapture, TensorRecord]] = {}
        for rank_capture in self._strategy.ranks:
            rank = rank_capture.rank
            if rank.tensor[1] == 1 or rank.sequence_parallel:
                continue
            for record in rank_capture.records:
                if not _is_replicated_output(rank, record.tensor_key):
                    continue
                group = (record.tensor_key, rank.data[0], rank.context[0], rank.pipeline[0])
                holder, holder_record = first_copies.setdefault(group, (rank_capture, record))
                if rank_capture.tensor_bytes(record) != holder.tensor_bytes(holder_record):
                    tensor = ComparedTensor(
                        rank.rank,
                        record.tensor_key.micro_batch,
                        ours=rank_capture.values(record),
                        reference=holder.values(holder_record),
                    )
                    comparison = self._get_comparison(_make_key(record.tensor_key), record)
                    comparison.add_copies(tensor, holder.rank.rank)

    def compare_scalars(self) -> None:
        """Compare the optimizer's step numbers, and each rank's gradient norm, with the reference's.

        The number of tokens per expert is skipped here. A gradient norm is listed as not compared if the rank
        does not clip gradients and one of the two norms is 0.
        """
        expected: dict[TensorKey, tuple[RankCapture, TensorRecord]] = {}
        for rank_capture, record in _list_scalars(self._reference):
            expected.setdefault(record.tensor_key, (rank_capture, record))
        reference_names = self._reference_names()
        for rank_capture, record in _list_scalars(self._strategy):
            if record.tensor_key.slot == COUNTS:
                continue
            self._num_seen += 1
            is_norm = record.tensor_key.stage is CaptureStage.NORM
            tensor_key = TensorKey(*NORM) if is_norm else record.tensor_key
            reference_name = reference_names.get(tensor_key.name, tensor_key.name)
            tensor_key = msgspec.structs.replace(tensor_key, name=reference_name)
            if tensor_key not in expected:
                self._skip(_NO_SUCH_PARAMETER, tensor_key.name)
                continue
            holder, holder_record = expected[tensor_key]
            rank = rank_capture.rank
            ours, reference = rank_capture.values(record), holder.values(holder_record)
            is_norm_computed = rank.clip_gradient or (ours.any() and reference.any())
            if is_norm and not is_norm_computed:
                self._skip(_NORM_UNUSED, tensor_key.name)
                continue
            comparison = self._get_comparison(_make_key(tensor_key), holder_record)
            tensor = ComparedTensor(rank.rank, None, ours=ours, reference=reference)
            comparison.add(tensor)
            if is_norm:
                comparison.copies.append(tensor)

    def _reference_names(self) -> dict[str, str]:
        """Return the name that each parameter of the strategy has in the reference, by its name in the strategy.

        The two names differ for tied weights: a pipeline holds the embedding under two names. Parameters that
        the reference lacks are left out.
        """
        expected = group_parameter_parts(self._reference, CaptureStage.WEIGHTS)
        names: dict[str, str] = {}
        for key, parts in group_parameter_parts(self._strategy, CaptureStage.WEIGHTS).items():
            if key in expected:
                for part in parts:
                    names[part.record.tensor_key.name] = expected[key][0].record.tensor_key.name
        return names

    def compare_token_counts(self) -> None:
        """Compare the number of tokens that each expert got in the iteration, summed over all ranks."""
        our_counts, first_records = _sum_token_counts(self._strategy)
        reference_counts, _ = _sum_token_counts(self._reference)
        for key, ours in our_counts.items():
            self._num_seen += 1
            if key not in reference_counts:
                self._skip(_NO_SUCH_TENSOR, f"{key[1]} {key[2]}")
                continue
            tensor = ComparedTensor(0, None, ours=ours, reference=reference_counts[key])
            self._get_comparison(key, first_records[key]).add(tensor)

    def compare_unobserved_gradients(self) -> None:
        """Check that capturing does not change the strategy's gradients.

        Some ranks repeated the iteration without capturing, and stored how much each reduced gradient changed.
        A change above the tolerance of the gradient is an error. Ranks without such a repetition are skipped.
        """
        for rank_capture in self._strategy.ranks:
            if not (rank_capture.folder / UNOBSERVED_FILE).is_file():
                continue
            changes = rank_capture.read_changes(UNOBSERVED_FILE)
            for (stage, name, slot), error in changes.items():
                tensor_key = TensorKey(CaptureStage.REDUCED_GRADIENTS, name, slot)
                record = rank_capture.first_records.get(tensor_key)
                if (
                    stage != CaptureStage.REDUCED_GRADIENTS
                    or record is None
                    or not np.isfinite(error)
                ):
                    continue
                full_name = full_parameter_name(name)
                key = (CaptureStage.REDUCED_GRADIENTS, full_name, slot)
                comparison = self._get_comparison(
                    (CaptureStage.REDUCED_GRADIENTS, full_name, UNOBSERVED_GRADIENT), record
                )
                comparison.tolerance = self._tolerances.tolerance_for(key, record)
                comparison.error = max(comparison.error, error)
                rank = rank_capture.rank.rank
                if error > comparison.tolerance:
                    comparison.wrong_ranks.add(rank)
                else:
                    comparison.right_ranks.add(rank)

    def check_norm(self) -> None:
        """Check that the gradient norm counts every element of every parameter exactly once."""
        expected = group_parameter_parts(self._reference, CaptureStage.REDUCED_GRADIENTS)
        for fault in check_norm_counts(self._strategy, expected):
            self._num_seen += 1
            self._add_fault((CaptureStage.NORM, fault.name, COUNTED_ONCE), fault)

    def check_initialization(self) -> None:
        """Check the weights with which the strategy would start if it did not load the reference's weights."""
        for fault in find_wrong_initializations(self._reference, self._strategy):
            self._add_fault((CaptureStage.WEIGHTS, fault.name, INITIAL), fault)

    def _add_fault(self, key: ComparisonKey, fault: ParameterFault) -> None:
        """Add the result of a check of one parameter to the comparison `key`.

        If several faults have the same key, their ranks are joined, and the largest fraction and the first
        description are kept.
        """
        weight_key = (CaptureStage.WEIGHTS, fault.name, _WEIGHT)
        order = self._order.get(weight_key, float(len(self._order)))
        comparison = self._comparisons.setdefault(
            key, TensorComparison(key, tolerance=0.0, order=order)
        )
        comparison.compared += 1
        comparison.error = max(comparison.error, fault.fraction)
        comparison.wrong_ranks.update(fault.ranks)
        comparison.fault = comparison.fault or fault.kind

    def _get_comparison(self, key: ComparisonKey, record: TensorRecord) -> TensorComparison:
        """Return the comparison of a key. If there is none yet, create it with the tolerance of a tensor like
        `record`.
        """
        if key not in self._comparisons:
            order = self._order.get(key, len(self._order))
            if key[0] in (CaptureStage.LOCAL_GRADIENTS, CaptureStage.NORM):
                # Buckets are reduced from the model's end, so the order of these tensors in the capture
                # is not that of the forward pass.
                order = self._order.get((CaptureStage.WEIGHTS, key[1], _WEIGHT), order)
            tolerance = self._tolerances.tolerance_for(key, record)
            if tolerance > 0:
                tolerance = max(tolerance, RESPONSES * self._drifted.get(key, 0.0))
            self._comparisons[key] = TensorComparison(key, tolerance=tolerance, order=order)
        return self._comparisons[key]

    def _skip_activation(self, obstacle: str, tensor_key: TensorKey) -> None:
        """Count a strategy's activation as not compared, and list its module and slot under the reason."""
        self._skip(obstacle, f"{tensor_key.name} {tensor_key.slot}")
        if tensor_key.stage is CaptureStage.OUTPUTS:
            self._obstacles_of_outputs.add(obstacle)

    def _skip(self, obstacle: str, name: str, *, num_tensors: int = 1) -> None:
        """Count `num_tensors` tensors as not compared, and list `name` under the reason `obstacle`."""
        self._num_skipped += num_tensors
        self._names_by_obstacle[obstacle].append(name)


def _sort_key(comparison: TensorComparison) -> tuple[object, ...]:
    """Return a sort key that puts an error before the errors that follow from it.

    Tensors at the start of the iteration come first. The value of the gradient norm comes after the elements
    that it counts, because a wrong count makes the value wrong. The strategy's initialization comes last: the
    loaded weights replace it, so it causes no other error.
    """
    stage, _, slot = comparison.key
    is_initialization = slot == INITIAL
    is_after_start = slot not in INITIAL_SLOTS
    is_last_of_stage = comparison.key == NORM or slot == UNOBSERVED_GRADIENT
    return (
        is_initialization,
        is_after_start,
        STAGES.index(stage),
        is_last_of_stage,
        comparison.order,
    )


def _add_sum_or_copies(comparison: TensorComparison, tensors: list[ComparedTensor]) -> None:
    """Add tensors of several ranks to a comparison, either as their sum or each by itself.

    All tensors must have the same reference. If the sum over the ranks has a smaller error than the worst
    single tensor, only the sum is added, under the first rank. Otherwise each tensor is added by itself.
    """
    first = tensors[0]
    if len(tensors) > 1:
        total = np.sum([tensor.ours for tensor in tensors], axis=0, dtype=np.float32)
        largest_error = max(relative_error(tensor.ours, tensor.reference) for tensor in tensors)
        if relative_error(total, first.reference) < largest_error:
            tensors = [
                ComparedTensor(first.rank, first.micro_batch, ours=total, reference=first.reference)
            ]
    for tensor in tensors:
        comparison.add(tensor)


def _cut_same_elements(
    parts: list[ParameterPart], capture: Capture, tensor: ComparedTensor
) -> Array | None:
    """Return the elements of a parameter that a compared tensor holds of its own parameter.

    Args:
        parts: Parts of the parameter on all ranks.
        capture: Capture of the ranks.
        tensor: The compared tensor, of a parameter that may be another one.

    Returns:
        The elements; None if the parameter has another shape than that of the compared tensor.
    """
    if tensor.owned is None:
        shape = tensor.reference.shape
        return assemble_region(parts, capture, region=tensor.region, shape=shape)
    region, is_owned = tensor.owned
    values = assemble_region(parts, capture, region=region, shape=is_owned.shape)
    return None if values is None else values[is_owned]


def _compare_parts(comparison: TensorComparison, parts: list[ParameterPart], full: Array) -> None:
    """Compare all ranks' parts of a parameter with the full tensor, and copies with each other.

    Elements that no rank holds are counted in `uncovered`. The parts are stored in `copies` if the
    parameter is wrong.
    """
    is_covered = np.zeros(full.shape, bool)
    first_copies: dict[str, _FirstCopy] = {}
    for part in parts:
        values, region = part.values(), part.region()
        is_owned = part.owned_elements(values)
        is_covered[region] |= is_owned
        reference = full[region]
        tensor = ComparedTensor(part.rank, None, ours=values, reference=reference, region=region)
        if is_owned.all():
            comparison.add(tensor)
        else:
            owned_values, owned_reference = values[is_owned], reference[is_owned]
            comparison.add(
                ComparedTensor(
                    part.rank,
                    None,
                    ours=owned_values,
                    reference=owned_reference,
                    owned=(region, is_owned),
                )
            )
        if not part.placement.partial:
            comparison.copies.append(tensor)
            _compare_copy(comparison, first_copies, part, values)
    comparison.uncovered = int((~is_covered).sum())
    if not comparison.differs:
        comparison.copies.clear()


def _find_stale_weights(
    part: ParameterPart, master: Array, is_mastered: Array
) -> ParameterFault | None:
    """Compare a rank's weights with the rounded master copy; return a fault, or None if all are equal.

    Elements without a master copy, and elements that the rank does not hold, are left out.

    Args:
        part: The rank's weights.
        master: Full fp32 master copy of the parameter.
        is_mastered: True for each element of the full parameter that has a master copy.
    """
    values, region = part.values(), part.region()
    is_compared = is_mastered[region] & part.owned_elements(values)
    is_stale = (values != round_to_dtype(master[region], part.record.dtype)) & is_compared
    if not is_stale.any():
        return None
    fraction = float(is_stale.sum() / is_compared.sum())
    kind = f"not the rounded master copy in {fraction:.1%} of its elements"
    return ParameterFault(part.name, (part.rank,), kind, fraction)


def _compare_copy(
    comparison: TensorComparison,
    first_copies: dict[str, _FirstCopy],
    part: ParameterPart,
    values: Array,
) -> None:
    """Compare a rank's copy of a region bit for bit with the first copy of the same region.

    If they differ, both ranks are added to the comparison's `replicas_differ`. `first_copies` holds the first
    copies by region; this copy is added to it if its region has none yet.
    """
    first = first_copies.setdefault(str(part.region()), _FirstCopy(part.rank, values))
    if first.rank != part.rank and first.values.tobytes() != values.tobytes():
        ranks = {*comparison.replicas_differ, first.rank, part.rank}
        comparison.replicas_differ = tuple(sorted(ranks))


def _list_scalars(capture: Capture) -> Iterator[tuple[RankCapture, TensorRecord]]:
    """Yield the tensors that are no part of a parameter and belong to no micro batch."""
    for rank_capture in capture.ranks:
        for record in rank_capture.records:
            if record.placement is None and record.tensor_key.micro_batch is None:
                yield rank_capture, record


def _sum_token_counts(
    capture: Capture,
) -> tuple[dict[ComparisonKey, Array], dict[ComparisonKey, TensorRecord]]:
    """Return the number of tokens that each router sent to each expert, summed over the ranks.

    Without sequence parallelism all tensor-parallel ranks route the same tokens, so only the first of these
    ranks is counted. The second result has the first record of each router.
    """
    totals: dict[ComparisonKey, Array] = {}
    first_records: dict[ComparisonKey, TensorRecord] = {}
    for rank_capture, record in _list_scalars(capture):
        if record.tensor_key.slot == COUNTS and has_distinct_tokens(rank_capture.rank):
            key = _make_key(record.tensor_key)
            first_records.setdefault(key, record)
            totals[key] = totals.get(key, 0) + rank_capture.values(record)
    return totals, first_records


def _may_be_partial_sum(rank: CapturedRank, tensor_key: TensorKey) -> bool:
    """Return True if a rank's tensor may be only one term of a sum over tensor-parallel ranks.

    There are two such cases. Ranks that share an expert add up their outputs only after the expert, so every
    tensor inside it may be a term. If there are fewer key/value heads than ranks, several ranks have queries that
    attend to one head. The gradient of the head is the sum over these ranks. So the gradients of keys, values and key
    norms may be terms.
    """
    if is_in_expert(tensor_key.name):
        return rank.expert_tensor[1] > 1
    if tensor_key.stage is not CaptureStage.ACTIVATION_GRADIENTS or rank.tensor[1] == 1:
        return False
    is_key_or_value = tensor_key.name.endswith(_ATTENTION) and tensor_key.slot in _KEY_AND_VALUE
    return is_key_or_value or tensor_key.name.endswith(_KEY_NORM)


def _is_replicated_output(rank: CapturedRank, tensor_key: TensorKey) -> bool:
    """Return True if every tensor-parallel rank holds this output of a module in full."""
    if tensor_key.stage is not CaptureStage.OUTPUTS or not tensor_key.slot.startswith("output"):
        return False
    module = rank.modules.get(tensor_key.name)
    if module is not None and module.kind in _MODULES_WITH_REPLICATED_OUTPUT:
        return True
    return tensor_key.name.rpartition(".")[2] in _RESIDUAL_MODULES


def _make_key(tensor_key: TensorKey) -> ComparisonKey:
    """Return the key of the comparison that a tensor belongs to: stage, full name and slot.

    So one comparison has the tensors of all ranks and micro batches.
    """
    return (tensor_key.stage, full_parameter_name(tensor_key.name), tensor_key.slot)
