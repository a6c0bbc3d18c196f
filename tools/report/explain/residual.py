"""One measured quantity beside its closed form."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Compared:
    """A component of one rank; bytes or elements are whole numbers, shares are not."""

    rank: int
    component: str
    measured: float
    predicted: float
    note: str = ""
    """What the residual is, or why the two are not the same thing."""

    @property
    def residual(self) -> float:
        """Measured minus predicted."""
        return self.measured - self.predicted

    @property
    def exact(self) -> bool:
        """Whether nothing is left over."""
        return self.measured == self.predicted
