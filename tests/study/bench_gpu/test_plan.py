from itertools import pairwise
from pathlib import Path

import pytest

from megatron_patches.fusions import NAMES
from tools.spec.model import load_model
from tools.study.bench_gpu.plan import (
    BUDGET_SECONDS,
    SETTINGS,
    WARM_UP,
    cells_of,
    chosen,
    describe,
    fitting,
    variables,
)
from tools.study.runner import in_turn

PUBLISHED, TUNED = chosen("published tuned")
ALONE = [setting for setting in SETTINGS if setting.name.startswith("published+")]
FIRST_ALONE = ALONE[0].name


def test_the_published_setting_is_fp16_without_a_patch_and_profiled_after_the_timed_part() -> None:
    assert (PUBLISHED.dtype, PUBLISHED.fused, PUBLISHED.timed) == ("fp16", (), 50)
    words = PUBLISHED.extra
    start = int(words[words.index("--profile-step-start") + 1])
    end = int(words[words.index("--profile-step-end") + 1])
    assert WARM_UP + 50 < start < end < PUBLISHED.iterations
    assert "--bf16" not in words


def test_the_tuned_setting_is_bf16_with_patches_that_exist() -> None:
    assert "--bf16" in TUNED.extra
    assert set(TUNED.fused) <= set(NAMES)


def test_every_patch_is_measured_alone_once() -> None:
    assert sorted(setting.fused[0] for setting in ALONE) == sorted(NAMES)
    assert all(setting.dtype == PUBLISHED.dtype for setting in ALONE)
    assert all(setting.why == f"the patch {setting.fused[0]} alone" for setting in ALONE)


def turns(names: str = "") -> list[str]:
    cells = cells_of(chosen(names), Path("runs"))
    return [f"{cell.label} {repeat}/{cell.repeats}" for repeat, cell in in_turn(cells)]


def test_main_settings_come_first_with_their_repeats_and_in_turn() -> None:
    assert turns()[:5] == [
        *("published 1/2", "tuned 1/2", "published 2/2", "tuned 2/2"),
        f"{ALONE[0].name} 1/1",
    ]


def test_what_does_not_fit_is_left_out_by_name_and_the_rest_kept() -> None:
    planned = in_turn(cells_of(SETTINGS, Path("runs")))
    kept, left = fitting(planned, BUDGET_SECONDS)
    assert set(kept) | set(left) == set(planned)
    assert sum(cell.expected_seconds for _, cell in kept) <= BUDGET_SECONDS
    assert left
    text = describe(SETTINGS, BUDGET_SECONDS, {"DATA": "my data"})
    assert all(title in text for title in turns())
    assert "DATA='my data' make train-baseline-gpt2-large-1gpu" in text


def test_the_train_command_names_the_patches_and_keeps_no_ledger() -> None:
    told = variables(TUNED, "r")
    assert (told["RUNTIME"], told["LEDGER"], told["RUNS"]) == ("host", "0", "r")
    assert told["FUSED"] == ",".join(TUNED.fused)
    assert "FUSED" not in variables(PUBLISHED, "r")


@pytest.mark.filterwarnings("ignore")  # Megatron tells of what is not installed.
def test_each_split_of_the_sample_holds_sequences_of_the_models_length(sample_prefix: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = IndexedDataset(
        str(sample_prefix)
    )  # Its lengths are its file's, mapped as long as it lives.
    lengths = data.sequence_lengths
    parts = [
        float(part) for part in PUBLISHED.extra[PUBLISHED.extra.index("--split") + 1].split(",")
    ]
    ends = [round(len(lengths) * sum(parts[: n + 1]) / sum(parts)) for n in range(len(parts))]
    for start, end in pairwise([0, *ends]):
        assert lengths[start:end].sum() > 4 * load_model("gpt2-large").shape.seq_length


def test_one_patch_can_be_left_out_of_tuned_or_added_by_name() -> None:
    without, beside = chosen("tuned-gradient_gemm tuned+attention_cudnn")
    assert set(TUNED.fused) - set(without.fused) == {"gradient_gemm"}
    assert set(beside.fused) - set(TUNED.fused) == {"attention_cudnn"}
    assert (without.dtype, without.flags) == (TUNED.dtype, TUNED.flags)
    assert not {without.name, beside.name} & {setting.name for setting in chosen("")}


def test_cuda_graphs_are_measured_in_addition_to_tuned() -> None:
    (graphs,) = chosen("tuned+cuda-graph")
    assert graphs.fused == TUNED.fused
    assert graphs.flags == (*TUNED.flags, "--cuda-graph-impl", "full_iteration")
    assert WARM_UP > 3  # Megatron captures after three iterations.


def test_every_patch_can_be_left_out_of_tuned_or_added_to_it() -> None:
    for name in NAMES:
        if name in TUNED.fused:
            (other,) = chosen(f"tuned-{name}")
            assert set(TUNED.fused) - set(other.fused) == {name}
        else:
            (other,) = chosen(f"tuned+{name}")
            assert set(other.fused) - set(TUNED.fused) == {name}


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no setting 'fast'; it knows published, tuned, "):
        chosen("published fast")
