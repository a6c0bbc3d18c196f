"""What kind of error a tensor has: a factor, a missing sum, rows in another order, copies that differ, …

The tests are tried in an order in which an earlier one explains more; each fits what was computed
(`h`, ours) to what should have been (`f`, the reference's).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from parakit.artifacts.capture import UNOBSERVED, CapturedRank, Stage
from parakit.verify.captured import Array
from parakit.verify.comparison import ComparedTensor, TensorComparison, relative_error

_LEFT = 0.1
"""Largest share of an error that a fit may leave unexplained, where that is above rounding."""
_MOST = 0.9
"""Share of the wrong rows that must be found elsewhere to say that rows were moved."""
_MOST_ROWS = 65_536
_MOST_FITTED = 2**26
"""Elements of all parts together: half a gigabyte of float64."""
_FEWEST = 16
"""Elements from which rounding can be told."""
_SOME_RANKS = "wrong on some ranks only"
MORE_GRADIENT = "another multiple of its gradient"


@dataclass(frozen=True)
class ErrorKind:
    """The kind of an error."""

    name: str
    """In words, such as `factor ×TP` or `missing sum over TP ranks`."""
    factor: float | None = None
    """Of ours to the reference's, where that is what is wrong."""


def classify_error(
    found: TensorComparison,
    pairs: Sequence[ComparedTensor],
    rank: CapturedRank,
    like: Iterable[tuple[str, Array]] = (),
) -> ErrorKind:
    """Say what is wrong with a tensor.

    Args:
        found: Its comparison, which differs.
        pairs: All ranks' tensors of one micro batch, the worst one's; the worst alone for parameters.
        rank: Any rank of the strategy, for its degrees.
        like: The reference's other tensors that it may be mixed up with (`Compared.like`).
    """
    return next(_kinds(found, pairs, rank, like), ErrorKind("other"))


def _kinds(
    found: TensorComparison,
    pairs: Sequence[ComparedTensor],
    rank: CapturedRank,
    like: Iterable[tuple[str, Array]],
) -> Iterator[ErrorKind]:
    if found.said:
        yield ErrorKind(found.said)
    if found.uncovered and not found.compared:
        yield ErrorKind("held by no rank")
    if found.uncovered:
        yield ErrorKind(f"{found.uncovered} elements are held by no rank")
    if found.key[2] == UNOBSERVED:
        yield ErrorKind("vanishes under observation: a buffer that is used again, or a race")
    pair = found.worst
    if pair is None:
        if found.replicas_differ:
            yield ErrorKind("copies differ between ranks")
        return
    if not np.issubdtype(pair.ours.dtype, np.floating):
        yield from (ErrorKind(f"that of {name}") for name, other in like if _is(pair, other))
        yield from _moved(pair)
        yield ErrorKind("other values")
        return
    if not np.isfinite(pair.ours).all():
        yield ErrorKind("not finite")
    limit = _limit(found.error, found.tolerance)
    if found.key[0] is Stage.NORM:
        yield from _norms(pairs, limit)
    yield from _factor(pair, limit, rank)
    yield from _rounded_to_half(pair)
    yield from _sums(pairs, limit, rank)
    yield from _of_others(pair, found, like)
    yield from _moved(pair)
    if found.key[0] in (Stage.OUTPUTS, Stage.ACTIVATION_GRADIENTS) and rank.dropout:
        yield from _random(pair)
    yield from _somewhere(pair, found, rank)
    if found.replicas_differ:
        yield ErrorKind("copies differ between ranks")
    if found.wrong_ranks and found.right_ranks:
        yield ErrorKind(_SOME_RANKS)


def _limit(error: float, tolerance: float) -> float:
    """What a fit may leave of an error."""
    return min(max(2 * tolerance, 1e-3 * error), _LEFT * error)


def _norms(pairs: Sequence[ComparedTensor], limit: float) -> Iterator[ErrorKind]:
    """Whether ranks have the same norm, and if not, whether each has that of its own part."""
    norms = {float(pair.ours.reshape(-1)[0]) for pair in pairs}
    if len(norms) > 1:
        whole = np.array([sum(norm**2 for norm in norms) ** 0.5])
        if relative_error(whole, pairs[0].reference) < limit:
            yield ErrorKind(f"missing sum of squares over {len(norms)} ranks")
        yield ErrorKind("another norm on each of the ranks")


def _factor(pair: ComparedTensor, limit: float, rank: CapturedRank) -> Iterator[ErrorKind]:
    """h ≈ α·f, with α the least squares fit."""
    ours, reference = _flat(pair.ours), _flat(pair.reference)
    square = float(reference @ reference)
    if square == 0:
        return
    factor = float(ours @ reference) / square
    if factor == 0 or relative_error(ours / factor, reference) > limit:
        return
    yield ErrorKind(f"factor {name_factor(factor, rank)}", factor)


def name_factor(factor: float, rank: CapturedRank) -> str:
    """Return the degree of parallelism that a factor is, such as `×TP`, or its number."""
    degrees = {
        "TP": rank.tensor[1],
        "DP": rank.data[1],
        "CP": rank.context[1],
        "EP": rank.expert[1],
        "PP": rank.pipeline[1],
        "micro batches": rank.micro_batches,
        "DP × CP": rank.data[1] * rank.context[1] if min(rank.data[1], rank.context[1]) > 1 else 1,
    }
    close = 1e-3
    fits = []
    for name, degree in degrees.items():
        for size, said in ((degree, name), (degree**0.5, f"√{name}")):
            if degree > 1 and abs(factor / size - 1) < close:
                fits.append(f"×{said}")
            elif degree > 1 and abs(factor * size - 1) < close:
                fits.append(f"÷{said}")
    return " or ".join(fits) or f"{factor:.6g}"


def classify_by_parts(
    pair: ComparedTensor,
    tolerance: float,
    parts: Mapping[str, Array],
    rank: CapturedRank,
    extra: str = "",
) -> ErrorKind | None:
    """Say by what the parts are multiplied that a tensor is a sum of; None if that is not what is wrong.

    The reference's is the sum of the parts, but for `extra`, such as what should have been forgotten.
    """
    if pair.ours.size * len(parts) > _MOST_FITTED:
        return None
    columns = np.stack([_flat(part) for part in parts.values()], axis=1)
    found, _, independent, _ = np.linalg.lstsq(columns, _flat(pair.ours), rcond=1e-9)
    limit = _limit(relative_error(pair.ours, pair.reference), tolerance)
    if independent < len(parts) or relative_error(columns @ found, _flat(pair.ours)) > limit:
        return None
    said, lost, factor = [], [], None
    for name, share in zip(parts, found, strict=True):
        right = 0.0 if name == extra else 1.0
        size = np.linalg.norm(parts[name]) * abs(share - right)
        if size > _LEFT * np.linalg.norm(pair.ours - pair.reference):
            factor = float(share)
            times = name_factor(factor, rank)
            if abs(factor) < _LEFT:
                lost.append(name)
            elif name == extra and abs(factor - 1) < _LEFT:
                said.append(f"{name} on top")
            else:
                said.append(f"{name} {times if times[0] in '×÷' else f'×{times}'}")
    said += [f"without {', '.join(lost)}"] if lost else []
    return ErrorKind(", ".join(said), factor if len(said) == 1 else None) if said else None


def _sums(pairs: Sequence[ComparedTensor], limit: float, rank: CapturedRank) -> Iterator[ErrorKind]:
    """Ranks that should each have the whole: their sum fits, or each has others' share on top."""
    if not pairs:
        return
    reference = pairs[0].reference
    alike = [pair for pair in pairs if np.array_equal(pair.reference, reference)]
    ranks = len({pair.rank for pair in alike})
    if ranks < 2 or ranks != len(alike):
        return
    total = np.sum([pair.ours for pair in alike], axis=0, dtype=np.float64)
    over = "TP" if ranks == rank.tensor[1] else f"{ranks}"
    if relative_error(total, reference) < limit:
        yield ErrorKind(f"missing sum over {over} ranks")
    elif relative_error(total / ranks, reference) < limit:
        yield ErrorKind(f"missing mean over {over} ranks")


def _rounded_to_half(pair: ComparedTensor) -> Iterator[ErrorKind]:
    """Rounded to the bits of bf16 where the reference is not; or off as far, either way, everywhere."""
    ours, reference = pair.ours, pair.reference
    if ours.dtype != np.float32 or reference.dtype != np.float32 or not _low_bits(reference).any():
        return
    there, exact = reference != 0, not _low_bits(ours).any()
    off = (ours[there].astype(np.float64) - reference[there]) / reference[there]
    if len(off) < _FEWEST or np.mean(np.abs(off) <= 2.0 ** (-7 if exact else -8)) < _MOST:
        return
    either_way = abs(np.sign(off).mean()) < 1 / 4
    if exact or (either_way and np.median(np.abs(off)) > 2.0**-12):
        yield ErrorKind("rounding to bf16")


def _low_bits(values: Array) -> Array:
    return np.asarray(np.ascontiguousarray(values).view(np.uint32) & 0xFFFF)


def _of_others(
    pair: ComparedTensor, found: TensorComparison, like: Iterable[tuple[str, Array]]
) -> Iterator[ErrorKind]:
    """Another parameter's tensor, or this one with it on top; a state with more of its gradient."""
    ours, reference = _flat(pair.ours), _flat(pair.reference)
    for name, values in like:
        other = _flat(values)
        if name == found.key[1]:
            other = other**2 if found.key[2] == "exp_avg_sq" else other
        elif relative_error(ours, other) < _LEFT * found.error:
            yield ErrorKind(f"that of {name}")
        elif _is(pair, values):
            yield ErrorKind(f"in part that of {name}")
        square = float(other @ other)
        share = float((ours - reference) @ other) / square if square else 0.0
        if not share or relative_error(reference + share * other, ours) > _LEFT * found.error:
            continue
        if name == found.key[1]:
            yield ErrorKind(MORE_GRADIENT)
        elif abs(share - 1) < _LEFT:
            yield ErrorKind(f"a sum too many: {name} on top")


def _is(pair: ComparedTensor, other: Array) -> bool:
    """Whether all that is wrong is another tensor's."""
    off = np.abs(np.subtract(pair.ours, pair.reference, dtype=np.float64))
    wrong = off > 1e-3 * off.max(initial=0.0)
    if not wrong.any():
        return False
    ours, reference, there = (one[wrong] for one in (pair.ours, pair.reference, other))
    return relative_error(ours, there) < _LEFT * relative_error(ours, reference)


def _moved(pair: ComparedTensor) -> Iterator[ErrorKind]:
    """Rows, or elements, of the reference in other places."""
    ours, reference = _rows(pair.ours), _rows(pair.reference)
    if ours.shape != reference.shape or not 1 < len(ours) <= _MOST_ROWS:
        return
    places: dict[bytes, list[int]] = {}
    for index, row in enumerate(_rounded(reference)):
        places.setdefault(row.tobytes(), []).append(index)
    if len(places) < len(reference) / 2:  # Most rows have equals, so that any fits.
        return
    wrong, shifts = 0, []
    for index, row in enumerate(_rounded(ours)):
        found = places.get(row.tobytes(), [])
        if index in found:
            continue
        wrong += 1
        if found:
            shifts.append(min(found, key=lambda place: abs(place - index)) - index)
    if not wrong or len(shifts) < _MOST * wrong:
        return
    if len(set(shifts)) == 1:
        yield ErrorKind(f"rows shifted by {shifts[0]:+d}")
    else:
        yield ErrorKind("rows in another order")


def _random(pair: ComparedTensor) -> Iterator[ErrorKind]:
    """Zeros in other places: another dropout mask."""
    ours, reference = pair.ours == 0, pair.reference == 0
    shares = float(ours.mean()), float(reference.mean())
    if min(shares) > 0.01 and (ours != reference).mean() > 0.5 * min(shares):
        yield ErrorKind("another random state")


def _somewhere(
    pair: ComparedTensor, found: TensorComparison, rank: CapturedRank
) -> Iterator[ErrorKind]:
    """Wrong in few places only: in the vocabulary's padding, or in some rows."""
    ours, reference = _rows(pair.ours), _rows(pair.reference)
    if ours.shape != reference.shape or len(ours) < 2:
        return
    size = float(np.linalg.norm(reference)) / len(reference) ** 0.5 or 1.0
    wrong = np.linalg.norm(ours - reference, axis=1) > found.tolerance * size
    places = np.flatnonzero(wrong)
    if len(places) and "word_embeddings" in found.key[1] and places[0] >= rank.vocabulary:
        yield ErrorKind("in the vocabulary's padding only")
    elif 0 < len(places) <= len(ours) / 4:
        on = f"{_SOME_RANKS}, " if found.wrong_ranks and found.right_ranks else ""
        yield ErrorKind(
            f"{on}in {len(places)} of {len(ours)} rows, from {places[0]} to {places[-1]}"
        )


def _flat(values: Array) -> Array:
    return values.astype(np.float64).ravel()


def _rows(values: Array) -> Array:
    """One row an element of the leading dimensions; a vector's elements are rows."""
    return values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(-1, 1)


def _rounded(values: Array) -> Array:
    """Values to three digits of the tensor's size, so that equal rows have equal bytes."""
    if not np.issubdtype(values.dtype, np.floating):
        return values
    size = float(np.abs(values).max()) or 1.0
    return np.round(values / size * 1000).astype(np.int32)
