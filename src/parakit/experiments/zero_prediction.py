"""`make compare-zero MODEL=gpt3-355m GPU=a100-80g`: predict the DeepSpeed report's comparison.

Its methods on nodes with one device each, over several links and numbers of nodes (`zero_prediction.yaml`). Every
device has the same work on any number of nodes: the model's own global batch for each.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from parakit.config.errors import LaunchError
from parakit.config.files import read_yaml
from parakit.config.model import find_model
from parakit.formatting.table import markdown_rows
from parakit.formatting.terminal import say_markdown, wide_console
from parakit.formatting.units import DASH, bracketed, joined, megabytes, percent
from parakit.planner import (
    TIE_RATIO,
    PlanOptions,
    TimedStrategy,
    are_tied,
    plan_options,
    time_strategy,
)


@dataclass(frozen=True)
class ZeroPredictionFile:
    """The links, nodes, methods and sentences of `zero_prediction.yaml`."""

    links: Mapping[str, str]
    nodes: tuple[int, ...]
    methods: Mapping[str, str]
    scales: float
    poorly: float
    said: Mapping[str, str]
    page: str


SETTINGS = msgspec.convert(read_yaml(Path(__file__).with_suffix(".yaml")), ZeroPredictionFile)


@dataclass(frozen=True)
class PredictedMethod:
    """One method over one link on so many nodes; None is a strategy that the model cannot have."""

    method: str
    link: str
    nodes: int
    timed: TimedStrategy | None

    @property
    def seconds(self) -> float | None:
        """Of an iteration."""
        return self.timed.candidate.seconds.total if self.timed else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Seconds between which the errors of measurements like it put it, if there are enough."""
        return self.timed.uncertainty.interval() if self.timed else None

    @property
    def peak_bytes(self) -> int | None:
        """Of the fullest rank."""
        return self.timed.candidate.memory.total if self.timed else None

    @property
    def time(self) -> str:
        """Milliseconds with their interval."""
        low, high = (1e3 * end for end in self.interval) if self.interval else (None, None)
        return bracketed(1e3 * self.seconds, low, high, ",.0f") if self.seconds else DASH

    @property
    def as_data(self) -> dict[str, object]:
        """Seconds and bytes; None where the model cannot have the strategy."""
        where = {"method": self.method, "link": self.link, "nodes": self.nodes}
        times = {"seconds": self.seconds, "interval_seconds": self.interval}
        return {**where, **times, "peak_bytes": self.peak_bytes}


def predict_zero(given: Namespace) -> int:
    """Print what the planner predicts for the experiment `zero` on the device GPU=; return 0.

    Raises:
        LaunchError: MODEL= is missing.
        ValueError: It cannot be predicted; one sentence.
    """
    if given.model is None:
        raise LaunchError(
            "MODEL= is required, for example: make compare-zero MODEL=gpt3-355m GPU=a100-80g"
        )
    asked = plan_options(given)
    links, scaling = predict_methods(asked, nodes=(2,)), predict_methods(asked, SETTINGS.nodes)
    if asked.json:
        print(json.dumps([each.as_data for each in scaling], indent=2))
        return 0
    page = SETTINGS.page.rstrip().format(
        model=asked.model,
        gpu=asked.gpu,
        over_links=format_links_table(links),
        over_nodes="\n\n".join(_format_nodes_table(link, scaling) for link in SETTINGS.links),
        scaling=format_scaling_table(scaling),
    )
    say_markdown(wide_console(), page)
    return 0


def predict_methods(
    options: PlanOptions, nodes: Sequence[int], links: Sequence[str] = tuple(SETTINGS.links)
) -> tuple[PredictedMethod, ...]:
    """Every method on every number of nodes over every link.

    Raises:
        RequestError: There is no such dtype.
        ValueError: There is no such model or device.
    """
    return tuple(
        PredictedMethod(method, link, count, _time_method(options, layout, count, link))
        for link in links
        for count in nodes
        for method, layout in SETTINGS.methods.items()
        if count > 2 or layout != "pp{nodes}"  # On two nodes it is the other pipeline.
    )


def _time_method(options: PlanOptions, layout: str, nodes: int, link: str) -> TimedStrategy | None:
    model = find_model(options.model)
    if layout == "pp{nodes}" and model.shape.layers % nodes:
        return None
    asked = replace(
        options,
        strategy=layout.format(nodes=nodes, replicas=nodes // 2).removesuffix("dp1"),
        gpus=nodes,
        nodes=nodes,
        gpus_per_node=1,
        inter=link,
        global_batch=nodes * (options.global_batch or 2 * model.batch.global_batch_size) // 2,
    )
    return time_strategy(asked)


def judge_column(found: Sequence[PredictedMethod]) -> tuple[str, str]:
    """Of one column: the fastest or *within noise*, and which to use.

    Of methods within the planner's error of the fastest the one with the least memory is to be used.
    """
    known = [(each.seconds, each) for each in found if each.seconds is not None]
    fastest = min(seconds for seconds, _ in known)
    close = [each for seconds, each in known if are_tied(seconds, fastest)]
    lightest = min(close, key=lambda each: each.peak_bytes or 0)
    if len(close) == 1:
        return lightest.method, lightest.method
    return f"within noise: {joined([each.method for each in close])}", lightest.method


def format_links_table(found: Sequence[PredictedMethod]) -> str:
    """Markdown: memory, time over each link, the fastest of a link and which to use."""
    rows = []
    for method in dict.fromkeys(each.method for each in found):
        own = [each for each in found if each.method == method]
        rows.append([method, megabytes(own[0].peak_bytes), *(each.time for each in own)])
    columns = [[each for each in found if each.link == link] for link in SETTINGS.links]
    rows += _make_verdict_rows(columns, "")
    return markdown_rows(["Method", "Peak memory", *SETTINGS.links.values()], rows)


def _format_nodes_table(link: str, found: Sequence[PredictedMethod]) -> str:
    rows = []
    for method in SETTINGS.methods:
        shares = (scaling_efficiency(method, link, nodes, found) for nodes in SETTINGS.nodes)
        rows.append([method, *map(percent, shares)])
    rows += _make_verdict_rows(
        [[e for e in found if (e.link, e.nodes) == (link, nodes)] for nodes in SETTINGS.nodes]
    )
    header = ["Method", *(f"{nodes} nodes" for nodes in SETTINGS.nodes)]
    return f"{SETTINGS.links[link]}:\n\n{markdown_rows(header, rows)}"


def _make_verdict_rows(
    columns: Sequence[Sequence[PredictedMethod]], *between: str
) -> Iterator[list[str]]:
    """The two last rows of a table."""
    said = zip(*map(judge_column, columns), strict=True)
    for name, cells in zip(("Fastest", "Use"), said, strict=True):
        yield [name, *between, *cells]


def scaling_efficiency(
    method: str, link: str, nodes: int, found: Sequence[PredictedMethod]
) -> float | None:
    """A device's work a second on so many nodes, over that on two; None where there is no strategy."""
    times = {(each.method, each.link, each.nodes): each.seconds for each in found}
    # A pipeline of as many stages as nodes begins as the one of two.
    first = times.get((method, link, 2)) or times.get(("Pipeline", link, 2))
    last = times.get((method, link, nodes))
    return first / last if first and last else None


def format_scaling_table(found: Sequence[PredictedMethod]) -> str:
    """Markdown: the report's sentences on more nodes, each judged for every link."""
    rows = []
    for method, sentence in SETTINGS.said.items():
        most = max((e.nodes for e in found if e.method == method and e.seconds), default=2)
        shares = {
            name: scaling_efficiency(method, link, most, found)
            for link, name in SETTINGS.links.items()
        }
        known = {name: share for name, share in shares.items() if share is not None}
        if most > 2 and known:
            said = f"“{sentence}”: {_judge_efficiencies(known, method == 'Baseline')}"
            rows.append([f"{method}, {most} nodes", *map(percent, shares.values()), said])
    header = ["Work of a device, over that on two", *SETTINGS.links.values(), "The report"]
    return markdown_rows(header, rows)


def _judge_efficiencies(shares: Mapping[str, float], is_said_to_scale: bool) -> str:
    """Shares by link; one within the planner's error of a limit judges nothing."""
    said: dict[str, list[str]] = {}
    for name, share in shares.items():
        limits = (SETTINGS.scales, SETTINGS.poorly)
        near = [limit for limit in limits if limit / TIE_RATIO < share < limit * TIE_RATIO]
        if near:
            judge_column = f"within noise of {near[0]:.0%}"
        elif SETTINGS.poorly <= share < SETTINGS.scales:
            judge_column = "neither"
        else:
            judge_column = (
                "confirmed" if (share >= SETTINGS.scales) == is_said_to_scale else "contradicted"
            )
        said.setdefault(judge_column, []).append(name)
    return "; ".join(f"{judge_column} at {joined(names)}" for judge_column, names in said.items())
