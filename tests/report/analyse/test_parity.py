from dataclasses import replace

import pytest

from tests.report.factory import log_text, run_record, write_run
from tools.records.io import write_record
from tools.records.measurements import LayerRouting, RankRouting, RoutingRecord
from tools.records.run import ROUTING_FILE
from tools.report.analyse.configurations import configurations
from tools.report.analyse.parity import last_digit, parity_of
from tools.report.read.runs import load_runs
from tools.spec.run import Plant
from tools.spec.strategy import Batch

LOSSES = [10.8, 10.7, 10.6, 10.5, 9.4]


def verdicts(tmp_path, *runs, micro=False, routed=None):
    """Write runs of (record, losses) and judge them; by name of the newest run of each row.

    `routed` has, by name, the tokens of two experts for each iteration.
    """
    folders = [
        write_run(tmp_path, record, log_text([100.0] * len(losses), losses, micro=micro))
        for record, losses in runs
    ]
    for name, tokens in (routed or {}).items():
        rows = tuple(
            LayerRouting(n, 1, counts, 0, None, None, None) for n, counts in enumerate(tokens, 1)
        )
        write_record(tmp_path / name / ROUTING_FILE, RoutingRecord((RankRouting(0, rows),)))
    loaded, problems = load_runs(folders)
    assert problems == []
    rows = configurations(loaded)
    found = parity_of(rows)
    return {row.newest.name: parity for row, parity in zip(rows, found, strict=True)}


def changed(losses, iteration, by):
    return [loss + by * (n == iteration) for n, loss in enumerate(losses, start=1)]


@pytest.mark.parametrize(
    ("value", "unit"), [(6.159759, 1e-6), (10.29183, 1e-5), (0.5, 1e-7), (0, 1e-6), (100.0, 1e-4)]
)
def test_last_digit_is_the_one_megatron_prints(value, unit):
    assert last_digit(value) == pytest.approx(unit, rel=1e-12)


def test_baseline_is_the_reference_and_one_digit_off_is_held(tmp_path):
    found = verdicts(
        tmp_path,
        (run_record("a", "tp2"), changed(LOSSES, 5, 1e-6)),
        (run_record("b", "baseline"), LOSSES),
    )
    assert (found["b"].verdict, found["a"].verdict) == ("reference", "held")
    assert found["a"].compared == 5
    assert found["a"].max_units == pytest.approx(1.0)
    assert found["a"].repeats == 0


def test_two_digits_off_is_broken_at_the_first_such_iteration(tmp_path):
    losses = changed(changed(LOSSES, 4, 2e-5), 5, 1.0)
    found = verdicts(tmp_path, (run_record("a", "tp2"), losses), (run_record("b"), LOSSES))
    assert found["a"].verdict == "broken@4"


def test_what_repeats_differ_by_is_tolerated_and_no_more(tmp_path):
    runs = [
        (run_record("b1"), LOSSES),
        (run_record("b2"), changed(LOSSES, 3, 5e-5)),
        (run_record("t", "tp2"), changed(LOSSES, 4, 4e-5)),
        (run_record("c", "cp2"), changed(LOSSES, 4, 9e-5)),
        (run_record("p", "pp2"), changed(LOSSES, 2, 4e-5)),
    ]
    found = verdicts(tmp_path, *runs)
    assert found["t"].verdict == "held"
    assert found["t"].repeats == 1
    assert found["c"].verdict == "broken@4"
    assert found["p"].verdict == "broken@2"


def test_averaged_line_is_not_compared(tmp_path):
    found = verdicts(
        tmp_path,
        (run_record("a", "tp2"), changed(LOSSES, 2, 0.5)),
        (run_record("b"), LOSSES),
        micro=True,
    )
    assert found["a"].verdict == "held"
    assert found["a"].compared == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"start_checkpoint": None}, "no shared starting checkpoint"),
        ({"start_checkpoint": "other"}, "no shared starting checkpoint"),
        ({"seed": 7}, "different seed"),
        ({"batch": Batch(2, 16)}, "different global batch"),
        ({"dtype": "bf16"}, "different precision"),
        ({"dropout": 0.1}, "dropout is on, and its random numbers differ by layout"),
    ],
)
def test_runs_that_need_not_agree_are_not_compared(tmp_path, change, reason):
    other = run_record("a", "tp2", **change)
    held = run_record("c", "cp2")
    found = verdicts(tmp_path, (other, LOSSES), (run_record("b"), LOSSES), (held, LOSSES))
    assert (found["a"].verdict, found["a"].reason) == ("not comparable", reason)
    assert found["c"].verdict == "held"


def test_a_planted_run_is_compared_with_none_that_is_not_and_is_no_reference_of_it(tmp_path):
    plant = {"plant": Plant("plant.py", "1a2b")}
    first, second = run_record("a", **plant), run_record("b", "tp2", **plant)
    found = verdicts(tmp_path, (first, LOSSES), (second, LOSSES), (run_record("c"), LOSSES))
    assert (found["a"].verdict, found["b"].verdict) == ("reference", "held")
    assert found["c"].verdict == ""
    found = verdicts(tmp_path / "one", (first, LOSSES), (run_record("c", "tp2"), LOSSES))
    assert (found["a"].verdict, found["a"].reason) == ("not comparable", "different plant")
    assert found["a"].reference == "c"


def test_single_run_has_no_parity(tmp_path):
    assert verdicts(tmp_path, (run_record("b"), LOSSES))["b"].verdict == ""


def test_reference_that_nothing_is_compared_with_is_none(tmp_path):
    other = replace(run_record("a", "tp2"), start_checkpoint=None)
    found = verdicts(tmp_path, (other, LOSSES), (run_record("b"), LOSSES))
    assert (found["a"].verdict, found["b"].verdict) == ("not comparable", "")


def test_each_batch_size_has_a_reference_of_its_own(tmp_path):
    double = {"batch": Batch(2, 16)}
    found = verdicts(
        tmp_path,
        (run_record("b"), LOSSES),
        (run_record("d", "dp2", **double), LOSSES),
        (run_record("t", "tp2", **double), changed(LOSSES, 3, 1e-6)),
        (run_record("p", "pp2", **double), changed(LOSSES, 3, 1e-2)),
    )
    assert found["b"].verdict == ""
    assert (found["d"].verdict, found["t"].verdict) == ("reference", "held")
    assert (found["p"].verdict, found["p"].reference) == ("broken@3", "d")


def test_losses_are_compared_until_a_token_takes_another_expert(tmp_path):
    even, other = (8, 8), (9, 7)
    runs = ((run_record("a", "dp2"), changed(LOSSES, 5, 0.1)), (run_record("b"), LOSSES))
    routed = {"b": [even] * 5}
    found = verdicts(tmp_path / "parted", *runs, routed=routed | {"a": [even] * 3 + [other] * 2})
    assert (found["a"].verdict, found["a"].compared, found["a"].parted) == ("held", 3, 4)
    same = verdicts(tmp_path / "same", *runs, routed=routed | {"a": [even] * 5})
    assert (same["a"].verdict, same["a"].parted) == ("broken@5", None)
    never = verdicts(tmp_path / "never", *runs, routed=routed | {"a": [other] * 5})
    assert never["a"].verdict == "not comparable"
    assert "took other experts in iteration 1" in never["a"].reason
