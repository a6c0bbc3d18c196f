from dataclasses import replace
from pathlib import Path

import pytest

from parakit.artifacts.measurements import (
    CommunicationRecord,
    DeviceMemory,
    MemoryCategory,
    RankCommunication,
)
from parakit.config.model import LinearAttention
from parakit.config.run import DeviceKind
from parakit.costs.collectives.call import LATEST_MEGATRON
from parakit.costs.operations import Phase
from parakit.logs.runs import load_folder
from parakit.reporting.explain.closed_form import (
    Kernels,
    NoClosedFormError,
    find_peak_candidate,
    require_closed_form_spec,
)
from parakit.reporting.explain.predicted import (
    PredictionEvidence,
    StageTimes,
    Unattributed,
    compare_calls,
    compare_run_with_predictions,
)
from parakit.reporting.explain.timelines import NoTraceError, build_scene
from tests.reporting.factory import log_text
from tests.reporting.ledger_factory import (
    call,
    communication,
    held,
    load,
    seconds,
    write,
    write_calls,
    write_memory,
    write_times,
    write_trace,
)

WORD = 50304 * 64
"""Elements of gpt2-tiny's word embedding."""


def found(folder: Path) -> PredictionEvidence:
    return compare_run_with_predictions(load(folder)[0])


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "sp2", "cp2", "pp2"])
def test_run_that_does_what_the_closed_form_says_leaves_nothing_over(
    tmp_path: Path, strategy: str
) -> None:
    folder = write(tmp_path, strategy)
    write_calls(folder, communication(folder))
    for comparison in found(folder).calls:
        assert comparison.unattributed == ()
        assert comparison.measured_wire_bytes == comparison.predicted_wire_bytes > 0
        assert all(row.what and not row.residual_wire_bytes for row in comparison.rows)


def changed(record: CommunicationRecord, *extra: object, drop: int = 0) -> CommunicationRecord:
    first, *other_ranks = record.ranks
    calls = (*first.calls[drop:], *extra)
    return CommunicationRecord((replace(first, calls=calls), *other_ranks))  # type: ignore[arg-type]


def test_call_that_the_closed_form_does_not_name_is_listed(tmp_path: Path) -> None:
    folder = write(tmp_path, "dp2")
    write_calls(folder, changed(communication(folder), call("tp_dp", "all_reduce", 40, 3)))
    first, second = found(folder).calls
    assert first.unattributed == (Unattributed("tp_dp", "all_reduce", 40, 3),)
    assert first.measured_wire_bytes - first.predicted_wire_bytes == 120
    assert second.unattributed == ()


def test_call_that_was_not_made_is_listed_as_missing(tmp_path: Path) -> None:
    folder = write(tmp_path, "dp2")
    write_calls(folder, changed(communication(folder), drop=1))
    first, _ = found(folder).calls
    assert first.unattributed == (Unattributed("dp_cp", "all_reduce", 4 * 3423616, -1),)


def test_receives_barriers_and_groups_of_one_rank_send_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path, "pp2")
    alone = replace(call("tp", "all_reduce", 8), ranks=1, wire_bytes=0)
    silent = (call("pp", "receive", 8), call("world", "barrier", 0), alone)
    write_calls(folder, changed(communication(folder), *silent))
    assert found(folder).calls[0].unattributed == ()


def test_bytes_to_experts_are_not_matched_because_the_router_decides_them(tmp_path: Path) -> None:
    _, dense = load(write(tmp_path, "dp2"))
    shape = replace(dense.shape, experts=4, experts_per_token=2, expert_ffn_hidden=64)
    configuration = replace(
        dense,
        shape=shape,
        parallelism=replace(dense.parallelism, expert=2),
        token_dispatcher="alltoall",
    )
    comparison = compare_calls(configuration, RankCommunication(0, 1, 0, ()), LATEST_MEGATRON)
    missing = [item for item in comparison.unattributed if item.group == "ep"]
    assert [(item.payload_bytes, item.calls < 0) for item in missing] == [(0, True)]


def test_ranks_that_the_split_does_not_have_are_ignored(tmp_path: Path) -> None:
    folder = write(tmp_path, "dp2")
    record = communication(folder)
    strange = replace(record.ranks[0], rank=7)
    write_calls(folder, CommunicationRecord((*record.ranks, strange)))
    write_memory(folder, held(9, {MemoryCategory.WEIGHTS: 1}))
    assert [comparison.rank for comparison in found(folder).calls] == [0, 1]
    assert found(folder).memory == ()


def test_missing_ledgers_are_said_so_and_the_rest_is_there(tmp_path: Path) -> None:
    folder = write(tmp_path, "pp2")
    write_times(folder, seconds(0, {Phase.FORWARD: 1.0}))
    evidence = found(folder)
    assert evidence.notes == ("no usable comm.json", "no usable memory.json")
    assert [(c.rank, c.measured, c.predicted) for c in evidence.parameters] == [
        (0, 3423424, 3323520)
    ]
    assert evidence.shares


def test_other_backend_has_no_closed_form(tmp_path: Path) -> None:
    run, _ = load(write(tmp_path, "dp2"))
    other = replace(run, spec=replace(run.spec, backend="native"))
    assert compare_run_with_predictions(other).notes[-1] == (
        "nothing predicted: the closed forms describe Megatron, this run's backend is native"
    )
    with pytest.raises(NoClosedFormError, match="not known"):
        require_closed_form_spec(replace(run, spec=None))


PRINTED = {
    "world_size": 2,
    "data_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 2,
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "padded_vocab_size": 50304,
}


def test_linear_attention_has_no_closed_form(tmp_path: Path) -> None:
    run, _ = load(write(tmp_path, "dp2"))
    shape = replace(run.spec.shape, linear=LinearAttention(2, 16, 4, 16, 4))
    with pytest.raises(NoClosedFormError, match="of linear attention only parameters and FLOPs"):
        require_closed_form_spec(replace(run, spec=replace(run.spec, shape=shape)))


def test_without_a_micro_batch_in_the_log_nothing_is_predicted_and_nothing_fails(
    tmp_path: Path,
) -> None:
    lines = [f"  {name} {48 * '.'} {value}" for name, value in PRINTED.items()]
    start, end = ("------------------------ arguments ---", "--- end of arguments ---")
    (tmp_path / "log.txt").write_text("\n".join([start, *lines, end, log_text([100.0] * 9)]))
    write_times(tmp_path, seconds(0, {Phase.FORWARD: 1.0}), seconds(1, {Phase.FORWARD: 1.0}))
    write_trace(tmp_path, (0, "forward-compute", "forward", 0, 1))
    run = load_folder(tmp_path)
    assert run.spec is not None
    assert (run.spec.microbatches, run.spec.batch.global_batch_size) == (0, 8)
    assert (
        compare_run_with_predictions(run).notes[-1]
        == "nothing predicted: the run's micro batch is not known"
    )
    with pytest.raises(NoTraceError, match="micro batch"):
        build_scene(run)


def test_memory_is_compared_by_component_and_adams_step_counts_are_named(tmp_path: Path) -> None:
    folder = write(tmp_path, "baseline")
    elements = 3423616
    categories = {
        MemoryCategory.WEIGHTS: 4 * elements,
        MemoryCategory.GRADIENTS: 4 * elements,
        MemoryCategory.OPTIMIZER_STATE: 8 * elements + 208,
        MemoryCategory.LOGITS: 4 * 128 * 50304,
        MemoryCategory.TEMPORARY: 4 * WORD + 1000,
    }
    write_memory(folder, held(0, categories))
    rows = {row.component: row for row in found(folder).memory}
    assert rows["weights"].is_exact
    assert rows["gradients"].is_exact
    assert rows["optimizer state"].residual == 208
    assert rows["optimizer state"].note == "Adam's step counts, 4 bytes per tensor: 52"
    assert rows["logits and temporaries"].residual == 1000
    assert "the output layer's backward" in rows["peak of live tensors"].note


def test_on_a_gpu_the_allocators_and_the_devices_figures_are_next_to_the_peak(
    tmp_path: Path,
) -> None:
    folder = write(tmp_path, "baseline")
    device = DeviceMemory(
        allocated_peak_bytes=300 << 20, reserved_peak_bytes=380 << 20, used_bytes=900 << 20
    )
    write_memory(folder, replace(held(0, {MemoryCategory.WEIGHTS: 1}), device=device))
    rows = {row.component: row for row in found(folder).memory}
    assert rows["allocated"].measured == 300 << 20
    assert rows["allocated"].predicted == rows["peak of live tensors"].predicted
    reading = rows["the device's own reading"]
    assert reading.measured == 900 << 20
    assert reading.predicted > rows["allocated"].predicted
    assert "reserved 380 MiB, of which the allocator's slack is 80 MiB" in reading.note


def moment(tmp_path: Path, strategy: str, stage: int = 0, **kernels: bool) -> tuple[str, int]:
    _, configuration = load(write(tmp_path, strategy))
    kinds = {"fused_gradients": False, "fused_adam": False} | kernels
    candidate = find_peak_candidate(configuration, stage, Kernels(**kinds))
    return candidate.name.split()[0] + " " + candidate.name.split()[1], candidate.temporaries


def test_unfused_layers_are_fullest_where_the_largest_gradient_is_not_yet_added(
    tmp_path: Path,
) -> None:
    logits = 4 * 128 * 50304
    assert moment(tmp_path / "a", "baseline") == ("the output", logits + 4 * WORD)
    # Half as many logits a rank: then the tied embedding's three gradients are more.
    assert moment(tmp_path / "b", "cp2") == ("the embedding's", 3 * 4 * WORD)
    # The first stage has no logits, but Adam makes two temporaries of its embedding.
    assert moment(tmp_path / "c", "pp2", 0) == ("Adam's step", 2 * 4 * WORD)
    assert moment(tmp_path / "d", "pp2", 1) == ("the output", logits + 4 * WORD)


def test_fused_kernels_are_fullest_at_the_planners_moment(tmp_path: Path) -> None:
    fused = {"fused_gradients": True, "fused_adam": True}
    assert moment(tmp_path, "baseline", **fused) == ("the loss", 4 * 128 * 50304)


def test_the_bubble_is_checked_against_the_closed_form_and_unequal_stages(tmp_path: Path) -> None:
    folder = write(tmp_path, "pp2")
    work = {Phase.FORWARD: 0.1, Phase.BACKWARD: 0.3}
    write_times(
        folder,
        seconds(0, work | {Phase.PIPELINE: 0.2}),
        seconds(1, {Phase.FORWARD: 0.2, Phase.BACKWARD: 0.6, Phase.PIPELINE: 0.1}),
    )
    first, last = found(folder).bubble
    assert (first.measured, first.predicted) == (pytest.approx(0.5), 0.25)
    assert last.measured == pytest.approx(0.125)
    # 4·0.2 + 0.1 s in all: the first stage works 0.4 of it, the last 0.8.
    assert first.note == "stages work 100.0 ms and 200.0 ms per micro batch, which makes 125.0%"
    assert last.note.endswith("which makes 12.5%")


def test_no_pipeline_has_no_bubble_and_half_a_ledger_says_so(tmp_path: Path) -> None:
    folder = write(tmp_path, "tp2")
    write_times(folder, seconds(0, {Phase.FORWARD: 0.1}))
    assert found(folder).bubble == ()
    folder = write(tmp_path, "pp2")
    write_times(folder, seconds(0, {Phase.FORWARD: 0.1, Phase.PIPELINE: 0.1}))
    (row,) = found(folder).bubble
    assert row.note == "another stage left no time.json"


def test_more_micro_batches_approach_the_slowest_stage() -> None:
    stages = StageTimes((0.1, 0.2), 4, 1)
    assert stages.iteration_seconds(4) == pytest.approx(0.9)
    assert stages.iteration_seconds(400) / 400 == pytest.approx(0.2, rel=0.01)
    assert StageTimes((0.1, 0.1), 4, 2).idle_over_work(0) == pytest.approx(1 / 8)


def test_times_of_a_gpu_are_the_hosts_and_nothing_is_concluded_from_them(tmp_path: Path) -> None:
    folder = write(tmp_path, "pp2", device=DeviceKind.GPU)
    write_times(folder, seconds(0, {Phase.FORWARD: 0.1}), seconds(1, {Phase.FORWARD: 0.1}))
    evidence = found(folder)
    assert (evidence.times, evidence.shares, evidence.bubble) == (None, (), ())
    assert "on a GPU tells when kernels were launched" in evidence.notes[-1]
