"""Exact losses, collectives, memory and routing of real runs of mixtures of experts with Megatron."""

import functools
from collections import Counter
from collections.abc import Callable

import pytest

from parakit.artifacts.measurements import (
    ROUTED_GROUPS,
    CommunicationRecord,
    LayerRouting,
    MemoryCategory,
    MemoryRecord,
    RankCommunication,
    RoutingRecord,
    read_measurements,
)
from parakit.artifacts.run import Status
from parakit.config.model import load_model
from parakit.config.run import RunSpec
from parakit.costs.collectives.rank import rank_collectives
from parakit.costs.memory import activation_bytes
from parakit.costs.operations import Operation
from parakit.costs.tensors import rank_parameters
from parakit.logs.runs import load_folder
from parakit.reporting.explain.closed_form import require_closed_form_spec
from parakit.reporting.explain.routing import compute_rank_loads, merge_routing_of_ranks
from tests.examples.runs import ITERATIONS, Run, Trainer

SHAPE = load_model("moe-tiny").shape
ROW_BYTES = 4 * SHAPE.hidden
COPIES = 8 * SHAPE.seq_length * SHAPE.experts_per_token
"""Copies of the tokens of an iteration, per layer."""
STEADY = range(2, ITERATIONS)
"""Iterations whose calls count: the first creates groups, and the last has no end."""
Key = tuple[str, str, int]

ON_TWO = ("sp2", "cp2", "pp2", "dp2", "ep2-zero1")
ON_FOUR = ("ep2dp2", "tp2ep2", "pp2ep2")


@pytest.fixture(scope="session")
def split(train: Trainer) -> Callable[[str], Run]:
    """Return a function that trains a run of another strategy, each only once."""

    @functools.cache
    def trained(name: str) -> Run:
        return train(f"train-{name}-moe-tiny-{4 if name in ON_FOUR else 2}cpu")

    return trained


def configuration(run: Run) -> RunSpec:
    return require_closed_form_spec(load_folder(run.folder))


def sent(rank: RankCommunication) -> Counter[Key]:
    """Return the calls whose size does not depend on a router."""
    calls: Counter[Key] = Counter()
    for row in rank.calls:
        silent = row.operation in (Operation.RECEIVE, Operation.BARRIER)
        if row.ranks > 1 and not silent and row.group not in ("ep", "expert_tp"):
            calls[row.group, row.operation, row.payload_bytes] += row.calls
    return calls


def predicted(run: Run, rank: int) -> Counter[Key]:
    expected: Counter[Key] = Counter()
    form = configuration(run)
    for item in rank_collectives(form, form.parallelism.pipeline_rank(rank)):
        if item.group not in ("ep", "expert_tp"):
            expected[item.group, item.operation, item.payload_bytes] += item.calls
    return expected


def routed(run: Run) -> dict[tuple[str, str, str], list[int]]:
    """Return measured calls and bytes over all ranks for collectives whose size depends on a router."""
    totals: dict[tuple[str, str, str], list[int]] = {}
    for rank in read_measurements(run.folder, CommunicationRecord).ranks:
        for row in rank.calls:
            if row.group in ("ep", "expert_tp") and row.ranks > 1:
                entry = totals.setdefault((row.group, row.operation, row.phase), [0, 0])
                entry[0] += row.calls
                entry[1] += row.calls * row.payload_bytes
    return totals


def routed_in_closed_form(run: Run) -> dict[tuple[str, str, str], list[int]]:
    form, totals = configuration(run), {}
    for rank in range(form.parallelism.world_size):
        for item in rank_collectives(form, form.parallelism.pipeline_rank(rank)):
            if item.group in ("ep", "expert_tp"):
                entry = totals.setdefault((item.group, item.operation, item.phase), [0, 0])
                entry[0] += item.calls
                entry[1] += item.total_payload_bytes
    return totals


def test_two_expert_ranks_print_the_losses_of_a_single_rank(experts: Run, ep2: Run) -> None:
    for run in (experts, ep2):
        assert run.status.status is Status.OK
        assert len(run.losses) == ITERATIONS
    assert ep2.losses == pytest.approx(experts.losses, abs=1.1e-5)
    assert ep2.record.start_checkpoint == experts.record.start_checkpoint


def test_each_expert_rank_holds_half_of_the_experts(experts: Run, ep2: Run) -> None:
    assert experts.parameters == {(0, 0): 666_176}
    assert ep2.parameters == {(0, 0): 404_032}
    for rank in read_measurements(ep2.folder, MemoryRecord).ranks:
        held = rank_parameters(configuration(ep2))
        assert held.experts == 4 * 4 * 2 * 64 * 128
        assert rank.categories[MemoryCategory.WEIGHTS] == 4 * held.total
        assert rank.categories[MemoryCategory.GRADIENTS] == 4 * held.total
        state = rank.categories[MemoryCategory.OPTIMIZER_STATE]
        assert 0 <= state - 8 * held.total < 4 * 200  # The step counts of Adam are included.


def test_activations_of_expert_layers_match_the_closed_form_summed_over_ranks(
    experts: Run, ep2: Run
) -> None:
    for run in (experts, ep2):
        ranks = read_measurements(run.folder, MemoryRecord).ranks
        kept = sum(rank.categories[MemoryCategory.ACTIVATIONS] for rank in ranks)
        # The closed form omits rotary tables, norm statistics, masks, and the destinations of tokens.
        assert 1 <= kept / len(ranks) / activation_bytes(configuration(run)) < 1.07


def test_every_call_of_expert_parallelism_is_in_the_closed_form(ep2: Run) -> None:
    for rank in read_measurements(ep2.folder, CommunicationRecord).ranks:
        assert rank.steady_iterations >= ITERATIONS - 3
        assert sent(rank) == predicted(ep2, rank.rank)


def test_bytes_to_experts_match_the_closed_form_summed_over_ranks(ep2: Run) -> None:
    measured, expected = routed(ep2), routed_in_closed_form(ep2)
    assert measured.keys() == expected.keys()
    for key, (calls, payload) in expected.items():
        assert measured[key][0] == calls
        # The bytes per call are a mean, rounded to a byte.
        assert measured[key][1] == pytest.approx(payload, abs=calls)


def test_bytes_to_experts_follow_from_the_choices_of_routers(ep2: Run) -> None:
    routing = {
        rank.rank: rank.layers for rank in read_measurements(ep2.folder, RoutingRecord).ranks
    }
    for rank in read_measurements(ep2.folder, CommunicationRecord).ranks:
        away = mean_copies(routing[rank.rank], range(4, 8) if rank.rank == 0 else range(4))
        from_others = mean_copies(
            routing[1 - rank.rank], range(4) if rank.rank == 0 else range(4, 8)
        )
        # Tokens are sent to experts and back, forward and backward. Their probabilities are sent to experts too.
        rows = 2 * (away + from_others) * ROW_BYTES + 4 * (away + from_others)
        on_the_wire = sum(row.wire_bytes for row in rank.calls if row.group == "ep")
        assert on_the_wire == pytest.approx(rows, abs=4)


def mean_copies(rows: tuple[LayerRouting, ...], experts: range) -> float:
    """Return the mean number of copies of a rank's tokens for these experts, over all layers of an iteration."""
    counted = [row for row in rows if row.iteration in STEADY]
    return sum(row.tokens_per_expert[e] for row in counted for e in experts) / len(STEADY)


def test_recorded_routing_losses_equal_the_printed_losses(experts: Run, ep2: Run) -> None:
    for run in (experts, ep2):
        lines = {line.iteration: line for line in run.log.iterations if not line.averaged}
        for record in merge_routing_of_ranks(read_measurements(run.folder, RoutingRecord)):
            if record.iteration not in lines:
                continue
            printed = lines[record.iteration].extra_metrics or {}
            assert record.load_balancing_loss == pytest.approx(
                printed["load_balancing_loss"], rel=1e-6
            )
            assert record.z_loss == pytest.approx(printed["z_loss"], rel=1e-6)


def test_both_runs_route_every_token_to_the_same_experts(experts: Run, ep2: Run) -> None:
    single_rank, two_ranks = (
        merge_routing_of_ranks(read_measurements(run.folder, RoutingRecord))
        for run in (experts, ep2)
    )
    assert [record.iteration for record in single_rank] == list(range(1, ITERATIONS + 1))
    for first, second in zip(single_rank, two_ranks, strict=True):
        assert first.tokens == second.tokens
        assert all(sum(tokens) == COPIES for tokens in first.tokens.values())
        assert first.dropped == second.dropped == 0


def test_loads_of_ranks_sum_to_all_tokens(ep2: Run) -> None:
    loads = compute_rank_loads(
        read_measurements(ep2.folder, RoutingRecord), ep2.record.spec.parallelism, None
    )
    assert sum(load.tokens for load in loads) == pytest.approx(4 * COPIES)
    assert sum(load.ratio_to_mean for load in loads) == pytest.approx(2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ON_TWO, *ON_FOUR])
def test_other_strategies_print_the_losses_of_a_single_rank(
    experts: Run, split: Callable[[str], Run], name: str
) -> None:
    run = split(name)
    assert run.status.status is Status.OK
    assert run.losses == pytest.approx(experts.losses, abs=1.1e-5)
    single_rank, several_ranks = (
        merge_routing_of_ranks(read_measurements(r.folder, RoutingRecord)) for r in (experts, run)
    )
    # Sums in another order may change a close choice, but only for a few tokens.
    for first, second in zip(single_rank, several_ranks, strict=True):
        for layer, tokens in first.tokens.items():
            moved = sum(abs(a - b) for a, b in zip(tokens, second.tokens[layer], strict=True))
            assert moved <= COPIES // 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_FOUR)
def test_calls_and_memory_on_four_ranks_are_the_closed_form(
    split: Callable[[str], Run], name: str
) -> None:
    run = split(name)
    form = configuration(run)
    for rank in read_measurements(run.folder, CommunicationRecord).ranks:
        assert sent(rank) == predicted(run, rank.rank)
    measured, expected = routed(run), routed_in_closed_form(run)
    assert measured.keys() == expected.keys()
    for key, (calls, payload) in expected.items():
        assert measured[key][0] == calls
        assert measured[key][1] == pytest.approx(payload, abs=calls)
    for memory in read_measurements(run.folder, MemoryRecord).ranks:
        held = rank_parameters(form, form.parallelism.pipeline_rank(memory.rank))
        assert memory.categories[MemoryCategory.WEIGHTS] == 4 * held.total


@pytest.mark.slow
def test_all_gather_prints_the_same_losses_and_makes_the_calls_of_its_closed_form(
    experts: Run, train: Trainer
) -> None:
    gathered = train("train-ep2-moe-tiny-2cpu", extra=("--moe-token-dispatcher-type", "allgather"))
    assert gathered.losses == pytest.approx(experts.losses, abs=1.1e-5)
    for rank in read_measurements(gathered.folder, CommunicationRecord).ranks:
        assert sent(rank) == predicted(gathered, rank.rank)
        assert {row.group for row in rank.calls} & set(ROUTED_GROUPS) == {"tp_ep"}


@pytest.mark.slow
@pytest.mark.parametrize("padding", [(), ("--moe-pad-expert-input-to-capacity",)])
def test_tokens_dropped_by_capacity_are_counted(train: Trainer, padding: tuple[str, ...]) -> None:
    extra = ("--moe-expert-capacity-factor", "1.0", *padding)
    run = train("train-ep2-moe-tiny-2cpu", extra=extra, shared_start=False)
    assert run.status.status is Status.OK
    for record in merge_routing_of_ranks(read_measurements(run.folder, RoutingRecord)):
        assert record.dropped > 0
        assert record.computed + record.dropped == 4 * COPIES
        # With this capacity an expert gets at most an eighth of the 256 copies of a micro batch of two sequences.
        highest = max(max(tokens) for tokens in record.tokens.values())
        assert highest <= 4 * 32


@pytest.mark.slow
def test_experts_with_etp_1_are_full_on_every_rank(experts: Run, train: Trainer) -> None:
    whole = ("--expert-tensor-parallel-size", "1")
    run = train("train-tp2ep2-moe-tiny-4cpu", extra=whole)
    assert run.losses == pytest.approx(experts.losses, abs=1.1e-5)
    assert run.record.spec.parallelism.expert_tensor == 1
    form = configuration(run)
    assert set(run.parameters.values()) == {rank_parameters(form).total}
    for rank in read_measurements(run.folder, CommunicationRecord).ranks:
        assert sent(rank) == predicted(run, rank.rank)
