"""The tables of write-up 002, from measurement: data parallelism, a pipeline and ZeRO's three stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tools.launch.compare.measured import DASH, Measured
from tools.spec.files import read_yaml
from tools.spec.published import FILE
from tools.text.table import markdown_rows

STRATEGIES = ("dp2", "pp2", "zero1", "zero2", "zero3")
NAMES = {
    "dp2": "Baseline",
    "pp2": "Pipeline",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
}
STANDS_IN = "gpt3-64m"
"""The published model whose figures stand beside a model that was not published."""


@dataclass(frozen=True)
class PublishedZero:
    """One row of the write-up; None where it gives no value."""

    milliseconds: float
    peak_gigabytes: float
    samples_per_second: float
    speedup: float
    shares: Mapping[str, float]
    network: Mapping[str, float]
    """Megabytes and seconds of one transfer, and the rate that follows, as the write-up has them."""


def published_rows(model: str) -> tuple[str, dict[str, PublishedZero]]:
    """The published model that is shown, and its rows by strategy."""
    figures: list[dict[str, Any]] = read_yaml(FILE)["figures"]
    of_002 = [figure for figure in figures if figure["source"] == "002"]
    shown = model if any(figure["model"] == model for figure in of_002) else STANDS_IN
    return shown, {
        figure["strategy"]: PublishedZero(
            figure["iteration_ms"][0],
            figure["peak_memory_gb"][0],
            figure["samples_per_second"],
            figure["speedup"],
            figure.get("shares", {}),
            figure.get("network", {}),
        )
        for figure in of_002
        if figure["model"] == shown
    }


def render(model: str, runs: Sequence[Measured]) -> str:
    """Markdown: three tables, and what was measured."""
    shown, published = published_rows(model)
    baseline = next((run for run in runs if run.strategy == "dp2"), None)
    other = "" if shown == model else f" The published figures are {shown}'s, not {model}'s."
    return "\n\n".join(
        (
            f"# ZeRO compared: {model}",
            "Each cell: measured, then what write-up 002 has (two GPUs on two nodes, 1 to 10 Gbit/s, "
            f"Megatron-DeepSpeed).{other} Its peaks are a GPU's, in GB.",
            "## Time and memory",
            _performance(runs, baseline, published),
            "## Where an iteration goes",
            _shares(runs, published),
            "## Memory saved and bytes sent",
            _traffic(runs, baseline, published),
            "The implied bandwidth is the bytes that the busiest rank sends over the time that ranks "
            "stand still for communication; what overlaps with computing is not in that time. On CPU "
            "ranks gloo sends an all-reduce for a reduce-scatter; NCCL's rings, as on GPUs, would send "
            "what stands beside. The write-up gives one transfer, not an iteration's.",
            "## What was measured",
            "\n".join(f"- {_name(run)}: {run.implementation}" for run in runs),
        )
    )


def _performance(
    runs: Sequence[Measured], baseline: Measured | None, published: Mapping[str, PublishedZero]
) -> str:
    header = [
        "Method",
        "Status",
        "Parity",
        "Peak memory",
        "ms/iteration [95%]",
        "Samples/s",
        "Speedup",
    ]
    rows = []
    for run in runs:
        faster = ratio(baseline.milliseconds if baseline else None, run.milliseconds)
        cells = (
            megabytes(run.peak_bytes),
            interval(run),
            number(run.samples_per_second),
            times(faster),
        )
        theirs = published_cells(published.get(run.strategy))
        both = [beside(*pair) for pair in zip(cells, theirs, strict=True)]
        rows.append([_name(run), run.status, run.parity, *both])
    return markdown_rows(header, rows)


def _shares(runs: Sequence[Measured], published: Mapping[str, PublishedZero]) -> str:
    rows = []
    for run in runs:
        theirs = published[run.strategy].shares if run.strategy in published else {}
        mine = run.shares or (None, None, None)
        parts = ("forward", "backward", "optimizer")
        cells = [
            beside(percent(share), percent(theirs[part]) if part in theirs else None)
            for part, share in zip(parts, mine, strict=True)
        ]
        rows.append([_name(run), *cells])
    return markdown_rows(["Method", "Forward", "Backward, with gradients", "Optimizer"], rows)


def _traffic(
    runs: Sequence[Measured], baseline: Measured | None, published: Mapping[str, PublishedZero]
) -> str:
    header = [
        *("Method", "Memory against baseline", "Sent/iteration", "With NCCL's rings"),
        *("Standing still", "Implied"),
    ]
    rows = []
    for run in runs:
        mine = ratio(run.peak_bytes, baseline.peak_bytes if baseline else None)
        theirs = ratio(
            published[run.strategy].peak_gigabytes if run.strategy in published else None,
            published["dp2"].peak_gigabytes if "dp2" in published else None,
        )
        seconds, bandwidth = run.communication_seconds, run.implied_gigabits
        network = published[run.strategy].network if run.strategy in published else {}
        rows.append(
            [
                _name(run),
                beside(change(mine), change(theirs) if theirs else None),
                beside(megabytes(run.sent_bytes), _published(network, "sent_mb", "MB")),
                megabytes(run.nccl_bytes),
                beside(
                    DASH if seconds is None else f"{seconds * 1000:.1f} ms",
                    _published(network, "seconds", "s"),
                ),
                beside(
                    DASH if bandwidth is None else f"{bandwidth:.2f} Gbit/s",
                    _published(network, "gbit_per_second", "Gbit/s"),
                ),
            ]
        )
    return markdown_rows(header, rows)


def published_cells(row: PublishedZero | None) -> tuple[str | None, ...]:
    """Peak memory, iteration, samples and speedup as published."""
    if row is None:
        return (None,) * 4
    return (
        f"{row.peak_gigabytes:g} GB",
        f"{row.milliseconds:g}",
        f"{row.samples_per_second:g}",
        f"{row.speedup:.2f}x",
    )


def _published(network: Mapping[str, float], name: str, unit: str) -> str | None:
    return f"{network[name]:g} {unit}" if name in network else None


def beside(measured: str, published: str | None) -> str:
    """`measured (published)`."""
    return f"{measured} ({published})" if published else measured


def ratio(value: float | None, reference: float | None) -> float | None:
    """None where either is missing."""
    return value / reference if value is not None and reference else None


def number(value: float | None) -> str:
    """Three significant digits, no exponent below a million."""
    return DASH if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"


def times(value: float | None) -> str:
    """`1.23x`."""
    return DASH if value is None else f"{value:.2f}x"


def percent(value: float | None) -> str:
    """A share as percent."""
    return DASH if value is None else f"{value:.1%}"


def change(value: float | None) -> str:
    """A ratio as what it adds or takes away."""
    return DASH if value is None else f"{value - 1:+.0%}"


def megabytes(value: int | None) -> str:
    """Bytes in MB, as networks and the write-up count them."""
    return DASH if value is None else f"{value / 1e6:.1f} MB"


def interval(run: Measured) -> str:
    """Median and interval in milliseconds."""
    found = run.estimate
    if found is None:
        return DASH
    if found.low is None or found.high is None:
        return f"{found.median:.1f}"
    return f"{found.median:.1f} [{found.low:.1f}, {found.high:.1f}]"


def _name(run: Measured) -> str:
    return NAMES.get(run.strategy, run.strategy)
