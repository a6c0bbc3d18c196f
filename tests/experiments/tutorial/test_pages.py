import os
import re
from pathlib import Path

import pytest

from parakit.config.files import ROOT
from parakit.experiments.tutorial.chapters import Chapter, read_chapters
from parakit.experiments.tutorial.pages import (
    PUBLISHED_GPU,
    draw_plots,
    render_chapter,
    render_overview,
    write_pages,
)
from parakit.experiments.tutorial.predict import predict_rows
from parakit.experiments.tutorial.rows import rows_of_chapter

PAGES = ROOT / "docs" / "tutorial"
REWRITE = "python -m parakit.experiments.tutorial.pages docs/tutorial writes the pages anew"
LINE = re.compile(r"^\| (\d{3}) \| (.*) \|$", re.MULTILINE)
PREDICTED = (3, 4, 6, 7)
"""Columns of a table's line, behind the id, that follow the planner's constants."""


def predicted_figures(page: str) -> dict[str, list[float]]:
    figures = {}
    for run, line in LINE.findall(page):
        cells = line.split(" | ")
        figures[run] = [float(cells[column].replace(",", "")) for column in (3, 6)]
    return figures


def without_predictions(page: str) -> str:
    """Return a page without the figures that a change of the planner's constants changes."""

    def blank(match: re.Match[str]) -> str:
        cells = match[2].split(" | ")
        return " | ".join("" if i in PREDICTED else cell for i, cell in enumerate(cells))

    page = re.sub(r"^Median error.*$", "", page, flags=re.MULTILINE)
    return LINE.sub(blank, page)


@pytest.fixture(scope="module", autouse=True)
def _rewrite() -> None:
    if os.environ.get("UPDATE_GOLDEN"):
        write_pages(PAGES)


@pytest.mark.parametrize("chapter", read_chapters(), ids=lambda chapter: chapter.name)
def test_page_of_a_chapter_is_current(chapter: Chapter) -> None:
    committed = (PAGES / f"{chapter.name}.md").read_text()
    rendered = render_chapter(chapter, predict_rows(rows_of_chapter(chapter.name), PUBLISHED_GPU))
    assert without_predictions(committed) == without_predictions(rendered), REWRITE
    present, stored = predicted_figures(rendered), predicted_figures(committed)
    for run, figures in stored.items():
        assert figures == pytest.approx(present[run], rel=0.02), f"{run}: {REWRITE}"


def test_overview_is_current_and_leads_to_every_claim_it_names() -> None:
    overview = render_overview()
    assert (PAGES / "README.md").read_text() == overview, REWRITE
    for page, anchor in re.findall(r"\]\((\w+\.md)#([\w-]+)\)", overview):
        heading = anchor.replace("-", " ").capitalize()
        assert f"### {heading}\n" in (PAGES / page).read_text()


def test_plot_has_its_series_and_a_picture_per_chapter(tmp_path: Path) -> None:
    chapter = next(chapter for chapter in read_chapters() if chapter.name == "pp")
    draw_plots(chapter, tmp_path / "pp.svg")
    drawn = (tmp_path / "pp.svg").read_text()
    assert "TP 2, PP 4" in drawn
    assert "ms per slot" in drawn
    assert all((PAGES / f"{chapter.name}.svg").is_file() for chapter in read_chapters())
