"""Explain why the ranks of a pipeline hold different amounts, and what SP and sharding save.

The figures come from the runs' `memory.json`: bytes per category at the moment of a rank's peak.
"""

from __future__ import annotations

import math
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
_MIN_FRACTION_NAMED = 0.02
"""Fraction of the difference between two ranks; categories that differ by less are not named."""
_LOSS = "loss"
_NO_RECORD = "a memory.json is missing, so what it saves is not known."


def pipeline_memory_sentences(subject: Subject, _: Sequence[Subject]) -> Iterator[str]:
    """Yield why the first and the last stage hold different amounts; nothing without a pipeline."""
    if subject.split.pipeline > 1:
        yield from (f"{subject.label}: {sentence}" for sentence in _compare_stages(subject))


def answer_pipeline_memory(subjects: Sequence[Subject]) -> str:
    """Return the peak memory of first and last rank for the pipeline where they differ most, and the main cause.

    The text is empty if no run recorded the memory of two stages.
    """
    pairs = []
    for subject in subjects:
        ranks = _stage_ranks(subject)
        if ranks is not None:
            pairs.append((subject, *ranks))
    if not pairs:
        return ""
    subject, heavier, lighter = max(pairs, key=lambda pair: pair[1].peak_bytes - pair[2].peak_bytes)
    text = (
        f"Rank {heavier.rank} of {subject.label} peaks at {amount(heavier.peak_bytes)},"
        f" rank {lighter.rank} at {amount(lighter.peak_bytes)}."
    )
    changes = _category_differences(heavier, lighter)
    if not changes:
        return text
    category = max(changes, key=lambda name: changes[name])
    return f"{text} The largest difference is {signed(amount(changes[category]))} {category}."


def _stage_ranks(subject: Subject) -> tuple[RankMemory, RankMemory] | None:
    """Return the memory of the first and of the last rank, the rank with the higher peak first.

    None means that the run has no pipeline, that a record is missing, or that both ranks are on the first stage.
    """
    ranks, spec = _sorted_ranks(subject), subject.evidence.configuration
    if subject.split.pipeline == 1 or spec is None or len(ranks) < 2:
        return None
    first, last = ranks[0], ranks[-1]
    if spec.parallelism.pipeline_rank(last.rank) == 0:
        return None
    return (last, first) if last.peak_bytes >= first.peak_bytes else (first, last)


def _category_differences(heavier: RankMemory, lighter: RankMemory) -> dict[str, int]:
    """Return, by memory category, how many more bytes `heavier` holds at its peak than `lighter`.

    A negative number means that `lighter` holds more. Small differences are left out.
    """
    least = _MIN_FRACTION_NAMED * max(heavier.peak_bytes - lighter.peak_bytes, 1)
    differences = {}
    for category in MemoryCategory:
        change = heavier.categories.get(category, 0) - lighter.categories.get(category, 0)
        if abs(change) > least:
            differences[category.value.replace("_", " ")] = change
    return differences


def _compare_stages(subject: Subject) -> Iterator[str]:
    """Yield sentences on the peaks of first and last rank, the embedding, and the micro batches in flight."""
    ranks, spec = _sorted_ranks(subject), subject.evidence.configuration
    if spec is None or len(ranks) < 2:
        yield "there is no memory.json of two ranks, so its stages are not compared."
        return
    pair = _stage_ranks(subject)
    if pair is None:
        yield "every memory.json is of one stage."
        return
    heavier, lighter = pair
    differences = [
        f"{signed(amount(change))} {category}"
        for category, change in _category_differences(heavier, lighter).items()
    ]
    yield (
        f"{_describe_peak(heavier)}, {_describe_peak(lighter)}; the"
        f" {amount(heavier.peak_bytes - lighter.peak_bytes)} between them are"
        f" {joined(differences) or 'spread over all categories'}."
    )
    first, last = ranks[0], ranks[-1]
    yield _explain_embedding(spec, spec.parallelism.pipeline_rank(last.rank))
    in_flight = "; ".join(_describe_in_flight(spec, rank) for rank in (first, last))
    yield (
        f"at the end of its forwards a stage holds in flight: {in_flight}. "
        "On the last stage the logits are part of the measured bytes."
    )


def _describe_peak(rank: RankMemory) -> str:
    """Return a rank's peak with its phase and module: `rank 1 peaks at 29 MiB (in backward)`."""
    module = f", {rank.peak_module}" if rank.peak_module else ""
    return (
        f"rank {rank.rank} peaks at {amount(rank.peak_bytes)} (in {rank.peak_phase.value}{module})"
    )


def _explain_embedding(spec: RunSpec, last_stage: int) -> str:
    """Return a sentence on the parameters of first and last stage, and on the embedding's part of them."""
    first, last = rank_parameters(spec, 0), rank_parameters(spec, last_stage)
    totals = f"{count(first.total)} and {count(last.total)} parameters per rank"
    if not (first.word_embedding and last.output_layer):
        return f"first and last stage hold {totals}."
    article = "the tied" if spec.trained_shape.tied_embeddings else "an"
    fraction = last.output_layer / last.total
    return (
        f"{article} embedding's {count(first.word_embedding)} elements are on the first stage as"
        f" embedding and once more on the last stage as output layer, {fraction:.0%} of its parameters."
        f" So weights and optimizer hardly differ ({totals}); the logits differ, because only the last"
        " stage computes them."
    )


def _describe_in_flight(spec: RunSpec, rank: RankMemory) -> str:
    """Return a phrase on a rank's micro batches in flight and the bytes of their activations.

    The phrase has the bytes by formula. If the record has a peak of forward, it also has the measured bytes.
    """
    stage = spec.parallelism.pipeline_rank(rank.rank)
    micro_batches = layers_in_flight(spec, stage) / spec.num_layers_on_stage(stage)
    forward_peak = rank.phase_peak_bytes.get(Phase.FORWARD)
    state_bytes = sum(rank.categories.get(category, 0) for category in _STATE)
    measured = ""
    if forward_peak:
        measured = (
            f", measured {amount(forward_peak - state_bytes)} in addition to weights, gradients and"
            " optimizer"
        )
    noun = "micro batch" if micro_batches == 1 else "micro batches"
    return (
        f"rank {rank.rank} {micro_batches:g} {noun}, in closed form "
        f"{amount(activation_bytes(spec, stage))} of activations{measured}"
    )


def sequence_parallel_sentences(subject: Subject, subjects: Sequence[Subject]) -> Iterator[str]:
    """Yield a sentence on how many bytes fewer a run with SP stores for backward than the same run without SP.

    Nothing is yielded for runs without SP and for runs with expert parallelism.
    """
    # Megatron trains no experts under TP without SP, so there is nothing to compare them with.
    if subject.split.sequence_parallel and subject.split.expert == 1:
        without = replace(subject.split, sequence_parallel=False)
        plain = find_subject(subjects, subject, without, same_batch=True)
        missing = f"there is no {strategy_name(without)} run of this batch to compare it with."
        yield f"{subject.label}: {_describe_saving(subject, plain) if plain else missing}"


def answer_sequence_parallel(subjects: Sequence[Subject]) -> str:
    """Return a sentence on the largest saving by sequence parallelism; empty if no pair of runs was measured."""
    largest_saving, text = -math.inf, ""
    for subject in subjects:
        if not subject.split.sequence_parallel or subject.split.expert != 1:
            continue
        without = replace(subject.split, sequence_parallel=False)
        plain = find_subject(subjects, subject, without, same_batch=True)
        if plain is None or not _sorted_ranks(plain) or not _sorted_ranks(subject):
            continue
        before = _stored_bytes(_sorted_ranks(plain)[0])
        after = _stored_bytes(_sorted_ranks(subject)[0])
        if not before:
            continue
        saving = 1 - after / before
        # Of equal savings the last one is taken.
        if saving >= largest_saving:
            largest_saving = saving
            text = (
                f"{subject.label} stores {amount(before - after)} ({saving:.0%}) less for"
                f" backward than {plain.label}, on rank 0."
            )
    return text


def _stored_bytes(rank: RankMemory) -> int:
    """Return the bytes that forward stores for backward, without the loss, which SP does not change."""
    stored = rank.activations_by_layer.items()
    return sum(stored_bytes for module, stored_bytes in stored if module != _LOSS)


def _final_norm_bytes(rank: RankMemory) -> int:
    """Return the bytes that the final norm stores for backward."""
    stored = rank.activations_by_layer.items()
    return sum(
        stored_bytes for module, stored_bytes in stored if module.endswith("final_layernorm")
    )


def _describe_saving(subject: Subject, plain: Subject) -> str:
    """Return sentences on the bytes that rank 0 stores for backward with SP and without it (`plain`).

    The saving is also given by formula. If a record is missing, the text says so.
    """
    plain_ranks, ranks = _sorted_ranks(plain), _sorted_ranks(subject)
    spec, plain_spec = subject.evidence.configuration, plain.evidence.configuration
    if not plain_ranks or not ranks or spec is None or plain_spec is None:
        return _NO_RECORD
    before, after = _stored_bytes(plain_ranks[0]), _stored_bytes(ranks[0])
    predicted_per_microbatch = _predicted_stored_bytes(plain_spec) - _predicted_stored_bytes(spec)
    return (
        f"on rank 0 forward stores {amount(after)} for backward over the"
        f" {plural(spec.microbatches, 'micro batch')} of an iteration, {plain.label} {amount(before)}."
        f" That is {amount(before - after)} less, where the closed form has"
        f" {amount(spec.microbatches * predicted_per_microbatch)}: inputs of norms and of the matrices"
        f" behind them, and dropout masks, are split over {spec.sequence_shards} ranks. The final norm"
        f" alone: {amount(_final_norm_bytes(plain_ranks[0]))} to {amount(_final_norm_bytes(ranks[0]))}."
    )


def _predicted_stored_bytes(spec: RunSpec) -> int:
    """Return the bytes per micro batch that the first stage stores for backward, in closed form."""
    stored = head_bytes(spec)
    chunks = zip(spec.layers_per_chunk(0), spec.dense_layers_per_chunk(0), strict=True)
    for num_layers, num_dense_layers in chunks:
        stored += chunk_activation_bytes(spec, num_layers, num_dense_layers)
    return stored


def sharding_sentences(subject: Subject, subjects: Sequence[Subject]) -> Iterator[str]:
    """Yield a sentence that compares the memory of a sharded run with the same run without sharding, on rank 0.

    Nothing is yielded without such a pair of runs.
    """
    plain = _find_unsharded(subject, subjects)
    if plain is None:
        return
    plain_ranks, ranks = _sorted_ranks(plain), _sorted_ranks(subject)
    if not plain_ranks or not ranks:
        yield f"{subject.label}: {_NO_RECORD}"
        return
    changes = [
        f"{category.value.replace('_', ' ')} {amount(plain_ranks[0].categories.get(category, 0))} to "
        f"{amount(ranks[0].categories.get(category, 0))}"
        for category in _STATE
    ]
    yield (
        f"{subject.label} against {plain.label}, rank 0: {joined(changes)}; the peak "
        f"{amount(plain_ranks[0].peak_bytes)} to {amount(ranks[0].peak_bytes)}."
    )


def answer_sharding(subjects: Sequence[Subject]) -> str:
    """Return a sentence on the row in which sharding reduces the peak memory most.

    The saving is relative to the row with the same split and batch and without sharding, on rank 0. The text is
    empty if no row has a saving.
    """
    largest_saving, text = 0.0, ""
    for subject in subjects:
        plain = _find_unsharded(subject, subjects)
        if plain is None:
            continue
        plain_ranks, ranks = _sorted_ranks(plain), _sorted_ranks(subject)
        if not plain_ranks or not ranks:
            continue
        before, after = plain_ranks[0].peak_bytes, ranks[0].peak_bytes
        if not 0 < after < before:
            continue
        saving = 1 - after / before
        # Of rows with equal savings the last is named.
        if saving >= largest_saving:
            largest_saving = saving
            text = (
                f"{subject.label} peaks at {amount(after)} on rank 0, {saving:.0%} below"
                f" {plain.label}'s {amount(before)}."
            )
    return text


def _find_unsharded(subject: Subject, subjects: Sequence[Subject]) -> Subject | None:
    """Return the row of the same split and batch without sharding; None without sharding or such a row."""
    if not subject.split.sharding:
        return None
    unsharded = replace(subject.split, sharding=Sharding.NONE)
    return find_subject(subjects, subject, unsharded, same_batch=True)


def _sorted_ranks(subject: Subject) -> tuple[RankMemory, ...]:
    """Return the memory records of a run by rank; empty without a `memory.json`."""
    record = subject.run.measurements.memory
    return tuple(sorted(record.ranks, key=lambda rank: rank.rank)) if record else ()
