"""What else is wrong by itself: one bug hides another, as all that follows from it is wrong too."""

from __future__ import annotations

from collections.abc import Iterator

from tools.records.capture import COUNTED_ONCE, RATE_SLOTS, Stage
from tools.verify.comparison import Compared, Comparison

_ACTIVATIONS = (Stage.OUTPUTS, Stage.LOSS, Stage.ACTIVATION_GRADIENTS)
_TIED = ("embedding.", "output_layer.")
"""Parameters that may be used twice: what is wrong of the one use is in the gradient of both."""


def independent(compared: Compared, first: Comparison) -> Iterator[Comparison]:
    """Tensors beside the first that are wrong although all that they are made of is right.

    Where it is in doubt whether one follows from another, it is left out.

    Args:
        compared: With the reference's tensors in the place of the strategy's, if errors spread.
        first: The first that is wrong.
    """
    yield from _modules(compared, first)
    seen = {first.key[0]}
    for one in _of_parameters(compared, first):
        if one.key[0] not in seen:
            seen.add(one.key[0])
            yield one


def _modules(compared: Compared, first: Comparison) -> Iterator[Comparison]:
    """Modules that are given what is right; not those that a wrong one is in."""
    wrong = compared.wrong(*_ACTIVATIONS)
    names = {one.key[1] for one in wrong} | {first.key[1]}
    given = {one.key[1] for one in wrong if _is_given(one)}
    seen = {first.key[1]}
    for one in wrong:
        name = one.key[1]
        around = name == "model" or any(other.startswith(f"{name}.") for other in names)
        if name not in seen | given and not around:
            seen.add(name)
            yield one


def _is_given(one: Comparison) -> bool:
    stage, _, slot = one.key
    return "input." in slot if stage is Stage.OUTPUTS else slot.startswith("output")


def _of_parameters(compared: Compared, first: Comparison) -> Iterator[Comparison]:
    """What becomes of gradients, by parameters whose gradients are right before."""
    modules = {one.key[1] for one in compared.wrong(*_ACTIVATIONS)}
    local = {one.key[1] for one in compared.wrong(Stage.LOCAL_GRADIENTS)}
    for one in compared.wrong():
        stage, name, slot = one.key
        tied = name.startswith(_TIED) and bool(modules | local)
        own = stage is Stage.LOCAL_GRADIENTS and name.rpartition(".")[0] not in modules
        reduced = stage is Stage.REDUCED_GRADIENTS and name not in local
        exact = slot == COUNTED_ONCE or slot in RATE_SLOTS
        if one is not first and (exact or ((own or reduced) and not tied)):
            yield one
