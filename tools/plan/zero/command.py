"""`make compare-zero MODEL=gpt3-355m GPU=a100-80g`: the DeepSpeed report's comparison, by prediction.

Its five methods on nodes with one device each, over four links and from 2 to 64 nodes. Every device
has the same work on any number of nodes: the model's own global batch for each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tools.plan.advice import NOISE
from tools.plan.layout import TimedLayout, time_layout
from tools.plan.options import PlanOptions
from tools.spec.model import model_of
from tools.text.table import markdown_rows
from tools.text.units import DASH, bracketed, joined, megabytes, percent

LINKS = {
    "ethernet-1g": "1 Gbit/s",
    "ethernet-10g": "10 Gbit/s",
    "ethernet-100g": "100 Gbit/s",
    "ib-400g": "400 Gbit/s",
}
NODES = (2, 4, 8, 16, 32, 64)
METHODS = {
    "Baseline": "dp{nodes}",
    "Pipeline": "pp2dp{replicas}",
    "Pipeline, a stage a node": "pp{nodes}",
    "ZeRO-1": "dp{nodes}-zero1",
    "ZeRO-2": "dp{nodes}-zero2",
    "ZeRO-3": "dp{nodes}-zero3",
}
"""As the report calls them, and as layouts."""

SCALES, POORLY = 0.8, 0.5
"""Of the work that a device does on two nodes: above the first share it is called scaling, below the
second scaling poorly."""
SAID = {
    "Baseline": "scales linearly",
    "ZeRO-3": "scales very poorly",
    "Pipeline": "does not scale with more nodes",
    "Pipeline, a stage a node": "does not scale with more nodes",
}
"""The report on more nodes; the first sentence is that a method scales, the others that it does not."""


@dataclass(frozen=True)
class Predicted:
    """One method over one link on so many nodes; None is a layout that the model cannot have."""

    method: str
    link: str
    nodes: int
    timed: TimedLayout | None

    @property
    def seconds(self) -> float | None:
        """Of an iteration."""
        return self.timed.candidate.seconds.total if self.timed else None

    @property
    def peak_bytes(self) -> int | None:
        """Of the fullest rank."""
        return self.timed.candidate.memory.total if self.timed else None

    @property
    def time(self) -> str:
        """Milliseconds, with the interval that the errors of readings like it give, if any."""
        if self.timed is None:
            return DASH
        low, high = self.timed.uncertainty.interval or (None, None)
        ends = low and 1e3 * low, high and 1e3 * high
        return bracketed(1e3 * self.timed.candidate.seconds.total, *ends, shape=",.0f")


def compare(options: PlanOptions) -> int:
    """Print the tables and what follows.

    Raises:
        ValueError: It cannot be predicted; one sentence.
    """
    links = predict(options, nodes=(2,), links=tuple(LINKS))
    scaling = predict(options, NODES, tuple(LINKS))
    if options.json:
        print(json.dumps([as_data(each) for each in scaling], indent=2))
    else:
        print(render(options, links, scaling))
    return 0


def predict(
    options: PlanOptions, nodes: Sequence[int], links: Sequence[str]
) -> tuple[Predicted, ...]:
    """Every method on every number of nodes over every link.

    Raises:
        RequestError: There is no such dtype.
        ValueError: There is no such model or device.
    """
    return tuple(
        Predicted(method, link, count, _timed(options, layout, count, link))
        for link in links
        for count in nodes
        for method, layout in METHODS.items()
        if count > 2 or method != "Pipeline, a stage a node"
    )


def _timed(options: PlanOptions, layout: str, nodes: int, link: str) -> TimedLayout | None:
    model = model_of(options.model)
    replicas = nodes // 2
    stages = nodes if layout == METHODS["Pipeline, a stage a node"] else 1
    if model.shape.layers % stages:
        return None
    named = layout.format(nodes=nodes, replicas=replicas).removesuffix("dp1")
    asked = replace(
        options,
        layout=named,
        gpus=nodes,
        nodes=nodes,
        gpus_per_node=1,
        inter=link,
        global_batch=nodes * (options.global_batch or 2 * model.batch.global_batch_size) // 2,
    )
    return time_layout(asked)


def render(options: PlanOptions, links: Sequence[Predicted], scaling: Sequence[Predicted]) -> str:
    """Markdown: over links, over nodes, and what the DeepSpeed report says of both."""
    title = f"# ZeRO compared, predicted: {options.model} on nodes with one {options.gpu} each"
    return "\n\n".join(
        (
            title,
            "No run is in this. Milliseconds an iteration; an interval, where there is one, is the "
            "error of public readings like it, predicted without their own source.",
            "## Two nodes, over four links",
            over_links(links),
            "## 2 to 64 nodes: work a device does, over that on two nodes",
            *(_over_nodes(link, scaling) for link in LINKS),
            "## What follows",
            scaling_table(scaling),
            "The bytes that a ring sends grow as (N−1)/N for data parallelism and ZeRO alike: they "
            "double from two nodes to many, and stay.",
        )
    )


def verdict(found: Sequence[Predicted]) -> tuple[str, str]:
    """Of one column: the fastest or *within noise*, and which to use.

    Of methods within the planner's error of the fastest the one with the least memory is to be used.
    """
    known = [each for each in found if each.seconds is not None]
    fastest = min(known, key=lambda each: each.seconds or 0.0)
    close = [each for each in known if (each.seconds or 0.0) <= NOISE * (fastest.seconds or 0.0)]
    lightest = min(close, key=lambda each: each.peak_bytes or 0)
    if len(close) == 1:
        return fastest.method, fastest.method
    return f"within noise: {joined([each.method for each in close])}", lightest.method


def share_of_two(method: str, link: str, nodes: int, found: Sequence[Predicted]) -> float | None:
    """A device's work a second on so many nodes, over that on two; None where there is no layout."""
    times = {(each.method, each.link, each.nodes): each.seconds for each in found}
    # A pipeline of as many stages as nodes begins as the one of two.
    first = times.get((method, link, 2)) or times.get(("Pipeline", link, 2))
    last = times.get((method, link, nodes))
    return first / last if first and last else None


def scaling_table(found: Sequence[Predicted]) -> str:
    """Markdown: the report's sentences on more nodes, each judged for every link."""
    rows = []
    for method, sentence in SAID.items():
        most = max((e.nodes for e in found if e.method == method and e.seconds), default=2)
        shares = {name: share_of_two(method, link, most, found) for link, name in LINKS.items()}
        known = {name: share for name, share in shares.items() if share is not None}
        if most > 2 and known:
            said = f"“{sentence}”: {_judged(known, method == 'Baseline')}"
            rows.append([f"{method}, {most} nodes", *map(percent, shares.values()), said])
    return markdown_rows(
        ["Work of a device, over that on two", *LINKS.values(), "The report"], rows
    )


def _judged(shares: Mapping[str, float], is_said_to_scale: bool) -> str:
    """Shares by link; one within the planner's error of a limit judges nothing."""
    said: dict[str, list[str]] = {}
    for name, share in shares.items():
        near = [limit for limit in (SCALES, POORLY) if limit / NOISE < share < limit * NOISE]
        if near:
            verdict = f"within noise of {near[0]:.0%}"
        elif share >= SCALES or share < POORLY:
            verdict = "confirmed" if (share >= SCALES) == is_said_to_scale else "contradicted"
        else:
            verdict = "neither"
        said.setdefault(verdict, []).append(name)
    return "; ".join(f"{verdict} at {joined(names)}" for verdict, names in said.items())


def over_links(found: Sequence[Predicted]) -> str:
    """Markdown: memory, time over each link, the fastest of a link and which to use."""
    methods = list(dict.fromkeys(each.method for each in found))
    rows = []
    for method in methods:
        own = [each for each in found if each.method == method]
        rows.append([method, megabytes(own[0].peak_bytes), *(each.time for each in own)])
    columns = [[each for each in found if each.link == link] for link in LINKS]
    said = [verdict(column) for column in columns]
    rows.append(["Fastest", "", *(winner for winner, _ in said)])
    rows.append(["Use", "", *(chosen for _, chosen in said)])
    return markdown_rows(["Method", "Peak memory", *LINKS.values()], rows)


def _over_nodes(link: str, found: Sequence[Predicted]) -> str:
    rows = []
    for method in METHODS:
        shares = (share_of_two(method, link, nodes, found) for nodes in NODES)
        rows.append([method, *(percent(share) for share in shares)])
    own = [[one for one in found if (one.link, one.nodes) == (link, nodes)] for nodes in NODES]
    said = [verdict(column) for column in own]
    rows.append(["Fastest", *(winner for winner, _ in said)])
    rows.append(["Use", *(chosen for _, chosen in said)])
    return f"{LINKS[link]}:\n\n" + markdown_rows(["Method", *(f"{n} nodes" for n in NODES)], rows)


def as_data(found: Predicted) -> dict[str, object]:
    """Seconds and bytes; None where the model cannot have the layout."""
    interval = found.timed.uncertainty.interval if found.timed else None
    return {
        "method": found.method,
        "link": found.link,
        "nodes": found.nodes,
        "seconds": found.seconds,
        "interval_seconds": interval,
        "peak_bytes": found.peak_bytes,
    }
