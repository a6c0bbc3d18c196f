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
    """The `number`-th, ten iterations and 5 s after the one before."""
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
    (found,) = steadiness([reading(n, megabytes=500 if n < 3 else 1000) for n in range(13)])
    assert (found.process, found.memory_bytes, found.is_steady) == ("rank 0", (10**9, 10**9), True)


def test_growth_of_more_than_a_hundredth_is_named() -> None:
    (found,) = steadiness([reading(n, megabytes=1000 + 3 * n) for n in range(1, 13)])
    # Readings 4 to 12 are left after the first quarter: the least of 4 to 6 and of 10 to 12.
    assert (found.memory_bytes, found.growth > 1.01, found.is_steady) == (
        (1012 * 10**6, 1030 * 10**6),
        True,
        False,
    )


def test_a_small_process_may_grow_by_less_than_an_allocators_piece() -> None:
    def grown(most: int) -> Steadiness:
        return Steadiness("sampler", (9_000_000, 9_000_000 + most), 0, (9, 9))

    assert grown(100_000).is_steady
    assert not grown(2_000_000).is_steady


def test_what_a_save_takes_for_a_while_is_no_growth() -> None:
    (found,) = steadiness([reading(n, megabytes=1000 + 100 * (n % 3 > 0)) for n in range(1, 13)])
    assert (found.memory_bytes, found.is_steady) == ((10**9, 10**9), True)


def test_one_file_descriptor_more_is_a_leak() -> None:
    (found,) = steadiness([reading(n, descriptors=9 + (n > 8)) for n in range(1, 13)])
    assert (found.descriptors, found.is_steady) == ((9, 10), False)


def test_readings_before_the_first_iteration_do_not_count() -> None:
    assert steadiness([reading(0), reading(0)]) == ()


def test_drift_is_judged_by_processor_time_over_the_controls() -> None:
    # From iteration 100 on everything takes twice as long, the control too: it is the machine.
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


def test_losses_are_compared_to_the_last_digit_where_both_have_a_line() -> None:
    whole = {1: 10.5, 2: 10.25, 3: 10.125}
    # The line after a restart is an average, and is not in the curve.
    assert compare_losses(whole, {1: 10.5, 3: 10.125}).compared == 2
    assert compare_losses(whole, {1: 10.5, 3: 10.126}).first_other == 3
    assert compare_losses(whole, {1: 10.5}).last == 1


def test_a_verdict_says_what_held_and_under_what_load() -> None:
    losses = compare_losses({1: 10.5}, {1: 10.5})
    held = SoakVerdict((), None, None, losses, (), (2.0, 7.5))
    assert held.held
    text = held.render("train-dp2-gpt2-tiny-2cpu, 0.33 h")
    assert "Losses after 0 faults: 1 compared, to iteration 1, all equal to the last digit." in text
    assert "The machine's load was 2.0 to 7.5." in text


def test_a_run_that_did_not_come_beyond_its_last_fault_has_not_recovered() -> None:
    whole = {1: 10.5, 2: 10.25, 3: 10.125}
    two, three = (
        compare_losses(whole, {n: whole[n] for n in range(1, last + 1)}) for last in (2, 3)
    )
    for iteration, losses, held in ((1, two, True), (2, two, False), (3, three, True)):
        fault = Fault(60.0, iteration, "rank 1", Status.CRASHED, "killed", 1.0)
        verdict = SoakVerdict((), None, None, losses, (fault,), (2.0, 7.5))
        assert verdict.held is held
