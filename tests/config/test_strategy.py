from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from parakit.config.strategy import (
    Parallelism,
    PipelineSchedule,
    Sharding,
    StrategyError,
    parallelism_from_flags,
    parse_strategy,
    strategy_flags,
    strategy_name,
)

DEGREE = st.sampled_from([2, 3, 4, 8])


@pytest.mark.parametrize(
    ("text", "devices", "expected"),
    [
        ("baseline", 1, Parallelism()),
        ("dp2", 2, Parallelism(data=2)),
        ("tp2", 2, Parallelism(tensor=2)),
        ("sp2", 2, Parallelism(tensor=2, sequence_parallel=True)),
        ("cp2", 2, Parallelism(context=2)),
        ("pp2", 2, Parallelism(pipeline=2)),
        ("vpp2", 2, Parallelism(pipeline=2, virtual_stages=2)),
        ("ep2", 2, Parallelism(data=2, expert=2)),
        ("tp2ep2", 4, Parallelism(data=2, tensor=2, expert=2, sequence_parallel=True)),
        ("sp2dp2-etp1", 4, Parallelism(2, tensor=2, expert_tensor=1, sequence_parallel=True)),
        ("tp2ep2-etp1", 4, Parallelism(2, 2, expert=2, expert_tensor=1, sequence_parallel=True)),
        # EP spans TP ranks too, because each expert is on a single TP rank.
        ("tp2ep2-etp1", 2, Parallelism(1, 2, expert=2, expert_tensor=1, sequence_parallel=True)),
        ("tp2ep2-etp2", 4, Parallelism(2, 2, expert=2, sequence_parallel=True)),
        ("cp2ep2", 2, Parallelism(context=2, expert=2)),
        ("tp2pp2dp2", 8, Parallelism(data=2, tensor=2, pipeline=2)),
        ("dp2-zero1", 2, Parallelism(data=2, sharding=Sharding.ZERO1)),
        ("zero3", 4, Parallelism(data=4, sharding=Sharding.ZERO3)),
        ("fsdp2", 2, Parallelism(data=2, sharding=Sharding.FSDP2)),
        ("gpipe4", 4, Parallelism(pipeline=4, schedule=PipelineSchedule.GPIPE)),
        ("pipedream2bw", 2, Parallelism(pipeline=2, schedule=PipelineSchedule.PIPEDREAM_2BW)),
        (
            "interleaved2x3",
            2,
            Parallelism(pipeline=2, virtual_stages=3, schedule=PipelineSchedule.INTERLEAVED),
        ),
    ],
)
def test_a_strategy_is_parsed_into_degrees(text: str, devices: int, expected: Parallelism) -> None:
    assert parse_strategy(text, devices) == expected


@pytest.mark.parametrize(
    ("text", "devices", "message"),
    [
        ("tp2", 4, "needs 2 devices, not 4; use that number"),
        ("xp2", 2, "Unknown strategy 'xp2'"),
        ("tp", 2, "Unknown strategy 'tp'"),
        ("zero3tp2", 4, "the sharding comes last; use tp2dp2-zero3"),
        ("pp2dp2zero3", 4, "FSDP does not work with pipeline stages; use pp2dp2-zero1"),
        ("tp2sp2", 4, "names its TP degree twice"),
        ("tp0", 0, "degree of 0"),
        ("dp2-zero9", 2, "ends in the invalid suffix '-zero9'"),
        (
            "tp2ep2-zero1-etp1",
            4,
            "use -etp with a degree, -zero1, .* with -etp before the sharding",
        ),
        ("tp2ep2-etp0", 4, "has a degree of 0"),
        ("tp2ep2-etp1", 16, "needs 4 devices, not 16; use that number"),
        ("tp2ep2", 2, "needs 4 devices, not 2; use that number"),
        ("tp2ep4dp2-etp1", 8, "needs 16 devices, not 8; use that number"),
        ("gpipe2dp2", 4, "Unknown strategy 'gpipe2dp2'"),
        ("gpipe2bw", 2, "Unknown strategy 'gpipe2bw'"),
        ("1f1b1", 1, "has 1 stage; use 2 or more, or baseline"),
        ("interleaved1x2", 1, "has 1 stage; use 2 or more, or baseline"),
        ("interleaved2x1", 2, "has 1 virtual stage per rank; use 2 or more, or 1f1b2"),
    ],
)
def test_strategy_outside_the_grammar_is_refused(text: str, devices: int, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        parse_strategy(text, devices)


@given(st.dictionaries(st.sampled_from(["dp", "tp", "cp", "pp"]), DEGREE, min_size=1))
def test_strategy_flags_are_those_of_the_name(degrees: dict[str, int]) -> None:
    text = "".join(f"{name}{degree}" for name, degree in degrees.items())
    devices = 1
    for degree in degrees.values():
        devices *= degree
    parallelism = parse_strategy(text, devices)
    assert parallelism.world_size == devices
    assert parallelism_from_flags(strategy_flags(parallelism), devices) == parallelism


@given(
    data=st.integers(1, 12),
    tensor=st.integers(1, 4),
    context=st.integers(1, 4),
    pipeline=st.integers(1, 3),
    expert=st.integers(1, 12),
    expert_tensor=st.integers(0, 4),
    sharding=st.sampled_from(Sharding),
)
def test_strategy_name_parses_back_to_the_same_parallelism(
    data: int,
    tensor: int,
    context: int,
    pipeline: int,
    expert: int,
    expert_tensor: int,
    sharding: Sharding,
) -> None:
    plain = Parallelism(data, tensor, pipeline, context, expert, sequence_parallel=tensor > 1)
    split = replace(plain, sharding=sharding).with_expert_tensor(expert_tensor)
    assume(split.world_size % split.ranks_per_expert_copy == 0)
    assert parse_strategy(strategy_name(split), split.world_size) == split
    assert parallelism_from_flags(strategy_flags(split), split.world_size) == split


SCHEDULED = ["gpipe2", "1f1b2", "interleaved2", "pipedream2", "pipedream2bw", "pipedream-flush2"]


@pytest.mark.parametrize("text", SCHEDULED)
def test_pipeline_schedule_has_a_single_name(text: str) -> None:
    assert strategy_name(parse_strategy(text, 2)) == text


def test_stage_without_flushes_keeps_a_weight_version_per_delayed_update() -> None:
    stashed, buffered, flushed = (
        parse_strategy(f"{text}", 4) for text in ("pipedream4", "pipedream4bw", "pipedream-flush4")
    )
    assert [stashed.weight_versions(stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [buffered.weight_versions(stage) for stage in range(4)] == [2, 2, 2, 2]
    assert [flushed.weight_versions(stage) for stage in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "text", ["sp2", "vpp2", "ep2", "zero1", "zero2", "zero3", "fsdp2", *SCHEDULED]
)
def test_strategy_flags_parse_back_to_the_same_parallelism(text: str) -> None:
    parallelism = parse_strategy(text, 2)
    assert parallelism_from_flags(strategy_flags(parallelism), 2) == parallelism


def test_degrees_that_do_not_divide_the_devices_are_refused() -> None:
    flags = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2"]
    with pytest.raises(StrategyError, match="TP 2 × PP 2 × CP 1 = 4 does not divide 6"):
        parallelism_from_flags(flags, 6)


def test_expert_tensor_parallel_flag_is_needed_only_if_it_differs_from_tp() -> None:
    flags = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
    unsplit = parallelism_from_flags((*flags, "--expert-tensor-parallel-size", "1"), 4)
    assert (unsplit.expert_tensor, unsplit.effective_expert_tensor, unsplit.expert_data) == (
        1,
        1,
        4,
    )
    assert strategy_flags(unsplit)[-3:] == (
        "--expert-tensor-parallel-size",
        "1",
        "--sequence-parallel",
    )
    as_tensor = parallelism_from_flags((*flags, "--expert-tensor-parallel-size", "2"), 4)
    assert as_tensor == parallelism_from_flags(flags, 4)


def test_expert_parallelism_divides_data_parallelism_and_covers_all_devices() -> None:
    split = parse_strategy("tp2pp2ep2dp2", 16)
    assert (split.data, split.expert, split.expert_data) == (4, 2, 2)
    assert split.sequence_parallel, "experts under TP need it"
    with pytest.raises(StrategyError, match="needs 4 devices"):
        parse_strategy("ep2dp2", 2)


@pytest.mark.parametrize(
    ("sharding", "stage", "wraps", "overlaps"),
    [
        (Sharding.NONE, 0, False, False),
        (Sharding.ZERO1, 1, False, False),
        (Sharding.ZERO2, 2, True, True),
        (Sharding.ZERO3, 3, True, True),
        (Sharding.FSDP2, 3, True, True),
    ],
)
def test_sharding_knows_its_sharded_tensors_and_method(
    sharding: Sharding, stage: int, wraps: bool, overlaps: bool
) -> None:
    assert (sharding.stage, sharding.wraps_modules, sharding.overlaps_by_default) == (
        stage,
        wraps,
        overlaps,
    )
    assert (sharding.shards_gradients, sharding.shards_weights) == (stage >= 2, stage == 3)
