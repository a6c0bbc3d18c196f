"""The guide's picture: it shows the guide's own numbers, in both colour schemes and on a phone."""

from __future__ import annotations

import re

import pytest

from parakit.planner.readings.published import h200_figures
from parakit.site.decision_picture import (
    GUIDE,
    PICTURES,
    QUESTIONS,
    Answer,
    draw_decision_picture,
    read_evidence,
)

MOST_WORDS = 1000
"""Words of two printed pages with the picture."""


@pytest.mark.parametrize("name", PICTURES)
def test_committed_picture_is_drawn_from_the_guide(name: str) -> None:
    picture = GUIDE.with_name(name).read_text(encoding="utf-8")
    assert picture == draw_decision_picture(GUIDE.read_text(encoding="utf-8"), PICTURES[name])
    assert "prefers-color-scheme: dark" in picture


@pytest.mark.parametrize("name", PICTURES)
def test_no_line_of_the_picture_is_wider_than_its_box(name: str) -> None:
    picture = GUIDE.with_name(name).read_text(encoding="utf-8")
    lines = re.findall(r'<text x="([\d.]+)"[^>]*class="([^"]*)">([^<]*)</text>', picture)
    assert len(lines) > 20
    for x, style, text in lines:
        character = 8.6 if "strong" in style else 7.4
        assert float(x) + character * len(text) <= PICTURES[name]


def test_measured_times_of_picture_and_guide_are_the_published_ones() -> None:
    times = {figure.strategy: figure.mean_iteration_ms for figure in h200_figures()}
    dp2, baseline, pp2, tp2 = (
        f"{times[strategy] or 0:.0f}" for strategy in ("dp2", "baseline", "pp2", "tp2")
    )
    picture = " ".join(answer.evidence for _, answers in QUESTIONS for answer in answers)
    assert f"DP 2 takes {dp2} ms, one device alone {baseline} ms" in picture
    assert f"takes {pp2} ms, DP 2 {dp2} ms" in picture
    guide = " ".join(GUIDE.read_text(encoding="utf-8").split())
    assert f"DP 2 takes {dp2} ms per iteration, and one device alone takes {baseline} ms" in guide
    assert f"TP 2 takes {tp2} ms for the same number" in guide
    assert f"PP 2 takes {pp2} ms where DP 2 takes {dp2} ms" in guide


def test_guide_has_two_pages_with_a_section_and_a_command_per_question() -> None:
    guide = GUIDE.read_text(encoding="utf-8")
    assert len(guide.split()) <= MOST_WORDS
    sections = re.split(r"^## ", guide, flags=re.M)[1:]
    assert len(sections) == len(QUESTIONS)
    for number, section in enumerate(sections, 1):
        assert section.startswith(f"{number}. ")
        assert re.search(r"parakit\s+plan|make compare", section)


def test_answer_without_a_prediction_is_refused() -> None:
    with pytest.raises(LookupError, match=r"predicts nothing for 'gpt4 on 1 H100'"):
        read_evidence(Answer("yes", "dpN", "gpt4 on 1 H100"), "no such sentence")
