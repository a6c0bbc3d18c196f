import re
import subprocess
import sys

import pytest

from parakit.config.files import ROOT
from tests.bench.scrape import bench_scrape


def test_bench_reports_speed_relative_to_a_plain_reader_and_peak_memory():
    result = bench_scrape(2_000)
    assert result.iterations == 2_000
    assert str(result).startswith("2,000 iterations, 1 MB: ")
    assert "iterations/s" in str(result)
    assert "times what one regular expression over each line takes, " in str(result)
    assert re.search(r"its report takes [\d.]+ times as long$", str(result))


@pytest.mark.slow
def test_peak_memory_excludes_that_of_the_parent_process():
    program = "from tests.bench.scrape import bench_scrape; r = bench_scrape(9);"
    command = [sys.executable, "-c", program + "print(r.peak_memory_mib)"]
    large = f"large = bytearray(2**29); import subprocess; subprocess.run({command})"
    done = subprocess.run(
        [sys.executable, "-c", large], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert 5 < float(done.stdout) < 200


@pytest.mark.slow
def test_scraping_half_a_million_iterations_needs_at_most_250_mb():
    program = (
        "from tests.bench.scrape import bench_scrape; r = bench_scrape();"
        "print(r.peak_memory_mib, r.log_bytes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    peak_mib, log_bytes = map(float, done.stdout.split())
    assert log_bytes > 150e6
    assert peak_mib < 250
