"""Predict the comparison of the DeepSpeed report: `make compare-zero MODEL=gpt3-355m GPU=a100-80g`.

The planner predicts the report's methods on nodes with one device each, over several links and numbers of nodes
(`zero_prediction.yaml`). Every device has the same work on any number of nodes: the model's own global batch per
device on two nodes.
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
    """Keys of the file `zero_prediction.yaml`."""

    links: Mapping[str, str]
    """Names for people, by the link's key."""
    nodes: tuple[int, ...]
    methods: Mapping[str, str]
    """Layouts by the report's name of the method."""
    scales: float
    """Scaling efficiency from which a method counts as scaling."""
    poorly: float
    """Scaling efficiency below which a method counts as scaling poorly."""
    said: Mapping[str, str]
    """The report's claim on a method's scaling, by method."""
    page: str


SETTINGS = msgspec.convert(read_yaml(Path(__file__).with_suffix(".yaml")), ZeroPredictionFile)


@dataclass(frozen=True)
class PredictedMethod:
    """Prediction of one method on a number of nodes over one link."""

    method: str
    link: str
    nodes: int
    timed: TimedStrategy | None
    """The planner's result; None if the model cannot have the strategy."""

    @property
    def seconds(self) -> float | None:
        """Predicted seconds per iteration; None if the model cannot have the strategy."""
        return self.timed.candidate.seconds.total if self.timed else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Interval of the seconds, by the errors of similar measurements; None if there are too few."""
        return self.timed.uncertainty.interval() if self.timed else None

    @property
    def peak_bytes(self) -> int | None:
        """Bytes of the rank with the peak memory."""
        return self.timed.candidate.memory.total if self.timed else None

    @property
    def time_text(self) -> str:
        """Milliseconds per iteration with their interval; a dash without a prediction."""
        low, high = (1e3 * end for end in self.interval) if self.interval else (None, None)
        return bracketed(1e3 * self.seconds, low, high, ",.0f") if self.seconds else DASH

    def to_data(self) -> dict[str, object]:
        """Return the prediction for JSON, in seconds and bytes; None if the model cannot have the strategy."""
        return {
            "method": self.method,
            "link": self.link,
            "nodes": self.nodes,
            "seconds": self.seconds,
            "interval_seconds": self.interval,
            "peak_bytes": self.peak_bytes,
        }


def predict_zero(variables: Namespace) -> int:
    """Print what the planner predicts for the experiment `zero` on the device GPU=; return 0.

    Raises:
        LaunchError: MODEL= is missing.
        ValueError: The experiment cannot be predicted.
    """
    if variables.model is None:
        raise LaunchError(
            "MODEL= is required, for example: make compare-zero MODEL=gpt3-355m GPU=a100-80g"
        )
    options = plan_options(variables)
    on_all_nodes = predict_methods(options, SETTINGS.nodes)
    if options.json:
        print(json.dumps([prediction.to_data() for prediction in on_all_nodes], indent=2))
        return 0
    page = SETTINGS.page.rstrip().format(
        model=options.model,
        gpu=options.gpu,
        over_links=format_links_table(
            [prediction for prediction in on_all_nodes if prediction.nodes == 2]
        ),
        over_nodes="\n\n".join(_format_nodes_table(link, on_all_nodes) for link in SETTINGS.links),
        scaling=format_scaling_table(on_all_nodes),
    )
    say_markdown(wide_console(), page)
    return 0


def predict_methods(
    options: PlanOptions, nodes: Sequence[int], links: Sequence[str] = tuple(SETTINGS.links)
) -> tuple[PredictedMethod, ...]:
    """Return a prediction per link, number of nodes and method, in this order.

    The pipeline with a stage per node is predicted from three nodes on. With fewer nodes it has one stage, or is the
    pipeline of two stages, which is predicted anyway.

    Raises:
        RequestError: There is no such dtype.
        ValueError: There is no such model or device.
    """
    predictions = []
    for link in links:
        for num_nodes in nodes:
            for method, layout in SETTINGS.methods.items():
                if num_nodes <= 2 and layout == "pp{nodes}":
                    continue
                timed = _time_method(options, layout, num_nodes, link)
                predictions.append(PredictedMethod(method, link, num_nodes, timed=timed))
    return tuple(predictions)


def _time_method(options: PlanOptions, layout: str, nodes: int, link: str) -> TimedStrategy | None:
    """Return the planner's time and memory of a layout; None if its stages do not divide the layers."""
    model = find_model(options.model)
    if layout == "pp{nodes}" and model.shape.layers % nodes:
        return None
    strategy = layout.format(nodes=nodes, replicas=nodes // 2).removesuffix("dp1")
    # Every node has as many samples as on two nodes.
    batch_of_two_nodes = options.global_batch or 2 * model.batch.global_batch_size
    method_options = replace(
        options,
        strategy=strategy,
        gpus=nodes,
        nodes=nodes,
        gpus_per_node=1,
        inter=link,
        global_batch=nodes * batch_of_two_nodes // 2,
    )
    return time_strategy(method_options)


def judge_column(predictions: Sequence[PredictedMethod]) -> tuple[str, str]:
    """Return two texts on a column: the fastest method, and the method to use.

    If other methods are within the planner's error of the fastest, the first text is *within noise* with their
    names. The method to use is the one with the least memory among them.
    """
    fastest = min(
        prediction.seconds for prediction in predictions if prediction.seconds is not None
    )
    tied = []
    for prediction in predictions:
        if prediction.seconds is not None and are_tied(prediction.seconds, fastest):
            tied.append(prediction)
    lightest = min(tied, key=lambda prediction: prediction.peak_bytes or 0)
    if len(tied) == 1:
        return lightest.method, lightest.method
    names = joined([prediction.method for prediction in tied])
    return f"within noise: {names}", lightest.method


def format_links_table(predictions: Sequence[PredictedMethod]) -> str:
    """Return a Markdown table of peak memory, and of the time over each link with the fastest method.

    All predictions are for the same number of nodes.
    """
    predictions_by_method: dict[str, list[PredictedMethod]] = {}
    predictions_by_link: dict[str, list[PredictedMethod]] = {link: [] for link in SETTINGS.links}
    for prediction in predictions:
        predictions_by_method.setdefault(prediction.method, []).append(prediction)
        predictions_by_link[prediction.link].append(prediction)
    rows = []
    for method, method_predictions in predictions_by_method.items():
        memory = megabytes(method_predictions[0].peak_bytes)  # It does not depend on the link.
        times = [prediction.time_text for prediction in method_predictions]
        rows.append([method, memory, *times])
    rows += _make_verdict_rows(list(predictions_by_link.values()), "")
    return markdown_rows(["Method", "Peak memory", *SETTINGS.links.values()], rows)


def _format_nodes_table(link: str, predictions: Sequence[PredictedMethod]) -> str:
    """Return a Markdown table of scaling efficiency over one link: a row per method, a column per number of nodes.

    Last rows name the fastest method of each column and the method to use.
    """
    rows = []
    for method in SETTINGS.methods:
        efficiencies = (
            scaling_efficiency(method, link, nodes, predictions) for nodes in SETTINGS.nodes
        )
        rows.append([method, *map(percent, efficiencies)])
    columns = []
    for nodes in SETTINGS.nodes:
        columns.append(
            [
                prediction
                for prediction in predictions
                if prediction.link == link and prediction.nodes == nodes
            ]
        )
    rows += _make_verdict_rows(columns)
    header = ["Method", *(f"{nodes} nodes" for nodes in SETTINGS.nodes)]
    return f"{SETTINGS.links[link]}:\n\n{markdown_rows(header, rows)}"


def _make_verdict_rows(
    columns: Sequence[Sequence[PredictedMethod]], *between: str
) -> Iterator[list[str]]:
    """Yield the last two rows of a table, `Fastest` and `Use`; `between` follows their headings."""
    verdicts = zip(*map(judge_column, columns), strict=True)
    for name, cells in zip(("Fastest", "Use"), verdicts, strict=True):
        yield [name, *between, *cells]


def scaling_efficiency(
    method: str, link: str, nodes: int, predictions: Sequence[PredictedMethod]
) -> float | None:
    """Return the work per second and device, divided by that on two nodes; None if one of the two is not predicted."""
    seconds = {
        (prediction.method, prediction.link, prediction.nodes): prediction.seconds
        for prediction in predictions
    }
    # On two nodes, a pipeline with a stage per node is the pipeline of two stages.
    seconds_on_two = seconds.get((method, link, 2)) or seconds.get(("Pipeline", link, 2))
    seconds_on_more = seconds.get((method, link, nodes))
    if not seconds_on_two or not seconds_on_more:
        return None
    return seconds_on_two / seconds_on_more


def format_scaling_table(predictions: Sequence[PredictedMethod]) -> str:
    """Return a Markdown table of the report's claims on scaling, each judged for every link.

    A claim is judged on the largest number of nodes that was predicted for its method.
    """
    rows = []
    for method, claim in SETTINGS.said.items():
        most_nodes = 2
        for prediction in predictions:
            if prediction.method == method and prediction.seconds:
                most_nodes = max(most_nodes, prediction.nodes)
        efficiencies = {
            name: scaling_efficiency(method, link, most_nodes, predictions)
            for link, name in SETTINGS.links.items()
        }
        known = {name: value for name, value in efficiencies.items() if value is not None}
        if most_nodes == 2 or not known:
            continue  # Nothing was predicted on more nodes than two.
        verdict = _judge_efficiencies(known, is_said_to_scale=method == "Baseline")
        head = f"{method}, {most_nodes} nodes"
        rows.append([head, *map(percent, efficiencies.values()), f"“{claim}”: {verdict}"])
    header = ["Work of a device, over that on two", *SETTINGS.links.values(), "The report"]
    return markdown_rows(header, rows)


def _judge_efficiencies(efficiencies: Mapping[str, float], is_said_to_scale: bool) -> str:
    """Return a text with the verdicts on a claim, each with the links that give this verdict.

    An efficiency that is within the planner's error of a limit gives no decision.

    Args:
        efficiencies: Scaling efficiency by the link's name.
        is_said_to_scale: Whether the claim is that the method scales, not that it scales poorly.
    """
    links_by_verdict: dict[str, list[str]] = {}
    for name, efficiency in efficiencies.items():
        limits = (SETTINGS.scales, SETTINGS.poorly)
        near = [limit for limit in limits if limit / TIE_RATIO < efficiency < limit * TIE_RATIO]
        if near:
            verdict = f"within noise of {near[0]:.0%}"
        elif SETTINGS.poorly <= efficiency < SETTINGS.scales:
            verdict = "neither"
        elif (efficiency >= SETTINGS.scales) == is_said_to_scale:
            verdict = "confirmed"
        else:
            verdict = "contradicted"
        links_by_verdict.setdefault(verdict, []).append(name)
    return "; ".join(f"{verdict} at {joined(names)}" for verdict, names in links_by_verdict.items())
