from dataclasses import replace

import pytest

from parakit.artifacts.run import HostRecord
from parakit.config.model import load_model
from parakit.config.run import DeviceKind
from parakit.config.strategy import Batch
from parakit.logs.runs import load_folder
from parakit.reporting.analyse.entry import build_entries_from_folders
from parakit.reporting.analyse.rates import compute_rates
from parakit.reporting.analyse.report import Report
from parakit.reporting.analyse.results import RESULTS
from parakit.reporting.render.sentences import write_sentences
from tests.reporting.factory import changed, log_text, run_record, write_run

LARGE = load_model("gpt2-large")
H200 = HostRecord("h", "cpu", 2, 1, ("NVIDIA H200",) * 2)


def published_dp2(**changes):
    """The H200 notes' DP2 run: 64 samples of 1024 tokens on two H200, fp16."""
    record = run_record(
        "r",
        "dp2",
        model="gpt2-large",
        device=DeviceKind.GPU,
        batch=Batch(32, 64),
        seq_length=1024,
        dtype="fp16",
        argv=LARGE.flags,
        host=H200,
    )
    return changed(record, **changes)


def rates(tmp_path, record, ms=437.2, log=None):
    text = log or log_text([ms] * 30)
    return compute_rates(load_folder(write_run(tmp_path, record, text)), ms)


def test_published_dp2_run_has_its_published_rates(tmp_path):
    measured = rates(tmp_path, published_dp2())
    assert measured.model_flops_per_iteration == pytest.approx(3.2219e14, rel=1e-4)
    assert measured.tokens_per_second == pytest.approx(64 * 1024 / 0.4372)
    assert measured.tokens_per_second_per_device == pytest.approx(32 * 1024 / 0.4372)
    assert measured.model_tflops_per_device == pytest.approx(368.5, abs=0.1)
    assert measured.mfu == pytest.approx(0.3724, abs=1e-4)
    assert measured.hfu == measured.mfu
    assert measured.peak_tflops == 989.5
    assert "H200" in measured.peak_source
    assert any("÷ 989.5 TFLOP/s dense fp16" in formula for formula in measured.formulas)


def test_recomputation_counts_in_hfu_only(tmp_path):
    full = published_dp2(argv=(*LARGE.flags, "--recompute-granularity", "full"))
    measured = rates(tmp_path, full)
    # A forward pass of the layers again: 6·(24h² + 2sh)·L of the tokens' 6·(…+ 2hV) FLOPs.
    h, s, layers, vocabulary = 1280, 1024, 36, 50304
    of_layers = layers * (24 * h * h + 2 * s * h)
    share = of_layers / (3 * (of_layers + 2 * h * vocabulary))
    assert measured.hfu == pytest.approx(measured.mfu * (1 + share))


def test_of_some_layers_their_forward_passes_count(tmp_path):
    method = ("--recompute-granularity", "full", "--recompute-method", "block")
    argv = (*LARGE.flags, *method, "--recompute-num-layers", "9")
    some = rates(tmp_path, published_dp2(run="some", argv=argv))
    every = rates(tmp_path, published_dp2(run="all", argv=(*LARGE.flags, *method[:2])))
    assert some.hfu / some.mfu - 1 == pytest.approx((every.hfu / every.mfu - 1) * 9 / 36)


def test_unknown_device_has_no_mfu_and_says_why(tmp_path):
    measured = rates(tmp_path, published_dp2(host=replace(H200, devices=("Tesla T4",) * 2)))
    assert (measured.mfu, measured.hfu, measured.peak_tflops) == (None, None, None)
    assert measured.model_tflops_per_device is not None
    assert measured.notes == ("no MFU: no peak rate is recorded for 'Tesla T4'",)


def test_megatrons_own_count_is_checked(tmp_path):
    text = log_text([437.2] * 30)
    agreeing = text.replace("437.2 |", "437.2 | throughput per GPU (TFLOP/s/GPU): 368.5 |")
    assert rates(tmp_path, published_dp2(run="a"), log=agreeing).notes == ()
    other = text.replace("437.2 |", "437.2 | throughput per GPU (TFLOP/s/GPU): 350.0 |")
    (note,) = rates(tmp_path, published_dp2(run="b"), log=other).notes
    assert note.startswith("FLOPs differ from Megatron's own count by +5.3%")


@pytest.mark.parametrize(
    ("factor", "is_named"), [(1.0, False), (1.01, False), (1.12, True), (0.65, True)]
)
def test_a_slow_run_is_checked_against_megatrons_count_too(tmp_path, factor, is_named):
    """Below 20 TFLOP/s the printed decimal hides a difference of 1%, and none of 12 to 35%."""
    milliseconds = 437.2 * 40
    printed = f"{368.5 / 40 * factor:.1f}"
    text = log_text([milliseconds] * 30).replace(
        f"{milliseconds:.1f} |",
        f"{milliseconds:.1f} | throughput per GPU (TFLOP/s/GPU): {printed} |",
    )
    measured = rates(tmp_path, published_dp2(), ms=milliseconds, log=text)
    assert (
        any(note.startswith("FLOPs differ from Megatron's") for note in measured.notes) == is_named
    )
    assert (measured.printed_over_counted is not None) == is_named


def test_tflops_of_a_model_with_other_parameters_than_printed_are_doubtful(tmp_path):
    for name, printed in (("a", 774_090_240), ("b", 774_090_241), ("c", 355_919_872)):
        write_run(tmp_path, published_dp2(run=name), log_text([437.2] * 30, parameters=printed))
    rows = build_entries_from_folders([[tmp_path / name] for name in "abc"])
    doubts = [bool(row.rates.model_doubt) for row in rows]
    assert doubts == [False, True, True]
    notes = next(column for column in RESULTS if column.name == "notes")
    assert "TFLOP/s are doubtful: a rank prints 355,919,872" in notes.value(rows[2])
    report = Report("r", "now", tuple(rows))
    sentences = [text for text in write_sentences(report) if "doubtful" in text]
    assert [text.split(" are")[0] for text in sentences] == ["TFLOP/s of b", "TFLOP/s of c"]


def with_variant(run, variant):
    argv = (*LARGE.flags, "--experimental-attention-variant", variant)
    return published_dp2(run=run, argv=(*argv, "--linear-attention-freq", "4"))


def test_the_gap_of_a_layer_that_has_no_formula_names_it(tmp_path):
    text = log_text([437.2] * 30)
    other = text.replace("437.2 |", "437.2 | throughput per GPU (TFLOP/s/GPU): 350.0 |")
    (note,) = rates(tmp_path, with_variant("a", "dsa"), log=other).notes
    assert note.endswith("): dsa is counted as attention")
    (note,) = rates(tmp_path, with_variant("b", "gated_delta_net"), log=other).notes
    assert "FLOPs differ" in note
    assert "counted as" not in note


def test_parameters_of_a_layer_that_has_no_formula_are_not_known(tmp_path):
    records = published_dp2(run="a"), with_variant("b", "dsa"), with_variant("c", "gated_delta_net")
    for record, printed in zip(records, (774_090_240, 1, 1_166_341_056), strict=True):
        write_run(tmp_path, record, log_text([437.2] * 30, parameters=printed))
    total = next(column for column in RESULTS if column.name == "parameters_total")
    rows = build_entries_from_folders([[tmp_path / record.run] for record in records])
    # In 27 of 36 layers 21,086,528 in place of 6,558,720.
    assert [total.value(row) for row in rows] == [774_090_240, None, 1_166_341_056]


def test_without_time_there_are_no_rates(tmp_path):
    run = load_folder(write_run(tmp_path, published_dp2(), log_text([1.0] * 3)))
    assert compute_rates(run, None).tokens_per_second is None
