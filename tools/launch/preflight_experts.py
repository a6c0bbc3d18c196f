"""What must be so before a mixture of experts trains, beyond what Megatron itself would refuse."""

from __future__ import annotations

from collections.abc import Iterator

from tools.launch.compose import Launch
from tools.spec.flags import Flags

_CAPACITY = "--moe-expert-capacity-factor"
_GROUPED = "--moe-grouped-gemm"


def expert_problems(launch: Launch) -> Iterator[str]:
    """Why its experts cannot be trained as asked, a sentence each."""
    shape, flags = launch.model.shape, Flags(launch.flags)
    if not shape.experts or not shape.experts_per_token:
        return
    dropless = shape.experts / shape.experts_per_token
    factor = _number(flags.text(_CAPACITY))
    if launch.start_checkpoint is not None and factor is not None and 0 <= factor < dropless:
        yield (
            f"{_CAPACITY} {factor:g} drops tokens, and which ones depends on how ranks share them, so "
            "losses could not be held against other runs from the same start; leave it out of EXTRA= "
            f"(from {dropless:g} on nothing is dropped), or set SHARED_START=0."
        )
    if flags.has(_GROUPED) and not launch.runtime.transformer_engine:
        yield (
            f"{_GROUPED} is Transformer Engine's, which does not work here; leave it out of EXTRA=, and "
            "experts are multiplied one by one."
        )


def _number(text: str) -> float | None:
    """None where there is no number; Megatron says what is wrong with other text."""
    try:
        return float(text)
    except ValueError:
        return None
