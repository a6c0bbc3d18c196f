import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tools.preprocess import run
from tools.preprocess.cli import sample_documents
from tools.preprocess.run import ProgressLine

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    return now


def test_without_a_terminal_there_is_one_line_a_minute(clock):
    stream = io.StringIO()
    line = ProgressLine(Console(file=stream, force_terminal=False))
    for second in range(0, 181, 10):
        clock[0] = float(second)
        line.add(second, 1000, 10_000_000 if second else 0, documents=1, tokens=2)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("1.0 MB/s · 7 documents · 14 tokens · 6% · 0:")


def test_an_input_of_unknown_size_shows_no_share(clock):
    stream = io.StringIO()
    line = ProgressLine(Console(file=stream, force_terminal=False))
    with line:
        clock[0] = 61.0
        line.add(0, 0, 122_000_000, documents=1, tokens=2)
        assert stream.getvalue() == "2.0 MB/s · 1 documents · 2 tokens\n"
        line.add(0, 0, 0, documents=1, tokens=0)
    assert stream.getvalue().splitlines()[1:] == ["2.0 MB/s · 2 documents · 2 tokens"]


def test_on_a_terminal_one_line_changes_and_sentences_stay(clock):
    stream = io.StringIO()
    line = ProgressLine(Console(file=stream, force_terminal=True, width=100))
    with line:
        clock[0] = 2.0
        line.add(500, 1000, 1_000_000, documents=7, tokens=9)
        line.say("in.jsonl:3: blank line (noted)")
    _, said, after = stream.getvalue().rpartition("in.jsonl:3: blank line (noted)")
    assert said
    assert "0.5 MB/s · 7 documents · 9 tokens" in after
    assert " 50%" in after


def test_the_sample_is_large_enough_and_made_only_once(tmp_path):
    assert sum(map(len, sample_documents())) > 400_000
    command = [sys.executable, "-m", "tools.preprocess", "sample"]
    command += ["--output-prefix", str(tmp_path / "sample")]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    tokens = int(first.stdout.split(" tokens")[0].split(" ")[-1].replace(",", ""))
    assert tokens >= 100_000
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Nothing to do" in again.stderr


def test_help_lists_the_commands(capsys):
    from tools.preprocess.cli import main

    with pytest.raises(SystemExit):
        main(["--help"])
    out = capsys.readouterr().out
    for name in ("merge", "verify", "stats", "hub", "sample"):
        assert name in out
