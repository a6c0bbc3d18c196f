"""Predictions that docs/guide.md states, each with its interval."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from parakit.config.batch import choose_samples
from parakit.config.hardware import device_by_key, link_by_key
from parakit.config.model import load_model
from parakit.config.run import spec_from_model
from parakit.config.strategy import Batch, Parallelism
from parakit.costs.collectives.tensor import layer_collectives
from parakit.costs.operations import Operation, Phase
from parakit.experiments.zero_prediction import (
    SETTINGS,
    PredictedMethod,
    format_links_table,
    format_scaling_table,
    predict_methods,
)
from parakit.formatting.table import Column, Table, markdown_table
from parakit.formatting.units import bracketed, joined
from parakit.planner.advice import (
    FAMILIES_OF_OTHER_TRAINERS,
    StrategyFamily,
    find_best_of_each_family,
    strategy_family,
)
from parakit.planner.options import PlanOptions
from parakit.planner.readings.neighbours import estimate_uncertainty
from parakit.planner.readings.published import h200_spec
from parakit.planner.request import replace_sequence_length
from parakit.planner.search import Candidate, Request, search_configurations
from parakit.planner.ties import TIE_RATIO
from parakit.planner.time.cluster import Cluster

PREDICTED = (
    ("gpt3-13b", 8, "a100", 512, None, StrategyFamily.SHARDED_DATA),
    ("llama3-8b", 8, "a100", 128, None, StrategyFamily.SHARDED_DATA),
    ("gpt3-13b", 8, "h100", None, None, "dp8-zero2"),
    ("gpt3-175b", 1024, "a100", None, None, StrategyFamily.SHARDED_DATA),
    ("llama3-8b", 8, "h100", 8, 131_072, StrategyFamily.TENSOR),
    ("mixtral-8x7b", 64, "h100", None, None, StrategyFamily.SHARDED_DATA),
)
"""The guide's predictions: model, GPUs, samples, sequence length, and what the best strategy is compared with. None
takes the samples or the sequence length of the model's file.
"""
SLOW_LINK = "ethernet-10g"
REPORT_MODELS = ("gpt3-64m", "gpt3-355m")
REPORT_GPU, REPORT_DTYPE = "a100-80g", "fp16"
"""The DeepSpeed report's models as `make compare-zero` predicts them."""
SIZES = ("dense-100m", "dense-500m", "dense-1b", "dense-5b")
SIZE_GPUS, SIZE_GPU = (2, 4, 8, 16), "h100"
"""The Blueberry experiment's sizes and devices."""


def predictions() -> list[str]:
    """Return a sentence per prediction of the guide: the best strategy, and how much slower another is."""
    return [
        *(_best(*prediction) for prediction in PREDICTED),
        *map(_over_a_slow_link, REPORT_MODELS),
    ]


def request_of(
    model: str, gpus: int, gpu: str, samples: int | None = None, seq_length: int | None = None
) -> Request:
    """Return a request for a model on nodes of a device.

    `samples` and `seq_length` replace those of the model's file unless they are None.
    """
    known, device = load_model(model), device_by_key(gpu)
    batch = samples or choose_samples(known, gpus)
    template = replace_sequence_length(
        spec_from_model(known, Parallelism(), Batch(1, batch)), seq_length
    )
    intra, inter = link_by_key(device.link), link_by_key(device.network)
    return Request(
        known, Cluster(device, gpus, min(gpus, device.domain), intra, inter), batch, template
    )


def tensor_parallel_sentence() -> str:
    """Return how many all-reduces TP makes per layer and micro batch, and which of them are exposed."""
    spec = h200_spec("tp2")
    per_layer = {
        (call.phase, call.overlappable): call.calls // (spec.shape.layers * spec.microbatches)
        for call in layer_collectives(spec)
        if call.operation is Operation.ALL_REDUCE
    }
    forward, backward = per_layer.pop((Phase.FORWARD, False)), per_layer.pop((Phase.BACKWARD, True))
    assert not per_layer
    names = {2: "two", 4: "four"}
    return (
        f"TP makes {names[forward + backward]} all-reduces per layer and micro batch: the "
        f"{names[forward]} of forward are exposed, and the {names[backward]} of backward are "
        "overlapped with the weight-gradient products (*formula*, "
        "`src/parakit/costs/collectives/tensor.py`)."
    )


def _best(
    model: str, gpus: int, gpu: str, samples: int | None, seq_length: int | None, other: str
) -> str:
    request = request_of(model, gpus, gpu, samples, seq_length)
    winner = search_configurations(request, kept=1).winner
    assert winner is not None
    families = (other,) if isinstance(other, StrategyFamily) else tuple(StrategyFamily)
    compared = next(
        candidate
        for kind, candidate in find_best_of_each_family(request, families).items()
        if other in (kind, candidate.strategy)
    )
    ratio = compared.seconds.total / winner.seconds.total
    tokens = f" of {seq_length:,} tokens" if seq_length else ""
    return (
        f"{model} on {gpus:,} {gpu.upper()}, {request.global_batch:,} samples{tokens}: `{winner.strategy}` "
        f"takes {_time(request, winner)}; `{compared.strategy}` takes {ratio:.2f} times as long."
    )


def _over_a_slow_link(model: str) -> str:
    entries = {entry.method: entry for entry in _report(model, 2, (SLOW_LINK,))}
    pipeline, plain = (entries[method] for method in ("Pipeline", "Baseline"))
    assert pipeline.timed is not None
    assert plain.timed is not None
    ratio = plain.timed.candidate.seconds.total / pipeline.timed.candidate.seconds.total
    return (
        f"{model} on 2 {REPORT_GPU.upper()} over {SETTINGS.links[SLOW_LINK]}: "
        f"`{pipeline.timed.candidate.strategy}` takes {pipeline.time_text} ms; "
        f"`{plain.timed.candidate.strategy}` takes {ratio:.2f} times as long."
    )


def report_tables() -> list[str]:
    """Return Markdown tables of the DeepSpeed report's large model: over links, and on many nodes."""
    model = REPORT_MODELS[-1]
    return [
        format_links_table(_report(model, 2, tuple(SETTINGS.links))),
        format_scaling_table(
            [entry for n in SETTINGS.nodes for entry in _report(model, n, tuple(SETTINGS.links))]
        ),
    ]


@cache
def _report(model: str, nodes: int, links: tuple[str, ...]) -> tuple[PredictedMethod, ...]:
    options = PlanOptions(model, REPORT_GPU, dtype=REPORT_DTYPE)
    return predict_methods(options, (nodes,), links)


@dataclass(frozen=True)
class SizeRow:
    """Predicted times of the best data-parallel strategy and of the best that splits layers or sequences."""

    request: Request
    plain: Candidate | None
    """Best candidate that needs nothing of Megatron, None if no such candidate fits."""
    split: Candidate | None

    @property
    def ratio(self) -> float | None:
        """Ratio of the split strategy's time over the data-parallel one's."""
        if self.plain is None or self.split is None:
            return None
        return self.split.seconds.total / self.plain.seconds.total

    @property
    def ahead(self) -> str:
        """Name of the strategy that is faster by more than the planner's error."""
        if self.ratio is None:
            return "the only one" if self.plain or self.split else "neither fits"
        if self.ratio > TIE_RATIO:
            return "data parallel"
        return "split" if self.ratio < 1 / TIE_RATIO else "within noise"

    def time(self, candidate: Candidate | None) -> str:
        """Strategy and time."""
        return f"{candidate.strategy} {_time(self.request, candidate)}" if candidate else "–"


def size_table(rows: tuple[SizeRow, ...]) -> str:
    """Return Markdown with a row per size and number of GPUs."""
    columns = (
        Column[SizeRow]("model", lambda row: row.request.model.name, right=False),
        Column[SizeRow]("GPUs", lambda row: row.request.cluster.devices),
        Column[SizeRow]("data parallel, ZeRO", lambda row: row.time(row.plain), right=False),
        Column[SizeRow]("TP, SP, CP or PP", lambda row: row.time(row.split), right=False),
        Column[SizeRow]("second over first", lambda row: row.ratio, lambda r: f"{r:.2f}"),
        Column[SizeRow]("ahead", lambda row: row.ahead, right=False),
    )
    return markdown_table(Table(columns, rows))


def size_sentence(rows: tuple[SizeRow, ...]) -> str:
    """Return a sentence on whether splitting overtakes data parallelism anywhere."""
    ahead = [row.ahead for row in rows]
    split = [
        f"{row.request.model.name} on {row.request.cluster.devices}"
        for row in rows
        if row.ahead == "split"
    ]
    crossover = f"splitting is ahead for {joined(split)}" if split else "none"
    return (
        f"Crossover from {SIZES[0]} to {SIZES[-1]}: {crossover}; of {len(rows)} cases data parallelism is "
        f"ahead in {ahead.count('data parallel')}, and {ahead.count('within noise')} are within noise."
    )


@cache
def size_rows() -> tuple[SizeRow, ...]:
    """Return a row for every size on every number of devices."""
    return tuple(_size_row(model, gpus) for model in SIZES for gpus in SIZE_GPUS)


def _size_row(model: str, gpus: int) -> SizeRow:
    samples_per_device = load_model(model).batch.global_batch_size
    request = request_of(model, gpus, SIZE_GPU, samples_per_device * gpus)
    unsplit = find_best_of_each_family(request, FAMILIES_OF_OTHER_TRAINERS).values()
    plain = [candidate for candidate in unsplit if candidate.is_recommended]
    # Without a split there are four strategies: replicas and three stages of ZeRO. A fifth one has a split.
    ranked = search_configurations(request, kept=5).ranked
    split = next(
        (
            candidate
            for candidate in ranked
            if strategy_family(candidate.spec.parallelism) not in FAMILIES_OF_OTHER_TRAINERS
        ),
        None,
    )
    return SizeRow(request, min(plain, key=lambda c: c.seconds.total, default=None), split)


def _time(request: Request, candidate: Candidate) -> str:
    """Return the time with its interval, if enough similar measurements have errors."""
    seconds = candidate.seconds.total
    factor, unit, shape = (1.0, "s", ",.1f") if seconds >= 10 else (1e3, "ms", ",.0f")
    ends = estimate_uncertainty(candidate.spec, request.cluster, request.own_runs).interval() or (
        None,
        None,
    )
    low, high = (end and factor * end for end in ends)
    return f"{bracketed(factor * seconds, low, high, shape)} {unit}"
