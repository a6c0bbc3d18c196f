"""Find the pattern of a tensor's errors: which elements, rows or columns are wrong, and what they have in common.

A pattern is named as a kind of error. Each function compares a rank's wrong tensor with what it should be, and yields
the kinds that fit. A row has one index per leading dimension; the elements of a vector are rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from parakit.artifacts.capture import CapturedRank
from parakit.verify.captured import Array
from parakit.verify.comparison import ComparedTensor, TensorComparison, relative_error

UNEXPLAINED_FRACTION = 0.1
"""Largest fraction of an error that a fit may leave unexplained, if that is more than rounding."""
SOME_RANKS = "wrong on some ranks only"
"""Kind of an error that other ranks do not have."""
_MIN_STEPS = 4
"""Smallest number of elements whose errors can be told to have one size."""
_STEP_ROUNDING = 1e-3
"""Relative distance of an element's error from the median error that rounding of the element explains."""
_SMALL_FRACTION = 1 / 4
"""Largest fraction of rows, columns or elements that is named by its position."""
_MAX_ROWS_PER_VECTOR = 8
"""Number of wrong rows per distinct error from which the errors count as few vectors on top of many rows."""
_BF16_ERRORS = (2.0**-12, 2.0**-7)
"""Range of the relative error of tensors that are computed from numbers rounded to bf16."""
_LARGEST_SIGN_IMBALANCE = 1 / 4
"""Largest absolute average sign of errors that count as random."""
_VISIBLE_ERROR = 0.01
"""Fraction of the largest absolute error that more than half of random errors exceed."""
_MIN_NOISY_ELEMENTS = 256
"""Smallest number of elements in which random errors can be told from others."""
_MIN_COLUMNS = 4
"""Smallest number of columns in which a factor per row can be told from other errors."""
_REQUIRED_FRACTION = 0.9
"""Smallest fraction of wrong rows that a kind must explain."""
_MAX_ROWS = 65_536
"""Largest number of rows that are searched for moved rows."""
_SIGNIFICANT_ERROR = 1e-3
"""Fraction of the largest absolute error above which an element counts as wrong."""
_MIN_ZERO_FRACTION = 0.01
"""Fraction of zeros from which a tensor can show its mask."""


@dataclass(frozen=True)
class ErrorKind:
    """Kind of a tensor's error."""

    name: str
    """Description, such as `factor ×TP` or `missing sum over TP ranks`."""
    factor: float | None = None
    """Ratio of ours to the reference's tensor, or to its wrong part; None if the error is no factor."""


def find_wrong_elements(tensor: ComparedTensor) -> Array:
    """Return a mask of the elements whose error is significant compared with the largest error."""
    errors = np.abs(np.subtract(tensor.ours, tensor.reference, dtype=np.float64))
    return np.asarray(errors > _SIGNIFICANT_ERROR * errors.max(initial=0.0))


def find_zeros(tensor: ComparedTensor) -> Iterator[ErrorKind]:
    """Yield a kind if all wrong elements are zero: the tensor, or a part of it, was never computed or was lost."""
    if tensor.ours.size == 1 or not tensor.reference.any():
        return
    if not tensor.ours.any():
        yield ErrorKind("zero", 0.0)
        return
    is_wrong = find_wrong_elements(tensor)
    # A dropout mask of another random state also puts zeros, but then other elements are wrong, too.
    if is_wrong.any() and not tensor.ours[is_wrong].any():
        yield ErrorKind(f"zero in {is_wrong.sum()} of {is_wrong.size} elements")


def find_moved_rows(tensor: ComparedTensor) -> Iterator[ErrorKind]:
    """Yield a kind if the wrong rows are rows of the reference in another order. Elements of a vector count as rows."""
    ours, reference = _reshape_to_rows(tensor.ours), _reshape_to_rows(tensor.reference)
    if ours.shape != reference.shape or not 1 < len(ours) <= _MAX_ROWS:
        return
    indices_of_row: dict[bytes, list[int]] = {}
    for index, row in enumerate(_round_for_search(reference)):
        indices_of_row.setdefault(row.tobytes(), []).append(index)
    # If most rows are equal to other rows, any order of the rows would fit.
    if len(indices_of_row) < len(reference) / 2:
        return
    num_wrong = 0
    shifts: list[int] = []
    for index, row in enumerate(_round_for_search(ours)):
        reference_indices = indices_of_row.get(row.tobytes(), [])
        if index in reference_indices:
            continue
        num_wrong += 1
        if reference_indices:
            distances = [reference_index - index for reference_index in reference_indices]
            shifts.append(min(distances, key=abs))
    if not num_wrong or len(shifts) < _REQUIRED_FRACTION * num_wrong:
        return
    if len(set(shifts)) == 1:
        yield ErrorKind(f"rows shifted by {shifts[0]:+d}")
    else:
        yield ErrorKind("rows in another order")


def find_other_dropout_mask(tensor: ComparedTensor) -> Iterator[ErrorKind]:
    """Yield a kind if the tensor is zero in other places than the reference."""
    is_our_zero, is_reference_zero = tensor.ours == 0, tensor.reference == 0
    smaller_fraction = min(float(is_our_zero.mean()), float(is_reference_zero.mean()))
    fraction_that_differs = (is_our_zero != is_reference_zero).mean()
    if smaller_fraction > _MIN_ZERO_FRACTION and fraction_that_differs > 0.5 * smaller_fraction:
        yield ErrorKind("another random state")


def find_other_mask(tensor: ComparedTensor) -> Iterator[ErrorKind]:
    """Yield a kind if elements are zero that should not be, or the reverse, in a tensor with many zeros."""
    is_our_zero, is_reference_zero = tensor.ours == 0, tensor.reference == 0
    if is_reference_zero.mean() < _MIN_ZERO_FRACTION:
        return
    num_hidden = int((is_our_zero & ~is_reference_zero).sum())
    num_shown = int((is_reference_zero & ~is_our_zero).sum())
    size = tensor.reference.size
    texts = []
    if num_hidden >= _MIN_ZERO_FRACTION * size:
        texts.append(f"zero in {num_hidden} of {size} elements that should not be")
    if num_shown >= _MIN_ZERO_FRACTION * size:
        texts.append(f"not zero in {num_shown} of {size} elements that should be")
    if texts:
        yield ErrorKind(f"another mask: {', '.join(texts)}")


def find_repeated_vectors(tensor: ComparedTensor) -> Iterator[ErrorKind]:
    """Yield a kind if the errors of many rows are one vector, or few vectors, that was added to them."""
    ours, reference = _reshape_to_rows(tensor.ours), _reshape_to_rows(tensor.reference)
    if ours.shape != reference.shape or ours.shape[1] < _MIN_COLUMNS:
        return
    errors = np.subtract(ours, reference, dtype=np.float64)
    norms = np.linalg.norm(errors, axis=1)
    errors = errors[norms > _SIGNIFICANT_ERROR * norms.max(initial=0.0)]
    if len(errors) < _MAX_ROWS_PER_VECTOR:
        return
    num_vectors = len({row.tobytes() for row in _round_for_search(errors)})
    if num_vectors * _MAX_ROWS_PER_VECTOR > len(errors):
        return
    vectors = "the same vector" if num_vectors == 1 else f"one of {num_vectors} vectors"
    yield ErrorKind(f"{vectors} on top of {len(errors)} of {len(ours)} rows")


def find_factor_per_row(tensor: ComparedTensor, limit: float) -> Iterator[ErrorKind]:
    """Yield a kind if each row is the reference's row times a factor of its own.

    The factors are found by least squares, and may leave an error of `limit`.
    """
    ours = _reshape_to_rows(tensor.ours).astype(np.float64)
    reference = _reshape_to_rows(tensor.reference).astype(np.float64)
    if ours.shape != reference.shape or len(ours) < 2 or ours.shape[1] < _MIN_COLUMNS:
        return
    squares = np.einsum("ij,ij->i", reference, reference)
    products = np.einsum("ij,ij->i", ours, reference)
    factors = np.divide(products, squares, out=np.ones_like(squares), where=squares > 0)
    scaled = factors[:, np.newaxis] * reference
    if relative_error(ours, scaled) > limit:
        return
    # Rows that are zero have no factor.
    factors = factors[squares > 0]
    yield ErrorKind(
        f"each row times a factor of its own, from {factors.min():.4g} to {factors.max():.4g}"
    )


def find_approximate_factor(tensor: ComparedTensor) -> Iterator[ErrorKind]:
    """Yield a kind if a constant factor explains most of the error, and not all of it."""
    ours, reference = tensor.ours.astype(np.float64).ravel(), tensor.reference.astype(np.float64)
    reference = reference.ravel()
    square = float(reference @ reference)
    factor = float(ours @ reference) / square if square else 0.0
    if ours.size < _MIN_COLUMNS or factor <= 0:
        return
    explained_error = np.linalg.norm((factor - 1) * reference)
    if explained_error**2 >= _REQUIRED_FRACTION * np.linalg.norm(ours - reference) ** 2:
        yield ErrorKind(f"about {factor:.4g} times as large")


def find_noise(tensor: ComparedTensor) -> Iterator[ErrorKind]:
    """Yield a kind if the errors are random and as large as rounding to bf16, as after sums of rounded numbers."""
    errors = np.subtract(tensor.ours, tensor.reference, dtype=np.float64).ravel()
    reference = tensor.reference.astype(np.float64).ravel()
    error_norm, norm = np.linalg.norm(errors), np.linalg.norm(reference)
    if (
        errors.size < _MIN_NOISY_ELEMENTS
        or not _BF16_ERRORS[0] * norm < error_norm < _BF16_ERRORS[1] * norm
    ):
        return
    correlation = abs(errors @ reference) / (error_norm * norm)
    is_in_both_directions = abs(np.sign(errors).mean()) < _LARGEST_SIGN_IMBALANCE
    # Errors in few elements have a cause of their own.
    is_everywhere = np.mean(np.abs(errors) > _VISIBLE_ERROR * np.abs(errors).max()) > 0.5
    if correlation < UNEXPLAINED_FRACTION and is_in_both_directions and is_everywhere:
        yield ErrorKind("noise of the size of bf16 rounding")


def find_equal_steps(tensor: ComparedTensor) -> Iterator[ErrorKind]:
    """Yield a kind if each element is wrong by the same amount, up or down, as after an update by the sign alone.

    Nothing is yielded for fewer than `_MIN_STEPS` elements.
    """
    errors = np.subtract(tensor.ours, tensor.reference, dtype=np.float64).ravel()
    step = float(np.median(np.abs(errors)))
    goes_both_ways = errors.min() < 0 < errors.max()
    if errors.size < _MIN_STEPS or not step or not goes_both_ways:
        return
    if (np.abs(np.abs(errors) / step - 1) < _STEP_ROUNDING).all():
        yield ErrorKind(f"each element is {step:.3g} larger or smaller")


def find_few_elements(tensor: ComparedTensor, tolerance: float) -> Iterator[ErrorKind]:
    """Yield a kind if at most a quarter of the columns or of the elements is wrong.

    An element is wrong if its error is above `tolerance`, relative to the reference's quadratic mean.
    """
    errors = np.abs(np.subtract(tensor.ours, tensor.reference, dtype=np.float64))
    usual_size = float(np.linalg.norm(tensor.reference)) / tensor.reference.size**0.5 or 1.0
    is_wrong = errors > tolerance * usual_size
    if not is_wrong.any():
        return
    columns = np.flatnonzero(_reshape_to_rows(is_wrong).any(axis=0))
    num_columns = is_wrong.shape[-1] if is_wrong.ndim > 1 else 1
    if len(columns) <= _SMALL_FRACTION * num_columns:
        first, last = columns[0], columns[-1]
        yield ErrorKind(f"in {len(columns)} of {num_columns} columns, from {first} to {last}")
    elif is_wrong.mean() <= _SMALL_FRACTION:
        yield ErrorKind(f"in {is_wrong.sum()} of {is_wrong.size} elements")


def find_wrong_rows(
    tensor: ComparedTensor, comparison: TensorComparison, rank: CapturedRank
) -> Iterator[ErrorKind]:
    """Yield a kind if at most a quarter of the rows is wrong, or only rows of the vocabulary's padding."""
    ours, reference = _reshape_to_rows(tensor.ours), _reshape_to_rows(tensor.reference)
    if ours.shape != reference.shape or len(ours) < 2:
        return
    # The root of the mean square norm of a row; 1 if the reference is 0 everywhere.
    usual_norm = float(np.linalg.norm(reference)) / len(reference) ** 0.5 or 1.0
    errors = np.linalg.norm(ours - reference, axis=1)
    wrong_rows = np.flatnonzero(errors > comparison.tolerance * usual_norm)
    if not len(wrong_rows):
        return
    first, last = wrong_rows[0], wrong_rows[-1]
    if "word_embeddings" in comparison.key[1] and first >= rank.vocabulary:
        yield ErrorKind("in the vocabulary's padding only")
    elif len(wrong_rows) <= _SMALL_FRACTION * len(ours):
        prefix = f"{SOME_RANKS}, " if comparison.wrong_ranks and comparison.right_ranks else ""
        rows = f"in {len(wrong_rows)} of {len(ours)} rows, from {first} to {last}"
        yield ErrorKind(f"{prefix}{rows}")


def _reshape_to_rows(values: Array) -> Array:
    """Return a matrix with one row per index of the leading dimensions; a vector's elements are rows."""
    return values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(-1, 1)


def _round_for_search(values: Array) -> Array:
    """Round values to thousandths of the largest value, so that nearly equal rows have equal bytes.

    Integers and truth values are returned as they are.
    """
    if not np.issubdtype(values.dtype, np.floating):
        return values
    size = float(np.abs(values).max()) or 1.0
    return np.round(values / size * 1000).astype(np.int32)
