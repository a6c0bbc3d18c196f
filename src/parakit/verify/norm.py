"""Whether the gradient norm counts every element of every parameter once.

The norm's value does not say: a parameter's share of it may be below its rounding, until that parameter
is large. So what every rank counts is compared with what it must count, exactly and without a reference.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from parakit.artifacts.capture import COUNTED, Stage
from parakit.verify.captured import (
    Array,
    Capture,
    ParameterKey,
    ParameterPart,
    group_parameter_parts,
)
from parakit.verify.comparison import ParameterFault

NormGroups = tuple[tuple[int, ...], ...]


def check_norm_counts(
    strategy: Capture, expected: Iterable[ParameterKey] = ()
) -> Iterator[ParameterFault]:
    """How each parameter that has a reduced gradient is counted; the worst norm of all ranks.

    So is one that is `expected` to have such a gradient, if the strategy has its local one. Named are
    ranks that should have counted it, or did so too often, and the share of its elements.
    """
    counted: defaultdict[ParameterKey, list[ParameterPart]] = defaultdict(list)
    for (key, layer, _), parts in group_parameter_parts(strategy, Stage.NORM, COUNTED).items():
        counted[key, layer] += parts
    ranks_of: defaultdict[NormGroups, list[int]] = defaultdict(list)
    for one in strategy.ranks:
        if one.rank.norm_groups:
            ranks_of[one.rank.norm_groups].append(one.rank.rank)
    if not ranks_of:  # Nothing is clipped, and no norm computed.
        return
    reduced, local = (
        group_parameter_parts(strategy, stage)
        for stage in (Stage.REDUCED_GRADIENTS, Stage.LOCAL_GRADIENTS)
    )
    lost = {unit: local[unit] for unit in expected if unit in local and unit not in reduced}
    for (key, layer, _), held in (reduced | lost).items():
        found = [
            _membership(held, counted[key, layer], groups, ranks)
            for groups, ranks in ranks_of.items()
        ]
        yield max(found, key=lambda one: one.share)


def _membership(
    held: Sequence[ParameterPart],
    counted: Sequence[ParameterPart],
    groups: NormGroups,
    ranks: Sequence[int],
) -> ParameterFault:
    times = np.zeros(held[0].whole_shape, np.int32)
    for group in groups:
        slot = COUNTED + " ".join(map(str, group))
        for part in counted:
            if part.one.rank.rank in group and part.record.site.slot == slot:
                times[part.region()] += part.values()
    wrong = times != 1
    name, share = held[0].name, float(wrong.mean())
    if not wrong.any():
        return ParameterFault(name, (), "", share)
    missing = times == 0
    if missing.any():
        holders = _holding(held, missing)
        summed = {rank for group in groups for rank in group}
        outside = tuple(rank for rank in _holding(counted, missing) if rank not in summed)
        inside = tuple(rank for rank in holders if rank in summed and not outside)
        holders = outside or holders
        kind = f"not counted in the norm by {_ranks(inside or holders)}"
        if not inside:
            kind = f"not counted in the norm of {_ranks(ranks)}: {_ranks(holders)} not in its group"
        return ParameterFault(name, inside or holders, kind, share)
    most = int(times.max())
    holders = _holding(counted, times > 1)
    return ParameterFault(name, holders, f"counted {most} times in the norm", share)


def _holding(parts: Sequence[ParameterPart], wanted: Array) -> tuple[int, ...]:
    """Ranks that hold, or count, any of the elements."""
    found = set()
    for part in parts:
        values = part.values()
        there = values > 0 if part.record.site.stage is Stage.NORM else part.held(values)
        if (there & wanted[part.region()]).any():
            found.add(part.one.rank.rank)
    return tuple(sorted(found))


def _ranks(numbers: Sequence[int]) -> str:
    listed = ", ".join(map(str, numbers))
    return f"rank {listed}" if len(numbers) == 1 else f"ranks {listed}"
