"""Scraping ends soon, in bounded memory and without an exception, whatever a file contains."""

import gzip
import resource
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parakit.logs.diagnosis import classify_log
from parakit.logs.scrape import scrape_runs
from parakit.logs.training_log import TrainingLog
from parakit.logs.window import select_window
from tests.reporting import mutants
from tests.reporting.factory import iteration_line

GOLDEN = sorted((Path(__file__).parents[1] / "reporting" / "logs").glob("*.log"))
TEN_MB, FOUR_MB = 10_000_000, 4_000_000
FRAGMENTS = (
    *("iteration 5/10 |", " consumed samples: 5 |", "elapsed time per iteration (ms): 5.0 |"),
    *("[Rank 0] (after 2 iterations) memory (MB) | allocated: ", "| max allocated: nan"),
    *("Traceback (most recent call last):\n", '  File "x", line 3\n', "ValueError: no\n"),
    *("number of parameters on (tensor, pipeline) model parallel rank (0, 0): 9", "\x1b[1m"),
    *("\r", "\n", "|", ":", "....: (1.0, 2.0)", "--- arguments ---\n", "  a ... b\n", "\x00"),
    *("validation loss at iteration 5 | lm loss value: 1.0 |", "9" * 50, "1e999", "inf", "\ud800"),
    *(
        "saving checkpoint at iteration 5",
        "Root Cause (first observed failure)",
        "rank : 1 (local_",
    ),
)


def scrape_everything(path):
    for log in scrape_runs(path):
        status = classify_log(log)
        select_window(log)
        TrainingLog(log, status).to_dict()


def write(tmp_path_factory, content: bytes) -> Path:
    path = tmp_path_factory.mktemp("fuzz") / "a.log"
    path.write_bytes(content)
    return path


@settings(max_examples=60)
@given(st.binary(max_size=2000))
def test_random_bytes_are_scraped_without_an_exception(tmp_path_factory, content):
    scrape_everything(write(tmp_path_factory, content))


@settings(max_examples=60)
@given(st.binary(max_size=300))
def test_broken_gzip_is_scraped_without_an_exception(tmp_path_factory, content):
    packed = gzip.compress(b"iteration 1/2 |" * 50)
    scrape_everything(write(tmp_path_factory, packed[:20] + content + packed[40:]))
    scrape_everything(write(tmp_path_factory, b"\x1f\x8b" + content))


@settings(max_examples=100)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=60))
def test_pieces_of_logs_in_any_order_are_scraped_without_an_exception(tmp_path_factory, pieces):
    text = "".join(pieces).encode("utf-8", "surrogatepass")
    scrape_everything(write(tmp_path_factory, text))


def test_damaged_logs_are_read_without_a_false_figure(capsys):
    # `python -m tests.reporting.mutants` makes further damaged logs.
    assert mutants.main(["--seed", "3", "--count", "12"]) == 0, capsys.readouterr().out


def test_value_of_another_log_is_reported_as_a_problem(tmp_path, monkeypatch):
    original = GOLDEN[-1].read_bytes()
    other = tmp_path / "other.log"
    other.write_bytes(original.replace(b"(ms): ", b"(ms): 9"))
    (run,) = scrape_runs(other)
    monkeypatch.setattr(mutants, "scrape_runs", lambda path: (run,))
    problems = list(mutants.problems(original, mutants.Mutant(original, 0), tmp_path))
    assert problems
    assert all("elapsed_ms 9" in problem and "stands in no line" in problem for problem in problems)


HOSTILE = {
    "no newline": b"x" * FOUR_MB,
    "bars": b"|" * FOUR_MB,
    "spaces": b" " * FOUR_MB,
    "dots": b"a ." + b"." * FOUR_MB,
    "words of the format": b"iteration " * (FOUR_MB // 10),
    "digits": b"iteration " + b"1" * FOUR_MB,
    "escapes": b"\x1b[" * (FOUR_MB // 2),
    "open escape": b"\x1b[" + b"0;" * (FOUR_MB // 2),
    "open title": b"\x1b]" + b"a" * FOUR_MB,
    "half memory lines": b"[Rank 0] (after 2 iterations) memory (MB) | " * (FOUR_MB // 44),
    "fields": b"iteration 1/2 | consumed samples: 1 |" + b" a b: 1.0 |" * (FOUR_MB // 11),
    "empty lines": b"\n" * (FOUR_MB // 4),
    "carriage returns": b"abcdefghi\r" * (FOUR_MB // 40),
    "errors": b"Traceback (most recent call last):\nValueError: x\n" * (FOUR_MB // 200),
    "argument": b"--- arguments ---\n" + b"a . " * (FOUR_MB // 4),
    "word in the arguments": b"--- arguments ---\n" + b"a" * FOUR_MB,
    "words in the arguments": b"--- arguments ---\n" + b"abc.de-" * (FOUR_MB // 7),
    "a word before a timer": b"x" * FOUR_MB + b" ...: (1.0, 2.0)",
    "old timers": b"time (ms) |" + b" name name" * (FOUR_MB // 10),
    "gigabytes": b"[Rank 0] (after 2 iterations) memory (GB) |" + b" mem-a: 1 |" * (FOUR_MB // 11),
    "other trainers": b"step: 1 loss: 1 Epoch 1: [batch=1/" * (FOUR_MB // 34),
    "slurm": b"slurm JOB x CANCELLED AT y DUE TO " * (FOUR_MB // 34),
    "timers": b"name ...: (1.0, 2.0) " * (FOUR_MB // 21),
    "brackets": b"[" * FOUR_MB,
    "dotted error": b"Traceback (most recent call last):\n" + b"A.b" * (FOUR_MB // 3),
    "checkpoints": b"successfully loaded checkpoint from " * (FOUR_MB // 36),
    "gzip bomb": gzip.compress(b"0" * (4 * FOUR_MB)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_line_is_read_in_bounded_memory(tmp_path_factory, name):
    path = write(tmp_path_factory, HOSTILE[name])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scrape_everything(path)
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024 < 60


def test_all_iterations_in_a_line_of_ten_megabytes_are_read(tmp_path_factory):
    count = TEN_MB // 330
    text = "".join(iteration_line(n, total=count) for n in range(1, count + 1))
    (log,) = scrape_runs(write(tmp_path_factory, text.encode()))
    assert len(log.iterations) == count
    assert all(iteration.lm_loss == 10.0 for iteration in log.iterations)
