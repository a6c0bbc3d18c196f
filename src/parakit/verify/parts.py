"""What a gradient is a sum of: losses, micro batches, ranks, and what is left of the iteration before.

Where a gradient as a whole fits nothing, one of its parts may be wrong: an auxiliary loss that counts
once a rank, a micro batch that was lost, a buffer that was not reset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from parakit.artifacts.capture import PART, Stage
from parakit.verify.align import ActivationAligner
from parakit.verify.captured import Array, Capture, assemble_region, group_parameter_parts
from parakit.verify.comparison import ComparedTensor, ComparisonKey
from parakit.verify.kinds import classify_by_parts
from parakit.verify.verdict import Judgement

BEFORE = "the iteration before"
_GRADIENTS = (Stage.ACTIVATION_GRADIENTS, Stage.LOCAL_GRADIENTS, Stage.REDUCED_GRADIENTS)
_UNEXPLAINED = ("other", "wrong on some ranks only", "copies differ between ranks")


def needs_parts(judgement: Judgement) -> bool:
    """Whether the first wrong tensor is a gradient that is explained by none of the usual kinds."""
    first, kind = judgement.first, judgement.verdict.kind or ""
    if first is None or first.worst is None or first.key[0] not in _GRADIENTS:
        return False
    return kind.startswith(_UNEXPLAINED)


def explain_by_parts(
    judgement: Judgement, strategy: Capture, parts: Capture, without: Mapping[str, Capture]
) -> Judgement:
    """The judgement with the part that is wrong as its kind, if there is one.

    Args:
        judgement: That wants parts.
        strategy: What was judged.
        parts: The reference with each micro batch's gradient, and the iteration before's.
        without: The reference without a loss, with its other tensors forced, by that loss' name.
    """
    first = judgement.first
    assert first is not None
    assert first.worst is not None
    for found, extra in _sums(first.key, first.worst, strategy, parts, without):
        kind = classify_by_parts(first.worst, first.tolerance, found, strategy.first, extra)
        if kind is not None:
            verdict = replace(judgement.verdict, kind=kind.name, factor=kind.factor)
            return replace(judgement, verdict=verdict)
    return judgement


def _sums(
    key: ComparisonKey,
    pair: ComparedTensor,
    strategy: Capture,
    parts: Capture,
    without: Mapping[str, Capture],
) -> Iterator[tuple[dict[str, Array], str]]:
    """Ways to write the reference's tensor as a sum, each with the part that is not in it."""
    losses = {}
    for name, capture in without.items():
        others = _same(key, pair, strategy, capture)
        if others is not None and (others != pair.reference).any():
            losses[name] = pair.reference - others
    if losses:
        yield {"main loss": pair.reference - sum(losses.values()), **losses}, ""
    if key[0] is Stage.ACTIVATION_GRADIENTS:
        return
    if key[0] is Stage.REDUCED_GRADIENTS:
        ranks = {
            f"rank {part.one.rank.rank}": part.values() / part.one.rank.data[1]
            for pieces in group_parameter_parts(strategy, Stage.LOCAL_GRADIENTS, key[2]).values()
            for part in pieces
            if part.name == key[1] and part.record.shape == pair.ours.shape
        }
        if len(ranks) > 1:
            yield ranks, ""
    found = {
        unit[2].removeprefix(PART): values
        for unit, pieces in group_parameter_parts(parts, Stage.LOCAL_GRADIENTS, PART).items()
        if pieces[0].name == key[1]
        and (values := assemble_region(pieces, parts, pair.region, pair.ours.shape)) is not None
    }
    before = found.pop(BEFORE, None)
    if len(found) > 1:
        yield found, ""
    if before is not None and before.any():
        yield {"this iteration": pair.reference, BEFORE: before}, BEFORE


def _same(
    key: ComparisonKey, pair: ComparedTensor, strategy: Capture, other: Capture
) -> Array | None:
    """Of another run of the reference what the pair has of it; None if it has nothing like it."""
    if pair.micro_batch is None:
        for unit, pieces in group_parameter_parts(other, key[0], key[2]).items():
            if unit[2] == key[2] and pieces[0].name == key[1]:
                return assemble_region(pieces, other, pair.region, pair.ours.shape)
        return None
    aligner, one = ActivationAligner(other, strategy), strategy.ranks[pair.rank]
    for record in one.records:
        site = record.site
        if (site.stage, site.name, site.slot, site.micro_batch) == (*key, pair.micro_batch):
            part = aligner.align(one, record).reference
            if part is not None and part.shape == pair.ours.shape:
                return part
    return None
