import json
import re
from dataclasses import replace
from pathlib import Path

from parakit.planner.readings.page import write_page
from parakit.planner.readings.residual import compute_residuals
from parakit.planner.readings.summary import collect_errors, evaluate_choices, group_by_kind
from parakit.planner.readings.table import read_measurements


def test_page_contains_every_measurement_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    readings, unreadable = read_measurements()
    residuals = compute_residuals(readings[::200], unreadable)
    page, picture = write_page(residuals, collect_errors(residuals), tmp_path)
    text = page.read_text()
    packed = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert packed is not None
    data = json.loads(packed[1])
    lines = {row[0] for row in data["rows"]}
    drawn = {
        item.measurement.line
        for item in residuals.predicted
        if item.measurement.metric != "matmul_tflops"
    }
    assert lines == drawn
    assert not re.search(r'(?:src|href)\s*=\s*"?https?:|@import|fetch\(', text)
    assert picture.read_text().startswith("<?xml")


def test_regret_of_a_choice_uses_measured_times() -> None:
    readings, _ = read_measurements()
    small = [item for item in readings if "vTrain single" in item.source and item.gpus == 2]
    choices = evaluate_choices(compute_residuals(small))
    assert choices
    assert all(choice.regret >= 0 for choice in choices)
    lost = [
        replace(choices[0], regret=0.02, repeat_spreads=apart)
        for apart in ((), (0.01,), (0.01, 0.03))
    ]
    assert [choice.decidable for choice in lost] == [True, True, False]
    assert replace(choices[0], regret=0.0, repeat_spreads=(0.03,)).decidable, "nothing is lost"


def test_each_published_measurement_has_at_most_one_kind_of_run() -> None:
    readings, unreadable = read_measurements()
    residuals = compute_residuals(readings[::20], unreadable)
    kinds = group_by_kind(residuals)
    assert 0 < sum(len(kind.errors) for kind in kinds) <= len(residuals.predicted)
