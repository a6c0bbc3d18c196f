"""Ends of commands, and Markdown on the terminal."""

import io
import os
import subprocess
import sys

import pytest
from rich.console import Console

from parakit.formatting.terminal import exit_with, say_markdown


def interrupted() -> int:
    raise KeyboardInterrupt


def test_interrupted_command_exits_with_130_and_one_word(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        exit_with(interrupted)
    assert ended.value.code == 130
    assert capsys.readouterr().err == "Interrupted.\n"
    with pytest.raises(SystemExit) as ended:
        exit_with(lambda: 3)
    assert ended.value.code == 3


def test_closed_pipe_gives_no_traceback() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    code = "from parakit.formatting.terminal import exit_with; exit_with(lambda: print('x' * 9999) or 0)"
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=pipe, stderr=subprocess.PIPE, check=False
        )
    assert (done.returncode, done.stderr) == (141, b"")


def test_markdown_page_is_printed_with_tables_and_lists_and_without_images() -> None:
    written = io.StringIO()
    table = "| ms \\[95%\\] | b |\n| --- | --- |\n| 1.5 | x |"
    say_markdown(Console(file=written), f"# Sweep\n\n- first\n\n![Tokens](sweep.svg)\n\n{table}")
    lines = [line.strip() for line in written.getvalue().splitlines() if line.strip()]
    text_lines = [line for line in lines if "─" not in line]
    assert text_lines == ["Sweep", "• first", "ms [95%]  b", "1.5       x"]
