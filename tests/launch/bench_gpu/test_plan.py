import pytest

from megatron_patches.fused.names import NAMES
from tests.launch.bench_gpu.results import bench, result
from tools.launch.bench_gpu.plan import BUDGET_SECONDS, describe, fitting, steps, variables
from tools.launch.bench_gpu.settings import ALONE, PUBLISHED, SETTINGS, TUNED, WARM_UP, chosen


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


def test_main_settings_come_first_with_their_repeats_and_in_turn() -> None:
    assert [step.title for step in steps(SETTINGS)][:5] == [
        *("published 1/2", "tuned 1/2", "published 2/2", "tuned 2/2"),
        f"{ALONE[0].name} 1/1",
    ]


def test_a_second_call_goes_on_where_the_first_ended() -> None:
    before = bench(result("published", 400.0, 401.0), result("tuned", 300.0))
    titles = [step.title for step in steps(SETTINGS, before)]
    assert titles[:2] == ["tuned 2/2", f"{ALONE[0].name} 1/1"]


def test_a_setting_that_failed_is_tried_again() -> None:
    before = bench(result("bf16", reason="it failed"))
    assert [step.title for step in steps(chosen("bf16"), before)] == ["bf16 1/1"]


def test_what_does_not_fit_is_left_out_by_name_and_the_rest_kept() -> None:
    planned = steps(SETTINGS)
    kept, left = fitting(planned, BUDGET_SECONDS)
    assert set(kept) | set(left) == set(planned)
    assert sum(step.expected_seconds for step in kept) <= BUDGET_SECONDS
    assert left
    text = describe(planned, BUDGET_SECONDS, {"DATA": "my data"})
    assert all(step.title in text for step in planned)
    assert "DATA='my data' make train-baseline-gpt2-large-1gpu" in text


def test_the_train_command_is_told_the_patches_and_keeps_no_ledger() -> None:
    told = variables(TUNED, "r")
    assert (told["RUNTIME"], told["LEDGER"], told["RUNS"]) == ("host", "0", "r")
    assert told["FUSED"] == ",".join(TUNED.fused)
    assert "FUSED" not in variables(PUBLISHED, "r")


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no setting 'fast'; it knows published, tuned, "):
        chosen("published fast")
