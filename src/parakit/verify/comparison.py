"""Results of comparing a strategy with its reference, per tensor and for the whole capture.

A tensor's error is relative: the Frobenius norm of the difference over the reference's norm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from parakit.artifacts.capture import ELEMENTS_PER_CHUNK, CaptureStage
from parakit.verify.captured import Array

ComparisonKey = tuple[CaptureStage, str, str]
"""Stage, name and slot of a tensor, which all ranks and micro batches share."""


@dataclass(frozen=True)
class ComparedTensor:
    """A tensor of one rank of the strategy, and the same part of the reference's tensor."""

    rank: int
    micro_batch: int | None
    """Number of the micro batch on the rank; None if the tensor belongs to the whole iteration."""
    ours: Array
    reference: Array
    region: tuple[slice, ...] = ()
    """Region of the full parameter; empty for the whole parameter, and for activations."""
    owned: tuple[tuple[slice, ...], Array] | None = None
    """Region of the full parameter, and which of its elements the rank owns, if it does not own all of them. Both
    tensors then hold the owned elements in order, as a vector. None means that the tensors hold the whole `region`."""


@dataclass
class TensorComparison:
    """Comparison of one tensor over all ranks and micro batches."""

    key: ComparisonKey
    tolerance: float
    """Largest relative error that rounding explains; 0 if values must be equal bit for bit."""
    order: float
    """Position among all tensors, in the order in which the reference computed them."""
    error: float = 0.0
    """Largest relative error; infinite if the reference is zero and the strategy's tensor is not."""
    compared: int = 0
    """Number of ranks' tensors that were compared."""
    wrong_ranks: set[int] = field(default_factory=set)
    """Ranks of which some tensor is beyond the tolerance."""
    right_ranks: set[int] = field(default_factory=set)
    """Ranks of which some tensor is within the tolerance."""
    wrong_micro_batches: set[int] = field(default_factory=set)
    """Micro batches in which the tensor of some rank is beyond the tolerance; empty for parameters."""
    right_micro_batches: set[int] = field(default_factory=set)
    """Micro batches in which the tensor of some rank is within the tolerance; empty for parameters."""
    replicas_differ: tuple[int, ...] = ()
    """Ranks whose copies differ although they must be equal bit for bit."""
    uncovered: int = 0
    """Number of the parameter's elements that no rank holds."""
    worst: ComparedTensor | None = None
    """The tensor with the largest error beyond the tolerance; None if every tensor is within it."""
    copies: list[ComparedTensor] = field(default_factory=list)
    """Parts of all ranks of a wrong parameter, which together show the kind of the error."""
    fault: str = ""
    """Description of a fault that is found without comparing values; empty if there is none."""

    @property
    def differs(self) -> bool:
        """True if the tensor is wrong: too large an error, copies that differ, or missing elements."""
        return self.error > self.tolerance or bool(self.replicas_differ) or self.uncovered > 0

    @property
    def is_wrong_in_some_micro_batches(self) -> bool:
        """True if the tensor is wrong on every rank in some micro batches, and right on every rank in all others."""
        has_both = bool(self.wrong_micro_batches) and bool(self.right_micro_batches)
        return has_both and self.wrong_micro_batches.isdisjoint(self.right_micro_batches)

    def add_copies(self, tensor: ComparedTensor, holder: int) -> None:
        """Record that a rank's copy of a tensor differs bit for bit from the copy of rank `holder`.

        `tensor.ours` is the rank's copy, and `tensor.reference` is the copy of rank `holder`.
        """
        self.replicas_differ = tuple(sorted({*self.replicas_differ, tensor.rank, holder}))
        if self.worst is None:
            self.worst = tensor
            self.error = max(self.error, relative_error(tensor.ours, tensor.reference))

    @property
    def ratio(self) -> float:
        """Error over tolerance; at least 1 if copies differ or elements are missing."""
        if self.replicas_differ or self.uncovered:
            return max(np.inf if self.tolerance == 0 else self.error / self.tolerance, 1.0)
        if self.tolerance == 0:
            return 0.0 if self.error == 0 else np.inf
        return self.error / self.tolerance

    def add(self, tensor: ComparedTensor, error: float | None = None) -> None:
        """Add one rank's tensor to the comparison, with the error `error`; None computes the relative error."""
        if error is None:
            error = relative_error(tensor.ours, tensor.reference)
        self.compared += 1
        is_wrong = error > self.tolerance
        (self.wrong_ranks if is_wrong else self.right_ranks).add(tensor.rank)
        if tensor.micro_batch is not None:
            micro_batches = self.wrong_micro_batches if is_wrong else self.right_micro_batches
            micro_batches.add(tensor.micro_batch)
        if is_wrong and (self.worst is None or error > self.error):
            self.worst = tensor
        self.error = max(self.error, error)


@dataclass(frozen=True)
class ParameterFault:
    """Result of checking one parameter without comparing values of two runs."""

    name: str
    """Name of the full parameter."""
    ranks: tuple[int, ...]
    """Ranks that are at fault."""
    kind: str
    """Description of the fault; empty if there is none."""
    fraction: float = 1.0
    """Fraction of the parameter's elements that the fault concerns."""


@dataclass(frozen=True)
class SkippedTensors:
    """Tensors that were not compared for one reason."""

    reason: str
    names: tuple[str, ...]
    """Names of the tensors, each once: `module slot`, or the name of a parameter."""
    has_outputs: bool
    """True if an output of a module is among the tensors."""

    def __str__(self) -> str:
        return f"{' '.join(self.names)}: {self.reason}"


@dataclass(frozen=True)
class CaptureComparison:
    """Comparison of all tensors of two captures."""

    comparisons: tuple[TensorComparison, ...]
    """Comparisons in the order in which the reference computed the tensors."""
    not_aligned: tuple[str, ...]
    """Lines that name tensors that could not be compared, with the reason."""
    seen: int
    """Number of tensors of the strategy's ranks, plus tensors that only the reference has."""
    compared: int
    """Number of the seen tensors that were compared."""
    routing_flips: int = 0
    """Number of tokens for which a router chose other experts because of rounding alone."""
    constant: int | None = None
    """Number of parameters and buffers that start with one value; None if no start was captured."""
    initialised: int = 0
    """Number of parameter parts of the strategy whose initialization was checked."""
    skipped: tuple[SkippedTensors, ...] = ()
    """Tensors that were not compared, by reason; `not_aligned` has a line for each reason."""
    pairs_of: Callable[[ComparisonKey, int], list[ComparedTensor]] = lambda *_: []
    """Function from an activation's key and a micro batch to the compared tensors of every rank."""
    similar_tensors: Callable[[TensorComparison], Iterable[tuple[str, Array]]] = lambda _: ()
    """Function from a comparison to named tensors of the reference that may be mixed up with it."""

    def wrong(self, *stages: CaptureStage) -> list[TensorComparison]:
        """Return the wrong comparisons of the named stages, earliest first. Without a stage, return those of
        all stages.
        """
        wanted_stages = stages or tuple(CaptureStage)
        return [
            comparison
            for comparison in self.comparisons
            if comparison.differs and comparison.key[0] in wanted_stages
        ]


def relative_error(ours: Array, reference: Array) -> float:
    """Return the norm of the difference over the reference's norm.

    For integers and truth values, return the fraction of elements that differ. Tensors that are empty or equal
    have error 0, and NaN equals NaN. The error is infinite if a difference is not finite, or if the reference
    is zero and `ours` is not.
    """
    if ours.size == 0:
        return 0.0
    if not np.issubdtype(ours.dtype, np.floating):
        return float(np.mean(ours != reference))
    norms = np.sqrt(_sums_of_squares(ours.ravel(), reference.ravel()))
    difference, size = float(norms[0]), float(norms[1])
    if not np.isfinite(difference):
        return 0.0 if np.array_equal(ours, reference, equal_nan=True) else np.inf
    if size == 0:
        return 0.0 if difference == 0 else np.inf
    return difference / size


def _sums_of_squares(ours: Array, reference: Array) -> Array:
    """Return two sums of squares for flat arrays: of the difference, and of the reference.

    `np.linalg.norm` is not used. It calls BLAS, whose threads wait actively on small arrays, which took half of
    the time of a verification.
    """
    sums = np.zeros(2)
    for begin in range(0, reference.size, ELEMENTS_PER_CHUNK):
        chunk = slice(begin, begin + ELEMENTS_PER_CHUNK)
        expected = reference[chunk].astype(np.float64)
        difference = ours[chunk] - expected
        sums[0] += np.einsum("i,i->", difference, difference)
        sums[1] += np.einsum("i,i->", expected, expected)
    return sums
