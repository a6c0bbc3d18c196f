"""Compare the routers' choices with those of the serving engine, or replace them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from parakit.artifacts.capture import TensorKey
from parakit.capturing import StoredTensors


@dataclass
class ChoiceComparison:
    """Sink that counts the routers' choices that the serving engine does not make."""

    served: StoredTensors
    num_choices: int = 0
    num_flips: int = 0

    def write(self, tensor_key: TensorKey, tensor: Tensor) -> None:
        """Do nothing with the scores."""

    def choose(self, tensor_key: TensorKey, chosen: Tensor) -> Tensor | None:
        """Count the differing choices [tokens, experts], and return None, which keeps the router's choice."""
        served = self.served.get(tensor_key)
        if served is not None and served.shape == chosen.shape:
            self.num_choices += int(chosen.sum())
            self.num_flips += int((chosen & ~served).sum())
        return None


@dataclass
class ServedChoices:
    """Sink that lets routers choose what the serving engine chose."""

    served: StoredTensors

    def write(self, tensor_key: TensorKey, tensor: Tensor) -> None:
        """Do nothing with the scores."""

    def choose(self, tensor_key: TensorKey, chosen: Tensor) -> Tensor | None:
        """Return the serving engine's choice [tokens, experts]; None if it is not known."""
        served = self.served.get(tensor_key)
        return served if served is not None and served.shape == chosen.shape else None
