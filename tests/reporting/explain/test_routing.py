import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from matplotlib.figure import Figure

from parakit.artifacts import run as records
from parakit.artifacts.measurements import (
    CommunicationRecord,
    LayerRouting,
    RankCommunication,
    RankRouting,
    RoutingRecord,
)
from parakit.config.strategy import Parallelism
from parakit.costs.operations import Phase
from parakit.logs.runs import load_folder
from parakit.reporting.explain.explanation import explain
from parakit.reporting.explain.routing import (
    busiest_rank_ratio,
    choose_layers,
    compute_rank_loads,
    draw_routing,
    expert_token_ratios,
    merge_routing_of_ranks,
)
from parakit.reporting.render.charts import draw_charts
from tests.reporting.ledger_factory import (
    call,
    report_of,
    seconds,
    write,
    write_calls,
    write_times,
)

EP2 = Parallelism(data=2, expert=2)
QUESTION = "How evenly are tokens routed, and what does it cost?"


def layer(
    tokens: tuple[int, ...], iteration: int = 1, number: int = 1, loss: float | None = 1.0
) -> LayerRouting:
    return LayerRouting(iteration, number, tokens, 1, loss, 4.0, 0.5)


def record(*ranks: tuple[LayerRouting, ...]) -> RoutingRecord:
    return RoutingRecord(tuple(RankRouting(rank, rows) for rank, rows in enumerate(ranks)))


def waiting(*waits: float) -> CommunicationRecord:
    """Ranks that wait so long for tokens, and as long for gradients."""
    groups = ("ep", "dp_cp")
    return CommunicationRecord(
        tuple(
            RankCommunication(
                rank,
                9,
                0,
                tuple(replace(call(g, "all_to_all", 8), wait_seconds=wait) for g in groups),
            )
            for rank, wait in enumerate(waits)
        )
    )


def test_counts_add_up_over_ranks_and_losses_are_their_mean() -> None:
    rows = (layer((3, 1), loss=1.0), layer((2, 2), number=2, loss=2.0))
    (routing,) = merge_routing_of_ranks(record(rows, (layer((1, 3), loss=3.0),)))
    assert routing.tokens == {1: (4, 4), 2: (2, 2)}
    assert (routing.computed, routing.dropped) == (12, 3)
    assert routing.load_balancing_loss == pytest.approx(2.0)
    assert (routing.z_loss, routing.entropy_nats) == (4.0, 0.5)


def test_a_loss_that_no_router_has_is_unknown() -> None:
    (routing,) = merge_routing_of_ranks(record((layer((1, 1), loss=None),)))
    assert routing.load_balancing_loss is None


def test_shares_are_over_what_an_even_router_would_give() -> None:
    rows = (layer((3, 1)), layer((1, 3), number=2), layer((0, 0), iteration=2))
    routing = merge_routing_of_ranks(record(rows))
    assert expert_token_ratios(routing[:1], 1) == [(1.5, 0.5)]
    assert expert_token_ratios(routing[1:], 1) == [(0.0, 0.0)]


def test_a_rank_computes_what_all_ranks_of_its_group_route_to_its_experts() -> None:
    routed = record((layer((5, 1, 1, 1)),), (layer((1, 1, 0, 6)),))
    first, second = compute_rank_loads(routed, EP2, waiting(0.3, 0.1))
    assert (first.experts, second.experts) == (range(2), range(2, 4))
    assert (first.tokens, second.tokens) == (8.0, 8.0)
    assert (first.ratio_to_mean, second.ratio_to_mean) == (1.0, 1.0)
    assert (first.wait_seconds, second.wait_seconds) == (0.3, 0.1)


def test_ranks_that_share_experts_or_hold_copies_are_distinguished_as_megatron_numbers_them() -> (
    None
):
    rows = [(layer((4, 0)),), (layer((0, 4)),), (layer((4, 0)),), (layer((4, 0)),)]
    copies = compute_rank_loads(record(*rows), Parallelism(data=4, expert=2), None)
    assert [load.tokens for load in copies] == [4, 4, 8, 0]
    assert [load.ratio_to_mean for load in copies] == [1.0, 1.0, 2.0, 0.0]
    split = Parallelism(data=2, tensor=2, expert=2, sequence_parallel=True)
    shared = compute_rank_loads(record(*rows), split, None)
    assert [load.experts for load in shared] == [range(1), range(1), range(1, 2), range(1, 2)]
    assert [load.tokens for load in shared] == [12, 12, 4, 4]


def test_ranks_of_a_stage_without_a_router_compute_nothing() -> None:
    split = Parallelism(data=2, expert=2, pipeline=2)
    routing = compute_rank_loads(record((), (), (layer((6, 2)),), (layer((2, 4)),)), split, None)
    assert [(load.tokens, load.ratio_to_mean) for load in routing[:2]] == [(0, 1.0)] * 2
    assert [load.tokens for load in routing[2:]] == [8, 6]


def test_ranks_that_are_busy_in_turn_are_waited_for_in_turn() -> None:
    turns = record(
        (layer((3, 1)), layer((1, 3), number=2)), (layer((3, 1)), layer((1, 3), number=2))
    )
    assert [load.ratio_to_mean for load in compute_rank_loads(turns, EP2, None)] == [1.0, 1.0]
    assert busiest_rank_ratio(turns, EP2) == pytest.approx(1.5)
    assert busiest_rank_ratio(record(()), EP2) == 1.0


def test_without_expert_parallelism_no_rank_computes_for_another() -> None:
    assert compute_rank_loads(record((layer((1, 1)),)), Parallelism(data=2), None) == ()


def test_of_many_layers_the_first_the_last_and_some_between_are_drawn() -> None:
    assert choose_layers([1, 2, 3]) == [1, 2, 3]
    assert choose_layers(range(1, 33)) == [1, 11, 22, 32]


def test_one_iteration_of_one_layer_can_be_drawn() -> None:
    figure = Figure()
    draw_routing(figure, merge_routing_of_ranks(record((layer((3, 1)),))))
    image = figure.axes[0].get_images()[0]
    assert image.get_array().tolist() == [[1.5], [0.5]]  # type: ignore[union-attr]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = write(tmp_path, "dp2", parallelism=EP2)
    rows = tuple(
        tuple(layer(tokens, iteration) for iteration in (1, 2)) for tokens in ((6, 2), (2, 4))
    )
    (folder / records.ROUTING_FILE).write_bytes(msgspec.json.encode(record(*rows)))
    return folder


def answers(folder: Path) -> tuple[str, ...]:
    topics = {topic.question: topic.sentences for topic in explain(report_of(folder)).topics}
    return topics.get(QUESTION, ())


def test_choice_and_cost_are_sentences_with_their_numbers(run: Path) -> None:
    write_calls(run, waiting(0.010, 0.004))
    write_times(run, *(seconds(rank, {Phase.FORWARD: 0.1}) for rank in (0, 1)))
    choice, cost = answers(run)
    assert (
        "the busiest of 2 experts computed 1.14 times its even part (expert 0 of layer 1)" in choice
    )
    assert "4 of 32 copies of tokens were dropped" in choice
    assert f"of at most {math.log(2):.3f} nats" in choice
    assert "compute 0.857 to 1.143 times the mean" in cost
    assert "the busiest rank of each layer, for which the others wait, 1.143 times. In" in cost
    assert "rank 1 spends 4.0 ms and rank 0 10.0 ms of an iteration of 100 ms" in cost
    assert "at least the difference, 6.0 ms (6.0%), and at most the longer time (10.0%)" in cost


def test_without_a_communication_ledger_the_cost_is_not_known(run: Path) -> None:
    write_times(run, *(seconds(rank, {Phase.FORWARD: 0.1}) for rank in (0, 1)))
    assert answers(run)[1].endswith("they wait for one another is not known without a comm.json.")


def test_the_report_shows_a_picture_and_three_tables(run: Path) -> None:
    write_calls(run, waiting(0.010, 0.004))
    report = report_of(run)
    assert "routing" in {chart.name for chart in draw_charts(report)}
    tables = {table.name: table.lines for table in explain(report).tables}
    assert tables["routing-ranks"][0][1:4] == ("0", "0", "8")
    assert tables["routing-experts"][0][3] == "1.14 0.86"
    assert len(tables["routing-losses"]) == 2


def test_a_damaged_file_is_a_note(run: Path) -> None:
    (run / records.ROUTING_FILE).write_text("{")
    loaded = load_folder(run)
    assert loaded.measurements.routing is None
    assert any("routing.json cannot be used" in note for note in loaded.notes)


def test_a_dense_run_reports_no_routing(tmp_path: Path) -> None:
    folder = write(tmp_path, "dp2")
    write_calls(folder, waiting(0.010, 0.004))
    assert answers(folder) == ()
    assert "routing" not in {chart.name for chart in draw_charts(report_of(folder))}
