import math

from hypothesis import given
from hypothesis import strategies as st

from parakit.logs.dialects import find_iterations
from tests.reporting.factory import iteration_line

PUBLISHED = (
    " [2025-09-07 23:58:47] iteration      609/  500000 | consumed samples:        19488 |"
    " elapsed time per iteration (ms): 438.3 | learning rate: 5.999998E-05 | global batch size: "
    "   32 | lm loss: 6.159759E+00 | loss scale: 131072.0 | grad norm: 1.095 | number of skipped"
    " iterations:   0 | number of nan iterations:   0 |"
)
MOE = (
    " [2026-01-02 03:04:05.678901] iteration        7/      10 | consumed samples:           56 |"
    " skipped samples:            8 | elapsed time per iteration (ms): 12.5 |"
    " throughput per GPU (TFLOP/s/GPU): 301.2 | energy per GPU (J/iter/GPU): 250.5 |"
    " power per GPU (W/GPU): 612.0 | learning rate: 1.000000E-04 |"
    " decoupled learning rate: 2.000000E-04 | global batch size:     8 | lm loss: 9.000000E+00 |"
    " load_balancing_loss: 1.250000E+00 | z_loss: 3.500000E-03 | mtp_1 loss: 9.500000E+00 |"
    " loss scale: 1.0 | grad norm: 0.500 | num zeros: 12 | params norm: 88.250 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def test_published_line_gives_every_field():
    (iteration,) = find_iterations(PUBLISHED)
    assert iteration.iteration == 609
    assert iteration.total_iterations == 500000
    assert iteration.consumed_samples == 19488
    assert iteration.elapsed_ms == 438.3
    assert iteration.learning_rate == 5.999998e-05
    assert iteration.global_batch_size == 32
    assert iteration.lm_loss == 6.159759
    assert iteration.loss_scale == 131072.0
    assert iteration.grad_norm == 1.095
    assert (iteration.skipped_iterations, iteration.nan_iterations) == (0, 0)
    assert iteration.throughput_tflops_per_gpu is None
    assert iteration.extra_metrics is None


def test_optional_fields_and_losses_of_experts_are_read_by_name():
    (iteration,) = find_iterations(MOE)
    assert iteration.skipped_samples == 8
    assert iteration.throughput_tflops_per_gpu == 301.2
    assert iteration.energy_joules_per_gpu == 250.5
    assert iteration.power_watts_per_gpu == 612.0
    assert (iteration.num_zeros, iteration.params_norm) == (12.0, 88.25)
    assert iteration.extra_metrics == {
        "decoupled learning rate": 2e-4,
        "load_balancing_loss": 1.25,
        "z_loss": 0.0035,
        "mtp_1 loss": 9.5,
    }


def test_two_iterations_printed_in_a_single_line_are_both_read():
    memory = "[Rank 0] (after 2 iterations) memory (MB) | allocated: 5.0 | max allocated: 6.0 |"
    iterations = find_iterations(memory + PUBLISHED + iteration_line(610, 436.7))
    assert [(f.iteration, f.elapsed_ms) for f in iterations] == [(609, 438.3), (610, 436.7)]
    assert iterations[0].extra_metrics is None


def test_memory_line_inside_an_iteration_line_loses_only_the_interrupted_field():
    cut = PUBLISHED.index("6.159759") + 2
    hit = PUBLISHED[:cut] + "[Rank 1] (after 2 iterations) memory (MB)" + PUBLISHED[cut:]
    (iteration,) = find_iterations(hit)
    assert iteration.lm_loss is None
    assert (iteration.elapsed_ms, iteration.grad_norm) == (438.3, 1.095)


def test_truncated_line_never_gives_a_truncated_number():
    (whole,) = find_iterations(PUBLISHED)
    for end in range(len(PUBLISHED)):
        for iteration in find_iterations(PUBLISHED[:end]):
            for field in iteration.__struct_fields__:
                assert getattr(iteration, field) in (None, False, getattr(whole, field))


def test_line_without_time_and_samples_is_no_iteration():
    assert find_iterations("iteration 5/10 | lm loss: 1.0 |") == []


def test_nan_is_read_as_nan():
    (iteration,) = find_iterations(PUBLISHED.replace("grad norm: 1.095", "grad norm: nan"))
    assert iteration.grad_norm is not None
    assert math.isnan(iteration.grad_norm)


@given(
    iteration=st.integers(1, 10**8 - 1),
    ms=st.floats(0.1, 1e7),
    loss=st.floats(1e-6, 1e6),
    before=st.text(max_size=40),
)
def test_printed_values_are_read_back(iteration, ms, loss, before):
    if "\n" in before or "|" in before or "iteration" in before:
        return
    (parsed,) = find_iterations(before + iteration_line(iteration, ms, loss))
    assert parsed.iteration == iteration
    assert parsed.elapsed_ms == float(f"{ms:.1f}")
    assert parsed.lm_loss == float(f"{loss:.6E}")
