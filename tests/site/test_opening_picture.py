"""README's first picture: it shows a recorded run, in both colour schemes and on a phone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parakit.config.files import ROOT
from parakit.site.opening_picture import (
    DELETION,
    PICTURES,
    RECORD,
    draw_opening_picture,
    load_recording,
    record_run,
    wrap_text,
)

MOST_LINES = 120


@pytest.mark.parametrize("name", PICTURES)
def test_committed_picture_is_drawn_from_the_recording(name: str) -> None:
    picture = RECORD.with_name(name).read_text()
    assert picture == draw_opening_picture(load_recording(), PICTURES[name])
    assert len(picture) < 1_000_000
    assert "prefers-color-scheme: dark" in picture
    assert "prefers-reduced-motion: no-preference" in picture


def test_wide_picture_has_the_texts_of_the_run() -> None:
    picture = RECORD.with_name("first-wrong-tensor.svg").read_text()
    recording = load_recording()
    for text in (DELETION, recording.command, recording.finding, recording.changed):
        assert text in picture


def test_readme_has_the_commands_of_the_picture_and_fits_its_limit() -> None:
    readme = (ROOT / "README.md").read_text()
    assert f"`{DELETION}`" in readme
    assert f"`{load_recording().command}`" in readme
    assert len(readme.splitlines()) <= MOST_LINES


def test_run_is_recorded_from_its_verdict_and_the_map_of_its_page(tmp_path: Path) -> None:
    folder = tmp_path / "verify/tp2"
    folder.mkdir(parents=True)
    verdict = {
        "stage": "outputs",
        "module": "embedding.word_embeddings",
        "kind": "missing sum over TP ranks",
        "changed": ["a.py:1", "b.py:2"],
        "worst": "worst at [0] of rank 1: 0, not 1",
        "compared": 7,
        "command": "make verify-tp2-gpt2-tiny-2cpu MEGATRON_LM=/somewhere/fork",
    }
    (folder / "verdict.json").write_text(json.dumps(verdict))
    row = (
        '<tr><th title="{}"></th><td class="c0"></td><td class="c0"></td><td class="{}"></td></tr>'
    )
    page = row.format("embedding.word_embeddings", "c7 at") + row.format("output_layer", "c3 at")
    (folder / "verify.html").write_text(page)
    recording = record_run(tmp_path)
    assert recording.command == "MEGATRON_LM=~/Megatron-LM make verify-tp2-gpt2-tiny-2cpu"
    assert recording.finding == "outputs, embedding.word_embeddings: missing sum over TP ranks"
    assert recording.changed == "a.py:1"
    assert recording.wrong_modules == ("embedding.word_embeddings",)


def test_long_text_is_broken_at_slashes_and_spaces() -> None:
    assert wrap_text("sed a/bcd/efg", 9, "  ") == ["sed a/", "  bcd/efg"]
    assert wrap_text("one two", 20) == ["one two"]
