import gzip
import textwrap

import pytest

from parakit.logs.dialects.megatron import MICROSECONDS, MICROSECONDS_GTP, SECONDS
from parakit.logs.iterations import LOG_LINE
from parakit.logs.pieces import MAX_LINE
from parakit.logs.scrape import scrape_log, scrape_runs
from parakit.logs.scraped import CheckpointEvent, MemoryReading
from tests.reporting.factory import iteration_line, log_text

ARGUMENTS = """------------------------ arguments ------------------------
  hidden_size ..................................... 64
  log_interval .................................... 1
-------------------- end of arguments ---------------------
"""
START = "[before the start of training step] datetime: 2025-09-07 23:53:58 \n"


def scrape(tmp_path, text, name="a.log"):
    path = tmp_path / name
    path.write_text(text)
    return scrape_log(path)


def numbers(log):
    return [iteration.iteration for iteration in log.iterations]


def test_iterations_come_in_order_with_their_flags(tmp_path):
    log = scrape(tmp_path, log_text([300, 200, 100, 101], micro=True))
    assert numbers(log) == [1, 2, 3, 4]
    assert [f.first_of_start for f in log.iterations] == [True, False, False, False]
    assert [f.averaged for f in log.iterations] == [False, True, False, False]
    assert log.generation == MICROSECONDS
    assert log.exit_reason == "exiting program at iteration 4"


def test_second_line_is_no_average_before_0_16(tmp_path):
    log = scrape(tmp_path, log_text([300, 100, 100]))
    assert log.generation == SECONDS
    assert not any(iteration.averaged for iteration in log.iterations)


def test_version_0_19_is_recognised_by_an_interrupted_parameters_line(tmp_path):
    torn = " > number of parameters [rank1] hello on (tensor, gtp_remat, pipeline) model"
    log = scrape(tmp_path, f"{torn}\n{log_text([300, 200], micro=True)}")
    assert log.generation == MICROSECONDS_GTP


def test_after_a_restart_the_later_line_counts(tmp_path):
    before = "\n".join(iteration_line(n, 100.0 + n, micro=True) for n in range(1, 8))
    after = "\n".join(iteration_line(n, 200.0 + n, micro=True) for n in range(6, 10))
    log = scrape(tmp_path, f"{ARGUMENTS}{START}{before}\n{ARGUMENTS}{START}{after}\n")
    assert numbers(log) == list(range(1, 10))
    assert [f.elapsed_ms for f in log.iterations[4:7]] == [105.0, 206.0, 207.0]
    assert log.restarts == (6,)
    assert [(f.iteration, f.elapsed_ms) for f in log.replaced] == [(6, 106.0), (7, 107.0)]
    assert [f.iteration for f in log.iterations if f.averaged] == [2, 7]
    assert "restarted at iteration 6" in log.notes[0]


def test_resume_without_repeated_iterations_is_a_restart(tmp_path):
    text = "\n".join(
        [iteration_line(1), iteration_line(2), ARGUMENTS + START, iteration_line(3, micro=False)]
    )
    log = scrape(tmp_path, text)
    assert log.restarts == (3,)
    assert log.iterations[2].first_of_start


def test_invalid_log_interval_is_derived_from_the_lines(tmp_path):
    text = ARGUMENTS.replace(
        "log_interval .................................... 1", "log_interval ... ²"
    )
    log = scrape(tmp_path, text + "\n".join(iteration_line(n) for n in (2, 4, 6)))
    assert (log.arguments["log_interval"], log.log_interval) == ("²", 2)


def test_restart_without_arguments_is_recognised_by_decreasing_numbers(tmp_path):
    log = scrape(tmp_path, "\n".join(iteration_line(n) for n in (1, 2, 3, 4, 3, 4, 5)))
    assert numbers(log) == [1, 2, 3, 4, 5]
    assert log.restarts == (3,)


def test_runs_in_a_single_file_stay_separate(tmp_path):
    path = tmp_path / "two.log"
    path.write_text(
        ARGUMENTS
        + START
        + log_text([9, 9])
        + ARGUMENTS.replace("64", "128")
        + START
        + log_text([5, 5, 5])
    )
    first, second = scrape_runs(path)
    assert (first.part, first.parts, second.part) == (1, 2, 2)
    assert (len(first.iterations), len(second.iterations)) == (2, 3)
    assert (first.arguments["hidden_size"], second.arguments["hidden_size"]) == ("64", "128")


def test_line_printed_twice_is_no_restart(tmp_path):
    line = iteration_line(1)
    log = scrape(tmp_path, "\n".join([line, line, iteration_line(2)]))
    assert numbers(log) == [1, 2]
    assert (log.restarts, len(log.replaced)) == ((), 0)


def test_repeated_line_with_equal_values_after_a_restart_is_the_first_of_the_restart(tmp_path):
    lines = (iteration_line(n) for n in (1, 2, 3, 4, 3, 4, 5))
    log = scrape(tmp_path, "\n".join(f"[2026-01-01 00:00:00.000000] {line}" for line in lines))
    assert (log.restarts, len(log.replaced)) == ((3,), 2)
    assert [i.iteration for i in log.iterations if i.first_of_start] == [1, 3]
    assert [i.iteration for i in log.iterations if i.averaged] == [2, 4]


def test_line_after_evaluation_or_checkpoint_is_marked(tmp_path):
    text = "\n".join(
        [
            *(iteration_line(n) for n in (1, 2, 3)),
            " validation loss at iteration 3 | lm loss value: 9.5E+00 | lm loss PPL: 1.3E+04 | ",
            *(iteration_line(n) for n in (4, 5)),
            "  [2026-01-01 00:00:00.000000] successfully saved checkpoint from iteration       5"
            " to ckpt [ t 1/2, gtp_remat 1/1, p 1/1 ]",
            *(iteration_line(n) for n in (6, 7)),
        ]
    )
    log = scrape(tmp_path, text)
    assert [f.iteration for f in log.iterations if f.after_pause] == [4, 6]
    assert log.validation[0].iteration == 3
    assert log.validation[0].losses == {"lm loss": 9.5}
    assert log.checkpoints == (CheckpointEvent("saved", 5),)


def test_checkpoint_lines_of_every_version_are_read(tmp_path):
    text = "\n".join(
        (
            "saving checkpoint at iteration       8 to /a b/ckpt in torch_dist format",
            "[2026-01-01 00:00:00.000000] saving checkpoint at iteration       9 to ckpt",
            "  successfully saved local checkpoint from iteration      10",
            "  successfully loaded checkpoint from /a b/ckpt [ t 1/2, p 1/1 ] at iteration 11",
            " loading checkpoint from nowhere",
        )
    )
    assert scrape(tmp_path, text).checkpoints == (
        CheckpointEvent("saving", 8),
        CheckpointEvent("saving", 9),
        CheckpointEvent("saved", 10),
        CheckpointEvent("loaded", 11),
    )


def test_iterations_are_read_despite_prefixes_and_memory_lines(tmp_path):
    memory = (
        "[Rank 1] (after 2 iterations) memory (MB) | allocated: 1.5 | max allocated: 2.5 |"
        " reserved: 3.5 | max reserved: 4.5"
    )
    log = scrape(tmp_path, f"[default1]:{iteration_line(2)}{memory}{memory.replace('1]', '0]')}")
    assert numbers(log) == [2]
    assert log.memory == (
        MemoryReading(1, 2, 1.5, 2.5, 3.5, 4.5),
        MemoryReading(0, 2, 1.5, 2.5, 3.5, 4.5),
    )


def log_lines(path):
    return [log.iterations.values(LOG_LINE).tolist() for log in scrape_runs(path)]


def test_every_iteration_knows_its_line_as_an_editor_counts_them(tmp_path):
    path = tmp_path / "a.log"
    lines = [iteration_line(n, extra=f" note: {n} |") for n in range(1, 10)]
    # The log has a rewritten line, an empty line, a line longer than a piece, and a second run.
    lines[2:2] = ["progress 1%\rprogress 2%", "", "x" * 3 * MAX_LINE, "\x1b[1mbold\x1b[0m"]
    lines += [START, iteration_line(1), f"{iteration_line(2)}{iteration_line(3)}"]
    path.write_text("\n".join(lines))
    assert log_lines(path) == [[1, 2, 7, 8, 9, 10, 11, 12, 13], [16, 17, 17]]
    assert [lines[6].find(f"iteration {3:8d}/") > 0, "iteration" in lines[5]] == [True, False]
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert log_lines(path)[0][2] == 7


def test_line_number_is_the_first_part_of_a_folded_line_and_the_last_of_a_repeated_line(tmp_path):
    path = tmp_path / "a.log"
    lines = [iteration_line(n) for n in (1, 2, 3, 2, 3, 4)]
    path.write_text("\n".join(lines))
    assert log_lines(path) == [[1, 4, 5, 6]]
    parts = [textwrap.wrap(line, 90, drop_whitespace=False) for line in lines]
    path.write_text("\n".join(part for several in parts for part in several))
    starts = [1 + sum(map(len, parts[:index])) for index in (0, 3, 4, 5)]
    assert log_lines(path) == [starts]


def test_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        scrape_log(tmp_path / "nowhere.log")


@pytest.mark.parametrize("text", ["", "\n\n", "hello\n", "iteration\n", "|" * 100])
def test_foreign_text_is_an_empty_log(tmp_path, text):
    log = scrape(tmp_path, text)
    assert log.iterations == ()
    assert not log.is_megatron
