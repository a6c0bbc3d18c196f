"""Blocks of MLPerf results whose beginnings and ends may be counted in different units."""

import json

import pytest

from parakit.logs.diagnosis import classify_log
from parakit.logs.scrape import scrape_log

BATCH = 32
STEPS = 384
"""Steps per block."""
MS = 250.0
"""Milliseconds per step."""
PAUSE = 9000
"""Milliseconds of an evaluation between two blocks."""


def mllog(key, at_ms, value=None, **about):
    event = {"namespace": "", "time_ms": at_ms, "key": key, "value": value, "metadata": about}
    return f":::MLLOG {json.dumps(event)}\n"


def head(benchmark="llama31_8b"):
    settings = {"global_batch_size": BATCH, "submission_benchmark": benchmark}
    return mllog("init_start", 1) + "".join(mllog(key, 2, value) for key, value in settings.items())


def blocks(name, begins, ends, first=0, count=4, lost_ends=()):
    """Return the lines of blocks whose beginnings and ends count so many units per step."""
    text, clock = "", 1_000_000
    for block in range(first, first + count):
        text += mllog("block_start", clock, **{name: block * STEPS * begins})
        clock += int(STEPS * MS)
        if block not in lost_ends:
            text += mllog("block_stop", clock, **{name: (block + 1) * STEPS * ends})
        clock += PAUSE
    return text


def read(tmp_path, text):
    path = tmp_path / "result.txt"
    path.write_text(text)
    return scrape_log(path)


def figures(log):
    return [(iteration.iteration, iteration.elapsed_ms) for iteration in log.iterations]


ALL = [(block * STEPS, MS) for block in range(1, 5)]


@pytest.mark.parametrize(
    ("name", "begins", "ends"),
    [
        ("samples_count", BATCH, BATCH),
        ("samples_count", 1, BATCH),
    ],
)
def test_every_block_has_its_steps_and_their_time(tmp_path, name, begins, ends):
    log = read(tmp_path, head() + blocks(name, begins, ends))
    assert figures(log) == ALL
    assert [iteration.consumed_samples for iteration in log.iterations] == [
        n * BATCH for n, _ in ALL
    ]


def test_steps_are_read_as_steps(tmp_path):
    """An end that is not a multiple of the batch size cannot count samples, so it counts steps."""
    text = mllog("block_start", 1000, step=0) + mllog("block_stop", 2000, step=10)
    text += mllog("block_start", 3000, step=10) + mllog("block_stop", 5000, step=20)
    assert figures(read(tmp_path, head() + text)) == [(10, 100.0), (20, 200.0)]


@pytest.mark.parametrize(
    ("name", "begins", "ends"),
    [("samples_count", BATCH, 1), ("step", 1, 1), ("step", BATCH, 1), ("step", 1, BATCH)],
)
def test_units_are_recognised_from_the_second_block_on(tmp_path, name, begins, ends):
    log = read(tmp_path, head() + blocks(name, begins, ends))
    assert figures(log)[-3:] == ALL[1:]


def test_block_without_an_end_is_skipped_and_later_blocks_are_read(tmp_path):
    for begins in (1, BATCH):
        log = read(tmp_path, head() + blocks("samples_count", begins, BATCH, lost_ends=(2,)))
        assert figures(log) == [*ALL[:2], ALL[3]]


def test_first_block_with_ambiguous_units_is_skipped(tmp_path):
    """384 may be steps or samples until the second block begins at the end of the first."""
    log = read(tmp_path, head() + blocks("samples_count", 1, BATCH, first=1, count=3))
    assert figures(log) == ALL[2:]


def test_a_first_block_that_cannot_begin_in_steps_is_read(tmp_path):
    log = read(tmp_path, head() + blocks("samples_count", BATCH, BATCH, first=1, count=3))
    assert figures(log) == ALL[1:]


def test_inconsistent_counts_give_no_time(tmp_path):
    text = mllog("block_start", 1000, samples_count=0) + mllog("block_stop", 2000, samples_count=64)
    text += mllog("block_start", 3000, samples_count=7) + mllog(
        "block_stop", 4000, samples_count=640
    )
    assert figures(read(tmp_path, head() + text)) == [(2, 500.0)]


def test_result_with_unknown_units_is_reported(tmp_path):
    text = mllog("block_start", 3000, samples_count=7)
    text += mllog("block_stop", 4000, samples_count=640)
    log = read(tmp_path, head() + mllog("run_start", 3) + text)
    assert log.iterations == ()
    assert "no time of a step is in it or follows from its blocks" in classify_log(log).reason


def test_a_restarted_result_is_read_from_its_new_beginning(tmp_path):
    text = head() + blocks("samples_count", 1, BATCH, count=3)
    text += head() + blocks("samples_count", 1, BATCH, first=0, count=2)
    log = read(tmp_path, text)
    assert [ms for _, ms in figures(log)] == [MS] * len(log.iterations)
    assert figures(log)[0] == ALL[0]


def test_losses_that_are_events_of_their_own_are_read(tmp_path):
    text = mllog("train_loss", 1000, 11.846, samples_count=0, lr=3.1e-06)
    text += mllog("train_loss", 2000, 9.5, samples_count=10 * BATCH, lr=3.1e-06)
    text += mllog("train_loss", 3000, 8.5, samples_count=20 * BATCH + 1)
    text += mllog("train_loss", 4000, 7.5, step=30, samples_count=30 * BATCH)
    log = read(tmp_path, head() + text)
    losses = [(iteration.iteration, iteration.lm_loss) for iteration in log.iterations]
    # 641 samples are no whole number of steps.
    assert losses == [(0, 11.846), (10, 9.5), (30, 7.5)]


# Counts and clocks of MLPerf 4.0's results for Llama 2 70B LoRA, of the first file of each submission: a block's
# stop in samples, the following block's start in steps, and the milliseconds between start and stop.
GAUDI_2 = (8, 1536, 192, (590_404, 590_321, 590_420, 590_050, 590_001))
JUNIPER_A100 = (64, 8448, 132, (274_932, 275_035, 274_784, 274_969, 274_969, 274_805, 274_715))
JUNIPER_H100 = (8, 1536, 192, (725_090, 709_469, 710_288, 703_593, 696_065, 685_218))


@pytest.mark.parametrize(
    ("result", "first_ms"), [(GAUDI_2, 12300.1), (JUNIPER_A100, 22911.0), (JUNIPER_H100, 15106.0)]
)
def test_public_results_with_starts_in_steps_have_the_times_of_their_blocks(
    tmp_path, result, first_ms
):
    batch, first_stop, first_start, durations = result
    steps = 48 if batch == 8 else 12
    text = mllog("init_start", 1) + mllog("global_batch_size", 2, batch) + mllog("run_start", 3)
    clock, samples = 1_715_242_795_848, first_stop
    text += mllog("block_stop", clock, samples_count=samples)
    for block, duration in enumerate(durations):
        text += mllog("block_start", clock, samples_count=first_start + block * steps)
        clock += duration
        samples += steps * batch
        text += mllog("block_stop", clock, samples_count=samples)
    rows = figures(read(tmp_path, text))
    assert rows == [
        (first_start + (block + 1) * steps, pytest.approx(duration / steps))
        for block, duration in enumerate(durations)
    ]
    assert rows[0][1] == pytest.approx(first_ms, abs=0.05)
