"""A dialect with another line format needs only a format file. No other part of the kit knows the one used here."""

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


def test_log_of_new_dialect_is_empty_without_its_format_file():
    assert scrape_log(LOG).iterations == ()


@pytest.mark.usefixtures("with_abacus")
def test_iterations_settings_and_checkpoints_of_new_dialect_are_read():
    (run,) = load_log(LOG)
    log = run.log
    assert [iteration.iteration for iteration in log.iterations] == list(range(1, 42))
    assert log.iterations.values("elapsed_ms")[[0, -1]].tolist() == [9500.0, 1250.0]
    assert log.iterations.values("lm_loss")[[0, -1]].tolist() == [10.95, 8.9]
    assert log.iterations[-1].extra_metrics == {"beads": 1234.0}
    assert log.checkpoints == (CheckpointEvent("saved", 20),)
    assert [iteration.iteration for iteration in log.iterations if iteration.after_pause] == [21]
    assert log.arguments == {"width": "64", "ranks": "2"}
    assert run.arguments == {"hidden_size": "64", "world_size": "2"}
    assert 20 < len(run.window.samples_ms) < 40


@pytest.mark.usefixtures("with_abacus")
def test_lines_of_new_dialect_are_read_as_columns_unless_a_number_has_other_characters():
    data = LOG.read_bytes()
    reader = LayoutReader(make_event_pattern())
    reader.format = next(
        line_format for line_format in load_line_formats() if line_format.mark == b"step "
    )
    block = reader.block(data, range(1, data.count(b"\n") + 1))
    lines = data.decode().splitlines()
    plain = [line for line, is_plain in zip(lines, block.plain, strict=True) if is_plain]
    assert len(plain) == 40
    assert not any("1,234" in line for line in plain)
    rows = block.columns.rows(0, len(lines))
    read = [row for row, is_plain in zip(rows, block.plain, strict=True) if is_plain]
    assert read == [iteration for line in plain for iteration in find_iterations(line)]


@pytest.mark.usefixtures("with_abacus")
def test_format_of_lower_rank_is_read_if_a_log_has_two_formats(tmp_path):
    both = tmp_path / "both.log"
    steps = LOG.read_text().splitlines()[5:10]
    both.write_text("\n".join([*steps, *(iteration_line(n, 100.0) for n in range(1, 4))]))
    assert scrape_log(both).iterations.values("elapsed_ms").tolist() == [100.0] * 3


@pytest.mark.usefixtures("with_abacus")
def test_log_with_late_iterations_has_the_first_format_that_appears(tmp_path):
    late = tmp_path / "late.log"
    noise = 100 * "nothing " + "\n"
    late.write_text(6000 * noise + LOG.read_text() + iteration_line(50) + "\n")
    assert scrape_log(late).iterations == scrape_log(LOG).iterations


@pytest.mark.parametrize("path", sorted(LOGS.glob("*.log")), ids=lambda path: path.stem)
def test_new_dialect_does_not_change_other_logs(path, request):
    before = scrape_log(path)
    request.getfixturevalue("with_abacus")
    assert scrape_log(path) == before
