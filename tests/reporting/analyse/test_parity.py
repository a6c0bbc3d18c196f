from dataclasses import replace

import pytest

from parakit.artifacts.io import write_record
from parakit.artifacts.measurements import LayerRouting, RankRouting, RoutingRecord
from parakit.artifacts.run import ROUTING_FILE, CodeHashes
from parakit.config.run import DeviceKind, PatchFile
from parakit.config.strategy import Batch
from parakit.logs.runs import load_runs
from parakit.reporting.analyse.configurations import group_into_rows
from parakit.reporting.analyse.parity import judge_parity, last_digit_unit
from tests.reporting.factory import iteration_line, log_text, run_record, write_run

LOSSES = [10.8, 10.7, 10.6, 10.5, 9.4]
GOOD, EDITED = CodeHashes("kit-1", "megatron-1"), CodeHashes("kit-2", "megatron-1")


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
    rows = group_into_rows(loaded)
    parities = judge_parity(rows)
    return {row.newest.name: parity for row, parity in zip(rows, parities, strict=True)}


def changed(losses, iteration, by):
    return [loss + by * (n == iteration) for n, loss in enumerate(losses, start=1)]


@pytest.mark.parametrize(
    ("value", "unit"), [(6.159759, 1e-6), (10.29183, 1e-5), (0.5, 1e-7), (0, 1e-6), (100.0, 1e-4)]
)
def test_last_digit_is_the_one_megatron_prints(value, unit):
    assert last_digit_unit(value) == pytest.approx(unit, rel=1e-12)


def test_baseline_is_the_reference_and_one_digit_off_keeps_parity(tmp_path):
    parities = verdicts(
        tmp_path,
        (run_record("a", "tp2"), changed(LOSSES, 5, 1e-6)),
        (run_record("b", "baseline"), LOSSES),
    )
    assert (parities["b"].verdict, parities["a"].verdict) == ("reference", "held")
    assert parities["a"].compared == 5
    assert parities["a"].max_units == pytest.approx(1.0)
    assert parities["a"].repeats == 0


def test_two_digits_off_is_broken_at_the_first_such_iteration(tmp_path):
    losses = changed(changed(LOSSES, 4, 2e-5), 5, 1.0)
    parities = verdicts(tmp_path, (run_record("a", "tp2"), losses), (run_record("b"), LOSSES))
    assert parities["a"].verdict == "broken@4"


@pytest.mark.parametrize(
    ("backend", "by", "verdict"),
    [
        # Of a loss of 5.0 a unit is 1e-6; 400 iterations add 6 units, between backends 80.
        ("megatron", 7e-6, "held"),
        ("megatron", 8e-6, "broken@400"),
        ("native", 81e-6, "held"),
        ("native", 82e-6, "broken@400"),
    ],
)
def test_long_curves_may_drift_apart_by_what_was_measured_and_no_more(
    tmp_path, backend, by, verdict
):
    losses = [5.0] * 400
    other = run_record("b", "tp2", backend=backend), changed(losses, 400, by)
    parities = verdicts(tmp_path, (run_record("a"), losses), other)
    assert parities["b"].verdict == verdict


def on_gpu(name, strategy="baseline", **changes):
    record = run_record(name, strategy, device=DeviceKind.GPU, **({"code": GOOD} | changes))
    return replace(record, host=replace(record.host, devices=("H200",) * len(record.host.devices)))


def test_what_repeats_on_gpus_differ_by_is_tolerated_and_no_more(tmp_path):
    runs = [
        (on_gpu("b1"), LOSSES),
        (on_gpu("b2"), changed(LOSSES, 3, 5e-5)),
        (on_gpu("t", "tp2"), changed(LOSSES, 4, 4e-5)),
        (on_gpu("c", "cp2"), changed(LOSSES, 4, 9e-5)),
        (on_gpu("p", "pp2"), changed(LOSSES, 2, 4e-5)),
    ]
    parities = verdicts(tmp_path, *runs)
    assert parities["t"].verdict == "held"
    assert parities["t"].repeats == 1
    assert parities["c"].verdict == "broken@4"
    assert parities["p"].verdict == "broken@2"
    assert parities["b2"].repeats_differ == ""


@pytest.mark.parametrize("code", [None, EDITED])
def test_runs_of_other_or_unknown_code_are_no_repeats(tmp_path, code):
    runs = [
        (on_gpu("b"), LOSSES),
        (on_gpu("s1", "sp2", code=None if code is None else GOOD), LOSSES),
        (on_gpu("s2", "sp2", code=code), changed(LOSSES, 5, 1e-3)),
    ]
    parities = verdicts(tmp_path, *runs)
    assert (parities["s2"].verdict, parities["s2"].repeats) == ("broken@5", 0)


def test_an_edit_between_two_runs_is_seen_though_the_first_was_good(tmp_path):
    parities = verdicts(
        tmp_path,
        (run_record("b", code=GOOD), LOSSES),
        (run_record("s1", "sp2", code=GOOD), LOSSES),
        (run_record("s2", "sp2", code=EDITED), changed(LOSSES, 5, 1e-3)),
    )
    assert parities["s2"].verdict == "broken@5"
    assert "s1" not in parities
    back = verdicts(
        tmp_path / "back",
        (run_record("b", code=GOOD), LOSSES),
        (run_record("s1", "sp2", code=EDITED), changed(LOSSES, 5, 1e-3)),
        (run_record("s2", "sp2", code=GOOD), LOSSES),
    )
    assert back["s2"].verdict == "held"


@pytest.mark.parametrize("order", [(0.0, 1e-3), (1e-3, 0.0)])
def test_repeats_on_cpu_ranks_that_differ_are_a_finding_and_never_a_tolerance(tmp_path, order):
    parities = verdicts(
        tmp_path,
        (run_record("b", code=GOOD), LOSSES),
        (run_record("s1", "sp2", code=GOOD), changed(LOSSES, 5, order[0])),
        (run_record("s2", "sp2", code=GOOD), changed(LOSSES, 5, order[1])),
        (run_record("t", "tp2", code=GOOD), changed(LOSSES, 5, 1e-4)),
    )
    assert parities["s2"].verdict == "broken@5"
    assert parities["s2"].judged == ("s1" if order[0] else "s2")
    assert parities["s2"].repeats_differ == (
        "repeats differ by 1,000 units of the last printed digit: not deterministic, or not the "
        "same code"
    )
    assert parities["t"].verdict == "broken@5"
    assert parities["b"].repeats_differ == ""


def test_a_baseline_of_another_seed_does_not_take_the_reference_away(tmp_path):
    wrong = changed(LOSSES, 5, 1e-3)
    parities = verdicts(
        tmp_path,
        (run_record("b"), LOSSES),
        (run_record("t", "tp2"), LOSSES),
        (run_record("s", "sp2"), wrong),
        (run_record("b7", seed=7, start_checkpoint="start-7"), [loss + 1 for loss in LOSSES]),
    )
    assert (parities["b7"].verdict, parities["b7"].reference) == ("reference", "b")
    assert (parities["t"].verdict, parities["t"].reference) == ("held", "b")
    assert (parities["s"].verdict, parities["s"].reference) == ("broken@5", "b")


def test_rows_whose_baseline_is_of_another_seed_say_so(tmp_path):
    parities = verdicts(
        tmp_path,
        (run_record("t", "tp2"), LOSSES),
        (run_record("s", "sp2"), LOSSES),
        (run_record("b7", seed=7, start_checkpoint="start-7"), LOSSES),
    )
    assert [parities[name].verdict for name in "ts"] == ["reference", "held"]
    assert {parities[name].without_baseline for name in "ts"} == {"different seed"}
    assert (parities["b7"].verdict, parities["b7"].without_baseline) == ("", "")


def test_a_row_of_which_one_run_has_the_references_seed_is_compared_by_that_run(tmp_path):
    parities = verdicts(
        tmp_path,
        (run_record("b"), LOSSES),
        (run_record("t", "tp2"), LOSSES),
        (run_record("t7", "tp2", seed=7), changed(LOSSES, 5, 1.0)),
    )
    assert (parities["t7"].verdict, parities["t7"].judged) == ("held", "t")


def test_bf16_is_given_what_it_was_measured_to_add_and_no_more(tmp_path):
    # Of gpt2-tiny: baseline, a healthy tp2, and one whose norms' gradients were not reduced.
    numbers = (1, 10, 25, 50, 82)
    by_iteration = {"b": [10.83, 10.33, 8.92, 7.08, 5.92]}
    healthy = (9.3e-7, 1.2e-5, 3.1e-5, 1.4e-4, 2.8e-3)
    broken = (9.3e-7, 8.9e-5, 7.6e-4, 7.8e-4, 3e-3)
    for name, apart in (("t", healthy), ("s", broken)):
        by_iteration[name] = [
            loss * (1 + by) for loss, by in zip(by_iteration["b"], apart, strict=True)
        ]
    folders = []
    for name, strategy in (("b", "baseline"), ("t", "tp2"), ("s", "sp2")):
        lines = zip(numbers, by_iteration[name], strict=True)
        text = "\n".join(iteration_line(number, 100.0, loss) for number, loss in lines)
        folders.append(write_run(tmp_path, run_record(name, strategy, dtype="bf16"), text))
    rows = group_into_rows(load_runs(folders)[0])
    parities = judge_parity(rows)
    assert [parity.verdict for parity in parities] == ["reference", "held", "broken@10"]
    assert [(parity.compared, parity.until) for parity in parities[1:]] == [(4, 50), (4, 50)]


def test_weights_decide_what_start_is_shared_where_their_hash_is_known(tmp_path):
    anew = run_record("a", "tp2", start_checkpoint="start-2", start_weights="w")
    other = run_record("c", "cp2", start_weights="v")
    base = (run_record("b", start_weights="w"), LOSSES)
    parities = verdicts(tmp_path, base, (anew, LOSSES), (other, LOSSES))
    assert parities["a"].verdict == "held"
    assert parities["c"].reason == "no shared starting checkpoint"
    of_before = (run_record("d", "dp2"), LOSSES)
    assert verdicts(tmp_path / "before", base, of_before)["d"].verdict == "held"


def test_averaged_line_is_not_compared(tmp_path):
    parities = verdicts(
        tmp_path,
        (run_record("a", "tp2"), changed(LOSSES, 2, 0.5)),
        (run_record("b"), LOSSES),
        micro=True,
    )
    assert parities["a"].verdict == "held"
    assert parities["a"].compared == 4


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"start_checkpoint": None}, "no shared starting checkpoint"),
        ({"start_checkpoint": "other"}, "no shared starting checkpoint"),
        ({"seed": 7}, "different seed"),
        ({"batch": Batch(2, 16)}, "different global batch"),
        ({"dtype": "bf16"}, "different precision"),
        ({"argv": (*run_record("x").argv, "--lr", "1e-4")}, "different --lr"),
        ({"dropout": 0.1}, "dropout is on, and its random numbers differ by strategy"),
    ],
)
def test_runs_that_need_not_agree_are_not_compared(tmp_path, change, reason):
    other = run_record("a", "tp2", **change)
    held = run_record("c", "cp2")
    parities = verdicts(tmp_path, (other, LOSSES), (run_record("b"), LOSSES), (held, LOSSES))
    assert (parities["a"].verdict, parities["a"].reason) == ("not comparable", reason)
    assert parities["c"].verdict == "held"


def test_a_patched_run_is_compared_with_none_that_is_not_and_is_no_reference_of_it(tmp_path):
    patch_file = {"patch_file": PatchFile("change.py", "1a2b")}
    first, second = run_record("a", **patch_file), run_record("b", "tp2", **patch_file)
    parities = verdicts(tmp_path, (first, LOSSES), (second, LOSSES), (run_record("c"), LOSSES))
    assert (parities["a"].verdict, parities["b"].verdict) == ("reference", "held")
    assert parities["c"].verdict == ""
    parities = verdicts(tmp_path / "one", (first, LOSSES), (run_record("c", "tp2"), LOSSES))
    assert (parities["a"].verdict, parities["a"].reason) == (
        "not comparable",
        "different patch file",
    )
    assert parities["a"].reference == "c"


def test_single_run_has_no_parity(tmp_path):
    assert verdicts(tmp_path, (run_record("b"), LOSSES))["b"].verdict == ""


def test_reference_that_nothing_is_compared_with_is_none(tmp_path):
    other = replace(run_record("a", "tp2"), start_checkpoint=None)
    parities = verdicts(tmp_path, (other, LOSSES), (run_record("b"), LOSSES))
    assert (parities["a"].verdict, parities["b"].verdict) == ("not comparable", "")


def test_each_batch_size_has_a_reference_of_its_own(tmp_path):
    double = {"batch": Batch(2, 16)}
    parities = verdicts(
        tmp_path,
        (run_record("b"), LOSSES),
        (run_record("d", "dp2", **double), LOSSES),
        (run_record("t", "tp2", **double), changed(LOSSES, 3, 1e-6)),
        (run_record("p", "pp2", **double), changed(LOSSES, 3, 1e-2)),
    )
    assert parities["b"].verdict == ""
    assert (parities["d"].verdict, parities["t"].verdict) == ("reference", "held")
    assert (parities["p"].verdict, parities["p"].reference) == ("broken@3", "d")


def test_losses_are_compared_until_a_token_takes_another_expert(tmp_path):
    even, other, many = (800, 800), (801, 799), (850, 750)
    runs = ((run_record("a", "dp2"), changed(LOSSES, 5, 0.1)), (run_record("b"), LOSSES))
    routed = {"b": [even] * 5}
    parities = verdicts(
        tmp_path / "diverged", *runs, routed=routed | {"a": [even] * 3 + [other] * 2}
    )
    assert (parities["a"].verdict, parities["a"].compared, parities["a"].diverged) == ("held", 3, 4)
    same = verdicts(tmp_path / "same", *runs, routed=routed | {"a": [even] * 5})
    assert (same["a"].verdict, same["a"].diverged) == ("broken@5", None)
    wrong = verdicts(tmp_path / "wrong", *runs, routed=routed | {"a": [even] * 4 + [many]})
    assert wrong["a"].verdict == "broken@5", "more than rounding can move: their losses count"
    never = verdicts(tmp_path / "never", *runs, routed=routed | {"a": [other] * 5})
    assert never["a"].verdict == "not comparable"
    assert "took other experts in iteration 1" in never["a"].reason
