import pytest

from parakit.config.flags import Flags
from parakit.config.stages import (
    EVEN_SPLIT,
    StageSplit,
    choose_stage_split,
    even_layout,
    find_uneven_split,
    front_loaded_layout,
    parse_stage_split,
)
from parakit.config.strategy import parallelism_from_flags

BOTH = StageSplit(embedding=True, loss=True)


def laid(stages: StageSplit, layers: int, pipeline: int, virtual: int = 1) -> list[tuple[int, ...]]:
    return [stages.layers_per_chunk(layers, pipeline, virtual, rank) for rank in range(pipeline)]


def test_126_layers_are_placed_on_pp_8_with_8_virtual_stages_like_in_megatron() -> None:
    chunks = laid(BOTH, 126, 8, 8)
    assert chunks[0] == (1, 2, 2, 2, 2, 2, 2, 2)
    assert chunks[7] == (2, 2, 2, 2, 2, 2, 2, 1)
    assert sum(map(sum, chunks)) == 126
    assert find_uneven_split(126, 8, 8) == choose_stage_split(126, 8) == BOTH


@pytest.mark.parametrize(
    ("stages", "layers", "pipeline", "virtual", "expected"),
    [
        (EVEN_SPLIT, 8, 4, 2, [2, 2, 2, 2]),
        (StageSplit(loss=True), 7, 4, 1, [2, 2, 2, 1]),
        (StageSplit(embedding=True), 7, 4, 1, [1, 2, 2, 2]),
        (StageSplit(first=1, last=3), 8, 4, 1, [1, 2, 2, 3]),
        (StageSplit(last=2), 14, 4, 2, [4, 4, 4, 2]),
        (StageSplit(first=5, last=3), 8, 2, 1, [5, 3]),
    ],
)
def test_layers_per_stage_follow_the_split(
    stages: StageSplit, layers: int, pipeline: int, virtual: int, expected: list[int]
) -> None:
    assert stages.find_problem(layers, pipeline, virtual) == ""
    assert [sum(chunks) for chunks in laid(stages, layers, pipeline, virtual)] == expected


@pytest.mark.parametrize(
    ("stages", "layers", "pipeline", "virtual", "problem"),
    [
        (EVEN_SPLIT, 126, 8, 1, "they do not divide"),
        (BOTH, 126, 6, 1, "128 with embedding or loss counted do not divide"),
        (StageSplit(first=1, loss=True), 8, 4, 1, "excludes counting"),
        (StageSplit(first=1), 9, 4, 1, "the other 8 layers do not divide over 3 other stages"),
        (StageSplit(first=4, last=3), 8, 2, 1, "1 layers are left for 0 other stages"),
        (StageSplit(last=3), 15, 4, 2, "2 virtual stages do not divide a stage's layers"),
        (StageSplit(layout="Et|tL"), 3, 2, 1, "it has 2 layers"),
        (StageSplit(layout="Et|t|tL"), 3, 2, 1, "it has 3 stages"),
        (StageSplit(layout="Et|xL"), 1, 2, 1, "it is not E, t for each layer"),
        (StageSplit(layout="Et|Lt"), 2, 2, 1, "it is not E, t for each layer"),
        (StageSplit(layout="Et*1000000000000|tL"), 2, 2, 1, "it is not E, t for each layer"),
        (StageSplit(layout="Et||tL"), 2, 3, 1, "a stage between the ends has no layer"),
        (StageSplit(layout="Et|tm|L"), 2, 3, 1, "MTP layers are planned on the last stage only"),
        (StageSplit(layout="Et|tL", loss=True), 2, 2, 1, "a layout excludes other ways"),
    ],
)
def test_stage_split_that_megatron_refuses_is_named(
    stages: StageSplit, layers: int, pipeline: int, virtual: int, problem: str
) -> None:
    assert problem in stages.find_problem(layers, pipeline, virtual)


def test_61_layers_on_16_stages_leave_the_last_one_short() -> None:
    assert find_uneven_split(61, 16, 1) == StageSplit(last=1)
    assert choose_stage_split(61, 61) == EVEN_SPLIT
    assert choose_stage_split(3, 8) is None


def test_flags_are_read_back_and_count_for_virtual_stages() -> None:
    flags = ["--pipeline-model-parallel-size", "8", "--num-layers", "126", *BOTH.flags]
    assert parse_stage_split(Flags(flags)) == BOTH
    assert (
        parse_stage_split(Flags(BOTH.flags)) == EVEN_SPLIT
    )  # The flags have no effect without pipeline stages.
    flags += ["--num-layers-per-virtual-pipeline-stage", "2"]
    assert parallelism_from_flags(flags, 8).virtual_stages == 8
    assert StageSplit(first=3).flags == ("--decoder-first-pipeline-num-layers", "3")


def test_pipeline_layout_determines_order_and_number_of_virtual_stages() -> None:
    """The layout is that of a functional test of Megatron: 16 layers and an MTP layer on PP 2."""
    pipeline = ("--pipeline-model-parallel-size", "2")
    arguments = (*pipeline, "--pipeline-model-parallel-layout", "Et*3|(tt|)*6,tmL")
    stages = parse_stage_split(Flags(arguments))
    assert laid(stages, 16, 2, 4) == [(3, 2, 2, 2), (2, 2, 2, 1)]
    assert (
        stages.find_problem(16, 2, 4),
        stages.virtual_stages_in_layout(2),
        stages.mtp_layers_in_layout,
    ) == ("", 4, 1)
    assert parallelism_from_flags(arguments, 2).virtual_stages == 4
    assert parse_stage_split(Flags((*pipeline, *stages.flags))) == stages


def test_generated_layouts_have_fewer_layers_at_the_ends_or_in_the_last_stages() -> None:
    assert even_layout(7, 4) == StageSplit(layout="Et|tt|tt|ttL")
    assert even_layout(6, 4) == StageSplit(layout="Et|tt|tt|tL")
    assert front_loaded_layout(61, 16, 1).layout.endswith("tttt|tmL")
    assert front_loaded_layout(3, 3, 0) == StageSplit(layout="Et|t|tL")
