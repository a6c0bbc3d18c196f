"""What the page's curves are given: thinned without losing extremes, limited, and safe in a script."""

import json

import pytest
from matplotlib.figure import Figure

from parakit.config.published import Published
from parakit.logs.runs import find_run_folders, load_runs
from parakit.reporting.analyse.report import build_report
from parakit.reporting.canvas import evenly_spread_indexes, extreme_indexes
from parakit.reporting.render.charts import draw_losses
from parakit.reporting.render.headline import write_headline
from parakit.reporting.render.plots import (
    MAX_POINTS,
    MAX_SERIES,
    build_loss_plots,
    build_plots,
    encode_plots,
)
from parakit.reporting.render.sentences import write_sentences
from parakit.reporting.render.tables import arguments_table
from tests.reporting.factory import iteration_line, log_text, run_record, write_run


def report_of(root):
    runs, problems = load_runs(find_run_folders(root))
    return build_report("r", runs, Published(), problems)


def plots(root):
    return {plot.name: plot for plot in build_plots(report_of(root))}


def test_a_spike_stays_in_a_thinned_curve():
    values = [1.0] * 10_000
    values[4321], values[7777] = 99.0, -5.0
    kept = extreme_indexes(values, 500)
    assert len(kept) <= 500
    assert {0, 4321, 7777, 9999} <= set(kept)


@pytest.mark.parametrize(
    "thinned", [lambda v: extreme_indexes(v, 500), lambda v: evenly_spread_indexes(len(v), 500)]
)
def test_both_states_of_an_alternating_run_stay(thinned):
    values = [100.0, 130.0] * 4000
    kept = [values[index] for index in thinned(values)]
    assert 0.4 < kept.count(100.0) / len(kept) < 0.6


def test_what_is_short_stays_whole():
    assert extreme_indexes([3.0, 1.0, 2.0], 500) == evenly_spread_indexes(3, 500) == [0, 1, 2]


def test_curves_are_of_the_newest_run_and_what_never_changes_is_left_out(tmp_path):
    write_run(tmp_path, run_record("a"), log_text([400.0, 100.0, 101.0, 102.0]))
    plot_names = plots(tmp_path)
    assert list(plot_names) == ["times", "losses"]
    (series,) = plot_names["times"].series
    assert (series.x, series.y) == ([2, 3, 4], [100.0, 101.0, 102.0])


def test_a_line_that_averages_all_since_the_start_is_no_iterations_time(tmp_path):
    write_run(tmp_path, run_record("a"), log_text([400.0, 250.0, 101.0, 102.0], micro=True))
    (series,) = plots(tmp_path)["times"].series
    assert (series.x, series.y) == ([3, 4], [101.0, 102.0])


def test_every_point_of_a_thinned_curve_names_its_line_in_the_log(tmp_path):
    text = log_text([100.0 + n % 7 for n in range(900)])
    write_run(tmp_path, run_record("a"), text)
    lines = text.split("\n")
    for plot in plots(tmp_path).values():
        (series,) = plot.series
        assert len(series.x) == len(series.log_lines) <= MAX_POINTS < 900
        for iteration, line in zip(series.x, series.log_lines, strict=True):
            assert f"iteration {iteration:8d}/" in lines[line - 1]


@pytest.mark.parametrize(("off", "drawn"), [(0.0, False), (1e-6, True)])
def test_differences_of_the_loss_are_drawn_where_there_are_any(tmp_path, off, drawn):
    for name, strategy, more in (("a", "baseline", 0.0), ("b", "dp2", off)):
        lines = [iteration_line(n, 100.0, 9 + more * (n == 4)) for n in range(1, 7)]
        write_run(tmp_path, run_record(name, strategy), "\n".join([*lines, ""]))
    assert ("differences" in plots(tmp_path)) is drawn
    (parity,) = [text for text in write_sentences(report_of(tmp_path)) if "the same model" in text]
    assert ("by more than" in parity) is drawn


def test_further_numbers_of_the_lines_are_curves_of_their_own(tmp_path):
    extra = " load_balancing_loss: {:.6E} | mtp_1 loss: {:.6E} |"
    lines = [iteration_line(n, extra=extra.format(1 + 1 / n, 9 - n)) for n in range(1, 6)]
    write_run(tmp_path, run_record("a"), "\n".join(lines))
    titles = [plot.title for plot in plots(tmp_path).values()]
    assert titles[-2:] == ["load_balancing_loss", "mtp_1 loss"]


def test_many_rows_are_picked_and_the_picture_says_so(tmp_path):
    for k in range(MAX_SERIES + 3):
        record = run_record(f"run-{k:02d}")
        record = run_record(f"run-{k:02d}", argv=(*record.argv, "--variant", str(k)))
        write_run(tmp_path, record, log_text([9.0 + k] * 700))
    report = report_of(tmp_path)
    times = build_plots(report)[0]
    assert len(times.series) == MAX_SERIES
    assert times.text.endswith(f"The first {MAX_SERIES} of {MAX_SERIES + 3} rows.")
    assert max(len(series.x) for series in times.series) <= MAX_POINTS
    assert write_headline(report).startswith(f"None of the {MAX_SERIES + 2} other rows whose speed")
    assert sum(" time per token" in text for text in write_sentences(report)) <= 3
    (argument,) = arguments_table(report, 9).cells
    assert argument[0] == "variant"
    assert argument[1].endswith("(1 rows) and 3 other values")


def test_a_long_loss_curve_has_a_mean_and_a_short_one_has_none(tmp_path):
    losses = [10.0 - n / 100 + (0.5 if n % 2 else -0.5) for n in range(200)]
    write_run(tmp_path, run_record("a"), log_text([100.0] * 200, losses))
    (series,) = plots(tmp_path)["losses"].series
    assert len(series.means) == len(series.y)
    middle = series.x.index(101)
    assert series.means[middle] == pytest.approx(9.0, abs=0.06)
    assert all(not curve.means for curve in plots(tmp_path)["times"].series)


def test_a_broken_loss_differs_in_losses_and_not_in_millions_of_digits(tmp_path):
    losses = [10.0 - n / 100 for n in range(20)]
    for name, strategy, more in (("a", "baseline", 0.0), ("b", "dp2", 2.0)):
        write_run(
            tmp_path,
            run_record(name, strategy),
            log_text([100.0] * 20, [loss + more for loss in losses]),
        )
    plot = plots(tmp_path)["differences"]
    assert plot.unit == "lm loss"
    assert plot.series[0].y == pytest.approx([2.0] * len(plot.series[0].y))


def test_each_model_has_a_picture_of_its_own(tmp_path):
    for model, base in (("gpt2-tiny", 9.0), ("moe-tiny", 5.0)):
        losses = [base, base - 1, base - 2]
        write_run(tmp_path, run_record(model, model=model), log_text([100.0] * 3, losses))
    pictures = plots(tmp_path)
    assert list(pictures) == ["times", "times-2", "losses", "losses-2"]
    assert [plot.title for plot in pictures.values()][2:] == ["Loss, gpt2-tiny", "Loss, moe-tiny"]
    assert [plot.series[0].y[0] for plot in pictures.values()][2:] == [9.0, 5.0]
    assert {plot.quantity for plot in pictures.values()} == {"times", "losses"}


def test_losses_can_be_drawn_over_tokens_and_seconds(tmp_path):
    record = run_record("a")
    write_run(tmp_path, record, log_text([400.0, 100.0, 500.0], [9.0, 8.0, 7.0]))
    (series,) = plots(tmp_path)["losses"].series
    run = report_of(tmp_path).entries[0].run
    tokens_per_iteration = run.global_batch_size * run.seq_length
    assert series.tokens == [n * tokens_per_iteration for n in series.x]
    assert series.seconds == [[0.4, 0.5, 1.0][n - 1] for n in series.x]


def test_a_log_that_lacks_iterations_has_no_seconds(tmp_path):
    lines = [iteration_line(n, 100.0, 9 - n) for n in (5, 6, 7)]
    write_run(tmp_path, run_record("a"), "\n".join([*lines, ""]))
    (series,) = plots(tmp_path)["losses"].series
    assert series.seconds == []


def test_equal_losses_are_drawn_apart_only_over_seconds(tmp_path):
    for name, strategy, time in (("a", "baseline", 100.0), ("b", "dp2", 50.0)):
        write_run(tmp_path, run_record(name, strategy), log_text([time] * 4, [9.0, 8.0, 7.0, 6.0]))
    plot = plots(tmp_path)["losses"]
    assert len(plot.series) == len(plot.coinciding) == 1
    assert plot.coinciding[0].seconds[-1] == plot.series[0].seconds[-1] / 2


def test_text_of_a_log_cannot_end_the_script(tmp_path):
    write_run(tmp_path, run_record("$x_<b>$"), log_text([9.0, 8.0, 7.0]))
    report = report_of(tmp_path)
    text = encode_plots(build_plots(report))
    assert "<" not in text
    assert json.loads(text)["times"]["unit"] == "ms"


def test_chart_of_losses_draws_the_curves_of_the_page(tmp_path):
    for strategy, loss in (("dp2", 9.0), ("tp2", 7.0), ("baseline", 9.0)):
        lines = "\n".join(iteration_line(n, loss=loss - n) for n in range(1, 8))
        write_run(tmp_path, run_record(strategy, strategy), lines + "\n")
    report, figure = report_of(tmp_path), Figure()
    losses, differences = build_loss_plots(report.entries, merges=False)
    draw_losses(figure, report.entries)
    upper, lower = figure.axes
    assert [list(line.get_ydata()) for line in upper.lines] == [curve.y for curve in losses.series]
    assert [line.get_label() for line in upper.lines] == [curve.label for curve in losses.series]
    drawn = lower.lines[: len(differences.series)]
    assert [list(line.get_ydata()) for line in drawn] == [curve.y for curve in differences.series]
    (shown,) = (plot for plot in build_plots(report) if plot.name == "losses")
    assert {series.label.partition(" (")[0] for series in shown.series} <= {
        series.label for series in losses.series
    }
    assert {series.label: series for series in losses.series}["tp2 ×2"] in shown.series
