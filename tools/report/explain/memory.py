"""Why a pipeline's ranks hold different amounts, and what SP and sharding save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tools.plan.activations import chunk_activation_bytes
from tools.plan.memory import activation_bytes, head_bytes, layers_in_flight
from tools.plan.tensors import rank_parameters
from tools.records.measurements import MemoryCategory, Phase, RankMemory
from tools.report.explain.subjects import Subject, find
from tools.spec.strategy import Sharding, strategy_name
from tools.text.units import amount, count, joined, signed

_STATE = (MemoryCategory.WEIGHTS, MemoryCategory.GRADIENTS, MemoryCategory.OPTIMIZER_STATE)
_SMALLEST_SHARE = 0.02
"""Of the difference between two ranks; smaller categories are not named."""
_LOSS = "loss"


def pipeline_memory_sentences(subjects: Sequence[Subject]) -> list[str]:
    """Why first and last stage differ, for every pipeline."""
    found: list[str] = []
    for subject in subjects:
        if subject.split.pipeline > 1:
            found += _stages(subject)
    return found


def sequence_parallel_sentences(subjects: Sequence[Subject]) -> list[str]:
    """What SP keeps less than the TP it is added to."""
    found = []
    for subject in subjects:
        # Megatron trains no experts under TP without SP, so there is nothing to compare those with.
        if not subject.split.sequence_parallel or subject.split.expert > 1:
            continue
        without = replace(subject.split, sequence_parallel=False)
        plain = find(subjects, subject, without, same_batch=True)
        found.append(_saving(subject, plain, strategy_name(without)))
    return found


def sharding_sentences(subjects: Sequence[Subject]) -> list[str]:
    """What sharding the optimizer saves against plain data parallelism."""
    found = []
    for subject in subjects:
        if not subject.split.sharding:
            continue
        whole = replace(subject.split, sharding=Sharding.NONE)
        if plain := find(subjects, subject, whole, same_batch=True):
            found.append(_sharded(subject, plain))
    return found


def _stages(subject: Subject) -> list[str]:
    ranks, configuration = _ranks(subject), subject.evidence.configuration
    if configuration is None or len(ranks) < 2:
        return [f"{subject.label}: no memory ledger of two ranks, so its stages are not compared."]
    first, last = ranks[0], ranks[-1]
    stage = configuration.parallelism.pipeline_rank(last.rank)
    if stage == 0:
        return [f"{subject.label}: the ledgers found are all of one stage."]
    return [_difference(subject, first, last), _tied(subject, stage), _in_flight(subject, ranks)]


def _difference(subject: Subject, first: RankMemory, last: RankMemory) -> str:
    heavier, lighter = (last, first) if last.peak_bytes >= first.peak_bytes else (first, last)
    difference = heavier.peak_bytes - lighter.peak_bytes
    parts = []
    for category in MemoryCategory:
        change = heavier.categories.get(category, 0) - lighter.categories.get(category, 0)
        if abs(change) > _SMALLEST_SHARE * max(difference, 1):
            parts.append(f"{signed(amount(change))} {category.value.replace('_', ' ')}")
    return (
        f"{subject.label}: rank {heavier.rank} peaks at {amount(heavier.peak_bytes)} "
        f"({_where(heavier)}), rank {lighter.rank} at {amount(lighter.peak_bytes)} ({_where(lighter)}); "
        f"the {amount(difference)} between them are {joined(parts) or 'spread over all categories'}."
    )


def _tied(subject: Subject, stage: int) -> str:
    configuration = subject.evidence.configuration
    assert configuration is not None
    one = rank_parameters(configuration, 0)
    other = rank_parameters(configuration, stage)
    held = f"rank by rank {count(one.total)} and {count(other.total)} parameters"
    if not (one.word_embedding and other.output_layer):
        return f"{subject.label}: first and last stage hold {held}."
    tied = "the tied" if configuration.trained_shape.tied_embeddings else "an"
    share = other.output_layer / other.total
    return (
        f"{subject.label}: {tied} embedding's {count(one.word_embedding)} elements are on the first "
        f"stage as embedding and on the last again as output layer, {share:.0%} of what it holds; so "
        f"weights and optimizer hardly differ ({held}), and the logits that only the last stage makes "
        "do."
    )


def _in_flight(subject: Subject, ranks: Sequence[RankMemory]) -> str:
    configuration = subject.evidence.configuration
    assert configuration is not None
    parts = []
    for rank in (ranks[0], ranks[-1]):
        stage = configuration.parallelism.pipeline_rank(rank.rank)
        flights = layers_in_flight(configuration, stage) / configuration.stage_layers(stage)
        forward = rank.phase_peak_bytes.get(Phase.FORWARD)
        state = sum(rank.categories.get(category, 0) for category in _STATE)
        seen = (
            f", {amount(forward - state)} measured then beside weights, gradients and optimizer"
            if forward
            else ""
        )
        parts.append(
            f"rank {rank.rank} {flights:g} micro batch(es), in closed form "
            f"{amount(activation_bytes(configuration, stage))} of activations{seen}"
        )
    return (
        f"{subject.label}: at the end of its forwards a stage holds in flight: {'; '.join(parts)}. "
        "On the last stage the logits are among what was measured."
    )


def _saving(subject: Subject, plain: Subject | None, strategy: str) -> str:
    if plain is None:
        return (
            f"{subject.label}: there is no {strategy} run of this batch to see its saving against."
        )
    one, two = _ranks(plain), _ranks(subject)
    configuration, reference = subject.evidence.configuration, plain.evidence.configuration
    if not one or not two or configuration is None or reference is None:
        return _without_ledger(subject)
    before, after = _kept(one[0]), _kept(two[0])
    closed = [
        head_bytes(spec)
        + sum(
            chunk_activation_bytes(spec, *of_kinds)
            for of_kinds in zip(spec.chunk_layers(0), spec.chunk_dense_layers(0), strict=True)
        )
        for spec in (reference, configuration)
    ]
    predicted = configuration.microbatches * (closed[0] - closed[1])
    norm = _of(one[0], "final_layernorm"), _of(two[0], "final_layernorm")
    return (
        f"{subject.label}: forward keeps {amount(after)} for backward over an iteration's "
        f"{configuration.microbatches} micro batch(es) on rank 0, {plain.label} {amount(before)}: "
        f"{amount(before - after)} less, where the closed form has {amount(predicted)} (inputs of norms "
        "and of the matrices behind them, and dropout masks, split over "
        f"{configuration.sequence_shards} ranks instead of held by each). The final norm alone: "
        f"{amount(norm[0])} to {amount(norm[1])}. Nothing is moved to the host."
    )


def _without_ledger(subject: Subject) -> str:
    return f"{subject.label}: a memory ledger is missing, so what it saves is not known."


def _sharded(subject: Subject, plain: Subject) -> str:
    one, two = _ranks(plain), _ranks(subject)
    if not one or not two:
        return _without_ledger(subject)
    changes = [
        f"{category.value.replace('_', ' ')} {amount(one[0].categories.get(category, 0))} to "
        f"{amount(two[0].categories.get(category, 0))}"
        for category in _STATE
    ]
    return (
        f"{subject.label} against {plain.label}, rank 0: {joined(changes)}; the peak "
        f"{amount(one[0].peak_bytes)} to {amount(two[0].peak_bytes)}."
    )


def _ranks(subject: Subject) -> tuple[RankMemory, ...]:
    record = subject.run.ledgers.memory
    return tuple(sorted(record.ranks, key=lambda rank: rank.rank)) if record else ()


def _kept(rank: RankMemory) -> int:
    """Bytes that layers, norms and embeddings kept; the loss keeps logits, which SP does not touch."""
    return sum(kept for module, kept in rank.activations_by_layer.items() if module != _LOSS)


def _of(rank: RankMemory, ending: str) -> int:
    kept_by = rank.activations_by_layer.items()
    return sum(kept for module, kept in kept_by if module.endswith(ending))


def _where(rank: RankMemory) -> str:
    module = f", {rank.peak_module}" if rank.peak_module else ""
    return f"in {rank.peak_phase.value}{module}"
