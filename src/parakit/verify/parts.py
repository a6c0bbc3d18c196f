"""Explain a wrong gradient as a sum of parts with wrong factors.

If no kind fits a gradient as a whole, one of its parts may be wrong: an auxiliary loss that counts once per
rank, a micro batch that was lost, or a buffer that was not reset. The parts are losses, micro batches,
ranks, and what the iteration before has left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from parakit.artifacts.capture import GRADIENT_PART_PREFIX, CaptureStage
from parakit.verify.align import ActivationAligner
from parakit.verify.captured import Array, Capture, assemble_region, group_parameter_parts
from parakit.verify.comparison import ComparedTensor, ComparisonKey
from parakit.verify.kinds import classify_by_parts
from parakit.verify.patterns import UNEXPLAINED_FRACTION
from parakit.verify.verdict import Judgement

BEFORE = "the iteration before"
"""Name of the part that the iteration before has left in a gradient."""
_GRADIENTS = (
    CaptureStage.ACTIVATION_GRADIENTS,
    CaptureStage.LOCAL_GRADIENTS,
    CaptureStage.REDUCED_GRADIENTS,
)
_UNEXPLAINED_KINDS = (
    "other",
    "wrong on some ranks only",
    "wrong in ",  # some micro batches only
    "copies differ between ranks",
    "about ",  # a factor that does not explain all
)


@dataclass(frozen=True)
class _Sum:
    """The reference's tensor written as a sum of named parts."""

    parts: dict[str, Array]
    extra: str = ""
    """Name of a part that should not be in the sum; empty if all parts should."""


def needs_parts(judgement: Judgement) -> bool:
    """Return True if the first wrong tensor is a gradient, and the verdict's kind of error does not explain it."""
    first, kind = judgement.first, judgement.verdict.kind or ""
    if first is None or first.worst is None or first.key[0] not in _GRADIENTS:
        return False
    return kind.startswith(_UNEXPLAINED_KINDS)


def explain_by_parts(
    judgement: Judgement, strategy: Capture, parts: Capture, without: Mapping[str, Capture]
) -> Judgement:
    """Return the judgement with an explanation of its first wrong gradient in the verdict's `kind` and `factor`.

    A gradient is explained if it is the sum of parts of the reference's gradient, some of them multiplied by a
    wrong factor. Four ways to split the reference's gradient are tried in this order: by loss, by rank, by
    micro batch and by iteration. The first split that explains the wrong gradient counts. If no split explains
    the gradient, the judgement is returned unchanged.

    Args:
        judgement: A judgement for which `needs_parts` is true.
        strategy: Capture that was judged.
        parts: Capture of the reference with the gradient of each micro batch, and of the iteration before.
        without: Captures of reference runs that leave out one loss each, by the name of the loss. Weights and
            module inputs of such a run are replaced by the reference's, so only the gradient of the loss is missing.
    """
    first = judgement.first
    assert first is not None
    assert first.worst is not None
    for candidate in _list_sums(first.key, first.worst, strategy, parts, without):
        kind = classify_by_parts(
            first.worst,
            first.tolerance,
            parts=candidate.parts,
            rank=strategy.first,
            extra=candidate.extra,
        )
        if kind is not None:
            verdict = replace(judgement.verdict, kind=kind.name, factor=kind.factor)
            return replace(judgement, verdict=verdict)
    return judgement


def is_right_without_loss(
    judgement: Judgement, strategy_without: Capture, reference_without: Capture
) -> bool:
    """Return True if the error of the first wrong tensor vanishes when both runs leave out a loss.

    The loss then has a wrong gradient that is no multiple of the right one, and everything else is right.

    Args:
        judgement: A judgement for which `needs_parts` is true.
        strategy_without: Capture of the strategy without the loss, with the reference's module inputs.
        reference_without: Capture of the reference without the loss, with the same module inputs.
    """
    first = judgement.first
    assert first is not None
    tensor = first.worst
    assert tensor is not None
    aligner = ActivationAligner(reference_without, strategy_without)
    rank_capture = strategy_without.ranks[tensor.rank]
    for record in rank_capture.records:
        tensor_key = record.tensor_key
        record_key = (tensor_key.stage, tensor_key.name, tensor_key.slot)
        if record_key != first.key or tensor_key.micro_batch != tensor.micro_batch:
            continue
        aligned = aligner.align(rank_capture, record)
        if aligned.ours is None or aligned.reference is None:
            return False
        error_without = np.linalg.norm(aligned.ours - aligned.reference)
        error = np.linalg.norm(tensor.ours - tensor.reference)
        return bool(error_without <= UNEXPLAINED_FRACTION * error)
    return False


def name_wrong_loss(judgement: Judgement, loss: str) -> Judgement:
    """Return the judgement with the loss as the kind of the error, because everything is right without it."""
    kind = f"wrong in the {loss} only"
    return replace(judgement, verdict=replace(judgement.verdict, kind=kind, factor=None))


def _list_sums(
    key: ComparisonKey,
    tensor: ComparedTensor,
    strategy: Capture,
    parts: Capture,
    without: Mapping[str, Capture],
) -> Iterator[_Sum]:
    """Yield the ways to write the reference's tensor as a sum of parts: by loss, rank, micro batch and iteration.

    Splits into a single part are left out. An activation gradient is split only by loss, and only a reduced
    gradient is split by rank.
    """
    stage = key[0]
    losses = _split_by_loss(key, tensor, strategy, without)
    if losses:
        yield _Sum(losses)
    if stage is CaptureStage.ACTIVATION_GRADIENTS:
        return
    if stage is CaptureStage.REDUCED_GRADIENTS:
        ranks = _split_by_rank(key, tensor, strategy)
        if len(ranks) > 1:
            yield _Sum(ranks)
    micro_batches = _read_captured_parts(key, tensor, parts)
    before = micro_batches.pop(BEFORE, None)
    if len(micro_batches) > 1:
        yield _Sum(micro_batches)
    if before is not None and before.any():
        yield _Sum({"this iteration": tensor.reference, BEFORE: before}, extra=BEFORE)


def _split_by_loss(
    key: ComparisonKey,
    tensor: ComparedTensor,
    strategy: Capture,
    without: Mapping[str, Capture],
) -> dict[str, Array]:
    """Return the part of the reference's gradient that each loss contributes, by the name of the loss.

    The result is empty if no auxiliary loss contributes to this tensor.
    """
    losses: dict[str, Array] = {}
    for name, capture in without.items():
        remaining = _find_same_tensor(key, tensor, strategy, capture)
        if remaining is not None and (remaining != tensor.reference).any():
            losses[name] = tensor.reference - remaining
    if not losses:
        return {}
    return {"main loss": tensor.reference - sum(losses.values()), **losses}


def _split_by_rank(
    key: ComparisonKey, tensor: ComparedTensor, strategy: Capture
) -> dict[str, Array]:
    """Return each rank's gradient before the reduction, divided by the data-parallel size, by `rank N`.

    Ranks whose gradient has another shape than the tensor are left out.
    """
    _, name, slot = key
    ranks: dict[str, Array] = {}
    for parts in group_parameter_parts(strategy, CaptureStage.LOCAL_GRADIENTS, slot).values():
        for part in parts:
            if part.name == name and part.record.shape == tensor.ours.shape:
                data_size = part.rank_capture.rank.data[1]
                ranks[f"rank {part.rank}"] = part.values() / data_size
    return ranks


def _read_captured_parts(
    key: ComparisonKey, tensor: ComparedTensor, capture: Capture
) -> dict[str, Array]:
    """Return the parts into which a capture has split a parameter's gradient, by the name of the part.

    A part is the gradient of one micro batch, or of the iteration before (`BEFORE`). `key` names the parameter.
    Each part is assembled from all ranks and cut to the region of `tensor`. Parts that then have another shape
    than `tensor` are left out.
    """
    captured_parts: dict[str, Array] = {}
    parts_by_key = group_parameter_parts(
        capture, CaptureStage.LOCAL_GRADIENTS, GRADIENT_PART_PREFIX
    )
    for parameter_key, parts in parts_by_key.items():
        if parts[0].name != key[1]:
            continue
        values = assemble_region(parts, capture, region=tensor.region, shape=tensor.ours.shape)
        if values is not None:
            captured_parts[parameter_key[2].removeprefix(GRADIENT_PART_PREFIX)] = values
    return captured_parts


def _find_same_tensor(
    key: ComparisonKey, tensor: ComparedTensor, strategy: Capture, other_run: Capture
) -> Array | None:
    """Return the tensor of another run that corresponds to `tensor`; None if the run has none of its shape."""
    if tensor.micro_batch is None:
        return _find_same_parameter(key, tensor, other_run)
    return _find_same_activation(key, tensor, strategy, other_run)


def _find_same_parameter(
    key: ComparisonKey, tensor: ComparedTensor, other_run: Capture
) -> Array | None:
    """Return the region of another run's parameter that `tensor` covers; None if the run has none of its shape."""
    stage, name, slot = key
    for parameter_key, parts in group_parameter_parts(other_run, stage, slot).items():
        parameter_slot = parameter_key[2]
        if parameter_slot == slot and parts[0].name == name:
            return assemble_region(parts, other_run, region=tensor.region, shape=tensor.ours.shape)
    return None


def _find_same_activation(
    key: ComparisonKey, tensor: ComparedTensor, strategy: Capture, other_run: Capture
) -> Array | None:
    """Return another run's activation that corresponds to `tensor`; None if the run has none of its shape.

    The other run's tensor is aligned with each record of the key on the rank of `tensor`. The first that has the
    shape of `tensor` is returned.
    """
    aligner = ActivationAligner(other_run, strategy)
    rank_capture = strategy.ranks[tensor.rank]
    for record in rank_capture.records:
        tensor_key = record.tensor_key
        record_key = (tensor_key.stage, tensor_key.name, tensor_key.slot)
        if record_key != key or tensor_key.micro_batch != tensor.micro_batch:
            continue
        other_values = aligner.align(rank_capture, record).reference
        if other_values is not None and other_values.shape == tensor.ours.shape:
            return other_values
    return None
