"""Data sets that are too small for the split of the published runs."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from parakit.config.errors import LaunchError
from parakit.config.flags import Flags
from parakit.data.indexed import open_dataset
from parakit.data.split import Split, divide_into_parts, unusable_parts
from parakit.launch import initial_checkpoint
from parakit.launch.compose import Launch
from parakit.launch.job import parse_target
from parakit.launch.options import Options
from parakit.launch.preflight import check_launch
from parakit.launch.train import compose_job, list_differences
from tests.small import write_documents

SEQUENCE = 64
"""Of gpt2-tiny."""

SHORT = 36
"""Tokens of a document that is shorter than a sequence."""


def composed(
    folder: Path, lengths: Sequence[int], extra: Sequence[str] = (), iterations: int | None = None
) -> Launch:
    prefix = write_documents(folder / "mine", lengths)
    options = Options(data=prefix, runs=folder, extra=tuple(extra), iterations=iterations)
    return compose_job(parse_target("train-baseline-gpt2-tiny-1cpu").with_options(options))


def refusal(launch: Launch) -> str:
    with pytest.raises(LaunchError) as caught:
        check_launch(launch)
    return str(caught.value)


@pytest.mark.parametrize(
    ("lengths", "split", "evaluations", "sizes"),
    [
        (
            [SHORT] * 60,
            "56,3,1",
            "10",
            "training 56 documents (2,016 tokens), validation 3 documents",
        ),
        ([SHORT] * 3, "1,1,1", "10", "validation 1 document (36 tokens) and test 1 document"),
        ([SHORT] * 2, "1,1,0", "10", "and test 0 documents (0 tokens)"),
        ([100], "1,0,0", "0", "1,0,0 and --eval-iters 0 is used: training 1 document (100 tokens)"),
    ],
)
def test_a_small_data_set_gets_a_split_that_leaves_no_part_empty_and_a_sentence(
    tmp_path: Path, lengths: list[int], split: str, evaluations: str, sizes: str
) -> None:
    launch = composed(tmp_path, lengths, iterations=60)
    check_launch(launch)
    assert Flags(launch.flags).text("--split") == split
    assert Flags(launch.flags).text("--eval-iters") == evaluations
    (sentence,) = (text for text in list_differences(launch) if "too small" in text)
    assert f"too small for --split 949,50,1; --split {split}" in sentence
    assert sizes in sentence


def test_a_data_set_that_fills_the_published_split_keeps_it(tmp_path: Path) -> None:
    launch = composed(tmp_path, [SHORT] * 1000)
    assert Flags(launch.flags).text("--split") == "949,50,1"
    assert not any("too small" in text for text in list_differences(launch))


def test_a_split_of_the_users_own_is_refused_with_the_parts_and_one_that_works(
    tmp_path: Path,
) -> None:
    launch = composed(tmp_path, [SHORT] * 60, ("--split", "949,50,1"))
    assert refusal(launch) == (
        f"--split 949,50,1 divides data set {launch.data} into training 57 documents (2,052 tokens), "
        "validation 3 documents (108 tokens) and test 0 documents (0 tokens): the test part has nothing "
        "that Megatron could draw a sample from; set EXTRA='--split 56,3,1', or prepare more documents."
    )
    single = composed(tmp_path, [100], ("--split", "949,50,1"))
    assert "set EXTRA='--split 1,0,0 --eval-iters 0', or prepare" in refusal(single)


def test_the_starting_checkpoint_is_written_on_the_split_of_the_run(tmp_path: Path) -> None:
    for extra in (("--split", "90,5,5"), ()):
        launch = composed(tmp_path, [SHORT] * 60, extra)
        writer = initial_checkpoint._compose_writer(launch, tmp_path)
        assert Flags(writer.flags).text("--split") == Flags(launch.flags).text("--split")
        check_launch(writer)


def test_parts_that_are_shorter_than_a_sample_work_only_where_megatron_repeats_them(
    tmp_path: Path,
) -> None:
    check_launch(composed(tmp_path, [SHORT] * 3, ("--split", "1,1,1")))
    short = composed(tmp_path, [SHORT] * 3, ("--split", "1,1,1", "--eval-iters", "0"))
    assert "shorter than one sample of 65 tokens, which --eval-iters 0 forbids" in refusal(short)
    chosen = composed(tmp_path, [SHORT] * 60, ("--eval-iters", "0"))
    check_launch(chosen)
    assert Flags(chosen.flags).text("--split") == "1,0,0"


def test_an_evaluation_without_a_validation_part_is_refused_only_if_the_run_reaches_it(
    tmp_path: Path,
) -> None:
    extra = ("--split", "1,0,0")
    check_launch(composed(tmp_path, [SHORT] * 60, extra, iterations=49))
    message = refusal(composed(tmp_path, [SHORT] * 60, extra, iterations=50))
    assert message == (
        "--split 1,0,0 leaves no validation part, and --eval-iters 10 evaluates on it; "
        "add --eval-iters 0 to EXTRA=, or give the part a weight."
    )


@pytest.mark.parametrize(
    ("split", "sequences", "unusable"),
    [
        ("949,50,1", 79, ["test"]),
        ("949,50,1", 1000, []),
        ("949,50,1", 5, ["validation", "test"]),
        ("100,0,0", 5, []),
    ],
)
def test_parts_without_tokens_are_found(
    tmp_path: Path, split: str, sequences: int, unusable: list[str]
) -> None:
    dataset = open_dataset(Path(write_documents(tmp_path / "mine", [SHORT] * sequences)))
    empty = unusable_parts(dataset, split, SEQUENCE)
    assert [part.name for part in empty] == unusable


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("split", ["949,50,1", "56,3,1", "1,1,1", "33,33,33", "1,0,0"])
@pytest.mark.parametrize("sequences", [1, 3, 60, 79])
def test_parts_are_those_that_megatron_builds(tmp_path: Path, sequences: int, split: str) -> None:
    """Megatron's builder, with a stand-in for the data set that would never end on an empty part."""
    from types import SimpleNamespace

    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    class Indices:
        build_low_level_dataset = staticmethod(lambda *_: None)
        numel_low_level_dataset = staticmethod(lambda _: sequences)

        def __init__(self, *arguments: object) -> None:
            self.count = len(arguments[2])  # type: ignore[arg-type]

    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    builder = SimpleNamespace(
        cls=Indices,
        config=None,
        is_built_on_rank=lambda: True,
        build_generic_dataset=BlendedMegatronDatasetBuilder.build_generic_dataset,
    )
    built_parts = BlendedMegatronDatasetBuilder._build_megatron_dataset_splits(
        builder, "mine", matrix, [1, 1, 1]
    )
    dataset = open_dataset(Path(write_documents(tmp_path / "mine", [SHORT] * sequences)))
    ours = divide_into_parts(dataset, split)
    for part in Split:
        built = built_parts[part]
        assert (built is None) == (ours[part].weight == 0)
        assert ours[part].sequences == (built.count if built else 0)
