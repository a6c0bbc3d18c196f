"""What a drawing shows is what the planner counts: added up from the picture, arrow by arrow."""

from __future__ import annotations

import json
import re
from collections import Counter
from xml.etree import ElementTree

import pytest

from parakit.config.files import ROOT
from parakit.config.groups import Group, group_size
from parakit.config.strategy import parse_strategy
from parakit.costs.collectives.call import total_wire_bytes
from parakit.costs.collectives.rank import rank_collectives
from parakit.costs.memory import estimate_rank_memory
from parakit.site import in_browser
from parakit.site.drawing.figure import DRAWN, draw_figure, render_drawings_page, resolve_run
from parakit.site.drawing.sheet import group_ranks_by, locate_rank, select_ranks

PRODUCTS = (
    ("gpt2-large", "sp2cp2dp2-zero1", "h200"),
    ("gpt2-large", "vpp2x3dp2", "h200"),
    ("moe-tiny", "tp2ep2dp2", "cpu"),
    ("gpt3-175b", "tp8pp16dp8", "a100"),
    ("llama3-8b", "sp4pp2dp4", "h100"),
)
CASES = [
    *((models[0], strategy, "cpu", devices) for strategy, (_, devices, models) in DRAWN.items()),
    *((models[1], strategy, "h200", devices) for strategy, (_, devices, models) in DRAWN.items()),
    *((*product, None) for product in PRODUCTS),
]

WHOLE = [case for case in CASES if "zero3" not in case[1]]
"""ZeRO-3 computes with more weights than a rank keeps."""


def added_up(drawing: str, attribute: str) -> Counter[int]:
    """Bytes by rank of all parts of a drawing that say `what`."""
    bytes_by_rank: Counter[int] = Counter()
    for part in ElementTree.fromstring(drawing).iter("g"):
        if f"data-{attribute}" in part.attrib:
            bytes_by_rank[int(part.attrib["data-rank"])] += int(part.attrib[f"data-{attribute}"])
    return bytes_by_rank


@pytest.mark.parametrize(("model", "strategy", "device", "devices"), CASES)
def test_the_arrows_add_up_to_the_planners_bytes(
    model: str, strategy: str, device: str, devices: int | None
) -> None:
    spec = resolve_run(model, strategy, device, devices)
    assert added_up(draw_figure(spec, "x"), "sends") == {
        rank.number: total_wire_bytes(rank_collectives(spec, rank.stage))
        for rank in select_ranks(spec.parallelism)
    }


@pytest.mark.parametrize(("model", "strategy", "device", "devices"), WHOLE)
def test_the_tensors_add_up_to_the_planners_weights(
    model: str, strategy: str, device: str, devices: int | None
) -> None:
    spec = resolve_run(model, strategy, device, devices)
    assert added_up(draw_figure(spec, "x"), "holds") == {
        rank.number: estimate_rank_memory(spec, rank.stage).weights
        for rank in select_ranks(spec.parallelism)
    }


def test_tiny_models_send_what_the_lab_guide_measured() -> None:
    guide = (ROOT / "examples/gpt3/README.md").read_text()
    guide = guide.partition("## What does each strategy send?")[2].partition("\n## ")[0]
    measured = dict(re.findall(r"^\| (\w+) \| \d+ \| ([\d,]+) \|", guide, re.M))
    assert set(measured) == {"dp2", "tp2", "sp2", "cp2", "pp2", "vpp2", "zero1"}
    for strategy, size in measured.items():
        # Two micro batches or more of two samples, as the lab guide states.
        spec = resolve_run("gpt2-tiny", strategy, "cpu", 2, micro_batch=2, global_batch=8)
        sent = added_up(draw_figure(spec, "x"), "sends")
        assert sent[0] == int(size.replace(",", "")), strategy


@pytest.mark.parametrize("strategy", ["tp2cp2dp2", "pp2cp2dp2", "tp2pp2ep2", "ep4dp2", "tp2ep2dp2"])
@pytest.mark.parametrize("group", Group)
def test_ranks_are_in_groups_of_their_size(strategy: str, group: Group) -> None:
    split = parse_strategy(strategy, 8)
    groups = group_ranks_by(group, select_ranks(split))
    assert {len(members) for members in groups} == {group_size(split, group)}
    assert sorted(rank.number for members in groups for rank in members) == list(range(8))


def test_ranks_are_in_megatrons_order() -> None:
    split = parse_strategy("tp2cp2pp2ep2", 16)
    assert locate_rank(split, 5)[:5] == (5, 1, 0, 1, 0)
    assert locate_rank(split, 15)[1:5] == (1, 1, 1, 1)
    assert [locate_rank(split, number).expert for number in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_of_many_ranks_the_first_and_last_of_each_dimension_are_drawn() -> None:
    split = parse_strategy("tp8pp16dp8", 1024)
    numbers = [rank.number for rank in select_ranks(split)]
    assert numbers == [0, 7, 56, 63, 960, 967, 1016, 1023]
    assert "8 of its ranks are drawn" in draw_figure(
        resolve_run("gpt3-175b", "tp8pp16dp8", "a100"), "x"
    )


def test_the_page_reads_without_javascript() -> None:
    html = render_drawings_page()
    for strategy, (heading, _, models) in DRAWN.items():
        assert f"<h2>{heading} <code>{strategy}</code></h2>" in html
        assert all(f'<figure id="{strategy}-{model}">' in html for model in models)
    names = re.findall(r'\sid="([^"]+)"', html)
    assert len(names) == len(set(names))
    for sheet in re.findall(r'<svg class="sheet".*?</svg>', html, re.S):
        title = re.search(r'aria-labelledby="([^"]+)"><title id="([^"]+)">[^<]+</title>', sheet)
        assert title is not None
        assert title[1] == title[2]
    assert not re.search(r'(src|href)="(https?:)?//', html)


def test_the_browsers_drawing_is_the_same_and_a_refusal_is_a_sentence() -> None:
    answer = json.loads(in_browser.draw("gpt2-large", "vpp2dp2", "h200", "4", "8", "128"))
    spec = resolve_run("gpt2-large", "vpp2dp2", "h200", 4, 8, 128)
    assert spec.microbatches == 8
    assert answer == {"code": 0, "out": draw_figure(spec, "drawn") + "\n", "err": ""}
    refused = json.loads(in_browser.draw("gpt2-large", "tp3", "h200", "", "", ""))
    assert (refused["code"], refused["out"]) == (2, "")
    assert "16 attention heads" in refused["err"]
