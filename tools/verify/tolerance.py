"""How far a tensor may be off, relative: a few times its response, and never less than a sum rounds.

The response is the tensor's change when every weight of the reference changes by one rounding error.
"""

from __future__ import annotations

import numpy as np

from tools.records.capture import (
    BUFFER,
    START_BUFFER,
    START_WEIGHT,
    UPDATE,
    Stage,
    TensorRecord,
)
from tools.verify.captured import Capture
from tools.verify.comparison import Key
from tools.verify.parameters import PARAMETERS

RESPONSES = 6.0
"""Times its response that a tensor may be off. Healthy strategies stay below 2 (README,
bench-verify)."""
EPSILON = {"float32": 2.0**-23, "bfloat16": 2.0**-7, "float16": 2.0**-10}
_NORM_TERMS = 64
"""A norm is a sum over all parameters, but of squares: its rounding is that of a short sum."""
_AS = {START_WEIGHT: UPDATE, START_BUFFER: BUFFER}
"""Slots whose response is that of another."""


class Tolerances:
    """Of every tensor, as a reference's responses give it."""

    def __init__(self, reference: Capture) -> None:
        self._reference = reference
        self._responses = reference.responses()
        self._squared = {name for _, name, slot in self._responses if slot == "exp_avg_sq"}
        # The largest response by slot of weights whose optimizer keeps no square of the gradient. Muon
        # computes in bf16: a rounding error of fp32 changes the update of some matrices by a
        # hundredth, and of others not at all.
        self._of_matrices: dict[str, float] = {}
        for (stage, name, slot), response in self._responses.items():
            if stage == Stage.WEIGHTS and name not in self._squared:
                self._of_matrices[slot] = max(self._of_matrices.get(slot, 0.0), response)

    def of(self, key: Key, like: TensorRecord) -> float:
        """Of a tensor like this; 0 for integers and truth values."""
        if not like.dtype.startswith(("float", "bfloat")):
            return 0.0
        first = self._reference.first
        terms = max((*like.shape, _NORM_TERMS if key[0] is Stage.NORM else 1))
        if key[0] in PARAMETERS:
            terms = first.sequence_length * first.micro_batch_size * first.micro_batches
        epsilon = EPSILON.get(first.dtype, EPSILON["float32"])
        of = (key[0], key[1], _AS.get(key[2], key[2]))
        response = self._responses.get(of, 0.0)
        if key[0] is Stage.WEIGHTS and key[1] not in self._squared:
            response = max(response, self._of_matrices.get(of[2], 0.0))
        return RESPONSES * max(response, epsilon * float(np.sqrt(terms)) / 4)
