import pytest

from parakit.artifacts.run import Status
from parakit.reporting.analyse.statistics import TimeVerdict
from tests.faults.soak_verdict import (
    UNDISTURBED,
    Fault,
    ProcessReading,
    SoakVerdict,
    Steadiness,
    compare_losses,
    drift,
    steadiness,
)


def reading(
    number: int,
    process: str = "rank 0",
    megabytes: int = 1000,
    descriptors: int = 9,
    processor: float = 0.0,
    control: float = 1.0,
) -> ProcessReading:
    """Return reading `number`, which is ten iterations and 5 s after the previous reading."""
    return ProcessReading(
        UNDISTURBED,
        1,
        5.0 * number,
        10 * number,
        process,
        megabytes * 10**6,
        descriptors,
        processor,
        control,
        2.0,
    )


def test_memory_that_settles_after_the_start_is_steady() -> None:
    (process,) = steadiness([reading(n, megabytes=500 if n < 3 else 1000) for n in range(13)])
    assert (process.process, process.memory_bytes, process.is_steady) == (
        "rank 0",
        (10**9, 10**9),
        True,
    )


def test_memory_growth_above_1_percent_is_reported() -> None:
    (process,) = steadiness([reading(n, megabytes=1000 + 3 * n) for n in range(1, 13)])
    # After the first quarter readings 4 to 12 remain. Compared are the minima of 4 to 6 and of 10 to 12.
    assert (process.memory_bytes, process.growth > 1.01, process.is_steady) == (
        (1012 * 10**6, 1030 * 10**6),
        True,
        False,
    )


def test_small_process_may_grow_by_less_than_an_allocator_block() -> None:
    def grown(growth: int) -> Steadiness:
        return Steadiness("sampler", (9_000_000, 9_000_000 + growth), 0, (9, 9))

    assert grown(100_000).is_steady
    assert not grown(2_000_000).is_steady


def test_temporary_memory_of_a_save_is_no_growth() -> None:
    (process,) = steadiness([reading(n, megabytes=1000 + 100 * (n % 3 > 0)) for n in range(1, 13)])
    assert (process.memory_bytes, process.is_steady) == ((10**9, 10**9), True)


def test_single_additional_file_descriptor_is_a_leak() -> None:
    (process,) = steadiness([reading(n, descriptors=9 + (n > 8)) for n in range(1, 13)])
    assert (process.descriptors, process.is_steady) == ((9, 10), False)


def test_readings_before_the_first_iteration_do_not_count() -> None:
    assert steadiness([reading(0), reading(0)]) == ()


def test_drift_is_judged_by_processor_time_relative_to_the_control() -> None:
    # From iteration 100 on everything takes twice as long, including the control, so the machine is the cause.
    spent = [n if n <= 10 else 10 + 2 * (n - 10) for n in range(21)]
    slow = [reading(n, processor=spent[n], control=1 + (n >= 10)) for n in range(21)]
    _, processor = drift(slow, every=10)
    assert processor is not None
    assert processor.ratio == pytest.approx(1)
    _, processor = drift([reading(n, processor=spent[n]) for n in range(21)], every=10)
    assert processor is not None
    assert processor.ratio == pytest.approx(2)
    assert processor.verdict is TimeVerdict.SLOWER


def test_drift_needs_three_windows_in_each_half() -> None:
    assert drift([reading(n, processor=n) for n in range(8)], every=10) == (None, None)
    assert drift([], every=10) == (None, None)


def test_losses_are_compared_exactly_at_iterations_of_both_runs() -> None:
    whole = {1: 10.5, 2: 10.25, 3: 10.125}
    # The line after a restart is an average, and is not in the curve.
    assert compare_losses(whole, {1: 10.5, 3: 10.125}).compared == 2
    assert compare_losses(whole, {1: 10.5, 3: 10.126}).first_other == 3
    assert compare_losses(whole, {1: 10.5}).last == 1


def test_verdict_states_what_passed_and_the_load() -> None:
    losses = compare_losses({1: 10.5}, {1: 10.5})
    held = SoakVerdict((), None, None, losses, (), (2.0, 7.5))
    assert held.held
    text = held.render("train-dp2-gpt2-tiny-2cpu, 0.33 h")
    assert "Losses after 0 faults: 1 compared, to iteration 1, all equal to the last digit." in text
    assert "The machine's load was 2.0 to 7.5." in text


def test_run_that_did_not_pass_its_last_fault_has_not_recovered() -> None:
    whole = {1: 10.5, 2: 10.25, 3: 10.125}
    two, three = (
        compare_losses(whole, {n: whole[n] for n in range(1, last + 1)}) for last in (2, 3)
    )
    for iteration, losses, held in ((1, two, True), (2, two, False), (3, three, True)):
        fault = Fault(60.0, iteration, "rank 1", Status.CRASHED, "killed", 1.0)
        verdict = SoakVerdict((), None, None, losses, (fault,), (2.0, 7.5))
        assert verdict.held is held
