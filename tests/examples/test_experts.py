"""Mixtures of experts under Megatron: losses, calls, memory and routing of real runs, exactly."""

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
"""Of the tokens of an iteration, in each layer."""
STEADY = range(2, ITERATIONS)
"""Those whose calls count: the first iteration starts groups, the last never ends."""
Key = tuple[str, str, int]

ON_TWO = ("sp2", "cp2", "pp2", "dp2", "ep2-zero1")
ON_FOUR = ("ep2dp2", "tp2ep2", "pp2ep2")


@pytest.fixture(scope="session")
def split(train: Trainer) -> Callable[[str], Run]:
    """Runs of the other strategies, each made once."""

    @functools.cache
    def trained(name: str) -> Run:
        return train(f"train-{name}-moe-tiny-{4 if name in ON_FOUR else 2}cpu")

    return trained


def configuration(run: Run) -> RunSpec:
    return require_closed_form_spec(load_folder(run.folder))


def sent(rank: RankCommunication) -> Counter[Key]:
    """Calls whose size no router decides."""
    found: Counter[Key] = Counter()
    for row in rank.calls:
        silent = row.operation in (Operation.RECEIVE, Operation.BARRIER)
        if row.ranks > 1 and not silent and row.group not in ("ep", "expert_tp"):
            found[row.group, row.operation, row.payload_bytes] += row.calls
    return found


def predicted(run: Run, rank: int) -> Counter[Key]:
    expected: Counter[Key] = Counter()
    form = configuration(run)
    for item in rank_collectives(form, form.parallelism.pipeline_rank(rank)):
        if item.group not in ("ep", "expert_tp"):
            expected[item.group, item.operation, item.payload_bytes] += item.calls
    return expected


def routed(run: Run) -> dict[tuple[str, str, str], list[int]]:
    """Calls and bytes over all ranks of what a router decides, as measured."""
    found: dict[tuple[str, str, str], list[int]] = {}
    for rank in read_measurements(run.folder, CommunicationRecord).ranks:
        for row in rank.calls:
            if row.group in ("ep", "expert_tp") and row.ranks > 1:
                entry = found.setdefault((row.group, row.operation, row.phase), [0, 0])
                entry[0] += row.calls
                entry[1] += row.calls * row.payload_bytes
    return found


def routed_in_closed_form(run: Run) -> dict[tuple[str, str, str], list[int]]:
    form, found = configuration(run), {}
    for rank in range(form.parallelism.world_size):
        for item in rank_collectives(form, form.parallelism.pipeline_rank(rank)):
            if item.group in ("ep", "expert_tp"):
                entry = found.setdefault((item.group, item.operation, item.phase), [0, 0])
                entry[0] += item.calls
                entry[1] += item.total_payload_bytes
    return found


def test_two_expert_ranks_print_one_ranks_losses(experts: Run, ep2: Run) -> None:
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
        assert 0 <= state - 8 * held.total < 4 * 200  # Adam's step counts


def test_what_layers_of_experts_keep_is_the_closed_form_over_all_ranks(
    experts: Run, ep2: Run
) -> None:
    for run in (experts, ep2):
        ranks = read_measurements(run.folder, MemoryRecord).ranks
        kept = sum(rank.categories[MemoryCategory.ACTIVATIONS] for rank in ranks)
        # Rotary tables, norms' statistics, masks, and where each token went.
        assert 1 <= kept / len(ranks) / activation_bytes(configuration(run)) < 1.07


def test_every_call_of_expert_parallelism_is_in_the_closed_form(ep2: Run) -> None:
    for rank in read_measurements(ep2.folder, CommunicationRecord).ranks:
        assert rank.steady_iterations >= ITERATIONS - 3
        assert sent(rank) == predicted(ep2, rank.rank)


def test_what_goes_to_experts_is_the_closed_form_summed_over_their_ranks(ep2: Run) -> None:
    measured, expected = routed(ep2), routed_in_closed_form(ep2)
    assert measured.keys() == expected.keys()
    for key, (calls, payload) in expected.items():
        assert measured[key][0] == calls
        # A call's bytes are a mean, rounded to a byte.
        assert measured[key][1] == pytest.approx(payload, abs=calls)


def test_bytes_to_experts_are_those_that_the_routers_chose(ep2: Run) -> None:
    routing = {
        rank.rank: rank.layers for rank in read_measurements(ep2.folder, RoutingRecord).ranks
    }
    for rank in read_measurements(ep2.folder, CommunicationRecord).ranks:
        away = mean_copies(routing[rank.rank], range(4, 8) if rank.rank == 0 else range(4))
        from_others = mean_copies(
            routing[1 - rank.rank], range(4) if rank.rank == 0 else range(4, 8)
        )
        # Out, and back to where they came from; backward the same, and out also the probabilities.
        rows = 2 * (away + from_others) * ROW_BYTES + 4 * (away + from_others)
        on_the_wire = sum(row.wire_bytes for row in rank.calls if row.group == "ep")
        assert on_the_wire == pytest.approx(rows, abs=4)


def mean_copies(rows: tuple[LayerRouting, ...], experts: range) -> float:
    """Copies of a rank's own tokens for these experts, all layers, in a steady iteration."""
    counted = [row for row in rows if row.iteration in STEADY]
    return sum(row.tokens_per_expert[e] for row in counted for e in experts) / len(STEADY)


def test_routing_says_what_megatron_prints(experts: Run, ep2: Run) -> None:
    for run in (experts, ep2):
        lines = {line.iteration: line for line in run.log.iterations if not line.averaged}
        for found in merge_routing_of_ranks(read_measurements(run.folder, RoutingRecord)):
            if found.iteration not in lines:
                continue
            printed = lines[found.iteration].extra_metrics or {}
            assert found.load_balancing_loss == pytest.approx(
                printed["load_balancing_loss"], rel=1e-6
            )
            assert found.z_loss == pytest.approx(printed["z_loss"], rel=1e-6)


def test_both_runs_route_every_token_alike(experts: Run, ep2: Run) -> None:
    one, two = (
        merge_routing_of_ranks(read_measurements(run.folder, RoutingRecord))
        for run in (experts, ep2)
    )
    assert [found.iteration for found in one] == list(range(1, ITERATIONS + 1))
    for first, second in zip(one, two, strict=True):
        assert first.tokens == second.tokens
        assert all(sum(tokens) == COPIES for tokens in first.tokens.values())
        assert first.dropped == second.dropped == 0


def test_the_work_of_the_ranks_is_all_the_work(ep2: Run) -> None:
    found = compute_rank_loads(
        read_measurements(ep2.folder, RoutingRecord), ep2.record.spec.parallelism, None
    )
    assert sum(load.tokens for load in found) == pytest.approx(4 * COPIES)
    assert sum(load.ratio_to_mean for load in found) == pytest.approx(2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ON_TWO, *ON_FOUR])
def test_every_other_split_prints_one_ranks_losses(
    experts: Run, split: Callable[[str], Run], name: str
) -> None:
    run = split(name)
    assert run.status.status is Status.OK
    assert run.losses == pytest.approx(experts.losses, abs=1.1e-5)
    one, many = (
        merge_routing_of_ranks(read_measurements(r.folder, RoutingRecord)) for r in (experts, run)
    )
    # Sums of other order may turn a close choice: no more than a few of all tokens.
    for first, second in zip(one, many, strict=True):
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
def test_what_capacity_drops_is_counted(train: Trainer, padding: tuple[str, ...]) -> None:
    extra = ("--moe-expert-capacity-factor", "1.0", *padding)
    run = train("train-ep2-moe-tiny-2cpu", extra=extra, shared_start=False)
    assert run.status.status is Status.OK
    for found in merge_routing_of_ranks(read_measurements(run.folder, RoutingRecord)):
        assert found.dropped > 0
        assert found.computed + found.dropped == 4 * COPIES
        # A micro batch of two sequences may give each expert an eighth of its 256 copies.
        most = max(max(tokens) for tokens in found.tokens.values())
        assert most <= 4 * 32


@pytest.mark.slow
def test_experts_in_their_own_split_are_whole_on_every_rank(experts: Run, train: Trainer) -> None:
    whole = ("--expert-tensor-parallel-size", "1")
    run = train("train-tp2ep2-moe-tiny-4cpu", extra=whole)
    assert run.losses == pytest.approx(experts.losses, abs=1.1e-5)
    assert run.record.spec.parallelism.expert_tensor == 1
    form = configuration(run)
    assert set(run.parameters.values()) == {rank_parameters(form).total}
    for rank in read_measurements(run.folder, CommunicationRecord).ranks:
        assert sent(rank) == predicted(run, rank.rank)
