from pathlib import Path

import pytest

from parakit.artifacts import run as records
from parakit.artifacts.measurements import CommunicationRecord, RankCommunication
from parakit.config.strategy import Batch
from parakit.reporting.explain.bandwidth import RateCurve, rate_curves
from parakit.reporting.render.charts import _draw_bandwidth_chart, draw_charts
from tests.reporting.factory import changed, log_text, run_record, write_run
from tests.reporting.ledger_factory import call, report_of, write_calls

SENT = 12_500_000
"""Bytes that take 100 ms at 1 Gbit/s."""


def run(root: Path, name: str, strategy: str, milliseconds: float, bits: int | None) -> Path:
    record = run_record(name, strategy, link_bits_per_second=bits)
    folder = write_run(root, record, log_text([900.0] + [milliseconds] * 12))
    calls = (call("dp_cp", "all_reduce", SENT),)
    ranks = tuple(RankCommunication(rank, 9, 0, calls) for rank in (0, 1))
    write_calls(folder, CommunicationRecord(ranks))
    return folder


def curves(*folders: Path) -> dict[str, RateCurve]:
    return {curve.name: curve for curve in rate_curves(report_of(*folders).entries)}


def test_rates_of_one_strategy_are_one_curve_and_never_pooled(tmp_path: Path) -> None:
    curves_by_call = curves(
        run(tmp_path, "1", "dp2", 300.0, 10**9),
        run(tmp_path, "2", "dp2", 210.0, 10**10),
        run(tmp_path, "3", "dp2", 205.0, None),
        run(tmp_path, "4", "tp2", 100.0, None),
    )
    assert list(curves_by_call) == ["dp2 ×2"]
    curve = curves_by_call["dp2 ×2"]
    assert curve.points == ((10**9, 300.0), (10**10, 210.0))
    assert curve.unshaped == 205.0


def test_of_two_rows_at_the_fastest_rate_the_last_is_predicted_from(tmp_path: Path) -> None:
    half = run(tmp_path, "1", "dp2", 300.0, 10**9)
    records.write_run(half, changed(records.read_run(half), dtype="bf16"))
    curve = curves(half, run(tmp_path, "2", "dp2", 280.0, 10**9))["dp2 ×2"]
    assert curve.points == ((10**9, 300.0), (10**9, 280.0))
    assert curve.predict_ms(1e11) == pytest.approx(181.0)


def test_a_faster_link_takes_away_only_the_time_the_bytes_need(tmp_path: Path) -> None:
    curve = curves(run(tmp_path, "1", "dp2", 300.0, 10**9))["dp2 ×2"]
    assert curve.predict_ms(1e9) == pytest.approx(300.0)
    assert curve.predict_ms(1e11) == pytest.approx(201.0)
    assert curve.predict_ms(5e8) == pytest.approx(400.0)


def test_rows_at_different_rates_are_distinguished_by_their_rate(tmp_path: Path) -> None:
    report = report_of(
        run(tmp_path, "1", "dp2", 300.0, 10**9),
        run(tmp_path, "2", "dp2", 900.0, 2 * 10**8),
        run(tmp_path, "3", "dp2", 205.0, None),
    )
    assert sorted(entry.label for entry in report.entries) == [
        "dp2 ×2 at 1 Gbit/s",
        "dp2 ×2 at 200 Mbit/s",
        "dp2 ×2 unshaped",
    ]


def test_rows_that_differ_in_two_things_are_distinguished_by_both(tmp_path: Path) -> None:
    def batch(folder: Path, size: int) -> Path:
        records.write_run(folder, changed(records.read_run(folder), batch=Batch(2, size)))
        return folder

    report = report_of(
        run(tmp_path, "1", "dp2", 300.0, 10**9),
        run(tmp_path, "2", "dp2", 205.0, None),
        batch(run(tmp_path, "3", "dp2", 310.0, 10**9), 16),
    )
    assert sorted(entry.label for entry in report.entries) == [
        "dp2 ×2 batch 2/16 at 1 Gbit/s",
        "dp2 ×2 batch 2/8 at 1 Gbit/s",
        "dp2 ×2 batch 2/8 unshaped",
    ]


def test_the_chart_is_drawn_only_of_shaped_runs(tmp_path: Path) -> None:
    plain, shaped = run(tmp_path, "1", "dp2", 205.0, None), run(tmp_path, "2", "dp2", 300.0, 10**9)
    assert "bandwidth" not in [chart.name for chart in draw_charts(report_of(plain))]
    assert "bandwidth" in [chart.name for chart in draw_charts(report_of(plain, shaped))]


@pytest.mark.usefixtures("laid_out_charts")
def test_the_chart_says_what_is_not_measured(tmp_path: Path) -> None:
    plain, shaped = run(tmp_path, "1", "dp2", 205.0, None), run(tmp_path, "2", "dp2", 300.0, 10**9)
    (chart,) = _draw_bandwidth_chart(report_of(plain, shaped).entries)
    assert "not measured" in chart.text
    assert ">400</text>" in chart.svg
    assert ">dp2 ×2</text>" in chart.svg
