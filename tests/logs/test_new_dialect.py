"""A dialect of another line format is one file and a log: nothing else of the kit knows this one."""

from pathlib import Path

import pytest

from parakit.logs import dialects
from parakit.logs.dialects import find_iterations, load_line_formats
from parakit.logs.layouts import LayoutReader
from parakit.logs.runs import load_log
from parakit.logs.scrape import make_event_pattern, scrape_log
from parakit.logs.scraped import CheckpointEvent
from tests.reporting.factory import iteration_line

MADE_UP = Path(__file__).parents[1] / "reporting" / "dialects" / "made_up"
LOG = MADE_UP / "abacus.log"
LOGS = Path(__file__).parents[1] / "reporting" / "logs"


@pytest.fixture
def with_abacus(monkeypatch):
    monkeypatch.setattr(dialects, "__path__", [*dialects.__path__, str(MADE_UP)])
    forget()
    yield
    forget()


def forget():
    dialects.load_dialects.cache_clear()
    load_line_formats.cache_clear()


def test_without_its_file_nothing_of_the_log_is_read():
    assert scrape_log(LOG).iterations == ()


@pytest.mark.usefixtures("with_abacus")
def test_its_iterations_settings_and_checkpoints_are_read():
    (run,) = load_log(LOG)
    log = run.log
    assert [found.iteration for found in log.iterations] == list(range(1, 42))
    assert log.iterations.values("elapsed_ms")[[0, -1]].tolist() == [9500.0, 1250.0]
    assert log.iterations.values("lm_loss")[[0, -1]].tolist() == [10.95, 8.9]
    assert log.iterations[-1].extra_metrics == {"beads": 1234.0}
    assert log.checkpoints == (CheckpointEvent("saved", 20),)
    assert [found.iteration for found in log.iterations if found.after_pause] == [21]
    assert log.arguments == {"width": "64", "ranks": "2"}
    assert run.arguments == {"hidden_size": "64", "world_size": "2"}
    assert 20 < len(run.window.samples_ms) < 40


@pytest.mark.usefixtures("with_abacus")
def test_its_lines_are_read_as_columns_but_for_numbers_that_are_no_digits_alone():
    data = LOG.read_bytes()
    reader = LayoutReader(make_event_pattern())
    reader.format = next(each for each in load_line_formats() if each.mark == b"step ")
    block = reader.block(data, range(1, data.count(b"\n") + 1))
    lines = data.decode().splitlines()
    plain = [line for line, is_plain in zip(lines, block.plain, strict=True) if is_plain]
    assert len(plain) == 40
    assert not any("1,234" in line for line in plain)
    rows = block.columns.rows(0, len(lines))
    read = [row for row, is_plain in zip(rows, block.plain, strict=True) if is_plain]
    assert read == [found for line in plain for found in find_iterations(line)]


@pytest.mark.usefixtures("with_abacus")
def test_of_two_formats_in_a_log_the_one_of_lower_rank_is_read(tmp_path):
    both = tmp_path / "both.log"
    steps = LOG.read_text().splitlines()[5:10]
    both.write_text("\n".join([*steps, *(iteration_line(n, 100.0) for n in range(1, 4))]))
    assert scrape_log(both).iterations.values("elapsed_ms").tolist() == [100.0] * 3


@pytest.mark.usefixtures("with_abacus")
def test_a_log_whose_format_shows_late_is_of_the_first_that_does(tmp_path):
    late = tmp_path / "late.log"
    noise = 100 * "nothing " + "\n"
    late.write_text(6000 * noise + LOG.read_text() + iteration_line(50) + "\n")
    assert scrape_log(late).iterations == scrape_log(LOG).iterations


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
def test_other_logs_say_what_they_said(path, request):
    before = scrape_log(path)
    request.getfixturevalue("with_abacus")
    assert scrape_log(path) == before
