"""Check that the gradient norm counts every element of every parameter exactly once.

The norm's value cannot show this: a parameter's contribution can be below the norm's rounding until that
parameter is large. So each rank has noted which elements it counted, and over which ranks the norm was
summed. The check is exact and needs no reference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from parakit.artifacts.capture import NORM_RANKS_PREFIX, CaptureStage
from parakit.verify.captured import (
    Array,
    Capture,
    ParameterKey,
    ParameterPart,
    group_parameter_parts,
)
from parakit.verify.comparison import ParameterFault

NormGroups = tuple[tuple[int, ...], ...]
"""Groups of ranks over which one rank's norm was summed; several if experts have their own group."""


def check_norm_counts(
    strategy: Capture, expected: Iterable[ParameterKey] = ()
) -> Iterator[ParameterFault]:
    """Check that the gradient norm counts each element of each parameter exactly once.

    All parameters with a reduced gradient are checked. If ranks compute different norms, the norm with the most
    wrong elements is reported. Nothing is yielded if no rank computed a norm.

    Args:
        strategy: Capture to check.
        expected: Keys of reduced gradients that must exist. A parameter with such a key is also checked if the
            strategy captured only its gradient before the reduction.

    Returns:
        One result per parameter. It names the ranks that should have counted the parameter, or that counted it
        too often, and the fraction of wrong elements. The kind is empty if every element is counted once.
    """
    counted: defaultdict[ParameterKey, list[ParameterPart]] = defaultdict(list)
    for key, parts in group_parameter_parts(strategy, CaptureStage.NORM, NORM_RANKS_PREFIX).items():
        counted[key[:2]] += parts
    ranks_by_groups: defaultdict[NormGroups, list[int]] = defaultdict(list)
    for rank_capture in strategy.ranks:
        rank = rank_capture.rank
        if rank.norm_groups:
            ranks_by_groups[rank.norm_groups].append(rank.rank)
    if not ranks_by_groups:
        return
    gradients = group_parameter_parts(strategy, CaptureStage.REDUCED_GRADIENTS)
    local_gradients = group_parameter_parts(strategy, CaptureStage.LOCAL_GRADIENTS)
    for key in expected:
        if key in local_gradients and key not in gradients:
            gradients[key] = local_gradients[key]
    for key, parts in gradients.items():
        faults = [
            _check_parameter(parts, counted[key[:2]], groups=groups, ranks=ranks)
            for groups, ranks in ranks_by_groups.items()
        ]
        yield max(faults, key=lambda fault: fault.fraction)


def _check_parameter(
    parts: Sequence[ParameterPart],
    counted: Sequence[ParameterPart],
    *,
    groups: NormGroups,
    ranks: Sequence[int],
) -> ParameterFault:
    """Check that one norm counts each element of a parameter once, and return the fault with its ranks.

    The `kind` of the result is empty if each element is counted once.

    Args:
        parts: Parts of the parameter's gradient on all ranks.
        counted: Parts that ranks counted, 1 for an element that is counted.
        groups: Groups of ranks over which the norm was summed.
        ranks: Ranks that computed this norm.
    """
    num_times = np.zeros(parts[0].full_shape, np.int32)
    for group in groups:
        slot = NORM_RANKS_PREFIX + " ".join(map(str, group))
        for part in counted:
            if part.rank in group and part.record.tensor_key.slot == slot:
                num_times[part.region()] += part.values()
    is_wrong = num_times != 1
    name, fraction = parts[0].name, float(is_wrong.mean())
    if not is_wrong.any():
        return ParameterFault(name, ranks=(), kind="", fraction=fraction)
    is_missing = num_times == 0
    if is_missing.any():
        return _describe_missing(
            parts, counted, groups=groups, ranks=ranks, is_missing=is_missing, fraction=fraction
        )
    largest = int(num_times.max())
    holders = _find_holders(counted, num_times > 1)
    kind = f"counted {largest} times in the norm"
    return ParameterFault(name, ranks=holders, kind=kind, fraction=fraction)


def _describe_missing(
    parts: Sequence[ParameterPart],
    counted: Sequence[ParameterPart],
    *,
    groups: NormGroups,
    ranks: Sequence[int],
    is_missing: Array,
    fraction: float,
) -> ParameterFault:
    """Return the fault of a parameter with elements that one norm does not count.

    The fault names the ranks that are missing from the sum, and why. Either these ranks are in none of the
    process groups over which the norm was summed, or they are in a group and skipped elements that they hold.

    Args:
        parts: Parts of the parameter's gradient on all ranks.
        counted: Parts that ranks counted, 1 for an element that is counted.
        groups: Groups of ranks over which the norm was summed.
        ranks: Ranks that computed this norm.
        is_missing: True for each element of the full parameter that the norm does not count.
        fraction: Fraction of the elements whose count is wrong.
    """
    name = parts[0].name
    summed_ranks = {rank for group in groups for rank in group}
    holders = _find_holders(parts, is_missing)
    counting_ranks = _find_holders(counted, is_missing)
    counting_outside = tuple(rank for rank in counting_ranks if rank not in summed_ranks)
    holders_inside = tuple(rank for rank in holders if rank in summed_ranks)
    if holders_inside and not counting_outside:
        kind = f"not counted in the norm by {_format_ranks(holders_inside)}"
        return ParameterFault(name, ranks=holders_inside, kind=kind, fraction=fraction)
    # Without a holder in the groups, the norm lacks the elements whether or not a holder counted them.
    ranks_outside = counting_outside or holders
    norm, missing = _format_ranks(ranks), _format_ranks(ranks_outside)
    kind = f"not counted in the norm of {norm}: {missing} not in its group"
    return ParameterFault(name, ranks=ranks_outside, kind=kind, fraction=fraction)


def _find_holders(parts: Sequence[ParameterPart], is_wanted: Array) -> tuple[int, ...]:
    """Return the ranks that have at least one element for which `is_wanted` is True, in ascending order.

    The parts are either gradients, or records of the elements that a norm counts. A rank has an element if its
    gradient holds the element, or if its record counts the element.
    """
    ranks = set()
    for part in parts:
        values = part.values()
        is_count = part.record.tensor_key.stage is CaptureStage.NORM
        is_present = values > 0 if is_count else part.owned_elements(values)
        if (is_present & is_wanted[part.region()]).any():
            ranks.add(part.rank)
    return tuple(sorted(ranks))


def _format_ranks(ranks: Sequence[int]) -> str:
    """Return the ranks as text, such as `rank 1` or `ranks 0, 2`."""
    numbers = ", ".join(map(str, ranks))
    return f"rank {numbers}" if len(ranks) == 1 else f"ranks {numbers}"
