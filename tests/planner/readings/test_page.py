import json
import re
from dataclasses import replace
from pathlib import Path

from parakit.planner.readings.page import write_page
from parakit.planner.readings.residual import compute_residuals
from parakit.planner.readings.summary import collect_errors, evaluate_choices, group_by_kind
from parakit.planner.readings.table import read_measurements


def test_the_page_holds_every_point_and_asks_no_network(tmp_path: Path) -> None:
    readings, unreadable = read_measurements()
    found = compute_residuals(readings[::40], unreadable)
    page, picture = write_page(found, collect_errors(found), tmp_path)
    text = page.read_text()
    packed = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert packed is not None
    data = json.loads(packed[1])
    lines = {row[0] for row in data["rows"]}
    drawn = {
        item.measurement.line
        for item in found.predicted
        if item.measurement.metric != "matmul_tflops"
    }
    assert lines == drawn
    assert not re.search(r'(?:src|href)\s*=\s*"?https?:|@import|fetch\(', text)
    assert picture.read_text().startswith("<?xml")


def test_a_choice_is_judged_by_what_its_layout_took() -> None:
    readings, _ = read_measurements()
    small = [item for item in readings if "vTrain single" in item.source and item.gpus == 2]
    found = evaluate_choices(compute_residuals(small))
    assert found
    assert all(choice.regret >= 0 for choice in found)
    lost = [
        replace(found[0], regret=0.02, repeat_spreads=apart)
        for apart in ((), (0.01,), (0.01, 0.03))
    ]
    assert [choice.decidable for choice in lost] == [True, True, False]
    assert replace(found[0], regret=0.0, repeat_spreads=(0.03,)).decidable, "nothing is lost"


def test_no_published_measurement_is_of_two_kinds_of_run() -> None:
    readings, unreadable = read_measurements()
    found = compute_residuals(readings[::20], unreadable)
    kinds = group_by_kind(found)
    assert 0 < sum(len(kind.errors) for kind in kinds) <= len(found.predicted)
