"""Multi-token prediction: each depth embeds, joins, passes a layer and the output layer once more."""

from dataclasses import replace

import pytest

from parakit.config.groups import Group
from parakit.config.hardware import device_by_key, link_by_key
from parakit.config.model import SHAPE_FLAGS, apply_flags_to_model
from parakit.config.recompute import Recompute
from parakit.config.run import RunSpec, spec_from_model
from parakit.config.stages import front_loaded_layout
from parakit.config.strategy import Batch, Parallelism, Sharding
from parakit.costs.activations import residual_bytes
from parakit.costs.collectives.rank import rank_collectives
from parakit.costs.constraints import find_violations
from parakit.costs.flops import token_flops
from parakit.costs.memory import activation_bytes, embedding_bytes, logits_bytes
from parakit.costs.operations import Operation
from parakit.costs.tensors import rank_parameters, total_parameters
from parakit.planner.dryrun.job import DryRunner
from parakit.planner.time.cluster import Calibration, Cluster
from parakit.planner.time.iteration import stage_seconds
from tests.planner.conftest import TINY as LEARNED
from tests.planner.dry_runs import Case, run_case, small_model

TINY = replace(LEARNED, positions=0)
"""Four layers, eight wide, a table of 104 tokens."""
LAYER = 2 * 2 * 8 + (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8)
JOINING = 3 * 2 * 8 + 2 * 8 * 8
TABLE = 104 * 8


ALONE = Parallelism()


def run(depths: int = 1, split: Parallelism = ALONE, **changes: object) -> RunSpec:
    shape = replace(TINY, mtp_layers=depths)
    plain = RunSpec(shape, split, Batch(1, 4 * split.data), dropout=0.0)
    return replace(plain, **changes)  # type: ignore[arg-type]


def test_mtp_layer_has_parameters_of_a_layer_three_norms_and_a_projection() -> None:
    sizes = [total_parameters(run(depths).shape) for depths in (0, 1, 2)]
    assert sizes == [sizes[0], sizes[0] + LAYER + JOINING, sizes[0] + 2 * (LAYER + JOINING)]


def test_last_stage_holds_an_embedding_for_mtp_and_the_output_layer() -> None:
    split = Parallelism(pipeline=2)
    first, last = (rank_parameters(run(1, split), rank) for rank in (0, 1))
    assert first == rank_parameters(run(0, split), 0)
    without = rank_parameters(run(0, split), 1)
    assert (last.word_embedding, last.output_layer) == (TABLE, without.output_layer)
    assert last.total - without.total == TABLE + LAYER + JOINING


def test_mtp_layers_are_on_the_last_stage_which_a_recipe_gives_fewer_layers() -> None:
    assert [run(1, Parallelism(pipeline=2)).num_layers_on_stage(rank) for rank in (0, 1)] == [2, 3]
    deep = replace(TINY, layers=61, mtp_layers=1)
    laid = run(
        1,
        Parallelism(pipeline=4, virtual_stages=4),
        shape=deep,
        stages=front_loaded_layout(61, 16, 1),
    )
    assert [laid.layers_per_chunk(rank) for rank in (0, 3)] == [(4, 4, 4, 4), (4, 4, 4, 1 + 1)]
    assert front_loaded_layout(61, 32, 1).find_problem(61, 8, 4) == ""
    assert (
        front_loaded_layout(61, 40, 1).find_problem(61, 40, 1)
        == "a stage between the ends has no layer"
    )


def test_flops_of_mtp_layer_are_those_of_layer_projection_and_logits() -> None:
    none, two = token_flops(run(0).shape), token_flops(run(2).shape)
    assert two.logits == 3 * none.logits
    assert two.mlp == none.mlp * 6 // 4
    assert two.attention_projections == none.attention_projections * 6 // 4 + 2 * 2 * 2 * 8 * 8


def test_mtp_layer_stores_six_hidden_states_and_fp32_softmax_for_backward() -> None:
    state = residual_bytes(run())
    layer = (activation_bytes(run(0)) - 2 * state) // 4
    assert activation_bytes(run(1)) - activation_bytes(run(0)) == layer + 6 * state
    again = [activation_bytes(run(depths, recompute=Recompute.FULL)) for depths in (0, 1)]
    assert again[1] - again[0] == 3 * state
    logits = 16 * 104
    assert [logits_bytes(run(depths)) for depths in (0, 2)] == [6 * logits, 14 * logits]


def test_mtp_layer_adds_a_single_dropout_after_its_embedding() -> None:
    masked = run(1, dropout=0.1)
    masks = activation_bytes(masked) - activation_bytes(run(1))
    plain = activation_bytes(replace(masked, shape=TINY)) - activation_bytes(run(0))
    of_layers = (plain - embedding_bytes(masked)) // 4
    assert masks - plain == of_layers + embedding_bytes(masked)


def test_first_and_last_stage_reduce_embedding_gradients_even_if_untied() -> None:
    split = Parallelism(pipeline=2)
    for tied in (True, False):
        spec = run(1, split, shape=replace(TINY, mtp_layers=1, tied_embeddings=tied))
        calls = [c for c in rank_collectives(spec, 1) if c.group is Group.EMBEDDING]
        assert [(c.operation, c.payload_bytes) for c in calls] == [
            (Operation.ALL_REDUCE, 4 * TABLE)
        ]


def test_learned_positions_are_refused_with_mtp() -> None:
    refused = find_violations(run(1, shape=replace(LEARNED, mtp_layers=1)))
    assert [sentence for sentence in refused if "--position-embedding-type rope" in sentence]
    assert not find_violations(run(1))


def test_last_stage_takes_longer_by_the_parts_of_the_mtp_layer() -> None:
    split = Parallelism(pipeline=2)
    shape = replace(TINY, hidden=1024, head_width=256, ffn_hidden=4096, seq_length=1024)
    device = device_by_key("h100")
    no_host = Calibration(layer_launch_seconds=0.0)
    cluster = Cluster(device, 2, 8, link_by_key(device.link), link_by_key(device.network), no_host)
    times = []
    for depths in (0, 1, 2):
        spec = run(depths, split, shape=replace(shape, mtp_layers=depths))
        times.append([stage_seconds(spec, cluster, rank)[0] for rank in (0, 1)])
    assert times[0][0] == times[1][0] == times[2][0]
    once, twice = times[1][1] - times[0][1], times[2][1] - times[1][1]
    assert once == pytest.approx(twice)
    assert once > times[0][1] / 2  # More than one of the stage's two layers and its head.


_SP2 = Parallelism(tensor=2, sequence_parallel=True)


@pytest.mark.parametrize(
    ("kind", "depths", "split"),
    [
        ("gpt", 1, replace(_SP2, pipeline=2)),
        ("gpt", 2, Parallelism()),
        pytest.param("gpt", 1, Parallelism(), marks=pytest.mark.slow),
        pytest.param("gpt", 1, Parallelism(tensor=2), marks=pytest.mark.slow),
        pytest.param("gpt", 2, _SP2, marks=pytest.mark.slow),
        pytest.param("llama", 2, replace(_SP2, pipeline=2), marks=pytest.mark.slow),
        pytest.param(
            "gpt",
            1,
            Parallelism(pipeline=2, data=2, sharding=Sharding.ZERO1),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "llama", 1, replace(_SP2, pipeline=2, virtual_stages=2), marks=pytest.mark.slow
        ),
        pytest.param("llama", 1, Parallelism(context=2), marks=pytest.mark.slow),
        pytest.param("moe", 1, replace(_SP2, pipeline=2, data=2, expert=2), marks=pytest.mark.slow),
    ],
)
def test_dry_run_of_mtp_matches_closed_form_in_parameters_communication_and_memory(
    dry_runner: DryRunner, kind: str, depths: int, split: Parallelism
) -> None:
    # The vocabulary is so large that the peak is at the loss, when all activations are stored.
    mtp_flags = f"--vocab-size 50000 --position-embedding-type rope --mtp-num-layers {depths}"
    model = apply_flags_to_model(small_model(kind), mtp_flags.split(), SHAPE_FLAGS)
    spec = spec_from_model(model, split, Batch(2, 2 * split.data * split.pipeline))
    spec = replace(spec, dtype="bf16")
    for rank in {0, split.world_size - 1}:
        result = run_case(dry_runner, Case(model, spec, rank))
        assert result.agrees, result.differences
    measured, closed = result.memory["logits and temporaries"]
    assert measured == pytest.approx(closed, rel=0.003)
    if kind != "moe":  # Experts are kept otherwise without Transformer Engine.
        measured, closed = result.memory["activations"]
        # Norms' statistics, rotary tables, and masks of attention, of as many layers as there are.
        layers = spec.num_layers_on_stage(split.pipeline - 1)
        assert 0 <= measured - closed <= 4500 * (layers + depths)
