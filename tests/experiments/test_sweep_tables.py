from dataclasses import replace

import pytest

from parakit.config.run import Backend, DeviceKind
from parakit.experiments.tables.overtaking import (
    SizeComparison,
    describe_sweep,
    estimate_crossover,
    select_fastest,
)
from parakit.experiments.tables.sweep import draw_sweep, render
from parakit.formatting.units import parameters
from parakit.reporting.analyse.statistics import TimeComparison, TimeVerdict, estimate_time
from tests.experiments.factory import measured, pair
from tests.reporting.factory import report_row


def test_crossover_is_reported_between_the_two_deciding_sizes() -> None:
    assert describe_sweep(pair((110, 100), (200, 200.1), (1000, 1200))) == [
        "On 1 CPU rank megatron overtakes native at 62.9M parameters [4.0M, 149.4M], between gpt2-tiny "
        "(3.4M) and gpt3-355m (354.9M); within noise of each other at gpt3-64m (63.8M)."
    ]


def test_crossover_is_where_the_ratio_and_its_interval_ends_reach_1() -> None:
    # The ratio falls with the size from 4 to 1/4, with the interval [ratio / 2, 2 ratio].
    crossover = estimate_crossover([point(10, 4.0), point(1000, 0.25)])
    # From 10 to 1000 the ratio halves 4 times, once per factor of 10^0.5. The interval's ends are a halving away.
    assert crossover == pytest.approx((100, 10**1.5, 10**2.5))


def test_dense_models_and_mixtures_are_compared_along_separate_axes() -> None:
    cells = [
        *pair((110, 100)),
        measured(Backend.MEGATRON, 100, "moe-tiny"),
        measured(Backend.NATIVE, 200, "moe-tiny"),
    ]
    assert [sentence.partition(" is")[0] for sentence in describe_sweep(cells)] == [
        "On 1 CPU rank, dense models: native",
        "On 1 CPU rank, mixtures of experts: megatron",
    ]


def test_strategies_of_a_single_backend_are_compared_along_the_sizes() -> None:
    times = {("dp2", "gpt2-tiny"): 100, ("tp2", "gpt2-tiny"): 200}
    times |= {("dp2", "gpt3-64m"): 200, ("tp2", "gpt3-64m"): 100}
    cells = [
        measured(Backend.MEGATRON, milliseconds, model, 2, strategy)
        for (strategy, model), milliseconds in times.items()
    ]
    (sentence,) = describe_sweep(cells)
    assert sentence.startswith(
        "On 2 CPU ranks megatron tp2 overtakes megatron dp2 at 14.8M parameters"
    )


def point(parameters: int, ratio: float) -> SizeComparison:
    verdict = TimeVerdict.SLOWER if ratio > 1 else TimeVerdict.FASTER
    return SizeComparison("m", parameters, TimeComparison(ratio, ratio / 2, 2 * ratio, verdict))


def test_one_sided_results_report_no_crossover() -> None:
    assert describe_sweep(pair((110, 100), (240, 200), devices=2)) == [
        "On 2 CPU ranks native is faster than megatron at gpt2-tiny (3.4M) and gpt3-64m (63.8M): "
        "no crossover in the range."
    ]


def test_differences_within_noise_are_not_reported_as_a_crossover() -> None:
    assert describe_sweep(pair((100, 100.1))) == [
        "On 1 CPU rank native is within noise of megatron at gpt2-tiny (3.4M): neither overtakes."
    ]


def test_each_number_of_devices_has_a_separate_sentence() -> None:
    sentences = describe_sweep([*pair((110, 100)), *pair((100, 110), devices=2)])
    assert [sentence.partition(" is")[0] for sentence in sentences] == [
        "On 1 CPU rank native",
        "On 2 CPU ranks megatron",
    ]


def test_a_backend_that_was_never_measured_is_not_compared() -> None:
    only = [measured(Backend.MEGATRON, 100), measured(Backend.NATIVE, None)]
    assert describe_sweep(only) == [
        "On 1 CPU rank nothing can be said of native against megatron: no size has both."
    ]


def test_batches_of_different_sizes_are_compared_per_token() -> None:
    small = measured(Backend.MEGATRON, 100)
    large = measured(Backend.NATIVE, 150, global_batch_size=16)
    assert "native is faster" in describe_sweep([small, large])[0]


def test_backend_is_represented_by_its_fastest_strategy() -> None:
    slow = measured(Backend.NATIVE, 200, devices=2, strategy="tp2")
    fast = measured(Backend.NATIVE, 100, devices=2, strategy="dp2")
    lines = select_fastest([slow, fast])
    assert lines == {((2, DeviceKind.CPU), Backend.NATIVE): [fast]}


def test_fastest_run_of_a_model_may_have_a_shape_changed_by_flags() -> None:
    slow = measured(Backend.NATIVE, 200)
    fast = measured(Backend.NATIVE, 100, extra=("--num-layers", "6"))
    assert fast.parameters > slow.parameters
    assert list(select_fastest([slow, fast]).values()) == [[fast]]


def test_table_has_ratio_and_verdict_relative_to_the_first_backend() -> None:
    text = render("s", pair((100, 50)), [])
    rows = [line for line in text.splitlines() if line.startswith("| gpt2-tiny |")]
    assert "×0.500" in rows[1]
    assert "the time: faster" in rows[1]
    assert "the time" not in rows[0]
    assert "5,120" in rows[1]  # 256 tokens in 50 ms


def test_a_failed_cell_is_in_the_table_with_its_reason_and_the_sweep_is_incomplete() -> None:
    failed = measured(Backend.NATIVE, None, failure="oom: too large")
    text = render("s", [measured(Backend.MEGATRON, 100), failed], [])
    assert "oom: too large" in text
    assert "1 of 2 cells are not complete; the same command resumes." in text


@pytest.mark.usefixtures("laid_out_charts")
def test_the_picture_has_a_line_for_each_backend_and_number_of_devices() -> None:
    chart = draw_sweep([*pair((110, 100), (240, 200)), *pair((60, 50), devices=2)])
    assert chart is not None
    for label in ("megatron, 1 cpu", "native, 1 cpu", "megatron, 2 cpu", "native, 2 cpu"):
        assert label in chart.svg
    assert draw_sweep([measured(Backend.NATIVE, None)]) is None


def test_sizes_are_printed_in_short_form() -> None:
    assert [parameters(3_423_616), parameters(1_300_000_000)] == ["3.4M", "1.3B"]


def test_processor_time_on_cpu_ranks_has_a_separate_verdict() -> None:
    # The native run took longer because other processes used the processors, but needed half the processor time.
    times = {Backend.MEGATRON: (100, 80), Backend.NATIVE: (200, 40)}
    cells = []
    for backend, (wall, processor) in times.items():
        samples = [processor + 0.01 * n for n in range(21)]
        row = report_row(ms=wall, backend=backend, processor_ms=estimate_time([samples]))
        cells.append(replace(measured(backend, wall), row=row))
    text = render("s", cells, [])
    assert "- On 1 CPU rank megatron is faster than native" in text
    assert "- By processor time: On 1 CPU rank native is faster than megatron" in text
