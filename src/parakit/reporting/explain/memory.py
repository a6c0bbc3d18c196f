"""Why a pipeline's ranks hold different amounts, and what SP and sharding save."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from parakit.artifacts.measurements import MemoryCategory, RankMemory
from parakit.config.run import RunSpec
from parakit.config.strategy import Sharding, strategy_name
from parakit.costs import (
    Phase,
    activation_bytes,
    chunk_activation_bytes,
    head_bytes,
    layers_in_flight,
    rank_parameters,
)
from parakit.formatting.units import amount, count, joined, plural, signed
from parakit.reporting.explain.predicted import Subject, find_subject

_STATE = (MemoryCategory.WEIGHTS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER_STATE)
_SMALLEST_SHARE = 0.02
"""Of the difference between two ranks; smaller categories are not named."""
_LOSS = "loss"
_NO_LEDGER = "a memory ledger is missing, so what it saves is not known."


def pipeline_memory_sentences(subject: Subject, _: Sequence[Subject]) -> Iterator[str]:
    """Why first and last stage of a pipeline differ."""
    if subject.split.pipeline > 1:
        yield from (f"{subject.label}: {sentence}" for sentence in _stages(subject))


def _stages(subject: Subject) -> Iterator[str]:
    ranks, spec = _ranks(subject), subject.evidence.configuration
    if spec is None or len(ranks) < 2:
        yield "no memory ledger of two ranks, so its stages are not compared."
        return
    first, last = ranks[0], ranks[-1]
    stage = spec.parallelism.pipeline_rank(last.rank)
    if stage == 0:
        yield "the ledgers found are all of one stage."
        return
    heavier, lighter = (last, first) if last.peak_bytes >= first.peak_bytes else (first, last)
    difference = heavier.peak_bytes - lighter.peak_bytes
    parts = []
    for category in MemoryCategory:
        change = heavier.categories.get(category, 0) - lighter.categories.get(category, 0)
        if abs(change) > _SMALLEST_SHARE * max(difference, 1):
            parts.append(f"{signed(amount(change))} {category.value.replace('_', ' ')}")
    peaks = [
        f"at {amount(rank.peak_bytes)} (in {rank.peak_phase.value}"
        f"{f', {rank.peak_module}' if rank.peak_module else ''})"
        for rank in (heavier, lighter)
    ]
    yield (
        f"rank {heavier.rank} peaks {peaks[0]}, rank {lighter.rank} {peaks[1]}; "
        f"the {amount(difference)} between them are {joined(parts) or 'spread over all categories'}."
    )
    yield _tied(spec, stage)
    held = "; ".join(_describe_in_flight(spec, rank) for rank in (first, last))
    yield (
        f"at the end of its forwards a stage holds in flight: {held}. "
        "On the last stage the logits are among what was measured."
    )


def _tied(spec: RunSpec, stage: int) -> str:
    one, other = rank_parameters(spec, 0), rank_parameters(spec, stage)
    held = f"rank by rank {count(one.total)} and {count(other.total)} parameters"
    if not (one.word_embedding and other.output_layer):
        return f"first and last stage hold {held}."
    tied = "the tied" if spec.trained_shape.tied_embeddings else "an"
    share = other.output_layer / other.total
    return (
        f"{tied} embedding's {count(one.word_embedding)} elements are on the first "
        f"stage as embedding and on the last again as output layer, {share:.0%} of what it holds; so "
        f"weights and optimizer hardly differ ({held}), and the logits that only the last stage makes "
        "do."
    )


def _describe_in_flight(spec: RunSpec, rank: RankMemory) -> str:
    stage = spec.parallelism.pipeline_rank(rank.rank)
    flights = layers_in_flight(spec, stage) / spec.num_layers_on_stage(stage)
    forward = rank.phase_peak_bytes.get(Phase.FORWARD)
    state = sum(rank.categories.get(category, 0) for category in _STATE)
    seen = ""
    if forward:
        seen = f", {amount(forward - state)} measured then beside weights, gradients and optimizer"
    return (
        f"rank {rank.rank} {flights:g} micro batch{'es' * (flights != 1)}, in closed form "
        f"{amount(activation_bytes(spec, stage))} of activations{seen}"
    )


def sequence_parallel_sentences(subject: Subject, subjects: Sequence[Subject]) -> Iterator[str]:
    """What SP keeps less than the TP it is added to."""
    # Megatron trains no experts under TP without SP, so there is nothing to compare those with.
    if subject.split.sequence_parallel and subject.split.expert == 1:
        without = replace(subject.split, sequence_parallel=False)
        plain = find_subject(subjects, subject, without, same_batch=True)
        said = f"there is no {strategy_name(without)} run of this batch to see its saving against."
        yield f"{subject.label}: {_saving(subject, plain) if plain else said}"


def _saving(subject: Subject, plain: Subject) -> str:
    one, two = _ranks(plain), _ranks(subject)
    spec, reference = subject.evidence.configuration, plain.evidence.configuration
    if not one or not two or spec is None or reference is None:
        return _NO_LEDGER
    # What layers, norms and embeddings kept; the loss keeps logits, which SP does not touch.
    kept, norm = [], []
    for rank in (one[0], two[0]):
        by_layer = rank.activations_by_layer.items()
        kept.append(sum(size for module, size in by_layer if module != _LOSS))
        norm.append(sum(size for module, size in by_layer if module.endswith("final_layernorm")))
    before, after = kept
    closed = [
        head_bytes(each)
        + sum(
            chunk_activation_bytes(each, *of_kinds)
            for of_kinds in zip(
                each.layers_per_chunk(0), each.dense_layers_per_chunk(0), strict=True
            )
        )
        for each in (reference, spec)
    ]
    predicted = spec.microbatches * (closed[0] - closed[1])
    return (
        f"forward keeps {amount(after)} for backward over an iteration's "
        f"{plural(spec.microbatches, 'micro batch')} on rank 0, {plain.label} {amount(before)}: "
        f"{amount(before - after)} less, where the closed form has {amount(predicted)} (inputs of norms "
        "and of the matrices behind them, and dropout masks, split over "
        f"{spec.sequence_shards} ranks instead of held by each). The final norm alone: "
        f"{amount(norm[0])} to {amount(norm[1])}. Nothing is moved to the host."
    )


def sharding_sentences(subject: Subject, subjects: Sequence[Subject]) -> Iterator[str]:
    """What sharding the optimizer saves against plain data parallelism."""
    whole = replace(subject.split, sharding=Sharding.NONE)
    plain = (
        find_subject(subjects, subject, whole, same_batch=True) if subject.split.sharding else None
    )
    if plain is None:
        return
    one, two = _ranks(plain), _ranks(subject)
    if not one or not two:
        yield f"{subject.label}: {_NO_LEDGER}"
        return
    changes = [
        f"{category.value.replace('_', ' ')} {amount(one[0].categories.get(category, 0))} to "
        f"{amount(two[0].categories.get(category, 0))}"
        for category in _STATE
    ]
    yield (
        f"{subject.label} against {plain.label}, rank 0: {joined(changes)}; the peak "
        f"{amount(one[0].peak_bytes)} to {amount(two[0].peak_bytes)}."
    )


def _ranks(subject: Subject) -> tuple[RankMemory, ...]:
    record = subject.run.measurements.memory
    return tuple(sorted(record.ranks, key=lambda rank: rank.rank)) if record else ()
