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
MEGABYTE = 1_000_000
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


@pytest.mark.parametrize("count", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_damaged_logs_are_read_without_a_false_figure(capsys, count):
    # `python -m tests.reporting.mutants` makes further damaged logs.
    assert mutants.main(["--seed", "3", "--count", f"{count}"]) == 0, capsys.readouterr().out


def test_value_of_another_log_is_reported_as_a_problem(tmp_path, monkeypatch):
    original = GOLDEN[-1].read_bytes()
    other = tmp_path / "other.log"
    other.write_bytes(original.replace(b"(ms): ", b"(ms): 9"))
    (run,) = scrape_runs(other)
    monkeypatch.setattr(mutants, "scrape_runs", lambda path: (run,))
    problems = list(mutants.problems(original, mutants.Mutant(original, 0), tmp_path))
    assert problems
    assert all("elapsed_ms 9" in problem and "stands in no line" in problem for problem in problems)


def hostile_contents(size: int) -> dict[str, bytes]:
    """Return contents of about `size` bytes on which a careless expression takes quadratic time."""
    return {
        "no newline": b"x" * size,
        "bars": b"|" * size,
        "spaces": b" " * size,
        "dots": b"a ." + b"." * size,
        "words of the format": b"iteration " * (size // 10),
        "digits": b"iteration " + b"1" * size,
        "escapes": b"\x1b[" * (size // 2),
        "open escape": b"\x1b[" + b"0;" * (size // 2),
        "open title": b"\x1b]" + b"a" * size,
        "half memory lines": b"[Rank 0] (after 2 iterations) memory (MB) | " * (size // 44),
        "fields": b"iteration 1/2 | consumed samples: 1 |" + b" a b: 1.0 |" * (size // 11),
        "empty lines": b"\n" * (size // 4),
        "carriage returns": b"abcdefghi\r" * (size // 40),
        "errors": b"Traceback (most recent call last):\nValueError: x\n" * (size // 200),
        "argument": b"--- arguments ---\n" + b"a . " * (size // 4),
        "word in the arguments": b"--- arguments ---\n" + b"a" * size,
        "words in the arguments": b"--- arguments ---\n" + b"abc.de-" * (size // 7),
        "a word before a timer": b"x" * size + b" ...: (1.0, 2.0)",
        "old timers": b"time (ms) |" + b" name name" * (size // 10),
        "gigabytes": b"[Rank 0] (after 2 iterations) memory (GB) |" + b" mem-a: 1 |" * (size // 11),
        "other trainers": b"step: 1 loss: 1 Epoch 1: [batch=1/" * (size // 34),
        "slurm": b"slurm JOB x CANCELLED AT y DUE TO " * (size // 34),
        "timers": b"name ...: (1.0, 2.0) " * (size // 21),
        "brackets": b"[" * size,
        "dotted error": b"Traceback (most recent call last):\n" + b"A.b" * (size // 3),
        "checkpoints": b"successfully loaded checkpoint from " * (size // 36),
        "gzip bomb": gzip.compress(b"0" * (4 * size)),
    }


HOSTILE = hostile_contents(MEGABYTE // 4)
"""A quarter of a megabyte, on which an expression that takes quadratic time works for minutes."""


def grown_mebibytes(path: Path) -> float:
    """Return by how much reading a file raises the peak memory of this process."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    scrape_everything(path)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_content_is_read_in_bounded_memory(tmp_path_factory, name):
    assert grown_mebibytes(write(tmp_path_factory, HOSTILE[name])) < 15


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_ten_hostile_megabytes_are_read_in_bounded_memory(tmp_path_factory, name):
    content = hostile_contents(10 * MEGABYTE)[name]
    assert grown_mebibytes(write(tmp_path_factory, content)) < 100


@pytest.mark.parametrize("megabytes", [1, pytest.param(10, marks=pytest.mark.slow)])
def test_all_iterations_in_a_line_of_megabytes_are_read(tmp_path_factory, megabytes):
    count = megabytes * MEGABYTE // 330
    text = "".join(iteration_line(n, total=count) for n in range(1, count + 1))
    (log,) = scrape_runs(write(tmp_path_factory, text.encode()))
    assert len(log.iterations) == count
    assert all(iteration.lm_loss == 10.0 for iteration in log.iterations)
