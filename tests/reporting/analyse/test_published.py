import pytest

from parakit.artifacts.run import HostRecord, MegatronEntry
from parakit.config.published import load_published
from parakit.config.run import DeviceKind
from parakit.config.strategy import PUBLISHED_STRATEGIES, Batch, Parallelism
from parakit.logs.runs import load_folder
from parakit.reporting.analyse.published import (
    find_published_figure,
    match_figure,
    published_baseline_ratio,
)
from tests.reporting.factory import changed, log_text, run_record, write_run

PUBLISHED = load_published()
MIB = 2**20


def h200_tp2(**changes):
    record = run_record(
        "r",
        "tp2",
        model="gpt2-large",
        device=DeviceKind.GPU,
        batch=Batch(64, 64),
        seq_length=1024,
        dtype="fp16",
        host=HostRecord("h", "c", 2, 1, ("NVIDIA H200",) * 2, driver="580.82.07"),
        entry=MegatronEntry("pretrain_gpt.py", "0.15.0rc2", "f4fa7d6b1234"),
    )
    return changed(record, **changes)


def matches(tmp_path, record, ms, mib):
    run = load_folder(write_run(tmp_path, record, log_text([ms] * 3)))
    figure = find_published_figure(run, PUBLISHED)
    assert figure is not None
    return match_figure(run, figure, ms, round(mib * MIB) if mib else None)


def test_every_published_run_of_the_main_source_is_there():
    main = {f.strategy: f for f in PUBLISHED.figures if f.source.key == "003"}
    assert tuple(main) == PUBLISHED_STRATEGIES
    assert main["cp2"].iteration_ms == (514.5, 519.1)
    assert main["pp2"].device_memory_mib == (61249, 88299)
    assert main["baseline"].global_batch_size == 32


def test_second_source_has_its_ten_runs_and_consistent_rates():
    figures = [f for f in PUBLISHED.figures if f.source.key == "002"]
    assert len(figures) == 10
    assert {f.model for f in figures} == {"gpt3-64m", "gpt3-355m"}


def test_every_source_has_corrections():
    assert {c.source for c in PUBLISHED.corrections} == {"000", "001", "002", "003", "004"}


def test_same_setup_within_the_range_is_reproduced(tmp_path):
    time, memory = matches(tmp_path, h200_tp2(), 550.0, 85970)
    assert (time.verdict, memory.verdict) == ("reproduced", "reproduced")
    assert time.expected_low == pytest.approx(542.8 * 0.97)
    assert time.expected_high == pytest.approx(543.6 * 1.03)
    assert time.differs == ()


@pytest.mark.parametrize("ms", [500.0, 600.0])
def test_same_setup_outside_the_range_is_not_reproduced(tmp_path, ms):
    time, memory = matches(tmp_path, h200_tp2(), ms, None)
    assert (time.verdict, memory.verdict) == ("not reproduced", "not comparable")


def test_other_driver_is_named_but_no_obstacle(tmp_path):
    host = HostRecord("h", "c", 2, 1, ("NVIDIA H200",) * 2, driver="999")
    time, _ = matches(tmp_path, h200_tp2(host=host), 543.0, None)
    assert time.verdict == "reproduced"
    assert time.differs == ("driver 999 instead of 580.82.07",)


def test_other_device_cannot_reproduce(tmp_path):
    host = HostRecord("h", "c", 2, 1, ("NVIDIA H100 80GB HBM3",) * 2, driver="580.82.07")
    time, _ = matches(tmp_path, h200_tp2(host=host), 543.0, None)
    assert time.verdict == "not comparable"
    assert "device NVIDIA H100 80GB HBM3 instead of NVIDIA H200" in time.differs


def test_another_model_is_shown_next_to_the_main_sources_figure(tmp_path):
    (time,) = matches(tmp_path, run_record("r", "tp2"), 50.0, None)
    assert time.figure.model == "gpt2-large"
    assert time.verdict == "not comparable"
    assert time.differs == (
        "model gpt2-tiny instead of gpt2-large",
        "device cpu instead of NVIDIA H200",
    )


def test_an_unpublished_strategy_has_no_figure(tmp_path):
    split = Parallelism(tensor=2, pipeline=2, data=2)
    record = changed(run_record("r"), parallelism=split, strategy="tp2pp2dp2")
    run = load_folder(write_run(tmp_path, record, log_text([1.0])))
    assert find_published_figure(run, PUBLISHED) is None


def test_missing_file_publishes_nothing(tmp_path):
    assert load_published(tmp_path / "none.yaml").figures == ()


def test_published_ratio_to_baseline_is_a_sample():
    figures = {f.strategy: f for f in PUBLISHED.figures if f.source.key == "003"}
    ratio = published_baseline_ratio(figures["tp2"], PUBLISHED)
    assert ratio == pytest.approx((543.2 / 64) / (437.5 / 32))
    assert published_baseline_ratio(figures["baseline"], PUBLISHED) == 1.0
