"""One tensor of all ranks and micro batches, compared with the reference's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from parakit.artifacts.capture import STRETCH, Stage
from parakit.verify.captured import Array

ComparisonKey = tuple[Stage, str, str]
"""Stage, name and slot of a tensor, over all micro batches and ranks."""


@dataclass(frozen=True)
class ComparedTensor:
    """A tensor of one rank, and the same part of the reference's."""

    rank: int
    micro_batch: int | None
    ours: Array
    reference: Array
    region: tuple[slice, ...] = ()
    """Where it lies in the whole parameter; empty if it is all of it, or no parameter's."""


@dataclass
class TensorComparison:
    """One tensor over all ranks and micro batches."""

    key: ComparisonKey
    tolerance: float
    order: float
    """Its place among all, in the order in which the reference computed them."""
    error: float = 0.0
    """The largest, relative; infinite where the reference is zero and this is not."""
    compared: int = 0
    wrong_ranks: set[int] = field(default_factory=set)
    right_ranks: set[int] = field(default_factory=set)
    replicas_differ: tuple[int, ...] = ()
    """Ranks whose copies differ, where they must be equal bit for bit."""
    uncovered: int = 0
    """Elements of a parameter that no rank holds."""
    worst: ComparedTensor | None = None
    copies: list[ComparedTensor] = field(default_factory=list)
    """Of a parameter that is wrong, every rank's part: what they are together says what is wrong."""
    said: str = ""
    """What is wrong, in words, where no values say it."""

    @property
    def differs(self) -> bool:
        """Whether it is wrong."""
        return self.error > self.tolerance or bool(self.replicas_differ) or self.uncovered > 0

    def add_copies(self, pair: ComparedTensor, other: int) -> None:
        """Note that a tensor is not that of another rank, which should be equal bit for bit."""
        self.replicas_differ = tuple(sorted({*self.replicas_differ, pair.rank, other}))
        if self.worst is None:
            self.worst = pair
            self.error = max(self.error, relative_error(pair.ours, pair.reference))

    @property
    def ratio(self) -> float:
        """Error over tolerance: what the picture shows."""
        if self.replicas_differ or self.uncovered:
            return max(np.inf if self.tolerance == 0 else self.error / self.tolerance, 1.0)
        if self.tolerance == 0:
            return 0.0 if self.error == 0 else np.inf
        return self.error / self.tolerance

    def add(self, pair: ComparedTensor, error: float | None = None) -> None:
        """Take one rank's tensor in, with the relative error unless that is measured otherwise."""
        if error is None:
            error = relative_error(pair.ours, pair.reference)
        self.compared += 1
        wrong = error > self.tolerance
        (self.wrong_ranks if wrong else self.right_ranks).add(pair.rank)
        if wrong and (self.worst is None or error > self.error):
            self.worst = pair
        self.error = max(self.error, error)


@dataclass(frozen=True)
class ParameterFault:
    """What is wrong with a parameter where no values of two runs say it."""

    name: str
    ranks: tuple[int, ...]
    kind: str
    """In words; empty where nothing is wrong."""
    share: float = 1.0
    """Of its elements."""


@dataclass(frozen=True)
class CaptureComparison:
    """All tensors of two captures."""

    comparisons: tuple[TensorComparison, ...]
    """In the order in which the reference computed them."""
    not_aligned: tuple[str, ...]
    """What could not be compared, and why."""
    seen: int
    """Tensors of the strategy's ranks, and those of the reference that none of them has."""
    compared: int
    """How many of them were compared."""
    routing_flips: int = 0
    """Tokens for which a router chose other experts, within the rounding of what it chose by."""
    constant: int | None = None
    """Parameters and buffers that begin with one value; None where no start was captured."""
    initialised: int = 0
    """Pieces of parameters whose own initialisation, of the strategy's ranks, was looked at."""
    pairs_of: Callable[[ComparisonKey, int], list[ComparedTensor]] = lambda *_: []
    """Every rank's tensor of an activation and one micro batch, each with the reference's part."""
    like: Callable[[TensorComparison], Iterable[tuple[str, Array]]] = lambda _: ()
    """The same part of the reference's other parameters, by name; of a state also its own gradient."""

    def wrong(self, *stages: Stage) -> list[TensorComparison]:
        """Those that differ, the earliest first; of some stages or of all."""
        of = stages or tuple(Stage)
        return [one for one in self.comparisons if one.differs and one.key[0] in of]


def relative_error(ours: Array, reference: Array) -> float:
    """Norm of the difference over the reference's norm; of integers the share that differs.

    A result that is not finite where the reference is gives infinity.
    """
    if ours.size == 0:
        return 0.0
    if not np.issubdtype(ours.dtype, np.floating):
        return float(np.mean(ours != reference))
    difference, size = map(float, np.sqrt(_squares(ours.ravel(), reference.ravel())))
    if not np.isfinite(difference):
        return 0.0 if np.array_equal(ours, reference, equal_nan=True) else np.inf
    if size == 0:
        return 0.0 if difference == 0 else np.inf
    return difference / size


def _squares(ours: Array, reference: Array) -> Array:
    """The sum of squares of the difference, and of the reference.

    Not by BLAS, whose threads spin for small arrays: half of a verification's time.
    """
    squares = np.zeros(2)
    for begin in range(0, reference.size, STRETCH):
        part = slice(begin, begin + STRETCH)
        held = reference[part].astype(np.float64)
        off = ours[part] - held
        squares += np.einsum("i,i->", off, off), np.einsum("i,i->", held, held)
    return squares
