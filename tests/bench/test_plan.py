import csv

import pytest

from parakit.config.model import load_model
from tests.bench.plan import compared, of_report, of_search


@pytest.mark.slow
def test_each_benchmark_prints_a_line_with_a_ratio(tmp_path):
    work = {
        "a search": of_search(load_model("gpt2-tiny"), 2, "a100", 8),
        "a report": of_report(tmp_path, runs=12),
    }
    lines = list(compared(work, passes=100_000))
    assert [line.partition(":")[0] for line in lines] == ["a search", "a report"]
    assert all(line.endswith(" times the loop's") for line in lines)
    with (tmp_path / "reports" / "many" / "results.csv").open() as rows:
        assert len(list(csv.DictReader(rows))) == 12
