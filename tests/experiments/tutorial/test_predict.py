"""The tutorial's runs are predicted with all flags of their scripts."""

from dataclasses import replace
from statistics import median

import pytest

from parakit.experiments.tutorial.predict import predict_row
from parakit.experiments.tutorial.rows import find_row, read_rows
from parakit.planner import Fit
from parakit.planner.measured_step import TUTORIAL_SOURCE
from parakit.planner.readings.reading_to_spec import convert_measurement
from parakit.planner.readings.residual import compute_residual
from parakit.planner.readings.table import read_measurements
from parakit.planner.time.iteration import iteration_seconds


def test_overlap_of_gradients_and_weights_is_predicted_where_the_script_has_it() -> None:
    executions = [
        predict_row(find_row(row), "h100").timed.request.cluster.execution for row in ("114", "115")
    ]
    assert [item.overlap_gradients for item in executions] == [False, True]
    assert [item.overlap_parameters for item in executions] == [False, True]


def test_mixtures_are_predicted_with_the_dropout_of_their_scripts() -> None:
    assert predict_row(find_row("500"), "h100").timed.candidate.spec.dropout == 0.1


def test_published_measurements_of_the_tutorial_are_its_timed_runs_and_their_memory() -> None:
    measurements = [item for item in read_measurements()[0] if item.source == TUTORIAL_SOURCE]
    timed = [row for row in read_rows() if row.step_ms]
    assert len(measurements) == 2 * len(timed)
    times, memory = measurements[: len(timed)], measurements[len(timed) :]
    for measurement, held, row in zip(times, memory, timed, strict=True):
        assert f"; run {row.id}-" in measurement.notes
        assert measurement.is_held_out
        assert measurement.value == pytest.approx((row.step_ms or 0) / 1e3)
        run, named = convert_measurement(measurement), predict_row(row, "h100")
        seconds = named.timed.candidate.seconds.total
        assert iteration_seconds(run.spec, run.cluster).total == pytest.approx(seconds)
        assert replace(held, line=0, metric="", value=0) == replace(
            measurement, line=0, metric="", value=0
        )
        # The tutorial prints MiB divided by 1,000.
        assert (held.metric, held.value) == (
            "device_memory_gb",
            pytest.approx((row.memory_gb or 0) * 1.048576, rel=1e-5),
        )
        assert compute_residual(convert_measurement(held)).error == pytest.approx(
            named.memory_error, abs=1e-5
        )


def test_memory_of_the_tutorial_is_predicted_within_2_percent_in_the_median() -> None:
    errors = [predict_row(row, "h100").memory_error for row in read_rows()]
    assert median(abs(error) for error in errors if error is not None) < 0.02


def test_all_runs_out_of_memory_and_no_other_are_predicted_not_to_fit() -> None:
    predictions = [predict_row(row, "h100") for row in read_rows()]
    refused = {item.row.id for item in predictions if item.verdict is Fit.DOES_NOT_FIT}
    assert refused == {item.row.id for item in predictions if item.row.ran_out_of_memory}
    assert refused == {"121", "281", "301", "505"}


def test_times_of_the_tutorial_are_predicted_within_9_percent_in_the_median() -> None:
    errors = [predict_row(row, "h100").time_error for row in read_rows()]
    sizes = [abs(error) for error in errors if error is not None]
    assert len(sizes) == 62
    assert median(sizes) < 0.09
    assert sum(size > 0.2 for size in sizes) <= 5
