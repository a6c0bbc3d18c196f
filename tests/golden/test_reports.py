"""Reports, explanations and pictures of fixed run folders and logs, as text: `reports/<set>/`.

`runs/` was made by real runs on two cores (see its README). What is compared is everything that a
reader sees; of pictures the labels and the number of drawn elements, of `results.json` its keys and the
figures of each row. The page of the large report is not compared: it shows what `report.md` does.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from tests.golden.commands_of_the_kit import HERE, ROOT, Commands, check_golden
from tests.golden.readable import figures_as_text, json_as_text, page_as_text, picture_as_text

RUNS = HERE / "runs"
LOGS = sorted((ROOT / "tests/reporting/logs").glob("*.log"))
ENDINGS = ("011710Z-tp2", "011717Z-pp2")
"""A crashed and an interrupted run. In the report of the strategies they would be pooled with other runs."""

EXPLAINED = ("010857Z-tp2", "011032Z-pp2", "010731Z-zero3", "011638Z-ep2")
"""Runs for `explain`, one per kind of communication."""

SETS = {
    "strategies": lambda runs: [p for p in runs if not p.name[9:].startswith(ENDINGS)],
    "endings": lambda runs: [p for p in runs if p.name[9:].startswith((*ENDINGS, "010831Z-dp2"))],
    "logs": lambda runs: LOGS,
}

WIDTHS = {"strategies": ("120",), "endings": ("80", "120"), "logs": ("80", "120")}
"""Widths of the terminal. The large report has a single width, because building it twice takes long."""


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Return copies of the run folders, so that nothing is written into the golden files' folder."""
    shutil.copytree(RUNS, tmp_path / "runs")
    return sorted((tmp_path / "runs").glob("2*"))


@pytest.mark.parametrize("which", SETS)
def test_report_equals_its_golden_files(
    which: str, runs: list[Path], tmp_path: Path, commands: Commands
) -> None:
    paths = list(map(str, SETS[which](runs)))
    command_line = ("parakit", "report", *paths, "--name", "golden", "--reports", str(tmp_path))
    for width in WIDTHS[which]:
        code, printed = commands.run(command_line, {"COLUMNS": width})
        assert code == 0, printed
        _check(which, f"terminal-{width}.txt", printed, tmp_path)
    folder = tmp_path / "golden"
    _check(which, "results.csv", (folder / "results.csv").read_text(), tmp_path)
    _check(which, "report.md", (folder / "report.md").read_text(), tmp_path)
    results = (folder / "results.json").read_text()
    _check(which, "figures.txt", figures_as_text(results), tmp_path)
    page = page_as_text((folder / "report.html").read_text())
    if which != "strategies":
        _check(which, "report.html.txt", page, tmp_path)
    for sentence in json.loads(results)["sentences"]:
        assert sentence in page
    pictures = sorted(folder.glob("*.svg"))
    parts = [f"{path.name}: {picture_as_text(path.read_text())}\n" for path in pictures]
    _check(which, "pictures.txt", "\n".join(parts), tmp_path)
    assert {path.name for path in folder.iterdir()} == {
        *("results.csv", "results.json", "report.md", "report.html"),
        *(path.name for path in pictures),
    }


def test_explain_equals_its_golden_file(
    runs: list[Path], tmp_path: Path, commands: Commands
) -> None:
    paths = [str(path) for path in runs if path.name[9:].startswith(EXPLAINED)]
    code, printed = commands.run(("parakit", "explain", *paths), {"COLUMNS": "120"})
    assert code == 0, printed
    _check("strategies", "explain.txt", printed, tmp_path)


def test_scrape_equals_its_golden_files(
    runs: list[Path], tmp_path: Path, commands: Commands
) -> None:
    logs = [str(path / "log.txt") for path in runs] + list(map(str, LOGS))
    code, printed = commands.run(("parakit", "report", "scrape", *logs))
    assert code == 0, printed
    _check("logs", "scrape.txt", printed, tmp_path)
    few = [log for log in logs if re.search(r"ep2|native|crash|011717Z|0\.12|f4fa7d6b", log)]
    code, printed = commands.run(("parakit", "report", "scrape", "--json", *few))
    assert code == 0, printed
    _check("logs", "scrape.json", json_as_text(printed), tmp_path)


@pytest.mark.parametrize("run", ["pp2", "ep2"])
def test_trace_equals_its_golden_file(
    run: str, runs: list[Path], tmp_path: Path, commands: Commands
) -> None:
    (folder,) = (p for p in SETS["strategies"](runs) if re.search(rf"Z-{run}-", p.name))
    before = set(folder.iterdir())
    code, printed = commands.run(("parakit", "trace", str(folder)))
    assert code == 0, printed
    made = sorted(set(folder.iterdir()) - before)
    parts = [printed, *(path.name for path in made)]
    parts += [picture_as_text(path.read_text()) for path in made if path.suffix == ".svg"]
    _check("traces", f"{run}.txt", "\n".join(parts), tmp_path)


def _check(which: str, name: str, text: str, folder: Path) -> None:
    text = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d( UTC)", r"<now>\1", text)
    text = re.sub(r'("created_utc": ")[^"]*', r"\1<now>", text)
    text = text.replace(str(folder), "<tmp>").replace(str(ROOT), "<kit>")
    text = "\n".join(line.rstrip() for line in text.splitlines())
    check_golden(HERE / "reports" / which / name, text)
