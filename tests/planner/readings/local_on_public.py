"""Estimate how much own runs would improve predictions of the published measurements:
`python -m tests.planner.readings.local_on_public`.

Per source and device, ten random measurements act as own runs for each of the remaining ones.
"""

from __future__ import annotations

import random
from collections import defaultdict
from math import exp, log

from parakit.planner.readings.local_readings import OwnRuns
from parakit.planner.readings.residual import Residual, compute_residuals
from parakit.planner.readings.table import read_measurements

TIMED = ("step_time_s", "tokens_per_s_per_gpu")
LEAST, TRIED = 12, 100


def corrected_error(item: Residual, same_source: list[Residual], count: int) -> float:
    """Return the error of a measurement after `count` others of its source have corrected it."""
    chosen = random.Random(item.measurement.line).sample(same_source, count)
    corrections = OwnRuns(tuple(chosen))
    return exp(log(1 + item.error) - corrections.bias(item.measured_run.spec)) - 1


def main(count: int = 10) -> None:
    """Print a line per source and device."""
    readings, unreadable = read_measurements()
    groups: dict[tuple[str, str], list[Residual]] = defaultdict(list)
    for item in compute_residuals(readings, unreadable).predicted:
        if item.measurement.metric in TIMED:
            device = item.measured_run.cluster.device.name
            groups[item.measurement.source, device].append(item)
    print("| source and device | readings | mean error | corrected by ten |\n|---|---|---|---|")
    for (source, device), items in sorted(groups.items()):
        if len(items) < LEAST:
            continue
        tried = random.Random(0).sample(items, min(TRIED, len(items)))
        before = sum(abs(item.error) for item in tried) / len(tried)
        after = sum(
            abs(corrected_error(item, [x for x in items if x is not item], count)) for item in tried
        ) / len(tried)
        print(f"| {source}, {device} | {len(items)} | {before:.1%} | {after:.1%} |")


if __name__ == "__main__":
    main()
