"""The tutorial's runs are predicted with all flags of their scripts."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from statistics import median

import pytest

from parakit.experiments.tutorial.predict import PredictedRow, predict_row, predict_rows
from parakit.experiments.tutorial.rows import find_row, read_rows
from parakit.planner import Fit
from parakit.planner.measured_step import TUTORIAL_SOURCE
from parakit.planner.readings.reading_to_spec import convert_measurement
from parakit.planner.readings.residual import compute_residual
from parakit.planner.readings.table import read_measurements
from parakit.planner.time.compute import layer_seconds
from parakit.planner.time.iteration import iteration_seconds
from parakit.planner.time.rates import compute_device_rates


@pytest.fixture(scope="module")
def predicted_rows() -> Mapping[str, PredictedRow]:
    """Return the prediction of every row on H100 by the row's id."""
    return {item.row.id: item for item in predict_rows(read_rows(), "h100")}


def test_overlap_of_gradients_and_weights_is_predicted_where_the_script_has_it() -> None:
    executions = [
        predict_row(find_row(row), "h100").timed.request.cluster.execution for row in ("114", "115")
    ]
    assert [item.overlap_gradients for item in executions] == [False, True]
    assert [item.overlap_parameters for item in executions] == [False, True]


def test_mixtures_are_predicted_with_the_dropout_of_their_scripts() -> None:
    assert predict_row(find_row("500"), "h100").timed.candidate.spec.dropout == 0.1


def test_published_measurements_of_the_tutorial_are_its_timed_runs_and_their_memory(
    predicted_rows: Mapping[str, PredictedRow],
) -> None:
    measurements = [item for item in read_measurements()[0] if item.source == TUTORIAL_SOURCE]
    timed = [row for row in read_rows() if row.step_ms]
    assert len(measurements) == 2 * len(timed)
    times, memory = measurements[: len(timed)], measurements[len(timed) :]
    for measurement, held, row in zip(times, memory, timed, strict=True):
        assert f"; run {row.id}-" in measurement.notes
        assert measurement.is_held_out
        assert measurement.value == pytest.approx((row.step_ms or 0) / 1e3)
        run, named = convert_measurement(measurement), predicted_rows[row.id]
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


def test_memory_of_the_tutorial_is_predicted_within_2_percent_in_the_median(
    predicted_rows: Mapping[str, PredictedRow],
) -> None:
    errors = [item.memory_error for item in predicted_rows.values()]
    assert median(abs(error) for error in errors if error is not None) < 0.02


def test_all_runs_out_of_memory_and_no_other_are_predicted_not_to_fit(
    predicted_rows: Mapping[str, PredictedRow],
) -> None:
    predictions = predicted_rows.values()
    refused = {item.row.id for item in predictions if item.verdict is Fit.DOES_NOT_FIT}
    assert refused == {item.row.id for item in predictions if item.row.ran_out_of_memory}
    assert refused == {"121", "281", "301", "505"}


def _time_errors(predictions: Iterable[PredictedRow]) -> dict[str, float]:
    """Return the absolute error of the predicted time by row."""
    return {
        item.row.id: abs(item.time_error) for item in predictions if item.time_error is not None
    }


def test_times_of_the_tutorial_are_predicted_within_9_percent_in_the_median(
    predicted_rows: Mapping[str, PredictedRow],
) -> None:
    errors = _time_errors(predicted_rows.values())
    assert len(errors) == 62
    assert median(errors.values()) < 0.09
    assert {row for row, error in errors.items() if error > 0.2} == {"442", "511", "512"}


def test_times_are_predicted_within_6_percent_in_the_median_if_one_step_gives_the_time_of_the_host() -> (
    None
):
    errors = _time_errors(predict_rows(read_rows(), "h100", "210 ms on 231"))
    assert median(errors.values()) < 0.06
    assert {row for row, error in errors.items() if error > 0.2} == {"442", "511", "512"}


def test_flash_backend_with_dropout_is_predicted_with_the_rate_of_flash_attention_2() -> None:
    # Transformer Engine has no FlashAttention 3 with dropout, and FlashAttention 2 was measured on an H200:
    # tests/planner/h200_kernels.json.
    run = predict_row(find_row("358"), "h100").timed
    rate = compute_device_rates(run.request.cluster, "bf16")
    spec = run.candidate.spec
    layer = layer_seconds(spec, rate)
    scores = spec.shape.heads * spec.batch.micro_batch_size * spec.shape.seq_length**2 / 2 / 8
    picoseconds = 1e12 * (layer.forward_attention + layer.backward_attention) / scores
    assert picoseconds == pytest.approx(5.17 + 2.3, rel=0.03)


@pytest.mark.parametrize(("row", "milliseconds"), [("338", 33.6), ("308", 2.1), ("231", 0.13)])
def test_mask_of_the_loader_is_copied_to_the_device_before_each_micro_batch(
    row: str, milliseconds: float
) -> None:
    # One byte per pair of tokens at 64 GB/s: 8 samples of 16,384, 4,096 and 1,024 tokens.
    parts = predict_row(find_row(row), "h100").timed.candidate.seconds
    assert 1e3 * parts.host_copies == pytest.approx(milliseconds, rel=0.01)
