"""What the layouts of two runs begin with by themselves, before they load the same weights.

Loaded weights hide a wrong initialisation. One rank and several draw other numbers, so values are not
compared with the reference's: copies on several ranks must be equal, all else must differ, and each must
have the reference's mean and standard deviation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from parakit.artifacts.capture import InitialPiece, read_initial
from parakit.verify.captured import Capture, full_parameter_name
from parakit.verify.comparison import ParameterFault

_SIGMAS = 6.0
"""Of the error of a mean or a standard deviation that was measured on so many elements."""
_ROUNDING = 1e-2
"""A standard deviation's, relative, in half precision."""
_FEWEST = 8
"""Elements that are not alike by chance."""
_Held = tuple[int, InitialPiece]
"""A rank and what it has."""


def find_wrong_initializations(reference: Capture, strategy: Capture) -> Iterator[ParameterFault]:
    """Parameters that the strategy initialises otherwise, the most telling kind first."""
    ours, theirs = list_initial_pieces(strategy), list_initial_pieces(reference)
    places: defaultdict[object, list[_Held]] = defaultdict(list)
    values: defaultdict[str, list[_Held]] = defaultdict(list)
    for rank, piece in ours:
        places[piece.where].append((rank, piece))
        if piece.deviation > 0 and math.prod(piece.shape) >= _FEWEST:
            values[piece.digest].append((rank, piece))
    for copies in places.values():
        if len({piece.digest for _, piece in copies}) > 1:
            ranks = tuple(sorted(rank for rank, _ in copies))
            kind = "copies are initialised otherwise on each of the ranks"
            yield ParameterFault(full_parameter_name(copies[0][1].name), ranks, kind)
    for alike in values.values():
        source, first = alike[0]
        for rank, other in alike:
            if other.where != first.where:
                same = full_parameter_name(other.name) == full_parameter_name(first.name)
                what = f"the part of rank {source}" if same else full_parameter_name(first.name)
                kind = f"initialised as a copy of {what}"
                yield ParameterFault(full_parameter_name(other.name), (rank,), kind)
    expected = {piece.unit: piece for _, piece in theirs}
    for rank, piece in ours:
        if kind := _otherwise(piece, expected.get(piece.unit, piece)):
            yield ParameterFault(full_parameter_name(piece.name), (rank,), kind)


def list_initial_pieces(capture: Capture) -> list[_Held]:
    """All pieces of all ranks; none where a run did not initialise its weights and then load others."""
    return [(one.rank.rank, piece) for one in capture.ranks for piece in read_initial(one.folder)]


def _otherwise(piece: InitialPiece, like: InitialPiece) -> str:
    """In which moment of its values it is another than the reference's; empty in none."""
    sizes = math.prod(piece.shape), math.prod(like.shape)
    error = _SIGMAS * float(np.sqrt(sum(1 / size for size in sizes)))
    ours, theirs = piece.deviation, like.deviation
    if abs(ours - theirs) > theirs * (error / np.sqrt(2) + _ROUNDING):
        return f"initialised with a standard deviation of {ours:.3g}, not {theirs:.3g}"
    if abs(piece.mean - like.mean) > theirs * error + _ROUNDING * abs(like.mean):
        return f"initialised with a mean of {piece.mean:.3g}, not {like.mean:.3g}"
    return ""
