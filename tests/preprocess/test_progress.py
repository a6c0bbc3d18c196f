import io

import pytest
from rich.console import Console

from parakit.data.indexed import open_dataset
from tools.preprocess import run
from tools.preprocess.cli import main, sample_documents
from tools.preprocess.run import ProgressLine


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    return now


def test_progress_without_a_terminal_is_a_line_per_minute(clock):
    stream = io.StringIO()
    line = ProgressLine(Console(file=stream, force_terminal=False))
    for second in range(0, 181, 10):
        clock[0] = float(second)
        line.add(second, 1000, 10_000_000 if second else 0, documents=1, tokens=2)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("1.0 MB/s · 7 documents · 14 tokens · 6% · 0:")


def test_progress_of_an_input_of_unknown_size_has_no_percentage(clock):
    stream = io.StringIO()
    line = ProgressLine(Console(file=stream, force_terminal=False))
    with line:
        clock[0] = 61.0
        line.add(0, 0, 122_000_000, documents=1, tokens=2)
        assert stream.getvalue() == "2.0 MB/s · 1 document · 2 tokens\n"
        line.add(0, 0, 0, documents=1, tokens=0)
    assert stream.getvalue().splitlines()[1:] == ["2.0 MB/s · 2 documents · 2 tokens"]


def test_progress_on_a_terminal_updates_a_single_line_and_keeps_messages(clock):
    stream = io.StringIO()
    line = ProgressLine(Console(file=stream, force_terminal=True, width=100))
    with line:
        clock[0] = 2.0
        line.add(500, 1000, 1_000_000, documents=7, tokens=9)
        line.say("in.jsonl:3: blank line (noted)")
    _, sentence, after = stream.getvalue().rpartition("in.jsonl:3: blank line (noted)")
    assert sentence
    assert "0.5 MB/s · 7 documents · 9 tokens" in after
    assert " 50%" in after


def test_the_sample_is_large_enough_and_made_only_once(sample_prefix, capsys):
    assert sum(map(len, sample_documents())) > 400_000
    assert open_dataset(sample_prefix).tokens >= 100_000
    assert main(["sample", "--output-prefix", str(sample_prefix.with_name("sample"))]) == 0
    assert "Nothing to do" in capsys.readouterr().err


def test_help_lists_the_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for name in ("merge", "verify", "stats", "hub", "sample"):
        assert name in out
