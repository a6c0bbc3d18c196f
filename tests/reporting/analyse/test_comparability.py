import pytest

from parakit.config.strategy import Batch
from parakit.logs.runs import load_folder, load_runs
from parakit.reporting.analyse.comparability import (
    compare_speed,
    describe_adam_state,
    list_differences,
)
from parakit.reporting.analyse.configurations import group_into_rows
from parakit.reporting.analyse.statistics import TimeVerdict
from tests.reporting.factory import iteration_line, log_text, run_record, write_run


def rows(tmp_path, *pairs):
    folders = [
        write_run(tmp_path, record, log_text([900.0] + [ms + k % 3 / 10 for k in range(30)]))
        for record, ms in pairs
    ]
    runs, _ = load_runs(folders)
    return {row.newest.strategy: row for row in group_into_rows(runs)}


def test_equal_work_is_compared_per_iteration(tmp_path):
    entries = rows(tmp_path, (run_record("a"), 100.0), (run_record("b", "tp2"), 150.0))
    speed = compare_speed(entries["baseline"], entries["tp2"])
    assert speed.per_iteration is not None
    assert speed.per_iteration.ratio == pytest.approx(1.5, abs=0.01)
    assert speed.per_iteration.verdict is TimeVerdict.SLOWER
    assert speed.per_device == pytest.approx(1 / 3, abs=0.01)


def test_speedup_per_iteration_is_refused_for_different_batches(tmp_path):
    double = run_record("b", "dp2", batch=Batch(2, 16))
    entries = rows(tmp_path, (run_record("a"), 100.0), (double, 100.0))
    speed = compare_speed(entries["baseline"], entries["dp2"])
    assert speed.per_iteration is None
    assert speed.per_token is not None
    assert speed.per_token.ratio == pytest.approx(0.5, abs=0.01)
    assert speed.per_device == pytest.approx(1.0, abs=0.02)
    assert ("tokens per iteration", "512", "1024") in [
        (d.what, d.reference, d.other) for d in speed.differences
    ]


def test_everything_that_differs_is_listed(tmp_path):
    argv = run_record("x").argv
    first = run_record("a", "baseline", dropout=0.1)
    two = run_record(
        "b",
        "tp2",
        dtype="bf16",
        argv=(*argv, "--recompute-granularity", "full", "--optimizer", "sgd"),
    )
    text = log_text([100.0] * 5)
    differences = list_differences(
        load_folder(write_run(tmp_path, first, text)), load_folder(write_run(tmp_path, two, text))
    )
    assert [(d.what, d.reference, d.other, d.part_of_strategy) for d in differences] == [
        ("devices", "1", "2", True),
        ("padded vocabulary", "50304", "50432", True),
        ("dropout", "0.1", "0.0", False),
        ("precision", "fp32", "bf16", False),
        ("optimizer", "adam", "sgd", False),
        ("recomputation", "none", "full", False),
    ]


def test_adam_never_existed_when_every_step_was_skipped(tmp_path):
    skipped = "\n".join(iteration_line(n, skipped=1) for n in range(1, 5))
    run = load_folder(write_run(tmp_path, run_record("a"), skipped))
    assert describe_adam_state(run) == "never existed (every step was skipped)"
    run = load_folder(write_run(tmp_path, run_record("b"), log_text([1.0, 1.0])))
    assert describe_adam_state(run) == "existed"
