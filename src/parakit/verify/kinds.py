"""Classify the error of a wrong tensor: a factor, a missing sum, rows in another order, and so on.

The inputs are the wrong tensor of each rank (`ours`) and what it should be (`reference`). Each test fits one
kind of error to them. The tests are tried in a fixed order, in which a test that explains more of the error
comes earlier; the first kind that fits is the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from parakit.artifacts.capture import (
    UNOBSERVED_GRADIENT,
    UPDATE_SUFFIX,
    CapturedRank,
    CaptureStage,
)
from parakit.verify.captured import Array
from parakit.verify.comparison import ComparedTensor, TensorComparison, relative_error
from parakit.verify.patterns import (
    SOME_RANKS,
    UNEXPLAINED_FRACTION,
    ErrorKind,
    find_approximate_factor,
    find_equal_steps,
    find_factor_per_row,
    find_few_elements,
    find_moved_rows,
    find_noise,
    find_other_dropout_mask,
    find_other_mask,
    find_repeated_vectors,
    find_wrong_elements,
    find_wrong_rows,
    find_zeros,
)

_REQUIRED_FRACTION = 0.9
"""Smallest fraction of elements or wrong rows that a kind must explain."""
_MAX_FITTED_ELEMENTS = 2**26
"""Largest number of elements of all parts of a fit together: half a gigabyte of float64."""
_MIN_ROUNDED_ELEMENTS = 16
"""Smallest number of elements in which rounding to bf16 can be told from other errors."""
_CLOSE_FACTOR = 1e-3
"""Relative distance from a parallel degree within which a factor is named after it."""
_BF16_STEP = 2.0**-7
"""Distance from 1 to the next larger bf16 number; rounding to nearest is off by half of it."""
_VISIBLE_ROUNDING = 2.0**-12
"""Median relative error from which errors may come from bf16 and not from fp32."""
MORE_GRADIENT = "another multiple of its gradient"
_ONLY_GRADIENT = "its gradient in this iteration alone: the state of earlier iterations is missing"
OTHER = "other"
"""Name of the kind of an error that no test explains."""


def classify_error(
    comparison: TensorComparison,
    tensors: Sequence[ComparedTensor],
    rank: CapturedRank,
    similar_tensors: Iterable[tuple[str, Array]] = (),
) -> ErrorKind:
    """Return the kind of a wrong tensor's error; `OTHER` if no kind fits.

    Args:
        comparison: Comparison of the tensor, which differs.
        tensors: The tensors of all ranks in the micro batch with the largest error. For a parameter, these are
            the parts of all ranks, or only the part with the largest error.
        rank: Any rank of the strategy, for its parallel degrees.
        similar_tensors: Names and values of the reference's tensors that the strategy may have used in place of
            the right tensor.
    """
    return next(_list_kinds(comparison, tensors, rank, similar_tensors), ErrorKind(OTHER))


def _list_kinds(
    comparison: TensorComparison,
    tensors: Sequence[ComparedTensor],
    rank: CapturedRank,
    similar_tensors: Iterable[tuple[str, Array]],
) -> Iterator[ErrorKind]:
    """Yield the kinds that fit, the most telling kind first."""
    stage = comparison.key[0]
    yield from _list_kinds_without_values(comparison)
    worst = comparison.worst
    if worst is None:
        if comparison.replicas_differ:
            yield ErrorKind("copies differ between ranks")
        return
    if not np.issubdtype(worst.ours.dtype, np.floating):
        yield from _list_kinds_of_integers(worst, similar_tensors)
        return
    if not np.isfinite(worst.ours).all():
        yield ErrorKind("not finite")
    limit = _residual_limit(comparison.error, comparison.tolerance)
    if stage is CaptureStage.NORM:
        yield from _find_wrong_norm(tensors, limit)
    if comparison.key[2].endswith(UPDATE_SUFFIX):
        yield from _find_wrong_update(worst, limit)
    yield from find_zeros(worst)
    yield from _find_factor(worst, limit, rank)
    yield from _find_bf16_rounding(worst)
    yield from _find_missing_sum(tensors, limit, rank)
    yield from _find_mixed_tensors(worst, comparison, similar_tensors)
    yield from find_moved_rows(worst)
    if stage in (CaptureStage.OUTPUTS, CaptureStage.ACTIVATION_GRADIENTS) and rank.has_dropout:
        yield from find_other_dropout_mask(worst)
    yield from find_other_mask(worst)
    yield from find_equal_steps(worst)
    yield from find_factor_per_row(worst, limit)
    yield from find_repeated_vectors(worst)
    yield from find_wrong_rows(worst, comparison, rank)
    if comparison.replicas_differ:
        yield ErrorKind("copies differ between ranks")
    if comparison.is_wrong_in_some_micro_batches:
        yield ErrorKind(_name_wrong_micro_batches(comparison))
    if comparison.wrong_ranks and comparison.right_ranks:
        yield ErrorKind(SOME_RANKS)
    yield from find_few_elements(worst, comparison.tolerance)
    yield from find_approximate_factor(worst)
    yield from find_noise(worst)
    if _have_unequal_copies(tensors, limit):
        yield ErrorKind("copies differ between ranks")


def _name_wrong_micro_batches(comparison: TensorComparison) -> str:
    """Return a kind that names the micro batches in which the tensor is wrong on every rank."""
    wrong = sorted(comparison.wrong_micro_batches)
    num_micro_batches = len(wrong) + len(comparison.right_micro_batches)
    if len(wrong) == 1:
        return f"wrong in micro batch {wrong[0]} of {num_micro_batches} only"
    return f"wrong in {len(wrong)} of {num_micro_batches} micro batches only"


def _find_wrong_update(tensor: ComparedTensor, limit: float) -> Iterator[ErrorKind]:
    """Yield a kind if a parameter was not updated, or was updated twice.

    `tensor` is the change of the parameter in the iteration.
    """
    if tensor.reference.any() and not tensor.ours.any():
        yield ErrorKind("not updated", 0.0)
    elif relative_error(tensor.ours, 2 * tensor.reference) < limit:
        yield ErrorKind("updated twice", 2.0)


def _list_kinds_of_integers(
    tensor: ComparedTensor, similar_tensors: Iterable[tuple[str, Array]]
) -> Iterator[ErrorKind]:
    """Yield the kinds that fit a tensor of integers or truth values, `other values` last."""
    for name, values in similar_tensors:
        if _is_error_explained_by(tensor, values):
            yield ErrorKind(f"that of {name}")
    yield from find_moved_rows(tensor)
    yield ErrorKind("other values")


def _list_kinds_without_values(comparison: TensorComparison) -> Iterator[ErrorKind]:
    """Yield the kinds that follow from the comparison alone: faults and elements that no rank holds."""
    if comparison.fault:
        yield ErrorKind(comparison.fault)
    if comparison.uncovered and not comparison.compared:
        yield ErrorKind("held by no rank")
    if comparison.uncovered:
        yield ErrorKind(f"{comparison.uncovered} elements are held by no rank")
    if comparison.key[2] == UNOBSERVED_GRADIENT:
        yield ErrorKind("vanishes under observation: a buffer that is used again, or a race")


def _residual_limit(error: float, tolerance: float) -> float:
    """Return the relative error that a fit may leave: rounding, or a small fraction of the error."""
    return min(max(2 * tolerance, 1e-3 * error), UNEXPLAINED_FRACTION * error)


def _find_wrong_norm(tensors: Sequence[ComparedTensor], limit: float) -> Iterator[ErrorKind]:
    """Yield kinds of error if ranks have different gradient norms.

    If each rank has the norm of its own part of the gradients, the first kind is a missing sum of squares. The
    last kind only says that the norms differ.
    """
    norms = {float(tensor.ours.reshape(-1)[0]) for tensor in tensors}
    if len(norms) > 1:
        total_norm = np.array([sum(norm**2 for norm in norms) ** 0.5])
        if relative_error(total_norm, tensors[0].reference) < limit:
            yield ErrorKind(f"missing sum of squares over {len(norms)} ranks")
        yield ErrorKind("another norm on each of the ranks")


def _find_factor(tensor: ComparedTensor, limit: float, rank: CapturedRank) -> Iterator[ErrorKind]:
    """Yield one kind, such as `factor ×TP`, if the tensor is the reference times a constant factor.

    The factor is found by least squares. Nothing is yielded if the scaled reference differs by more than `limit`, or
    if the factor explains too little of the error. `rank` gives the parallel degrees that a factor is named after.
    """
    ours, reference = _flatten(tensor.ours), _flatten(tensor.reference)
    square = float(reference @ reference)
    factor = float(ours @ reference) / square if square else 0.0
    if factor == 0:
        if ours.size == 1:
            yield ErrorKind(f"{ours[0]:.6g} instead of {reference[0]:.6g}")
        return
    remaining_error = relative_error(ours / factor, reference)
    if remaining_error > limit:
        return
    # `limit` is taken from the error of the worst row for an update. The error of the full tensor may be
    # smaller than that, down to rounding. A factor of about 1 would then fit, and explain nothing.
    if remaining_error > UNEXPLAINED_FRACTION * relative_error(ours, reference):
        return
    name = name_factor(factor, rank)
    if ours.size == 1 and name[0] not in "×÷":
        # Any two numbers have a factor. Only one that is a parallel degree tells something.
        yield ErrorKind(f"{ours[0]:.6g} instead of {reference[0]:.6g}", factor)
        return
    yield ErrorKind(f"factor {name}", factor)


def name_factor(factor: float, rank: CapturedRank) -> str:
    """Return the parallel degrees that a factor is close to, or the factor's number.

    For example, `×TP` means the tensor-parallel degree, `÷TP` its inverse and `×√TP` its square root. If
    several degrees are equal, their texts are joined by `or`. Degrees of 1 are left out.
    """
    data, context = rank.data[1], rank.context[1]
    degrees = {
        "TP": rank.tensor[1],
        "DP": data,
        "CP": context,
        "EP": rank.expert[1],
        "PP": rank.pipeline[1],
        "micro batches": rank.micro_batches,
        "DP × CP": data * context if min(data, context) > 1 else 1,
    }
    texts = []
    for name, degree in degrees.items():
        if degree <= 1:
            continue
        for label, size in ((name, degree), (f"√{name}", degree**0.5)):
            if abs(factor / size - 1) < _CLOSE_FACTOR:
                texts.append(f"×{label}")
            elif abs(factor * size - 1) < _CLOSE_FACTOR:
                texts.append(f"÷{label}")
    return " or ".join(texts) or f"{factor:.6g}"


def classify_by_parts(
    tensor: ComparedTensor,
    tolerance: float,
    parts: Mapping[str, Array],
    rank: CapturedRank,
    extra: str = "",
) -> ErrorKind | None:
    """Fit a wrong tensor as a sum of parts with factors, and return a kind that names the wrong factors.

    Args:
        tensor: The wrong tensor; its reference is the sum of the parts, without the part `extra`.
        tolerance: Relative tolerance of the tensor.
        parts: Named parts of the sum.
        rank: Any rank of the strategy, for the names of factors.
        extra: Name of a part that should not be in the sum, such as the gradient of the iteration before.

    Returns:
        The kind; None if the fit does not explain the tensor, or is too large to compute.
    """
    if tensor.ours.size * len(parts) > _MAX_FITTED_ELEMENTS:
        return None
    ours = _flatten(tensor.ours)
    columns = np.stack([_flatten(part) for part in parts.values()], axis=1)
    factors, _, num_independent, _ = np.linalg.lstsq(columns, ours, rcond=1e-9)
    limit = _residual_limit(relative_error(tensor.ours, tensor.reference), tolerance)
    if num_independent < len(parts) or relative_error(columns @ factors, ours) > limit:
        return None
    error_norm = np.linalg.norm(tensor.ours - tensor.reference)
    wrong_factors: dict[str, float] = {}
    for name, factor in zip(parts, factors, strict=True):
        expected_factor = 0.0 if name == extra else 1.0
        error_of_part = np.linalg.norm(parts[name]) * abs(factor - expected_factor)
        if error_of_part > UNEXPLAINED_FRACTION * error_norm:
            wrong_factors[name] = float(factor)
    return _make_kind_of_factors(wrong_factors, rank, extra)


def _make_kind_of_factors(
    wrong_factors: Mapping[str, float], rank: CapturedRank, extra: str
) -> ErrorKind | None:
    """Return the kind that names the wrong factors of parts; None if there are none.

    A factor near 0 means that the part is missing. If the name of the kind has a single item, the last factor is
    the factor of the kind.
    """
    if not wrong_factors:
        return None
    descriptions: list[str] = []
    missing_parts: list[str] = []
    for name, factor in wrong_factors.items():
        if abs(factor) < UNEXPLAINED_FRACTION:
            missing_parts.append(name)
        else:
            descriptions.append(_describe_wrong_factor(name, factor, rank, is_extra=name == extra))
    if missing_parts:
        descriptions.append(f"without {', '.join(missing_parts)}")
    last_factor = list(wrong_factors.values())[-1]
    return ErrorKind(", ".join(descriptions), last_factor if len(descriptions) == 1 else None)


def _describe_wrong_factor(name: str, factor: float, rank: CapturedRank, *, is_extra: bool) -> str:
    """Return how a part of a sum is wrong, such as `loss ×2`, or `loss on top` for a part that should not be there."""
    if is_extra and abs(factor - 1) < UNEXPLAINED_FRACTION:
        return f"{name} on top"
    text = name_factor(factor, rank)
    return f"{name} {text}" if text[0] in "×÷" else f"{name} ×{text}"


def _find_missing_sum(
    tensors: Sequence[ComparedTensor], limit: float, rank: CapturedRank
) -> Iterator[ErrorKind]:
    """Yield a kind if every rank should have the full tensor, but the ranks' tensors are terms of its sum or mean."""
    if not tensors:
        return
    reference = tensors[0].reference
    copies = [tensor for tensor in tensors if np.array_equal(tensor.reference, reference)]
    num_ranks = len({copy.rank for copy in copies})
    if num_ranks < 2 or num_ranks != len(copies):
        return
    group = "TP" if num_ranks == rank.tensor[1] else f"{num_ranks}"
    # Ranks with equal tensors have summed over a group that is too small, and hold the same term.
    terms = _list_distinct_values(copies, limit)
    ranks_per_term = num_ranks // len(terms)
    total = np.sum(terms, axis=0, dtype=np.float64)
    if len(terms) < 2:
        return
    partial = f", only over groups of {ranks_per_term}" if ranks_per_term > 1 else ""
    if relative_error(total, reference) < limit:
        yield ErrorKind(f"missing sum over {group} ranks{partial}")
    elif relative_error(total / len(terms), reference) < limit:
        yield ErrorKind(f"missing mean over {group} ranks{partial}")


def _list_distinct_values(copies: Sequence[ComparedTensor], limit: float) -> list[Array]:
    """Return the values of the ranks, each once: values that differ by no more than `limit` count as equal."""
    distinct: list[Array] = []
    for copy in copies:
        if not any(relative_error(copy.ours, values) < limit for values in distinct):
            distinct.append(copy.ours)
    return distinct


def _have_unequal_copies(tensors: Sequence[ComparedTensor], limit: float) -> bool:
    """Return True if ranks that should have the same tensor have tensors that differ by more than `limit`."""
    copies_by_value: dict[bytes, list[ComparedTensor]] = {}
    for tensor in tensors:
        copies_by_value.setdefault(tensor.reference.tobytes(), []).append(tensor)
    return any(len(_list_distinct_values(copies, limit)) > 1 for copies in copies_by_value.values())


def _find_bf16_rounding(tensor: ComparedTensor) -> Iterator[ErrorKind]:
    """Yield a kind if a float32 tensor was rounded to bf16 and the reference was not.

    A tensor counts as rounded in two cases. Either all its values are bf16 numbers, or nearly all elements
    differ from the reference by at most half a bf16 step, some upwards and some downwards.
    """
    ours, reference = tensor.ours, tensor.reference
    if ours.dtype != np.float32 or reference.dtype != np.float32:
        return
    if not _bits_below_bf16(reference).any():
        return
    is_nonzero = reference != 0
    is_all_bf16 = not _bits_below_bf16(ours).any()
    difference = ours[is_nonzero].astype(np.float64) - reference[is_nonzero]
    errors = difference / reference[is_nonzero]
    largest_rounding = _BF16_STEP if is_all_bf16 else _BF16_STEP / 2
    is_rounding = np.abs(errors) <= largest_rounding
    if len(errors) < _MIN_ROUNDED_ELEMENTS or np.mean(is_rounding) < _REQUIRED_FRACTION:
        return
    is_in_both_directions = abs(np.sign(errors).mean()) < 1 / 4
    is_visible = np.median(np.abs(errors)) > _VISIBLE_ROUNDING
    if is_all_bf16 or (is_in_both_directions and is_visible):
        yield ErrorKind("rounding to bf16")


def _bits_below_bf16(values: Array) -> Array:
    """Return the 16 bits of each float32 value that a bf16 number does not have."""
    return np.asarray(np.ascontiguousarray(values).view(np.uint32) & 0xFFFF)


def _find_mixed_tensors(
    tensor: ComparedTensor,
    comparison: TensorComparison,
    similar_tensors: Iterable[tuple[str, Array]],
) -> Iterator[ErrorKind]:
    """Yield a kind for each similar tensor that replaces the right tensor, or is added to it.

    If a similar tensor has the name of the wrong tensor itself, the wrong tensor is an optimizer state and the
    similar tensor is its gradient. The kind then says that the state contains another multiple of the gradient, or
    nothing else than a multiple of the gradient, as after a resume that lost the state.
    """
    _, wrong_name, slot = comparison.key
    ours, reference = _flatten(tensor.ours), _flatten(tensor.reference)
    limit = UNEXPLAINED_FRACTION * comparison.error
    for name, values in similar_tensors:
        similar, is_own_gradient = _flatten(values), name == wrong_name
        if is_own_gradient:
            if slot == "exp_avg_sq":
                similar = similar**2
            if _is_multiple(ours, similar, limit) and not _is_multiple(reference, similar, limit):
                yield ErrorKind(_ONLY_GRADIENT)
        elif relative_error(ours, similar) < limit:
            yield ErrorKind(f"that of {name}")
        elif _is_error_explained_by(tensor, values):
            yield ErrorKind(f"in part that of {name}")
        square = float(similar @ similar)
        factor = float((ours - reference) @ similar) / square if square else 0.0
        if not factor or relative_error(reference + factor * similar, ours) > limit:
            continue
        if is_own_gradient:
            yield ErrorKind(MORE_GRADIENT)
        elif abs(factor - 1) < UNEXPLAINED_FRACTION:
            yield ErrorKind(f"a sum too many: {name} on top")


def _is_multiple(values: Array, similar: Array, limit: float) -> bool:
    """Return True if a vector is a constant times another one, within a relative error of `limit`."""
    square = float(similar @ similar)
    factor = float(values @ similar) / square if square else 0.0
    return factor != 0 and relative_error(factor * similar, values) < limit


def _is_error_explained_by(tensor: ComparedTensor, similar: Array) -> bool:
    """Return True if the wrong elements of a tensor are equal to the same elements of `similar`."""
    is_wrong = find_wrong_elements(tensor)
    if not is_wrong.any():
        return False
    ours = tensor.ours[is_wrong]
    error = relative_error(ours, tensor.reference[is_wrong])
    return relative_error(ours, similar[is_wrong]) < UNEXPLAINED_FRACTION * error


def _flatten(values: Array) -> Array:
    """Return the values as a vector of float64."""
    return values.astype(np.float64).ravel()
