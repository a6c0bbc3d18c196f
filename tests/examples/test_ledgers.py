"""Exact comparison of bytes that real runs sent and held with the planner's closed forms."""

import json
from collections import Counter
from dataclasses import replace

import pytest

from parakit.artifacts.measurements import (
    CommunicationRecord,
    MemoryCategory,
    MemoryRecord,
    RankCommunication,
    TimeRecord,
    read_measurements,
)
from parakit.artifacts.run import LEDGER_FOLDER, TENSORBOARD_FOLDER, TRACE_FILE
from parakit.config.flags import Flags
from parakit.config.model import load_model
from parakit.config.run import DeviceKind, RunSpec, spec_from_model
from parakit.config.strategy import PUBLISHED_STRATEGIES
from parakit.costs.collectives.rank import rank_collectives
from parakit.costs.operations import Operation, Phase
from parakit.costs.tensors import rank_parameters
from parakit.logs.sources import read_scalars
from tests.examples.runs import ITERATIONS, Run
from tests.small import PADDED, VOCABULARY

MORE = ("vpp2", "zero1")
PARALLEL = (*PUBLISHED_STRATEGIES[1:], *MORE)
Key = tuple[str, str, int]


@pytest.fixture(scope="session")
def runs(eight: dict[str, Run]) -> dict[str, Run]:
    return eight


def configuration(run: Run) -> RunSpec:
    """Return the run's configuration for the planner: fp32, gathered keys and values, no dropout."""
    model = load_model(run.record.spec.model)
    flags = Flags(run.record.argv)
    multiple = flags.integer("--make-vocab-size-divisible-by", 128)
    shape = replace(model.shape, vocabulary=VOCABULARY, vocabulary_multiple=multiple)
    as_run = replace(model, shape=shape)
    return replace(
        spec_from_model(as_run, run.record.spec.parallelism, run.record.spec.batch),
        dtype="fp32",
        cp_comm_type="all_gather",
        device=DeviceKind.CPU,
    )


def pipeline_rank(run: Run, rank: int) -> int:
    degrees = run.record.spec.parallelism
    return rank // (degrees.world_size // degrees.pipeline)


def measured(rank: RankCommunication) -> Counter[Key]:
    calls: Counter[Key] = Counter()
    for row in rank.calls:
        if row.ranks > 1 and row.operation not in (Operation.RECEIVE, Operation.BARRIER):
            calls[row.group, row.operation, row.payload_bytes] += row.calls
    return calls


def predicted(run: Run, rank: int) -> Counter[Key]:
    expected: Counter[Key] = Counter()
    for item in rank_collectives(configuration(run), pipeline_rank(run, rank)):
        expected[item.group, item.operation, item.payload_bytes] += item.calls
    return expected


@pytest.mark.parametrize("name", PARALLEL)
def test_every_call_of_a_steady_iteration_is_in_the_closed_form(
    runs: dict[str, Run], name: str
) -> None:
    for rank in read_measurements(runs[name].folder, CommunicationRecord).ranks:
        assert measured(rank) == predicted(runs[name], rank.rank)


@pytest.mark.parametrize("name", PARALLEL)
def test_bytes_on_the_wire_equal_the_closed_form(runs: dict[str, Run], name: str) -> None:
    for rank in read_measurements(runs[name].folder, CommunicationRecord).ranks:
        traffic = rank_collectives(configuration(runs[name]), pipeline_rank(runs[name], rank.rank))
        assert rank.wire_bytes == sum(item.wire_bytes for item in traffic)


@pytest.mark.parametrize("name", ["baseline", *PARALLEL])
def test_all_iterations_but_the_first_and_the_last_are_steady(
    runs: dict[str, Run], name: str
) -> None:
    for rank in read_measurements(runs[name].folder, CommunicationRecord).ranks:
        # The first iteration creates groups, and the last is not followed by another one.
        assert rank.steady_iterations + rank.other_iterations == ITERATIONS - 1
        assert rank.steady_iterations >= ITERATIONS - 3


@pytest.mark.parametrize("name", ["baseline", *PARALLEL])
def test_weights_gradients_and_adam_state_match_the_closed_form_exactly(
    runs: dict[str, Run], name: str
) -> None:
    run = runs[name]
    for rank in read_measurements(run.folder, MemoryRecord).ranks:
        held = rank_parameters(configuration(run), pipeline_rank(run, rank.rank)).total
        assert rank.categories[MemoryCategory.WEIGHTS] == 4 * held
        gradients = rank.categories[MemoryCategory.GRADIENTS]
        state = rank.categories[MemoryCategory.OPTIMIZER_STATE]
        if name != "zero1":
            assert gradients == 4 * held
            # Besides its two moments Adam keeps a step count of four bytes for each tensor.
            assert 0 <= state - 8 * held < 4 * 200


@pytest.mark.parametrize("name", ["baseline", *PARALLEL])
def test_categories_sum_to_the_peak(runs: dict[str, Run], name: str) -> None:
    for rank in read_measurements(runs[name].folder, MemoryRecord).ranks:
        assert sum(rank.categories.values()) == rank.peak_bytes
        assert rank.peak_bytes == max(rank.phase_peak_bytes.values())


def test_sequence_parallelism_halves_the_activations_of_norms(runs: dict[str, Run]) -> None:
    kept = {
        n: read_measurements(runs[n].folder, MemoryRecord).ranks[0].activations_by_layer
        for n in ("tp2", "sp2")
    }
    assert kept["sp2"]["decoder.final_layernorm"] * 2 == kept["tp2"]["decoder.final_layernorm"]


def test_only_the_last_stage_of_a_pipeline_holds_logits(runs: dict[str, Run]) -> None:
    first, last = read_measurements(runs["pp2"].folder, MemoryRecord).ranks
    assert first.categories[MemoryCategory.LOGITS] == 0
    one_micro_batch = 4 * 2 * 64 * PADDED
    assert last.categories[MemoryCategory.LOGITS] in (one_micro_batch, 2 * one_micro_batch)


@pytest.mark.parametrize("name", ["baseline", *PARALLEL])
def test_phases_sum_to_the_iteration(runs: dict[str, Run], name: str) -> None:
    for rank in read_measurements(runs[name].folder, TimeRecord).ranks:
        assert sum(rank.phase_seconds.values()) == pytest.approx(rank.iteration_seconds, rel=0.02)
        assert rank.phase_seconds[Phase.FORWARD] > 0
        assert rank.phase_seconds[Phase.BACKWARD] > 0
        for phase, seconds in rank.communication_seconds.items():
            assert seconds <= rank.phase_seconds[phase]


def test_only_pipeline_stages_wait_for_a_neighbour(
    runs: dict[str, Run],
) -> None:
    waiting = {
        name: [
            rank.phase_seconds.get(Phase.PIPELINE, 0) > 0
            for rank in read_measurements(run.folder, TimeRecord).ranks
        ]
        for name, run in runs.items()
    }
    pipelines = {name for name, waits in waiting.items() if all(waits)}
    assert pipelines == {name for name, waits in waiting.items() if any(waits)} == {"pp2", "vpp2"}


def test_the_trace_shows_both_ranks_and_every_micro_batch(runs: dict[str, Run]) -> None:
    events = json.loads((runs["pp2"].folder / TRACE_FILE).read_text())["traceEvents"]
    forwards = Counter(event["pid"] for event in events if event["name"] == "forward-compute")
    assert forwards == {0: 4, 1: 4}
    assert (runs["pp2"].folder / LEDGER_FOLDER / "rank1.json").is_file()


@pytest.mark.parametrize("name", ["baseline", *PARALLEL])
def test_tensorboard_shows_bytes_memory_and_time_per_iteration(
    runs: dict[str, Run], name: str
) -> None:
    scalars = read_scalars(runs[name].folder / TENSORBOARD_FOLDER)
    # Megatron writes on the last rank. The first iteration creates groups, the second measures memory.
    communication = read_measurements(runs[name].folder, CommunicationRecord).ranks[-1]
    memory = read_measurements(runs[name].folder, MemoryRecord).ranks[-1]
    steps = list(range(3, ITERATIONS))
    assert scalars["ledger/sent-bytes"] == dict.fromkeys(steps, communication.wire_bytes)
    assert scalars["ledger/peak-memory-bytes"] == dict.fromkeys(steps, memory.peak_bytes)
    for step in steps:
        milliseconds = scalars["ledger/iteration-ms"][step]
        assert 0 <= scalars["ledger/exposed-communication-ms"][step] <= milliseconds
        tokens = runs[name].record.spec.tokens_per_iteration
        assert scalars["ledger/tokens-per-second"][step] == pytest.approx(
            tokens * 1e3 / milliseconds
        )
