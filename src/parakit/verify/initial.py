"""Check the weights that each layout initializes by itself, before shared weights are loaded.

Loaded weights hide a wrong initialization. Layouts with other parallel degrees draw other random numbers, so
values are not compared with the reference's. Instead, copies of a part on several ranks must be equal,
parts of other regions must differ, and each part must have the reference's mean and standard deviation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from parakit.artifacts.capture import InitialPiece, read_initial
from parakit.verify.captured import Capture, full_parameter_name
from parakit.verify.comparison import ParameterFault

_MAX_STANDARD_ERRORS = 6.0
"""Standard errors by which a mean or a standard deviation may differ from the reference's."""
_HALF_PRECISION_ERROR = 1e-2
"""Relative rounding error of a mean or a standard deviation in half precision."""
_MIN_ELEMENTS = 8
"""Smallest number of elements that are not equal by chance."""


@dataclass(frozen=True)
class RankPiece:
    """A part of a parameter as one rank has initialized it."""

    rank: int
    piece: InitialPiece

    @property
    def name(self) -> str:
        """Name of the full parameter."""
        return full_parameter_name(self.piece.name)


def find_wrong_initializations(reference: Capture, strategy: Capture) -> Iterator[ParameterFault]:
    """Yield the parts of parameters that the strategy initializes wrongly.

    The order is: copies that differ between ranks, parts with the random values of another part, and parts
    whose mean or standard deviation differs from the reference. One parameter can be yielded several times.
    """
    pieces = list_initial_pieces(strategy)
    yield from _find_different_copies(pieces)
    yield from _find_equal_parts(pieces)
    expected_by_unit = {
        expected.piece.initialisation_key: expected.piece
        for expected in list_initial_pieces(reference)
    }
    for part in pieces:
        expected_piece = expected_by_unit.get(part.piece.initialisation_key, part.piece)
        kind = _compare_moments(part.piece, expected_piece)
        if kind:
            yield ParameterFault(part.name, ranks=(part.rank,), kind=kind)


def list_initial_pieces(capture: Capture) -> list[RankPiece]:
    """Return all parts of all ranks; empty if the run did not initialize weights and then load others."""
    return [
        RankPiece(rank_capture.rank.rank, piece)
        for rank_capture in capture.ranks
        for piece in read_initial(rank_capture.folder)
    ]


def _find_different_copies(pieces: list[RankPiece]) -> Iterator[ParameterFault]:
    """Yield the parts whose copies on several ranks are not equal bit for bit."""
    copies_by_position: defaultdict[object, list[RankPiece]] = defaultdict(list)
    for part in pieces:
        copies_by_position[part.piece.position_key].append(part)
    for copies in copies_by_position.values():
        if len({copy.piece.digest for copy in copies}) > 1:
            ranks = tuple(sorted(copy.rank for copy in copies))
            kind = "copies are initialised otherwise on each of the ranks"
            yield ParameterFault(copies[0].name, ranks=ranks, kind=kind)


def _find_equal_parts(pieces: list[RankPiece]) -> Iterator[ParameterFault]:
    """Yield the parts of initial weights whose random values equal those of a part of another region or
    parameter.

    Constant and very small parts are equal without a fault, so they are left out.
    """
    equal_parts: defaultdict[str, list[RankPiece]] = defaultdict(list)
    for part in pieces:
        if part.piece.deviation > 0 and math.prod(part.piece.shape) >= _MIN_ELEMENTS:
            equal_parts[part.piece.digest].append(part)
    for parts in equal_parts.values():
        first = parts[0]
        for part in parts:
            if part.piece.position_key != first.piece.position_key:
                is_same_parameter = part.name == first.name
                source = f"the part of rank {first.rank}" if is_same_parameter else first.name
                kind = f"initialised as a copy of {source}"
                yield ParameterFault(part.name, ranks=(part.rank,), kind=kind)


def _compare_moments(piece: InitialPiece, expected: InitialPiece) -> str:
    """Describe how a piece's standard deviation or mean differs from the expected piece; empty if neither does.

    If both differ, the standard deviation is described. A difference counts if it is larger than several
    standard errors, which follow from the numbers of elements, plus rounding.
    """
    num_elements, num_expected = math.prod(piece.shape), math.prod(expected.shape)
    standard_error = float(np.sqrt(1 / num_elements + 1 / num_expected))
    allowed = _MAX_STANDARD_ERRORS * standard_error
    deviation, expected_deviation = piece.deviation, expected.deviation
    allowed_of_deviation = expected_deviation * (allowed / np.sqrt(2) + _HALF_PRECISION_ERROR)
    if abs(deviation - expected_deviation) > allowed_of_deviation:
        return f"initialised with a standard deviation of {deviation:.3g}, not {expected_deviation:.3g}"
    allowed_of_mean = expected_deviation * allowed + _HALF_PRECISION_ERROR * abs(expected.mean)
    if abs(piece.mean - expected.mean) > allowed_of_mean:
        return f"initialised with a mean of {piece.mean:.3g}, not {expected.mean:.3g}"
    return ""
